"""A server process with the slow libraries loaded, which forks the processes of stages in milliseconds.

It belongs to one launching process. Of ttrain's own modules it has loaded those that stages import, which takes 0.26 s of a
core; a forked process imports all of them again where the file of one has changed since, so no code is stale. A fork is
safe because nothing has run in it: it has one thread when it forks, or it refuses.

`multiprocessing`'s fork server runs the caller's main module again in every child, hides an import that fails, and leaves
output, session, environment and the check of threads to the child; hence this one. It needs Linux (pidfd_open).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module, invalidate_caches
from pathlib import Path
from typing import Any, NoReturn

from ttrain.core.signals import PARENT, POLL_SECONDS, STOP_SIGNALS, end_with_parent

BASIC = ("numpy", "pyarrow", "tokenizers", "pydantic", "yaml", "jinja2", "filelock", "ttrain.engine.stage_worker")
PRELOADED = (
    *(*BASIC, "torch", "safetensors.torch", "torch.distributed.nn", "torch.nn.parallel.distributed"),
    *("transformers.models.llama.modeling_llama", "transformers.models.qwen3.modeling_qwen3", "peft"),
    *("ttrain.tasks.pretrain", "ttrain.tasks.evaluate"),
)  # of stages that load torch; BASIC is for those that do without
# Libraries that those import where they can, for what no stage does: scipy for losses of detectors, 36 MB and 0.2 s.
LEFT_OUT = ("scipy",)
# OpenBLAS (of numpy and scipy) and pyarrow's jemalloc start a thread when they are loaded, and asking the CUDA runtime
# instead of NVML how many GPUs there are makes CUDA unusable in what is forked later.
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
ANSWER_SECONDS = 120.0  # to load the libraries from a cold disk, and to fork
MESSAGE_BYTES = 1 << 20
LOADED = b"loaded"  # what a server says once its libraries are there
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ForkServerError(Exception):
    """The server cannot be started, has ended or does not answer; the message says which."""


# --- the launching side -------------------------------------------------------------------------------------------------


def available() -> bool:
    """Whether this system supports the fork server."""
    return hasattr(os, "pidfd_open") and hasattr(socket, "SOCK_SEQPACKET")


class ForkServer:
    """The fork server of this process. Threads may share it; it ends with `close`, or with this process."""

    def __init__(self, environment: Mapping[str, str], libraries: Sequence[str] = PRELOADED) -> None:
        self.environment, self.libraries = environment, libraries
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control, self._errors = ours, tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the server
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "ttrain.engine.fork_server",
                    str(os.getpid()),
                    str(theirs.fileno()),
                    *libraries,
                ],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=subprocess.STDOUT,
                env={**environment, **ONE_THREAD},
                start_new_session=True,
            )
        self.pid, self._is_loaded = self._process.pid, False

    @property
    def is_loaded(self) -> bool:
        """Whether the libraries are loaded, so that it forks at once."""
        if not self._is_loaded:
            with contextlib.suppress(OSError):  # nothing is said yet, or another thread has read it
                self._is_loaded = self._control.recv(len(LOADED), socket.MSG_DONTWAIT) == LOADED
        return self._is_loaded and self.alive

    @property
    def alive(self) -> bool:
        """Whether the server is running."""
        return self._process.poll() is None

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        output: int,
        stopped: Callable[[], bool] = lambda: False,
    ) -> ForkedProcess | None:
        """Fork a process that runs `module.main()`; standard output and error go to the file descriptor `output`.

        Waits while the libraries load. Returns None if `stopped()` becomes true. Raises ForkServerError.
        """
        request = {"module": module, "arguments": [*arguments], "environment": {**environment}, "directory": str(Path.cwd())}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno(), output])
            deadline = time.monotonic() + ANSWER_SECONDS
            while not select.select([ours], [], [], POLL_SECONDS / 2)[0]:
                if stopped():
                    ours.close()  # the server ends a child that nobody waits for
                    return None
                if not self.alive:
                    raise ForkServerError(self._describe_exit())
                if time.monotonic() > deadline:
                    self.close()
                    raise ForkServerError(f"the fork server did not answer for {ANSWER_SECONDS:.0f} s")
            data, descriptors, _, _ = socket.recv_fds(ours, MESSAGE_BYTES, 1)
            if not data:
                self._process.wait()
                raise ForkServerError(self._describe_exit())
            answer = json.loads(data)
            if "refused" in answer:
                raise ForkServerError(f"the fork server refused: {answer['refused']}")
        except OSError as error:
            ours.close()
            raise ForkServerError(
                self._describe_exit() if not self.alive else f"the fork server cannot be reached: {error}"
            ) from None
        except ForkServerError:
            ours.close()
            raise
        return ForkedProcess(answer["pid"], descriptors[0], ours)

    def close(self) -> None:
        """Kill the server and the processes it has forked."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _describe_exit(self) -> str:
        code = self._process.wait()
        ending = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._errors.seek(0)
        tail = self._errors.read().decode("utf-8", "replace").splitlines()[-1:]
        return f"the fork server {ending}{': ' if tail else ''}{''.join(tail)}"


@dataclass
class ForkedProcess:
    """A forked process, used like a subprocess.Popen by one thread. Its pidfd keeps signals from a wrong process."""

    pid: int
    _pidfd: int
    _reply: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        return self._wait(0.0)

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        code = self._wait(None)
        assert code is not None, "waited without a limit"
        return code

    def send_signal(self, signum: int) -> None:
        """Send a signal, even if the server has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is not None or not select.select([self._reply], [], [], seconds)[0]:
            return self.returncode
        data = self._reply.recv(MESSAGE_BYTES)
        if data:
            self.returncode = int(json.loads(data)["returncode"])
        else:  # the server is gone, and the kernel has ended its children with it
            self.kill()
            select.select([self._pidfd], [], [])
            self.returncode = -signal.SIGKILL
        os.close(self._pidfd)
        self._reply.close()
        return self.returncode


# --- the server's side --------------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """`python -m ttrain.engine.fork_server LAUNCHER DESCRIPTOR MODULE...`: load, then serve until the launcher ends."""
    launcher, control = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    stop_watching_parent = end_with_parent(launcher)
    began = time.time_ns()
    gc.disable()  # while it loads: 3.6 s instead of 4.6
    for name in LEFT_OUT:
        sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
    for name in sys.argv[3:]:
        import_module(name)
    for name in LEFT_OUT:
        del sys.modules[name]
    loaded = _own_files()
    if any(changed > began for changed, _ in loaded.values()):
        loaded = {}  # while it loaded, so that what is in memory may be older: nothing is taken over
    stop_watching_parent()
    deadline = time.monotonic() + 1.0  # the kernel lists a thread for a moment after it was joined
    while threads() > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    if threads() > 1:
        sys.exit(f"{threads()} threads run after loading {', '.join(sys.argv[3:])}")
    gc.collect()
    gc.freeze()  # so that no collection in a child touches, hence copies, what all of them share
    gc.enable()
    with contextlib.suppress(OSError):  # the launcher has ended
        control.send(LOADED)
    request = _serve(control, launcher)
    if not loaded or _own_files() != loaded:
        for name in _own_modules():
            del sys.modules[name]
        invalidate_caches()
    _end(_run_request(request))


def _own_modules() -> list[str]:
    """The names of ttrain's modules that are loaded."""
    return [name for name in sys.modules if name.partition(".")[0] == "ttrain"]


def _own_files() -> dict[str, tuple[int, int]]:
    """(time of the last change in ns, size) of their files by module; zeros for one that is gone."""
    found = {}
    for name in _own_modules():
        try:
            status = Path(str(sys.modules[name].__file__)).stat()
        except OSError:
            found[name] = (0, 0)
        else:
            found[name] = (status.st_mtime_ns, status.st_size)
    return found


def threads() -> int:
    """Threads of this process, native ones included."""
    return len([*Path("/proc/self/task").iterdir()])


def _serve(control: socket.socket, launcher: int) -> dict[str, Any]:
    """Fork on request and report the exit codes. Returns in the forked process, with its request."""
    children: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: the process, and where its exit code is sent
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # a child unblocks them once it has handlers
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while os.getppid() == launcher:
            for key, _ in selector.select(POLL_SECONDS):
                if key.fileobj is not control:
                    selector.unregister(key.fd)
                    pid, reply = children.pop(key.fd)
                    _, status = os.waitpid(pid, 0)
                    os.close(key.fd)
                    with contextlib.suppress(OSError), reply:
                        reply.send(json.dumps({"returncode": os.waitstatus_to_exitcode(status)}).encode())
                    continue
                data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
                if not data:
                    os._exit(0)  # the launching process has ended or closed the server
                reply = socket.socket(fileno=descriptors[0])
                child = _fork(reply, descriptors[1])
                if child == 0:
                    for descriptor, (_, sibling) in children.items():
                        os.close(descriptor)
                        sibling.close()
                    control.close()
                    return {**json.loads(data), "output": descriptors[1]}
                os.close(descriptors[1])
                if child:
                    pidfd = os.pidfd_open(child)
                    children[pidfd] = child, reply
                    selector.register(pidfd, selectors.EVENT_READ)
                    try:
                        socket.send_fds(reply, [json.dumps({"pid": child}).encode()], [pidfd])
                    except OSError:  # the requester has gone
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os._exit(1)


def _fork(reply: socket.socket, output: int) -> int | None:
    """Fork; return the child's id, 0 in the child, None if the fork is refused."""
    server = os.getpid()
    try:
        if threads() > 1:
            raise OSError(f"it has {threads()} threads")
        child = os.fork()
    except OSError as error:
        with contextlib.suppress(OSError), reply:
            reply.send(json.dumps({"refused": str(error)}).encode())
        return None
    if child == 0:
        # SIGKILL when the server ends, also to a child that is stopped or never leaves native code.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        os.environ[PARENT] = str(server)
        reply.close()
        return 0
    return child


def _run_request(request: Mapping[str, Any]) -> int:
    """Run the requested module in its own session and environment, with a fresh seed."""
    os.setsid()
    server = os.environ[PARENT]
    os.environ.clear()
    os.environ.update(request["environment"], **{PARENT: server})
    os.chdir(request["directory"])
    os.dup2(request["output"], 1)
    os.dup2(request["output"], 2)
    os.close(request["output"])
    import_module("numpy").random.seed()  # Python's `random` reseeds itself
    sys.argv = [request["module"], *request["arguments"]]
    try:
        code: int = import_module(request["module"]).main()
    except BaseException:
        traceback.print_exc()
        return 1
    return code


def _end(code: int) -> NoReturn:
    """End a forked process without tearing down its modules, which takes 0.6 s with torch loaded, 0.05 s without."""
    threading._shutdown()  # type: ignore[attr-defined]  # tells pools of threads to end, then waits for all but daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
