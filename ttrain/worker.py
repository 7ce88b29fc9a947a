"""The process of one stage: `python -m ttrain.worker WORK_DIRECTORY`, or the same under torchrun.

It reads `job.json`, runs the stage's module and writes `result.json`, which tells what happened; the exit code does not
(torchrun's agent exits 1 after a clean save on a signal).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import filelock

from ttrain.errors import Interrupted, TTrainError
from ttrain.job import Job
from ttrain.parent import end_with_parent
from ttrain.progress import Progress
from ttrain.store import read_json, write_json

JOB, RESULT, PROGRESS = "job.json", "result.json", "progress.json"
PARENT = "TTRAIN_PARENT"  # the process whose end is this one's end
log = logging.getLogger("ttrain")


class StopFlag:
    """Set by SIGTERM and SIGINT; the second one ends the process at once. What is on disk is whole: it was renamed there."""

    def __init__(self, *, stops_by_itself: bool) -> None:
        self.signum = 0
        self._stops_by_itself = stops_by_itself
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._handle)

    def __call__(self) -> bool:
        return self.signum != 0

    def _handle(self, signum: int, frame: object) -> None:
        if self.signum:
            os._exit(128 + signum)
        self.signum = signum
        if self._stops_by_itself:
            raise Interrupted("stopped by a signal", signum)


def main() -> int:
    """Run the job whose work directory is the only argument."""
    work = Path(sys.argv[1])
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s", stream=sys.stdout, force=True)
    log.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    end_with_parent(int(os.environ.get(PARENT, os.getppid())))  # it may be gone before this line is reached
    spec = read_json(work / JOB)
    if spec["uses_ranks"] and spec["runtime"]["devices"] > 1 and "RANK" not in os.environ:
        return _torchrun(work, spec["runtime"]["devices"])
    stop = StopFlag(stops_by_itself=not spec["uses_ranks"])
    with filelock.FileLock(work.with_name(f"{work.name}.process.lock")) if rank == 0 else contextlib.nullcontext():
        outcome = _run(work, spec, stop, rank)
        if rank == 0 or outcome["outcome"] == "failed":
            name = RESULT if rank == 0 else f"result.rank{rank}.json"
            write_json(work / name, outcome)
    sys.stdout.flush()
    return 0 if outcome["outcome"] == "completed" else 1


def _torchrun(work: Path, devices: int) -> int:
    """Be the agent that starts one worker a device; it passes a SIGTERM on and waits for their checkpoint."""
    from torch.distributed import run

    os.environ[PARENT] = str(os.getpid())
    rendezvous = ["--standalone", f"--nproc-per-node={devices}", "--max-restarts=0"]
    try:
        run.main([*rendezvous, "-m", "ttrain.worker", str(work)])
    except BaseException as error:  # the workers' result files tell what happened
        log.info("torchrun: %s", error.__class__.__name__)
        return 1
    return 0


def job_of(work: Path, stop: Callable[[], bool] = lambda: False, *, progress: bool = True) -> tuple[Any, Job]:
    """The configuration and the job that a work directory describes."""
    from ttrain.config import Runtime
    from ttrain.stages import STAGES

    spec = read_json(work / JOB)
    stage = STAGES[spec["stage"]]
    job = Job(
        inputs={name: Path(path) for name, path in spec["inputs"].items()},
        files=spec["files"],
        arguments=stage.arguments,
        output=work / "output",
        runtime=Runtime.model_validate(spec["runtime"]),
        progress=Progress(work / PROGRESS if progress else None),
        stop_requested=stop,
        start_from=Path(spec["start_from"]) if spec["start_from"] else None,
        versions=spec["versions"],
        groups=spec["groups"],
        weights=spec["weights"],
        reuse=tuple(spec["reuse"]),
    )
    return stage.config.model_validate(spec["config"]), job


def _run(work: Path, spec: dict[str, Any], stop: StopFlag, rank: int) -> dict[str, Any]:
    from ttrain.stages import STAGES

    config, job = job_of(work, stop, progress=rank == 0)
    try:
        result = import_module(STAGES[spec["stage"]].module).run(config, job)
        return {"outcome": "completed", "result": result}
    except Interrupted as error:
        return {"outcome": "interrupted", "error": str(error), "signal": stop.signum or error.signum}
    except TTrainError as error:
        log.error("%s", error)
        return {"outcome": "failed", "error": str(error), "kind": type(error).__name__}
    except BaseException as error:
        log.error("%s", traceback.format_exc())
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}", "kind": "unexpected"}
    finally:
        _leave_ranks()


def _leave_ranks() -> None:
    if "torch.distributed" in sys.modules and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
