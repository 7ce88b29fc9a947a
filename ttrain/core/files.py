"""Files that are whole or absent: JSON read and written, locks that end with their process, removal by a rename."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from ttrain.errors import UsageError

T = TypeVar("T")

JsonDict = dict[str, Any]  # a JSON object
JsonObject = Mapping[str, Any]  # the same, where it is only read
PRIVATE_FILE, PRIVATE_DIRECTORY, GROUP_AND_OTHERS = 0o600, 0o700, 0o077  # modes; records are for the owner of the home alone


def private_opener(name: str, flags: int) -> int:
    """As `opener` of `open`: a new file is for its owner alone."""
    return os.open(name, flags, PRIVATE_FILE)


def finite(value: T) -> T:
    """Convert for JSON: numbers that are not finite become null, tuples lists and dataclasses objects."""
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


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError for all that is not one, also where it is nested too deeply to be read."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def need_object(text: str | bytes) -> JsonDict:
    """The JSON object of a text. Raises ValueError for anything else."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


def parse_object(text: str | bytes) -> JsonDict:
    """The JSON object of a text; empty for anything else."""
    with contextlib.suppress(ValueError):
        return need_object(text)
    return {}


def misfit(value: object, types: Any, path: str = "") -> str | None:
    """The path, such as "files.a.bytes", of the first value that is missing or not of its type; None where all fit.

    `types`: a type, [type of each item], or {name: type}; a name that ends in "?" may be missing, "*" stands for every name.
    """
    if isinstance(types, list):
        return misfit(dict(enumerate(value)), {"*": types[0]}, path) if isinstance(value, list) else path
    if not isinstance(types, dict):
        return None if isinstance(value, types) else path
    if not isinstance(value, dict):
        return path
    if "*" in types:
        types = dict.fromkeys(value, types["*"])
    else:
        types = {name.rstrip("?"): type_ for name, type_ in types.items() if name[-1] != "?" or name[:-1] in value}
    for name, type_ in types.items():
        place = f"{path}.{name}".lstrip(".")
        wrong = misfit(value[name], type_, place) if name in value else place
        if wrong is not None:
            return wrong
    return None


def read_object(path: Path) -> JsonDict:
    """The JSON object of a file; empty where the file is missing, or holds anything else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> Any:
    """The value, or None where the file is missing or not JSON."""
    try:
        return parse_json(path.read_bytes())
    except (OSError, ValueError):
        return None


def whole_lines(path: Path) -> bytes:
    """The lines of a file; a torn last one, of a full disk or a crash, is cut off. Empty if there is no file."""
    try:
        data = path.read_bytes()
    except OSError:
        return b""
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    return whole


INTERRUPTED_WRITE = re.compile(r"\..+\.(\d+)\.tmp")  # a `temporary_path` and its process, which was killed before the rename


NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # of flock, where a file system has none


class Taken(Exception):
    """Another process has the lock."""


def refuse() -> NoReturn:
    """As `waiting` of `exclusive`: raise Taken instead."""
    raise Taken


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], object] | None = None, mode: int = 0o644) -> Iterator[None]:
    """One holder at a time; released by the system when its process dies. `waiting()` is called if it is taken.

    `mode` is that of a new file.
    """
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path, mode=mode)
    warnings.filterwarnings("ignore", "flock not supported")  # which is an error here
    try:
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            need_flock(lock, path.parent)
            if waiting:
                waiting()
            lock.acquire()
        need_flock(lock, path.parent)
        yield
    except (OSError, NotImplementedError) as error:
        if lock.is_locked or not lacks_locks(error):
            raise
        raise no_locks(path.parent) from None
    finally:
        lock.release()


def need_flock(lock: object, directory: Path) -> None:
    """Raise UsageError for a lock that is a file, as filelock makes of its own where the file system has no locks.

    It would outlive a killed process, and all others would wait for it.
    """
    import filelock

    if isinstance(lock, filelock.SoftFileLock):
        raise no_locks(directory)


def lacks_locks(error: Exception) -> bool:
    """Whether flock failed since the file system has none; filelock has an error of its own for that."""
    return isinstance(error, NotImplementedError) or getattr(error, "errno", None) in NO_LOCKS


def no_locks(directory: Path) -> UsageError:
    """The error for a directory on a file system without locks."""
    return UsageError(
        f"{directory.absolute()} is on a file system without locks (flock), which keep two processes from writing the "
        f"same file; use a directory on a local disk (of a home: set TTRAIN_HOME), or mount it with locks"
    )


def check_locks(path: Path) -> None:
    """Raise UsageError where a file, which no other process has, cannot be locked on its file system."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if lacks_locks(error):
                raise no_locks(path.parent) from None
            raise


def write_json(path: Path, value: object, mode: int = 0o666) -> None:
    """Write JSON so that a reader sees the old file or the whole new one; `mode` as in `write_bytes`."""
    write_bytes(path, json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode("utf-8"), mode)


def temporary_path(path: Path) -> Path:
    """Where this process writes what it then renames to `path`; in a home `artifacts clean` removes what a kill left."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def write_bytes(path: Path, data: bytes, mode: int = 0o666, *, durable: bool = True) -> None:
    """Write a file so that a reader sees the old one or the whole new one, if `durable` also after a power cut, which takes
    5 ms and more.

    `mode` less the umask is what it has from its first byte on; `PRIVATE_FILE` where it is for its owner alone. It is a new
    file: whoever has the old one open, as others once could, does not read the new bytes.
    """
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)  # of a process of the same number that was killed: its mode would stay
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # what a full disk says of a descriptor names no file
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync(path.parent)


@contextlib.contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A file that the user asked for, which takes its name once it is whole; an old one stays if this is interrupted.

    A link, such as /dev/stdout, a pipe, and a file in a directory that cannot be changed are written themselves.
    """
    is_replaced = not path.is_symlink() and (path.is_file() or not path.exists()) and os.access(path.parent, os.W_OK)
    written = temporary_path(path) if is_replaced else path
    try:
        with written.open("wb") as file:
            if is_replaced and path.exists():
                shutil.copymode(path, written)  # before there is anything to read: it may be for its owner alone
            yield file
        if is_replaced:
            written.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # as in `write_bytes`
        raise
    finally:
        if is_replaced:
            written.unlink(missing_ok=True)


def write_output(path: Path, text: str) -> None:
    """Write a text as `output_file` does."""
    with output_file(path) as file:
        file.write(text.encode("utf-8"))


def lacks_inodes(path: Path) -> bool:
    """Whether the file system of a path has no room for another file, however much space is free."""
    status = os.statvfs(path)
    return status.f_files > 0 and status.f_favail == 0  # without a number of its own, as of btrfs, there is no limit


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, which takes no space; a copy, at once whole, where the file system has none."""
    try:
        os.link(source, target)
    except OSError:
        temporary = temporary_path(target)
        shutil.copyfile(source, temporary)
        temporary.replace(target)


def private_directory(path: Path, *, closes_files: bool = True) -> Path:
    """Make a directory for its owner alone; one that others could look into is closed to them, with all that it holds.

    `closes_files=False` leaves the modes below as they are, where files have second names elsewhere: they cannot be reached.
    """
    path.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    with contextlib.suppress(OSError):  # somebody else's, in a home that is shared
        if stat.S_IMODE(path.stat().st_mode) & GROUP_AND_OTHERS:
            path.chmod(PRIVATE_DIRECTORY)
            for below in path.rglob("*") if closes_files else ():
                if not below.is_symlink():
                    below.chmod(stat.S_IMODE(below.stat().st_mode) & ~GROUP_AND_OTHERS)
    return path


def user_path(text: str | Path) -> Path:
    """The path with the user's home in place of `~`; `~` of a user that does not exist stays, as in a shell."""
    with contextlib.suppress(RuntimeError):
        return Path(text).expanduser()
    return Path(text)


UNLOCKED_SECONDS = 60.0  # a temporary directory has its lock within milliseconds


@contextlib.contextmanager
def temporary_directory(name: str) -> Iterator[Path]:
    """A directory in the system's one for temporary files, which is removed at the end; before it is made, those that killed
    processes of this account left are removed.

    Its lock, which ends with its process, says that it is in use.
    """
    for left in Path(tempfile.gettempdir()).glob(".ttrain-*.tmp"):
        with contextlib.suppress(OSError), _locked_directory(left) as status:  # in use, another account's, or gone
            if status.st_uid == os.geteuid() and time.time() - status.st_mtime > UNLOCKED_SECONDS:
                shutil.rmtree(left)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f".ttrain-{name}-", suffix=".tmp")))
        with contextlib.suppress(OSError):  # where the file system has no locks, no directory is taken for left
            stack.enter_context(_locked_directory(directory))
        yield directory


@contextlib.contextmanager
def _locked_directory(path: Path) -> Iterator[os.stat_result]:
    """Hold the lock of a directory, which is no link. Raises OSError where another process has it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a directory: renamed first, so that no half of it is ever taken for the whole."""
    if not path.exists():
        return
    trash = path.with_name(f".trash-{path.name}-{time.time_ns()}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


SECONDS_BETWEEN_WRITES = 0.2


class ProgressWriter:
    """Writes the progress file, at most five times a second, so that it costs nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._next = 0.0
        self._first: tuple[float, float] | None = None  # what was done, and when, at the first update

    def update(self, done: float, total: float, unit: str, *, start: bool = False, **figures: float) -> None:
        """`done` of `total` `unit`s, 0 where the total is not known; `figures` are shown beside the bar."""
        now = time.monotonic()
        if self._path is None or (now < self._next and done != total and not start):
            return
        self._next = now + SECONDS_BETWEEN_WRITES
        if self._first is None or start or done < self._first[0]:
            self._first = done, now
        first, began = self._first
        progress = {"done": done, "total": total, "unit": unit, "figures": figures}
        text = json.dumps({**progress, "first": first, "seconds": now - began})
        with contextlib.suppress(OSError):  # a full disk costs the bar, not the stage
            write_bytes(self._path, text.encode(), durable=False)
