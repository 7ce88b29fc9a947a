"""Standard output and standard error when they fail: the reader is gone, the disk is full, the terminal was closed.

A command that only prints ends quietly without its reader, as programs do that SIGPIPE ends (`ttrain config show | head`).
A command whose result lies elsewhere goes on and drops what cannot be written (`ttrain pipeline run full | head`): it calls
`outlast_output`. Both are decided in the file below the streams, so that Prefect, MLflow, rich and logging need no care.
"""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any, TextIO

from ttrain.errors import TTrainError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

NAMES = {1: "standard output", 2: "standard error"}
ERRORS = "replace"  # a terminal that lacks a character gets a question mark, not the run's end
READER_IS_GONE = 128 + signal.SIGPIPE  # the exit code that a shell shows for a program that SIGPIPE ended

_drops = False  # whether this process goes on without the output that cannot be written


def guard_streams() -> None:
    """Put the guard below `sys.stdout` and `sys.stderr`; replaces those that were closed before the program began.

    A stream that is no file of its own, as where tests capture it, stays.
    """
    _open_closed_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8")  # noqa: SIM115  # as long as the process lives
    sys.stdout = _guarded(sys.stdout, 1)
    sys.stderr = _guarded(sys.stderr, 2)


def outlast_output() -> None:
    """From now on output that cannot be written is dropped, and the command goes on."""
    global _drops
    _drops = True


class _GuardedFile(io.FileIO):
    """The file of a standard stream, whose failing writes are decided here. It writes all or raises, as a buffer would.

    `io.BufferedWriter` is not used: a signal's handler that prints while the same thread is writing gets a RuntimeError.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._descriptor, self._noted = descriptor, False

    def write(self, data: Buffer) -> int:
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # another program made the terminal non-blocking
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            self._failed(error)
        return size

    def _failed(self, error: OSError) -> None:
        """Return where the output is dropped. Raises SystemExit or TTrainError where the command ends with it."""
        if _drops:
            self._note(error)
            return
        self._noted = True
        outlast_output()  # the command ends, and its last words cannot fail it again
        if error.errno == errno.EPIPE:
            raise SystemExit(READER_IS_GONE)
        raise TTrainError(f"{NAMES[self._descriptor]} cannot be written: {error.strerror}")

    def _note(self, error: OSError) -> None:
        """Say once, on the stream that is left, that the other one is gone."""
        if not self._noted and self._descriptor == 1:
            self._noted = True
            print(f"{NAMES[1]} cannot be written ({error.strerror}); the command goes on without it", file=sys.stderr)


def _guarded(stream: TextIO | None, descriptor: int) -> TextIO:
    if stream is not None and not _is_plain(stream, descriptor):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=ERRORS)
        return stream
    line_buffered = descriptor == 2
    encoding = None
    if isinstance(stream, io.TextIOWrapper):
        stream.flush()
        encoding, line_buffered = stream.encoding, stream.line_buffering or stream.write_through
    file: Any = _GuardedFile(descriptor)
    return io.TextIOWrapper(file, encoding=encoding, errors=ERRORS, line_buffering=line_buffered)


def _is_plain(stream: TextIO, descriptor: int) -> bool:
    """Whether it is the stream that Python made for this descriptor."""
    if type(stream) is not io.TextIOWrapper or isinstance(stream.buffer, _GuardedFile):
        return False
    try:
        return stream.fileno() == descriptor
    except OSError:
        return False


def _open_closed_descriptors() -> None:
    """Without this, the next file that is opened (a database) gets the number of a closed stream, and what is printed."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.dup(descriptor)
    os.close(descriptor)
