"""Start and watch the processes of one stage: its ranks, or this node's torchrun agent if there are several nodes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ttrain.config import DATASETS, Settings
from ttrain.core.files import JsonDict, read_json
from ttrain.core.signals import PARENT, RENDEZVOUS, STOP_SIGNALS
from ttrain.engine import stage_worker
from ttrain.engine.fork_server import BASIC, PRELOADED, ForkedProcess, ForkServer, ForkServerError, available
from ttrain.engine.graph import Planned
from ttrain.engine.stage_worker import PROGRESS
from ttrain.engine.stop_request import StopRequest
from ttrain.errors import FREE_SPACE, Interrupted, NothingNew, RankLost, StageFailed
from ttrain.tasks import GATE, TASK, Stage

POLL_SECONDS = 0.05
CRASHES = (signal.SIGBUS, signal.SIGSEGV, signal.SIGILL)  # of native code
KERNELS = Path(__file__).parents[1] / "train"  # where they are compiled to
# After the stop signal: seconds for a step and its checkpoint (True), or for other stages. Native code may ignore it.
GRACE_SECONDS = {True: 60.0, False: 5.0}
OTHERS_SECONDS = 5.0  # for the other ranks to report, once one has failed or rank 0 has ended
SAME_SECONDS = 0.5  # a rank that fails this shortly before another is seen to be killed failed because of that
# glibc keeps freed memory and uses huge pages: 1.35 x the training speed of the quickstart's size, measured on two cores.
GLIBC_TUNABLES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184"
# Variables that native code and the libraries read while they load: a fork server that was started with other values
# cannot be used. The number of threads is not among them, the stages set it themselves.
READ_WHILE_LOADING = (
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
)
OUT_OF_MEMORY = ("memoryerror", "memory allocation", "allocate memory")  # in what Python, torch, Rust and OpenBLAS say
LEAST_FREE_BYTES = 1 << 16  # of a disk that is not full: a stage's result and log take less
WORKER, AGENT = "ttrain.engine.stage_worker", "ttrain.engine.torchrun_agent"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", RENDEZVOUS)


StageProcess = subprocess.Popen[bytes] | ForkedProcess


@dataclass
class ProcessGroup:
    """The processes of a stage, by rank. One that fails ends the others, and so does the end of rank 0."""

    processes: list[StageProcess] = field(default_factory=list)
    killed: tuple[int, int] | None = None  # (rank, exit code) of the first that a foreign signal ended
    killed_at: float = 0.0  # by time.time()
    _ended: set[int] = field(default_factory=set)
    _deadline: float | None = None
    _killed_by_us: bool = False

    def poll(self) -> bool:
        """Check the processes; return whether all have ended."""
        for rank, process in enumerate(self.processes):
            if rank in self._ended or process.poll() is None:
                continue
            self._ended.add(rank)
            code = process.returncode or 0
            if code < 0 and not self._killed_by_us and self.killed is None:
                self.killed, self.killed_at = (rank, code), time.time()
            if (code or rank == 0) and self._deadline is None:
                self._deadline = time.monotonic() + OTHERS_SECONDS
        done = len(self._ended) == len(self.processes)
        if not done and self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()
        return done

    def wait(self, seconds: float) -> None:
        """Wait so long, or until the next of the processes ends."""
        with contextlib.ExitStack() as opened:
            try:
                poller = select.poll()
                for rank, process in enumerate(self.processes):
                    if rank not in self._ended:
                        descriptor = os.pidfd_open(process.pid)
                        opened.callback(os.close, descriptor)
                        poller.register(descriptor, select.POLLIN)
                poller.poll(seconds * 1000)
            except ProcessLookupError:  # it has just ended, and its exit code is on the way
                time.sleep(seconds / 10)
            except (AttributeError, OSError):  # not on this system
                time.sleep(seconds)

    def send_signal(self, signum: int) -> None:
        """Send a signal to all that still run."""
        for process in self.processes:
            process.send_signal(signum)

    def kill(self) -> None:
        """Send SIGKILL to all that still run."""
        self._killed_by_us = True
        for process in self.processes:
            process.kill()

    def end(self) -> None:
        """Kill the processes that still run, and wait for them."""
        if not self.poll():
            self.kill()
            for process in self.processes:
                process.wait()

    def describe_end(self) -> str:
        """Describe the end of a stage that left no result."""
        rank, code = self.killed or next(
            ((rank, p.returncode) for rank, p in enumerate(self.processes) if p.returncode), (0, 0)
        )
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        who, others = ("its process", "") if len(self.processes) == 1 else (f"rank {rank}", ", and the others were ended")
        kernels = [*KERNELS.glob("_native.*")] if -code in CRASHES else []
        advice = f"; if that repeats, remove {kernels[0]}, which may be damaged, or install ttrain again" if kernels else ""
        return f"{who} {how} without a result{others}{advice}"


def run(stage: Stage, settings: Settings, work: Path, log_path: Path, observer: StageObserver) -> JsonDict:
    """Start the processes of a stage with a prepared work directory, wait for their end and return the stage's figures.

    Raises StageFailed with the stage's own message, or Interrupted once its state is saved.
    """
    with log_path.open("ab", buffering=0) as log:
        position = log.tell()
        group = ProcessGroup()
        try:
            start(group, stage, settings, work, log, observer)
            stop_signal, timed_out = _wait(group, stage, settings, work, log_path, position, observer)
        finally:
            group.end()
    return _result(group, stage, settings, work, log_path, stop_signal, timed_out)


# --- starting -----------------------------------------------------------------------------------------------------------


def environment_of(settings: Settings) -> dict[str, str]:
    """Environment variables of a stage's processes. glibc and OpenMP read theirs when a program starts."""
    environment = {
        name: value for name, value in os.environ.items() if name not in RANK_VARIABLES
    }  # they name a rank in another group
    environment.setdefault("GLIBC_TUNABLES", GLIBC_TUNABLES)
    # How long an idle OpenMP thread spins before it sleeps. A step of the quickstart on two cores, alone / beside a busy
    # process: libgomp's default 0.18 s / 5 s, no spinning at all 0.24 s / 0.31 s, this 0.18 s / 0.47 s.
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "10000")
    environment.setdefault("TOKENIZERS_PARALLELISM", "true")
    environment.setdefault("TQDM_DISABLE", "1")  # libraries' bars would stand in the log
    if not any(path.startswith("hf://") for name in DATASETS for path in settings.data.paths(name)):
        environment.setdefault("HF_HUB_OFFLINE", "1")
    environment["PYTHONUNBUFFERED"] = "1"
    environment[PARENT] = str(os.getpid())
    if settings.runtime.threads:
        environment["OMP_NUM_THREADS"] = str(settings.runtime.threads)
    if settings.runtime.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, settings.runtime.gpus))
    return environment


def warm_up(settings: Settings, stages: Sequence[Stage]) -> None:
    """Load the libraries of these stages, which are still to run, in the background while another stage runs."""
    if stages and available():
        with contextlib.suppress(ForkServerError):  # reported when the server is needed
            fork_server_for(environment_of(settings), PRELOADED if any(stage.loads_torch for stage in stages) else BASIC)


def start(
    group: ProcessGroup, stage: Stage, settings: Settings, work: Path, log: IO[bytes], observer: StageObserver
) -> None:
    """Start the processes of a stage, one per local rank, and add them to the group."""
    environment, runtime = environment_of(settings), settings.runtime
    is_of_pipeline = stage.module not in (TASK.module, GATE.module)
    module, arguments, environments = WORKER, [str(work)], [environment]
    if stage.uses_ranks and runtime.nodes > 1:
        host, _, port = str(runtime.rendezvous).rpartition(":")
        nodes = [f"--nnodes={runtime.nodes}", f"--node-rank={runtime.node_rank}", f"--nproc-per-node={runtime.devices}"]
        master = [f"--master-addr={host}", f"--master-port={port}", "--max-restarts=0"]
        module, arguments = AGENT, [*nodes, *master, "-m", WORKER, str(work)]
    elif (stage.uses_ranks or stage.spreads) and runtime.devices > 1:
        # a file instead of a port: it cannot be taken by another; they then talk over the loopback device
        rendezvous, world = work / f"rendezvous-{os.getpid()}-{time.time_ns()}", str(runtime.devices)
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
        of_all = {**loopback, **environment, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, RENDEZVOUS: str(rendezvous)}
        environments = [{**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(runtime.devices)]
    for variables in environments:
        process = None
        # Not what trains a task or a gate: it would load the libraries of language models, and be used once.
        if is_of_pipeline and available() and (stage.loads_torch or loaded_server_for(variables)):
            process = _fork(module, arguments, variables, log, observer, needs_torch=stage.loads_torch)
        group.processes.append(process or spawn(module, arguments, variables, log))


def spawn(module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes]) -> StageProcess:
    """Start a new interpreter. The stop signals stay blocked until it has handlers: a new program inherits the mask."""
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


def _fork(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], log: IO[bytes], observer: StageObserver,
    *, needs_torch: bool,
) -> StageProcess | None:  # fmt: skip
    """Start from the fork server; None if that fails, which the stage's log records. Raises Interrupted."""
    try:
        server = (None if needs_torch else loaded_server_for(environment)) or fork_server_for(environment)
        process = server.start(module, arguments, environment, log.fileno(), lambda: observer.stop_signal() != 0)
    except ForkServerError as error:
        with contextlib.suppress(OSError):  # a full disk costs the line
            log.write(f"{error}; a fresh process loads its libraries itself\n".encode())
        return None
    if process is None:
        raise Interrupted("the stage was stopped before it began", observer.stop_signal())
    return process


fork_servers: list[ForkServer] = []
_servers_lock = threading.Lock()


def fork_server_for(environment: Mapping[str, str], libraries: tuple[str, ...] = PRELOADED) -> ForkServer:
    """Return the fork server for this environment, started if there is none. Raises ForkServerError."""
    with _servers_lock:
        for server in _servers_for(environment):
            if set(server.libraries) >= set(libraries):
                return server
        try:
            fork_servers.append(ForkServer(environment, libraries))
        except OSError as error:
            raise ForkServerError(f"the fork server cannot be started: {error}") from None
        return fork_servers[-1]


def loaded_server_for(environment: Mapping[str, str]) -> ForkServer | None:
    """A fork server for this environment that need not be waited for, whatever it has loaded."""
    with _servers_lock:
        return next((server for server in _servers_for(environment) if server.is_loaded), None)


def _servers_for(environment: Mapping[str, str]) -> list[ForkServer]:
    """The servers that live and were started with these values; those that have ended are forgotten."""
    fork_servers[:] = [server for server in fork_servers if server.alive]
    return [server for server in fork_servers if _relevant(server.environment) == _relevant(environment)]


def _relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(READ_WHILE_LOADING)}


# --- waiting ------------------------------------------------------------------------------------------------------------


def _wait(
    group: ProcessGroup,
    stage: Stage,
    settings: Settings,
    work: Path,
    log_path: Path,
    position: int,
    observer: StageObserver,
) -> tuple[int, bool]:
    """Wait for all processes, report their progress and log lines, forward a stop signal. Returns (signal sent,
    whether the time limit was reached)."""
    limit = settings.runtime.timeout_seconds
    deadline = time.monotonic() + limit if limit else None
    sent_signal, kill_time, timed_out, last_progress = 0, 0.0, False, None
    while True:
        ended = group.poll()
        position = _follow(log_path, position, stage, observer, to_the_end=ended)
        progress = read_json(work / PROGRESS)
        if progress and progress != last_progress:
            last_progress = progress
            observer.progressed(stage, progress)
        if ended:
            return sent_signal, timed_out
        signum = sent_signal or observer.stop_signal()
        if deadline and time.monotonic() > deadline and not timed_out:
            timed_out, signum = True, signal.SIGTERM
        if signum and not sent_signal:
            sent_signal, kill_time = signum, time.monotonic() + GRACE_SECONDS[stage.uses_ranks]
            group.send_signal(signal.SIGTERM)
        if sent_signal and (time.monotonic() > kill_time or observer.at_once()):
            group.kill()
        group.wait(POLL_SECONDS)


def _follow(path: Path, position: int, stage: Stage, observer: StageObserver, *, to_the_end: bool) -> int:
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except FileNotFoundError:
        raise StageFailed(
            f"stage {stage.name}: its log {path} is gone, so its work directory was removed while it ran; run the same "
            f"command again"
        ) from None
    whole = len(data) if to_the_end else data.rfind(b"\n") + 1
    for line in data[:whole].decode("utf-8", "replace").splitlines():
        observer.logged(stage, line)
    return position + whole


def _result(
    group: ProcessGroup, stage: Stage, settings: Settings, work: Path, log_path: Path, sent_signal: int, timed_out: bool
) -> JsonDict:
    """Return the figures of a completed stage, or raise the error that says why it did not complete."""
    outcome = stage_worker.read(work)
    if outcome and outcome["outcome"] == "completed":
        return dict(outcome["result"])
    if timed_out:
        limit = settings.runtime.timeout_seconds
        raise StageFailed(f"stage {stage.name} took longer than runtime.timeout_seconds={limit}; the next run continues it")
    if outcome and outcome["outcome"] == "interrupted":
        raise Interrupted(f"stage {stage.name}: {outcome['error']}", sent_signal or outcome["signal"])
    if sent_signal and outcome is None:
        saved = "its last checkpoint is kept" if stage.uses_ranks else "its next run begins it again"
        raise Interrupted(f"stage {stage.name} did not stop by itself and was ended; {saved}", sent_signal)
    if outcome and (group.killed is None or outcome["at"] < group.killed_at - SAME_SECONDS):
        location = ""
        if outcome["kind"] == "unexpected":
            location = f"{_advice_on_memory(stage, outcome['error'])}; the traceback is in {log_path}"
        if outcome["kind"] == RankLost.__name__:
            location += _advice_on_disk(work)  # the other rank could not write its result
        who = f" on rank {outcome['rank']}" if len(group.processes) > 1 else ""
        if outcome["kind"] == NothingNew.__name__:
            raise NothingNew(outcome["error"])
        damaged = Path(outcome["damaged"]) if outcome.get("damaged") else None
        message = f"stage {stage.name} failed{who}: {outcome['error']}{location}"
        raise StageFailed(message, outcome["kind"], damaged, outcome.get("files", ()))
    tail = "\n".join(log_path.read_text(errors="replace").splitlines()[-5:])
    ended = group.describe_end()
    advice = _advice_on_disk(work) + _advice_on_memory(stage, f"{ended}\n{tail}")
    raise StageFailed(f"stage {stage.name}: {ended}{advice}; its log is {log_path}\n{tail}")


def _advice_on_memory(stage: Stage, text: str) -> str:
    """What to add to a stage's message where it may have had too little memory, and was sent SIGKILL; else empty."""
    if any(phrase in text.lower() for phrase in OUT_OF_MEMORY):
        return f"; memory ran out: {stage.memory_advice}"
    return f"; if memory ran out, {stage.memory_advice}" if signal.SIGKILL.name in text else ""


def _advice_on_disk(work: Path) -> str:
    """What to add to a stage's message where its disk is full; else empty."""
    if shutil.disk_usage(work).free < LEAST_FREE_BYTES:
        return f"; the disk of {work} is full: {FREE_SPACE}"
    return ""


class StageObserver:
    """Receives the events of a stage, from its plan to the end of its processes; by itself it ignores them."""

    def __init__(self, stop_request: StopRequest | None = None) -> None:
        self.stop_request = stop_request or StopRequest()

    def noted(self, stage: Stage, text: str) -> None:
        """Another process builds it, or files of an input are fetched from MLflow."""

    def waits_for(self, stage: Stage, who: str) -> None:
        """Note that another process builds it."""
        self.noted(stage, f"{who} is building it; waiting for it to finish")

    def started(self, stage: Stage, planned: Planned, work: Path) -> None:
        """Its work directory is prepared."""

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        """It reports how far it is."""

    def logged(self, stage: Stage, line: str) -> None:
        """A line of its log."""

    def stop_signal(self) -> int:
        """The signal to stop it with; 0 for none."""
        return self.stop_request.signum

    def at_once(self) -> bool:
        """Whether it must not even save its state."""
        return self.stop_request.at_once
