"""Start and watch the processes of one stage: its ranks on this machine."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ttrain.config import DATASETS, Runtime, Settings
from ttrain.core.files import JsonDict, JsonObject, read_json
from ttrain.core.signals import PARENT, RENDEZVOUS, STOP_SIGNALS
from ttrain.engine import stage_worker
from ttrain.engine.fork_server import ForkedProcess, ForkServer, ForkServerError
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import Interrupted, NothingNew, RankLost, StageFailed
from ttrain.tasks import GATE, TASK, Stage

Report = Callable[[str, JsonObject], object]  # gets the events of a stage: (event, data)

POLL_SECONDS = 0.02
# After the stop signal: seconds for a step and its checkpoint (True), or for other stages. Native
# code may ignore it.
GRACE_SECONDS = {True: 60.0, False: 5.0}
OTHERS_SECONDS = 5.0  # for the other ranks to report, once one has failed or rank 0 has ended
# glibc keeps freed memory and uses huge pages: 1.35 x the training speed of the quickstart's size,
# measured on two cores.
GLIBC_TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
)
# Variables that native code and the libraries read while they load: a fork server that was started
# with other values cannot be used. The number of threads is not among them, the stages set it
# themselves.
READ_WHILE_LOADING = (
    *(
        "GLIBC_",
        "MALLOC_",
        "GOMP_",
        "KMP_",
        "LD_",
        "PYTHON",
        "HF_",
        "TRANSFORMERS_",
        "TORCH",
        "ATEN_",
        "MKL_",
    ),
)
OUT_OF_MEMORY = (
    "memoryerror",
    "memory allocation",
    "allocate memory",
)  # in what Python, torch, Rust and OpenBLAS say
WORKER = "ttrain.engine.stage_worker"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", RENDEZVOUS)

StageProcess = subprocess.Popen[bytes] | ForkedProcess


@dataclass
class ProcessGroup:
    """The processes of a stage by rank; a failure, or the end of rank 0, ends all."""

    processes: list[StageProcess] = field(default_factory=list)
    first_rank: int = 0  # on this machine
    _deadline: float | None = None
    _killed_by_us: frozenset[int] = frozenset()  # ranks

    def poll(self) -> bool:
        """Check the processes; return whether all have ended."""
        codes = [process.poll() for process in self.processes]
        if self._deadline is None and (any(codes) or codes[0] is not None):
            self._deadline = time.monotonic() + OTHERS_SECONDS
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()
        return None not in codes

    def send_signal(self, signum: int) -> None:
        """Send a signal to all that still run."""
        for process in self.processes:
            process.send_signal(signum)

    def kill(self) -> None:
        """Send SIGKILL to all that still run."""
        running = {rank for rank, process in enumerate(self.processes) if process.poll() is None}
        self._killed_by_us |= running
        for rank in running:
            self.processes[rank].kill()

    def end(self) -> None:
        """Kill the processes that still run, and wait for them."""
        self.kill()
        for process in self.processes:
            process.wait()

    @property
    def killed(self) -> bool:
        """Whether a signal from elsewhere ended one of them."""
        return any(
            (process.returncode or 0) < 0
            for rank, process in enumerate(self.processes)
            if rank not in self._killed_by_us
        )

    def describe_end(self) -> str:
        """Describe the end of a stage that left no result."""
        codes = {
            rank: process.returncode
            for rank, process in enumerate(self.processes)
            if process.returncode
        }
        first = {
            rank: code for rank, code in codes.items() if rank not in self._killed_by_us
        } or codes
        rank, code = min(
            first.items(), key=lambda item: item[1] > 0, default=(0, 0)
        )  # a killed one before others
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"ended with exit code {code}"
        )
        if len(self.processes) == 1:
            return f"its process {how} without a result"
        return f"rank {self.first_rank + rank} {how} without a result, and the others were ended"


def run(
    stage: Stage, settings: Settings, work: Path, log_path: Path, report: Report, stop: StopRequest
) -> JsonDict:
    """Run a stage in a prepared work directory and return its result.

    Raises StageFailed with the stage's own message, or Interrupted once its state is saved.
    """
    group = ProcessGroup()
    with log_path.open("ab", buffering=0) as log, log_path.open("rb") as lines:
        lines.seek(0, os.SEEK_END)
        try:
            start(group, stage, settings, work, log, stop)
            stop_signal, timed_out = _wait(
                group, stage, settings, Followed(work, lines, report), stop
            )
        finally:
            group.end()
    outcome = stage_worker.read(work)
    if timed_out and not (outcome and outcome["outcome"] == "completed"):
        raise StageFailed(
            f"stage {stage.name} took longer than "
            f"runtime.timeout_seconds={settings.runtime.timeout_seconds}; "
            f"the next run continues it"
        )
    return result_of(group, stage, log_path, outcome, stop_signal)


# --- starting -------------------------------------------------------------------------------------


def environment_of(settings: Settings) -> dict[str, str]:
    """Environment variables of a stage's processes."""
    defaults = {
        "GLIBC_TUNABLES": GLIBC_TUNABLES,
        "TOKENIZERS_PARALLELISM": "true",
        "TQDM_DISABLE": "1",  # libraries' bars would stand in the log
    }
    # How long an idle OpenMP thread spins before it sleeps. A step of the quickstart on two cores,
    # alone / beside a busy process: libgomp's default 0.18 s / 5 s, no spinning at all 0.24 s /
    # 0.31 s, this 0.18 s / 0.47 s.
    if "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = "10000"
    if not any(path.startswith("hf://") for name in DATASETS for path in settings.data.paths(name)):
        defaults["HF_HUB_OFFLINE"] = "1"
    fixed = {"PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
    if settings.runtime.threads:
        fixed["OMP_NUM_THREADS"] = str(settings.runtime.threads)
    if settings.runtime.gpus:
        fixed["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.runtime.gpus))
    own = {
        name: value for name, value in os.environ.items() if name not in RANK_VARIABLES
    }  # those of another group
    return {**defaults, **own, **fixed}


def warm_up(settings: Settings) -> None:
    """Load the libraries of later stages while another one runs."""
    if sys.platform == "linux":
        fork_server_for(environment_of(settings))


def start(
    group: ProcessGroup,
    stage: Stage,
    settings: Settings,
    work: Path,
    log: IO[bytes],
    stop: StopRequest,
) -> None:
    """Start one process per local rank and add them to the group. Raises Interrupted."""
    environment = environment_of(settings)
    server = _server_of(stage, environment)
    ranks = environments_of_ranks(stage, settings.runtime, environment, work)
    group.first_rank = int(ranks[0].get("RANK", 0))
    for variables in ranks:
        forked = None
        if server:
            try:
                forked = server.start(
                    WORKER, [str(work)], variables, log.fileno(), lambda: stop.signum != 0
                )
            except ForkServerError as error:
                log.write(f"{error}; a fresh process loads its libraries itself\n".encode())
            if stop.signum and forked is None:
                raise Interrupted("the stage was stopped before it began", stop.signum)
        group.processes.append(forked or spawn(WORKER, [str(work)], variables, log))


def environments_of_ranks(
    stage: Stage, runtime: Runtime, environment: Mapping[str, str], work: Path
) -> list[dict[str, str]]:
    """The environment of each rank on this machine, with torchrun's variables."""
    nodes = runtime.nodes if stage.uses_ranks else 1
    devices = runtime.devices if stage.uses_ranks or stage.spreads else 1
    if nodes * devices == 1:
        return [{**environment}]
    shared = {
        **environment,
        "WORLD_SIZE": str(nodes * devices),
        "LOCAL_WORLD_SIZE": str(devices),
    }
    first = 0
    if nodes > 1:
        host, _, port = str(runtime.rendezvous).rpartition(":")
        shared |= {"MASTER_ADDR": host, "MASTER_PORT": port, "GROUP_RANK": str(runtime.node_rank)}
        first = runtime.node_rank * devices
    else:
        # a file instead of a port: it cannot be taken by another; they then talk over the loopback
        # device
        shared[RENDEZVOUS] = str(work / f"rendezvous-{os.getpid()}-{time.time_ns()}")
        if sys.platform == "linux":
            shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [
        {**shared, "RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(devices)
    ]


def spawn(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]
) -> StageProcess:
    """Start a new interpreter, with the stop signals blocked until it has handlers."""
    blocked_signals = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_signals)


fork_servers: dict[
    tuple[tuple[str, str], ...], ForkServer
] = {}  # by the variables that were read while they loaded
_servers_lock = threading.Lock()


def fork_server_for(environment: Mapping[str, str]) -> ForkServer:
    """Return the fork server for this environment, started if there is none."""
    with _servers_lock:
        read = _read_while_loading(environment)
        if read not in fork_servers or not fork_servers[read].alive:
            fork_servers[read] = ForkServer(environment)
        return fork_servers[read]


def _server_of(stage: Stage, environment: Mapping[str, str]) -> ForkServer | None:
    # A stage without torch does not wait until the libraries are loaded.
    if sys.platform != "linux" or stage.module in (
        TASK.module,
        GATE.module,
    ):  # these need no library of a language model
        return None
    if stage.loads_torch:
        return fork_server_for(environment)
    server = fork_servers.get(_read_while_loading(environment))
    return server if server and server.is_loaded else None


def _read_while_loading(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted(item for item in environment.items() if item[0].startswith(READ_WHILE_LOADING))
    )


# --- waiting --------------------------------------------------------------------------------------


@dataclass
class Followed:
    """The log and the progress of a running stage, and who gets their news."""

    work: Path
    log: IO[bytes]
    report: Report
    _line: bytes = b""
    _progress: Any = None

    def look(self, *, to_the_end: bool) -> None:
        """Report the new lines and the progress."""
        *lines, self._line = (self._line + self.log.read()).split(b"\n")
        if to_the_end and self._line:
            lines.append(self._line)
        for line in lines:
            self.report("logged", {"line": line.decode("utf-8", "replace")})
        progress = read_json(self.work / stage_worker.PROGRESS)
        if progress and progress != self._progress:
            self._progress = progress
            self.report("progressed", progress)


def _wait(
    group: ProcessGroup, stage: Stage, settings: Settings, followed: Followed, stop: StopRequest
) -> tuple[int, bool]:
    # Returns (signal sent, whether the time limit was reached).
    limit = settings.runtime.timeout_seconds
    deadline = time.monotonic() + limit if limit else None
    sent_signal = 0
    kill_time = 0.0
    timed_out = False
    while True:
        ended = group.poll()
        followed.look(to_the_end=ended)
        if ended:
            return sent_signal, timed_out
        signum = stop.signum
        if deadline and time.monotonic() > deadline and not sent_signal:
            timed_out = True
            signum = signal.SIGTERM
        if signum and not sent_signal:
            sent_signal = signum
            kill_time = time.monotonic() + GRACE_SECONDS[stage.uses_ranks]
            group.send_signal(signal.SIGTERM)
        if sent_signal and (time.monotonic() > kill_time or stop.at_once):
            group.kill()
        time.sleep(POLL_SECONDS)


def result_of(
    group: ProcessGroup,
    stage: Stage,
    log_path: Path,
    outcome: JsonDict | None,
    sent_signal: int = 0,
) -> JsonDict:
    """The result of a completed stage; otherwise raises the error that ended it."""
    if outcome and outcome["outcome"] == "completed":
        return dict(outcome["result"])
    if outcome and outcome["outcome"] == "interrupted":
        raise Interrupted(
            f"stage {stage.name}: {outcome['error']}", sent_signal or outcome["signal"]
        )
    if sent_signal and outcome is None:
        saved = (
            "what it saved is kept"
            if stage.uses_ranks or stage.keeps_output
            else "its next run begins it again"
        )
        raise Interrupted(
            f"stage {stage.name} did not stop by itself and was ended; {saved}", sent_signal
        )
    if outcome and not (group.killed and outcome["kind"] == RankLost.__name__):
        if outcome["kind"] == NothingNew.__name__:
            raise NothingNew(outcome["error"])
        where = f" on rank {outcome['rank']}" if len(group.processes) > 1 else ""
        message = f"stage {stage.name} failed{where}: {outcome['error']}"
        if outcome["kind"] == "unexpected":
            message += (
                f"{_advice_on_memory(stage, outcome['error'])}; the traceback is in {log_path}"
            )
        raise StageFailed(
            message,
            outcome["kind"],
            Path(outcome["damaged"]) if outcome.get("damaged") else None,
            outcome.get("files", ()),
        )
    tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-5:])
    ended = group.describe_end()
    ended += _advice_on_memory(stage, f"{ended}\n{tail}")
    raise StageFailed(f"stage {stage.name}: {ended}; its log is {log_path}\n{tail}")


def _advice_on_memory(stage: Stage, text: str) -> str:
    advice = " or ".join([*(f"lower {setting}" for setting in stage.memory), "end other programs"])
    if any(phrase in text.lower() for phrase in OUT_OF_MEMORY):
        return f"; memory ran out: {advice}"
    return f"; if memory ran out, {advice}" if signal.SIGKILL.name in text else ""
