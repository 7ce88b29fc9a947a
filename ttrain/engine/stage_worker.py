"""The process of a stage or of one rank: `python -m ttrain.engine.stage_worker WORK_DIRECTORY`.

It reads `job.json`, runs the stage's module and writes the result.
"""

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from ttrain.config import Runtime
from ttrain.core import redact
from ttrain.core.files import (
    JsonDict,
    ProgressWriter,
    exclusive,
    read_json,
    read_object,
    write_json,
)
from ttrain.core.signals import (
    PARENT,
    SAME_SIGNAL_SECONDS,
    STOP_SIGNALS,
    end_with_parent,
    heeded_signals,
    ignore_hangup,
)
from ttrain.core.terminal import guard_streams, outlast_output
from ttrain.engine.system_metrics import SystemMetrics, file_name
from ttrain.errors import (
    DamagedFile,
    DataError,
    Interrupted,
    NothingNew,
    RankLost,
    TTrainError,
    with_fix,
)
from ttrain.store import integrity
from ttrain.store.layout import JOB, TRACKED
from ttrain.tasks import RUNNABLE
from ttrain.tasks.common.job import StageContext

PROGRESS = "progress.json"
RESULTS = "result.rank*.json"  # in the work directory
PROCESS_NAME = "ttrain-worker"  # as `ps` and `top` show it; 15 characters at most

log = logging.getLogger("ttrain")


class _WithoutSecrets(logging.Formatter):
    """Redacts secrets: libraries' log lines and tracebacks may contain URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return redact.text(super().format(record))


class StopFlag:
    """Set by SIGTERM, SIGINT and SIGHUP; a later second signal ends the process at once.

    Signals that come before `listen` wait for it if the process was started with them blocked.
    """

    def __init__(self, *, stops_by_itself: bool) -> None:
        self.signum = 0
        self._since = 0.0
        self._raises = stops_by_itself

    def __call__(self) -> bool:
        return self.signum != 0

    def listen(self) -> None:
        """Install the handlers; they raise KeyboardInterrupt in stages that check no flag."""
        for signum in heeded_signals():
            signal.signal(signum, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def settle(self) -> int:
        """Stop raising, to write the result. Returns the signal that was raised before, or 0."""
        raised = self.signum if self._raises else 0
        self._raises = False
        return raised

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum:
            if time.monotonic() - self._since > SAME_SIGNAL_SECONDS:
                os._exit(128 + signum)
            return
        self.signum = signum
        self._since = time.monotonic()
        ignore_hangup()
        if self._raises:
            # Interrupted is an Exception, which libraries and the encoder take for their own
            raise KeyboardInterrupt


def main() -> int:
    """Run the job whose work directory is the only argument."""

    work = Path(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # It may be gone before this line is reached.
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))
    set_up(rank, world)
    spec = read_json(work / JOB)
    if spec is None:
        log.error(
            "there is no %s; do all nodes have the same TTRAIN_HOME and the same settings?",
            work / JOB,
        )
        return 1
    log.setLevel(level_of(spec["runtime"]["log_level"], rank))
    stop = StopFlag(stops_by_itself=not spec["uses_ranks"])
    with (
        exclusive(work.with_name(f"{work.name}.process.lock"))
        if rank == 0
        else contextlib.nullcontext()
    ):
        with sample_system_metrics(work, spec):
            outcome = _run(work, spec, stop, rank)
        write(work, rank, outcome)
        sys.stdout.flush()
        if world > 1 and outcome["outcome"] == "failed":
            # At once: the process group cannot be left cleanly, and the other ranks wait for it.
            os._exit(1)
        if world > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()
    return int(outcome["outcome"] == "failed")


def set_up(rank: int = 0, world: int = 1) -> None:
    """Set up logging, with the rank if there are several, and the process name."""
    guard_streams()
    outlast_output()  # a full disk costs lines of the log, not the stage
    who = f"rank {rank}: " if world > 1 else ""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_WithoutSecrets(f"%(asctime)s {who}%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    log.setLevel(level_of("info", rank))
    warnings.simplefilter(
        "ignore", FutureWarning
    )  # between libraries: who trains can do nothing about it
    with contextlib.suppress(OSError):  # Linux only
        Path("/proc/self/comm").write_text(PROCESS_NAME)


def level_of(name: str, rank: int) -> int:
    """The lowest level that a rank logs: other ranks would only repeat what rank 0 logs."""
    level = logging.getLevelNamesMapping()[name.upper()]
    return max(level, logging.WARNING) if rank and level != logging.DEBUG else level


def job_of(
    work: Path, stop: Callable[[], bool] = lambda: False, *, progress: bool = True
) -> tuple[Any, StageContext]:
    """The settings that the stage sees, and its context."""
    spec = read_json(work / JOB)
    stage = RUNNABLE[spec["stage"]]
    job = StageContext(
        inputs={name: Path(path) for name, path in spec["inputs"].items()},
        files=spec["files"],
        arguments=stage.arguments,
        output=work / spec["output"],
        runtime=Runtime.rebuilt(spec["runtime"]),
        progress=ProgressWriter(work / PROGRESS if progress else None),
        stop_requested=stop,
        groups=spec["groups"],
        weights=spec["weights"],
        labels={"stage": spec["stage"], **read_object(work / TRACKED)},
        reuse=tuple(spec["reuse"]),
        home=work.absolute().parents[2],
    )
    return stage.job.rebuilt(spec["settings"]), job


def _run(work: Path, spec: JsonDict, stop: StopFlag, rank: int) -> JsonDict:
    try:
        stop.listen()
        config, job = job_of(work, stop, progress=rank == 0)
        result = import_module(RUNNABLE[spec["stage"]].module).run(config, job)
        stop.settle()
        integrity.save()
        return {"outcome": "completed", "result": result}
    except BaseException as error:
        if signum := stop.settle():  # whatever error a library made of it
            return {"outcome": "interrupted", "error": "stopped by a signal", "signal": signum}
        if isinstance(error, Interrupted):
            return {
                "outcome": "interrupted",
                "error": str(error),
                "signal": stop.signum or error.signum,
            }
        if isinstance(error, TTrainError):
            log.log(logging.INFO if isinstance(error, NothingNew) else logging.ERROR, "%s", error)
            return {
                "outcome": "failed",
                "error": str(error),
                "kind": type(error).__name__,
                **({"damaged": str(error.path)} if isinstance(error, DamagedFile) else {}),
                **(
                    {"files": [*map(redact.url, error.files)]}
                    if isinstance(error, DataError)
                    else {}
                ),
            }
        log.error("%s", "".join(traceback.format_exception(error)))
        return {
            "outcome": "failed",
            "error": redact.text(f"{type(error).__name__}: {with_fix(error)}"),
            "kind": "unexpected",
        }


@contextlib.contextmanager
def sample_system_metrics(work: Path, spec: JsonDict) -> Iterator[None]:
    """Sample system metrics meanwhile, in the first process of each node."""
    seconds = spec["runtime"]["system_metrics_seconds"]
    if not seconds or int(os.environ.get("LOCAL_RANK", "0")):
        yield
        return
    several = spec["runtime"]["nodes"] > 1
    node = int(os.environ.get("GROUP_RANK", "0")) if several else 0
    metrics = SystemMetrics(
        work / spec["output"] / "run" / file_name(node), seconds, node=node if several else None
    )
    try:
        yield
    finally:
        metrics.stop()


def write(work: Path, rank: int, outcome: Mapping[str, Any]) -> None:
    """Write the outcome of a rank: of rank 0, or a failure."""
    if rank == 0 or outcome["outcome"] == "failed":
        write_json(work / f"result.rank{rank}.json", {"rank": rank, "at": time.time(), **outcome})


def read(work: Path) -> JsonDict | None:
    """Rank 0's outcome, or the first failure that another rank's did not cause; None if none."""
    outcomes: list[JsonDict] = [
        outcome for path in work.glob(RESULTS) if (outcome := read_json(path))
    ]
    first = next((outcome for outcome in outcomes if outcome["rank"] == 0), None)
    if first and first["outcome"] != "failed":
        return first
    return min(
        outcomes,
        key=lambda outcome: (outcome.get("kind") == RankLost.__name__, outcome["at"]),
        default=None,
    )


if __name__ == "__main__":
    sys.exit(main())
