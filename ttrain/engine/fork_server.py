"""A server process with the slow libraries loaded, which forks the processes of stages (Linux
only).

It belongs to one launching process and has one thread, so a fork is safe. It has loaded ttrain's
modules, too (0.26 s); a fork imports them again if a file has changed. For each request the server
forks a keeper, which forks the process, waits for it and reports its exit code.

`multiprocessing`'s fork server runs the caller's main module in every child, hides a failing
import, and does not set output, session and environment.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import select
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

PRELOADED = (
    *(
        "numpy",
        "pyarrow",
        "tokenizers",
        "pydantic",
        "yaml",
        "jinja2",
        "filelock",
        "ttrain.engine.stage_worker",
    ),
    *("torch", "safetensors.torch", "torch.distributed.nn", "torch.nn.parallel.distributed"),
    *(
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "peft",
    ),
    *("ttrain.tasks.pretrain", "ttrain.tasks.evaluate"),
)
# OpenBLAS (of numpy and scipy) and pyarrow's jemalloc start a thread when they are loaded, and
# asking the CUDA runtime instead of NVML how many GPUs there are makes CUDA unusable in what is
# forked later.
ONE_THREAD = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
MESSAGE_BYTES = 1 << 20
LOADED = b"loaded"  # what a server sends once its libraries are there
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class ForkServerError(Exception):
    """The server cannot be started or has ended; the message says how."""


# --- the launching side ---------------------------------------------------------------------------


class ForkServer:
    """The fork server of this process, shared by its threads; ends with `close` or this process."""

    def __init__(
        self, environment: Mapping[str, str], libraries: Sequence[str] = PRELOADED
    ) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the server
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
        self.pid = self._process.pid
        self._is_loaded = False

    @property
    def is_loaded(self) -> bool:
        """Whether the libraries are loaded, so that it forks at once."""
        if not self._is_loaded:
            with contextlib.suppress(
                OSError
            ):  # nothing was sent yet, or another thread has read it
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
        """Fork a process that runs `module.main()` with its output to the file descriptor `output`.

        Waits while the libraries load. Returns None if `stopped()` becomes true. Raises
        ForkServerError.
        """
        request = {
            "module": module,
            "arguments": [*arguments],
            "environment": {**environment},
            "directory": str(Path.cwd()),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.suppress(OSError):  # without a server the pair is closed, too
            socket.send_fds(
                self._control, [json.dumps(request).encode()], [theirs.fileno(), output]
            )
        while not select.select([ours], [], [], POLL_SECONDS / 2)[0]:
            if stopped():
                ours.close()  # the keeper ends a process that nobody waits for
                return None
        answer = ours.recv(MESSAGE_BYTES)
        if not answer:
            ours.close()
            code = self._process.wait()
            ending = (
                f"was killed by {signal.Signals(-code).name}"
                if code < 0
                else f"ended with exit code {code}"
            )
            self._errors.seek(0)
            tail = self._errors.read().decode("utf-8", "replace").splitlines()[-1:]
            raise ForkServerError(f"the fork server {': '.join([ending, *tail])}")
        return ForkedProcess(int(answer), ours)

    def close(self) -> None:
        """Kill the server and the processes it has forked."""
        self._control.close()
        self._process.kill()
        self._process.wait()


@dataclass
class ForkedProcess:
    """A forked process, used like a subprocess.Popen by one thread."""

    pid: int
    _reply: socket.socket
    returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        return self.wait(0.0)

    def wait(self, seconds: float | None = None) -> int | None:
        """Wait for the end, at most so long, and return the exit code."""
        if self.returncode is None and select.select([self._reply], [], [], seconds)[0]:
            # without an answer its keeper is gone, and the kernel has killed it, too
            self.returncode = int(self._reply.recv(MESSAGE_BYTES) or -signal.SIGKILL)
            self._reply.close()
        return self.returncode

    def send_signal(self, signum: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


# --- the server's side ----------------------------------------------------------------------------


def main() -> NoReturn:
    """`python -m ttrain.engine.fork_server LAUNCHER DESCRIPTOR MODULE...`: load, then serve."""
    launcher = int(sys.argv[1])
    stop_watching_parent = end_with_parent(launcher)
    gc.disable()  # while it loads: 3.6 s instead of 4.6
    # as if it were not installed: transformers imports it for losses of detectors, 36 MB and 0.2 s
    sys.modules["scipy"] = None  # type: ignore[assignment]
    for name in sys.argv[3:]:
        import_module(name)
    del sys.modules["scipy"]
    loaded = _own_files()
    stop_watching_parent()
    deadline = time.monotonic() + 1.0  # the kernel lists a thread for a moment after it was joined
    while (
        threads := len([*Path("/proc/self/task").iterdir()])
    ) > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
    if threads > 1:
        sys.exit(f"{threads} threads run after loading {', '.join(sys.argv[3:])}")
    gc.collect()
    gc.freeze()  # so that no collection in a child touches, hence copies, what all of them share
    gc.enable()
    request = _serve(socket.socket(fileno=int(sys.argv[2])), launcher)
    if _own_files() != loaded:
        for name in _own_modules():
            del sys.modules[name]
        invalidate_caches()
    _end(_run_request(request))


def _own_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "ttrain"]


def _own_files() -> dict[str, tuple[int, int] | None]:
    # (mtime in ns, size) by module; None if the file is gone
    files = {name: Path(str(sys.modules[name].__file__)) for name in _own_modules()}
    return {
        name: (file.stat().st_mtime_ns, file.stat().st_size) if file.exists() else None
        for name, file in files.items()
    }


def _serve(control: socket.socket, launcher: int) -> dict[str, Any]:
    # Returns only in the forked process, with its request.
    signal.pthread_sigmask(
        signal.SIG_BLOCK, STOP_SIGNALS
    )  # a child unblocks them once it has handlers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
    server = os.getpid()
    with contextlib.suppress(OSError):  # the launcher has ended
        control.send(LOADED)
    while os.getppid() == launcher:
        if not select.select([control], [], [], POLL_SECONDS)[0]:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not data:
            break  # the launching process has ended or closed the server
        reply = socket.socket(fileno=descriptors[0])
        output = descriptors[1]
        if os.fork() == 0:
            _end_with(server)
            control.close()
            return _keep(json.loads(data), reply, output)
        reply.close()
        os.close(output)
    os._exit(0)


def _keep(request: dict[str, Any], reply: socket.socket, output: int) -> dict[str, Any]:
    # Returns only in the requested process.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keeper = os.getpid()
    child = os.fork()
    if child == 0:
        _end_with(keeper)
        reply.close()
        return {**request, "output": output}
    os.close(output)
    try:
        reply.send(str(child).encode())
    except OSError:  # the requester has gone
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(OSError):
        reply.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _end_with(parent: int) -> None:
    # SIGKILL also ends a process that is stopped or never leaves native code.
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.environ[PARENT] = str(parent)


def _run_request(request: Mapping[str, Any]) -> int:
    os.setsid()
    parent = os.environ[PARENT]
    os.environ.clear()
    os.environ.update(request["environment"], **{PARENT: parent})
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
    # Tearing down the modules would take 0.6 s with torch loaded.
    threading._shutdown()  # type: ignore[attr-defined]  # tells pools of threads to end, then waits for all but daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
