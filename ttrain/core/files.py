"""Atomic files, JSON, locks that end with their process, atomic removal."""

import contextlib
import json
import math
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

JsonDict = dict[str, Any]  # a JSON object
JsonObject = Mapping[str, Any]  # the same, where it is only read
PRIVATE_FILE = 0o600  # records are for the owner of the home alone
PRIVATE_DIRECTORY = 0o700
# A `temporary_path` that was never renamed, since its process was killed; group 1: process id.
INTERRUPTED_WRITE = re.compile(r"\..+\.(\d+)\.tmp")
SECONDS_BETWEEN_WRITES = 0.2


def private_opener(name: str, flags: int) -> int:
    """An `opener` for `open`: a new file has mode 0600."""
    return os.open(name, flags, PRIVATE_FILE)


def finite(value: T) -> T:
    """Convert for JSON: non-finite numbers to null, tuples to lists, dataclasses to objects."""
    converted: Any = value
    if isinstance(value, dict):
        converted = {key: finite(inner) for key, inner in value.items()}
    elif isinstance(value, list | tuple):
        converted = [finite(inner) for inner in value]
    elif is_dataclass(value) and not isinstance(value, type):
        converted = finite(asdict(value))
    elif isinstance(value, float) and not math.isfinite(value):
        converted = None
    return converted  # type: ignore[no-any-return]


def need_object(text: str | bytes) -> JsonDict:
    """Parse a JSON object. Raises ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def read_object(path: Path) -> JsonDict:
    """The JSON object of a file; {} if it is missing or holds anything else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> Any:
    """The value; None if the file is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


class Taken(Exception):
    pass


def refuse() -> NoReturn:
    """Raise Taken; passed to `exclusive` as `waiting`, it fails at once instead of waiting."""
    raise Taken


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """Hold a lock, which the system releases with its process; `waiting()` if it is taken."""
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, mode=PRIVATE_FILE)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if waiting:
            waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def write_json(path: Path, value: object, mode: int = 0o666) -> None:
    """Write JSON atomically; `mode` as in `write_bytes`."""
    write_bytes(
        path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode("utf-8"), mode
    )


def temporary_path(path: Path) -> Path:
    """A name to write before renaming to `path`; `artifacts clean` removes leftovers."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_bytes(path: Path, data: bytes, mode: int = 0o666, *, durable: bool = True) -> None:
    """Write a file atomically; `durable`: also across a power cut, which takes 5 ms and more.

    `mode`, less the umask, holds from the first byte.
    """
    temporary = temporary_path(path)
    # A killed process with the same id may have left it, with another mode.
    temporary.unlink(missing_ok=True)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        # An error of a full disk on a descriptor names no file.
        error.filename = error.filename or str(path)
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync(path.parent)


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link, or an atomic copy where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        temporary = temporary_path(target)
        shutil.copyfile(source, temporary)
        temporary.replace(target)


def private_directory(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(PRIVATE_DIRECTORY)
    return path


def user_path(text: str | Path) -> Path:
    """Expand `~`; an unknown user's `~` stays, as in a shell."""
    return Path(os.path.expanduser(text))  # noqa: PTH111  # no error where that user is unknown


@contextlib.contextmanager
def temporary_directory(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=f"ttrain-{name}-") as directory:
        yield Path(directory)


def remove_tree(path: Path) -> None:
    """Rename a directory, then remove it, so that no partial one is ever read."""
    if not path.exists():
        return
    trash = path.with_name(f".trash-{path.name}-{time.time_ns()}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def fsync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ProgressWriter:
    """Writes the progress file, at most five times a second."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0
        self._first: tuple[float, float] | None = (
            None  # what was done, and when, at the first update
        )

    def update(
        self, done: float, total: float, unit: str, *, start: bool = False, **figures: float
    ) -> None:
        """`done` of `total` units, 0 if unknown; `figures` are shown next to the bar."""
        now = time.monotonic()
        if self._path is None or (now < self._next and done != total and not start):
            return
        self._next = now + SECONDS_BETWEEN_WRITES
        if self._first is None or start or done < self._first[0]:
            self._first = done, now
        first, began = self._first
        progress = {
            "done": done,
            "total": total,
            "unit": unit,
            "figures": figures,
            "first": first,
            "seconds": now - began,
        }
        with contextlib.suppress(OSError):  # a full disk costs the bar, not the stage
            write_bytes(self._path, json.dumps(progress).encode(), durable=False)
