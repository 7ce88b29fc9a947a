"""The child of `ttrain.core.sandbox`: `python -m ttrain.core.sandbox_process module:function memory_bytes [module...]`.

It loads what the work needs, then forks a worker, which reads requests from the standard input and writes what the function
makes of each. SIGPROF keeps its default action, which ends the worker: so the budget of CPU time holds within any regular
expression or allocation. The next worker is there within milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ttrain.core.sandbox import END, ERROR, HEADER, MEMORY, READY, REQUEST, RESULT, TIME, TIMES, Work
from ttrain.errors import TTrainError

MESSAGE_CHARACTERS = 2000
WRITTEN_BYTES = 1 << 16
RENEWED = 3  # exit code of a worker that asks for another in its place
STATM = Path("/proc/self/statm")


def main(arguments: list[str]) -> None:
    """Fork workers until there are no more requests, or until one crashes."""
    name, memory_bytes, *preloaded = arguments
    module, _, function = name.partition(":")
    results = os.dup(1)
    os.dup2(2, 1)  # what the work prints is not a result
    work: Work = getattr(importlib.import_module(module), function)
    for library in preloaded:
        importlib.import_module(library)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _limit_memory(int(memory_bytes))
    _write(results, [_frame(READY)])
    code = RENEWED
    while code in (RENEWED, -signal.SIGPROF):
        if code == -signal.SIGPROF:
            _write(results, [_frame(TIME)])
        worker = os.fork()
        if not worker:
            _work(work, results)
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    if code < 0:
        os.kill(os.getpid(), -code)  # the parent names the signal
    sys.exit(code)


def _work(work: Work, results: int) -> NoReturn:
    """Answer requests until there are no more, or one needs too much memory, after which a new worker starts clean."""
    code = 1
    try:
        while header := _read(HEADER.size):
            if not _answer(work, _read(HEADER.unpack(header)[1]), results):
                code = RENEWED
                break
        else:
            code = 0
    finally:
        os._exit(code)


def _answer(work: Work, data: bytes, results: int) -> bool:
    """Write the results of a request; False where it needs too much memory."""
    seconds, most, per_result = REQUEST.unpack_from(data)
    frames, size = list[bytes](), 0
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        for result in work(data[REQUEST.size :]):
            frames.append(_frame(RESULT, result))
            size += len(result)
            if size >= WRITTEN_BYTES:
                remaining_seconds = _remaining_seconds()
                signal.setitimer(signal.ITIMER_PROF, 0)  # the reader's time is not the work's
                _write(results, frames)
                frames, size = [], 0
                signal.setitimer(signal.ITIMER_PROF, remaining_seconds)
            signal.setitimer(signal.ITIMER_PROF, min(most, _remaining_seconds() + per_result))
        kind, message = END, b""
    except MemoryError:
        kind, message = MEMORY, b""
    except TTrainError as error:
        kind, message = ERROR, f"{type(error).__name__}\n{str(error)[:MESSAGE_CHARACTERS]}".encode("utf-8", "replace")
    except Exception as error:
        kind, message = ERROR, f"\n{type(error).__name__}: {error!s:.{MESSAGE_CHARACTERS}}".encode("utf-8", "replace")
    remaining_seconds = _remaining_seconds()
    signal.setitimer(signal.ITIMER_PROF, 0)
    _write(results, [*frames, _frame(kind, TIMES.pack(remaining_seconds, time.process_time() - begun) + message)])
    return kind != MEMORY


def _remaining_seconds() -> float:
    return signal.getitimer(signal.ITIMER_PROF)[0]


def _frame(kind: bytes, content: bytes = b"") -> bytes:
    return HEADER.pack(kind, len(content)) + content


def _write(results: int, frames: list[bytes]) -> None:
    """Whole frames only, with the clock stopped, so that no frame is ever cut."""
    data = memoryview(b"".join(frames))
    while data:
        data = data[os.write(results, data) :]


def _read(size: int) -> bytes:
    """So many bytes of the standard input; b"" at its end. Unbuffered: what follows is for this worker or the next."""
    data = bytearray()
    while len(data) < size and (piece := os.read(0, size - len(data))):
        data += piece
    return bytes(data)


def _limit_memory(allowed_bytes: int) -> None:
    """Allow so much on top of what the interpreter takes, and no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    taken_bytes = 0
    with contextlib.suppress(OSError):
        taken_bytes = int(STATM.read_text().split()[0]) * resource.getpagesize()
    with contextlib.suppress(OSError, ValueError):  # macOS knows no such limit
        resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + allowed_bytes,) * 2)


if __name__ == "__main__":
    main(sys.argv[1:])
