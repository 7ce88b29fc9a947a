"""Sends files to where a run's artifacts are, file by file, so that what arrived is not sent again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, final

from ttrain.tracking.journal import Entry
from ttrain.tracking.safe_names import artifact_path

if TYPE_CHECKING:
    from ttrain.tracking.runs import Run

File = tuple[Path, str, str]  # where it is, the directory below the run that it goes to, its name there

# From the last byte of a file to the answer: a server that hands 10 GB on to S3 answers when that is done.
ANSWER_SECONDS: Final = 600.0
SECONDS_BETWEEN: Final = 0.2
_patience = threading.local()
_changed = threading.Lock()


@dataclass
class Progress:
    """How far the uploads of this process are."""

    done: int = 0  # bytes, of files that are done and of the one that goes
    total: int = 0
    moved: float = 0.0  # when a byte last went, by the monotonic clock
    told: Callable[[int, int], object] = lambda done, total: None
    _next: float = 0.0

    def at(self, done: int) -> None:
        """So many bytes went."""
        self.done, self.moved = done, time.monotonic()
        if self.moved >= self._next or done == self.total:
            self._next = self.moved + SECONDS_BETWEEN
            self.told(done, self.total)


def listed(directory: Path, to: str) -> list[File]:
    """The files below a directory with their places. Raises ValueError where one is no place below a run."""
    found = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            place = artifact_path("/".join(filter(None, (to, path.relative_to(directory).as_posix()))))
            found.append((path, place.rpartition("/")[0], path.name))
    return found


def send(run: Run, entry: Entry, files: list[File]) -> None:
    """Uploads what has not arrived yet. Raises what MLflow does; what arrived stays noted."""
    progress = run.store.progress
    waiting = [one for one in files if f"{one[1]}/{one[2]}" not in entry.parts]
    ahead = sum(path.stat().st_size for path, _, _ in waiting)
    progress.total += ahead
    for path, to, name in waiting:
        before, size = progress.done, path.stat().st_size
        progress.at(before)
        try:
            with patience(progress), _named(path, name) as source:
                run.store.client.log_artifact(run.id, str(source), to or None)
        except Exception:
            progress.done, progress.total = before, progress.total - ahead
            raise
        progress.at(before + size)
        ahead -= size
        run.box.arrived(entry, f"{to}/{name}")


@contextlib.contextmanager
def patience(progress: Progress | None = None) -> Iterator[None]:
    """In here, this thread's uploads may take longer than other questions, and are counted as they go."""
    _teach()
    _patience.progress = progress or Progress()
    try:
        yield
    finally:
        _patience.progress = None


@contextlib.contextmanager
def _named(path: Path, name: str) -> Iterator[Path]:
    """The file under the name that it is to have, which MLflow takes from the path."""
    if path.name == name:
        yield path
        return
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        link = Path(folder) / name
        link.symlink_to(path.resolve())
        yield link


def _teach() -> None:
    """MLflow has one time limit for all requests (ours: 10 s); its uploads ask this function of their module for it."""
    module: Any = import_module("mlflow.store.artifact.http_artifact_repo")
    with _changed:
        if not isinstance(module.http_request, _Patient):
            module.http_request = _Patient(module.http_request)


@final
class _Patient:
    """MLflow's `http_request`; in a thread that uploads, with a limit of its own and counted bytes."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        progress = getattr(_patience, "progress", None)
        if progress is None:
            return self._original(*arguments, **named)
        if hasattr(named.get("data"), "fileno"):
            named["data"] = _Counted(named["data"], progress)
        return partial(self._original, timeout=(10.0, ANSWER_SECONDS))(*arguments, **named)


@final
class _Counted:
    """A file that says how far it was read; with what `requests` asks of a body that it streams."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self._file, self._progress, self._before = file, progress, progress.done

    def __len__(self) -> int:
        return Path(self._file.name).stat().st_size

    def __iter__(self) -> Iterator[bytes]:
        return iter(partial(self.read, 1 << 20), b"")

    def read(self, size: int = -1) -> bytes:
        """Bytes, and a note that they went."""
        data = self._file.read(size)
        self._progress.at(self._before + self._file.tell())
        return data

    def tell(self) -> int:
        """Where it stands."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Back to the start, where a request is sent again."""
        return self._file.seek(offset, whence)
