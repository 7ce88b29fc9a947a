"""A child process with a budget of CPU time and memory, for work that foreign programs and files describe.

A schema, a template or a file from elsewhere can ask for hours or for all memory, and no thread can interrupt a regular
expression or an allocation. So the work is done in a child (`ttrain.core.sandbox_process`): the kernel ends it where its
CPU time is used up, and refuses it memory beyond its limit. The child is kept for the next request.

CPU time is a budget over all requests: a request may use what is left, at most `seconds`; each result, and each megabyte
of a request, adds some. So one expensive request passes, and the next ones get little. What many of them may use in all
is for the caller to bound, by `used_seconds`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Sequence

from ttrain import errors
from ttrain.errors import StageFailed, TTrainError

HEADER = struct.Struct("<cQ")  # the kind of a frame, and the bytes of its content
REQUEST = struct.Struct("<ddd")  # before a request: seconds granted, most that may be left, added with each result
TIMES = struct.Struct("<dd")  # after a request: seconds that are left, seconds that it used
READY, RESULT, END, ERROR, MEMORY, TIME = b"r", b"d", b"e", b"x", b"m", b"t"
RESULT_BYTES = 1 << 30  # of one result; the memory limit ends the child long before
SECONDS_PER_BYTE = 1e-6  # added to the budget by a request: ten times what rendering takes
DEATH_SECONDS = 10
MIB = 1 << 20
Work = Callable[[bytes], Iterable[bytes]]


class BudgetExceeded(Exception):
    """The work needs more time or memory than its budget, or it crashed the child; the message says which, as in "it needs
    more than 2 s of CPU time"."""


class WorkFailed(Exception):
    """The work raised an error that is not one of ttrain's; the message is its own."""


class Sandbox:
    """Children that run one function, which maps a request to results. Threads may share it; so may a forked process.

    The function is one of a module, and gets nothing but the bytes of the request. `preloaded` names the modules that it
    imports, so that their time and memory are not in the budget.
    """

    def __init__(
        self, work: Work, *, seconds: float, seconds_per_result: float, memory_bytes: int, preloaded: Sequence[str] = ()
    ) -> None:
        self._command = (f"{work.__module__}:{work.__name__}", str(memory_bytes), *preloaded)
        self._seconds, self._seconds_per_result, self._memory_bytes = seconds, seconds_per_result, memory_bytes
        self._remaining_seconds = seconds
        self.used_seconds = 0.0  # CPU time of all requests
        self._idle: list[_Child] = []
        atexit.register(self.close)

    def call(self, request: bytes) -> bytes:
        """The only result. Raises BudgetExceeded, WorkFailed, or the work's own TTrainError."""
        (result,) = self.stream(request)
        return result

    def stream(self, request: bytes) -> Generator[bytes]:
        """The results in order, each as soon as it is there. Raises as `call` does."""
        added = self._seconds_per_result + SECONDS_PER_BYTE * len(request)
        most = self._seconds + SECONDS_PER_BYTE * len(request)
        granted = min(most, self._remaining_seconds + added)
        child = self._take()
        is_reusable = False
        try:
            try:
                child.send(HEADER.pack(RESULT, len(request) + REQUEST.size))
                child.send(REQUEST.pack(granted, most, self._seconds_per_result) + request)
                kind, content = child.receive()
                while kind == RESULT:
                    yield content
                    kind, content = child.receive()
            except (EOFError, OSError):
                self._remaining_seconds = 0.0
                self.used_seconds += granted
                raise BudgetExceeded(child.death()) from None
            is_reusable = True
            remaining_seconds, used_seconds = (0.0, granted) if kind == TIME else TIMES.unpack_from(content)
            self._remaining_seconds = min(self._seconds, remaining_seconds)
            self.used_seconds += used_seconds
            if kind == TIME:
                raise BudgetExceeded(f"it needs more than {granted:.2g} s of CPU time")
            if kind == MEMORY:
                raise BudgetExceeded(f"it needs more than {self._memory_bytes // MIB} MiB of memory")
            if kind == ERROR:
                raise _error(content[TIMES.size :])
        finally:
            if is_reusable:
                self._idle.append(child)
            else:
                child.close()

    def close(self) -> None:
        """End the children that wait."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Child:
        with contextlib.suppress(IndexError):
            while True:
                child = self._idle.pop()
                if child.is_usable():
                    return child
                child.close()
        return _Child(self._command)


class _Child:
    """One process, of the process that started it."""

    def __init__(self, command: Sequence[str]) -> None:
        self._owner = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the child
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "ttrain.core.sandbox_process", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            start_new_session=True,  # Ctrl-C is for the process that waits
        )
        try:
            self.receive()  # READY
        except EOFError:
            self._process.wait()
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - 2000))
            lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
            self.close()
            raise StageFailed(
                f"the process that limits untrusted work cannot be started: {lines[-1] if lines else 'it said nothing'}"
            ) from None
        except BaseException:
            self.close()
            raise

    def is_usable(self) -> bool:
        return self._owner == os.getpid() and self._process.poll() is None

    def send(self, data: bytes) -> None:
        assert self._process.stdin, "it has a pipe"
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def receive(self) -> tuple[bytes, bytes]:
        """(kind, content) of the next frame. Raises EOFError where the child ended."""
        kind, size = HEADER.unpack(self._read(HEADER.size))
        if size > RESULT_BYTES:
            raise EOFError("a result beyond all limits")
        return kind, self._read(size)

    def _read(self, size: int) -> bytes:
        assert self._process.stdout, "it has a pipe"
        data = self._process.stdout.read(size)
        if len(data) < size:
            raise EOFError("the child ended")
        return data

    def death(self) -> str:
        """What ended the child, for a message."""
        try:
            code = self._process.wait(DEATH_SECONDS)  # it ends with its worker
        except subprocess.TimeoutExpired:
            return "its answer is not a valid result"
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended with {name}, as it does where memory is refused"

    def close(self) -> None:
        if self._owner != os.getpid():
            self._process.returncode = 0  # another process's child: not to be waited for
        else:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)  # with its worker
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe, "it has pipes"
            with contextlib.suppress(OSError):  # what a dead child did not read
                pipe.close()


def _error(content: bytes) -> Exception:
    name, _, message = content.decode("utf-8", "replace").partition("\n")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TTrainError):
        return kind(message)
    return WorkFailed(message or name)
