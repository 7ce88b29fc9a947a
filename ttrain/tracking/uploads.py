"""Upload a run's files one by one, so that those that arrived are not sent again."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from tqdm.utils import CallbackIOWrapper  # type: ignore[import-untyped]

from ttrain.core.files import temporary_path
from ttrain.tracking.calls import artifact_path
from ttrain.tracking.outbox import Entry

if TYPE_CHECKING:
    from ttrain.tracking.runs import TrackedRun


File = tuple[Path, str]  # source, and target path below the run

# From the last byte of a file to the answer: a server that passes 10 GB on to S3 answers when that is done.
ANSWER_SECONDS = 600.0

SECONDS_BETWEEN = 0.2

_patience = threading.local()

_changed = threading.Lock()


@dataclass
class UploadProgress:
    """The progress of this process's uploads."""

    done: int = 0  # bytes, of finished files and of the current one
    total: int = 0
    moved: float = 0.0  # time of the last byte sent, by the monotonic clock
    on_progress: Callable[[int, int], object] = lambda done, total: None
    _next: float = 0.0

    def at(self, done: int) -> None:
        """Set the bytes sent so far, and call the callback every `SECONDS_BETWEEN`."""
        self.done, self.moved = done, time.monotonic()
        if self.moved >= self._next or done == self.total:
            self._next = self.moved + SECONDS_BETWEEN
            self.on_progress(done, self.total)


def list_files(directory: Path, to: str) -> list[File]:
    """The files below a directory with their targets. Raises ValueError if one is not a path below a run."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return [(path, artifact_path("/".join(filter(None, (to, path.relative_to(directory).as_posix()))))) for path in paths]


def send(run: TrackedRun, entry: Entry, files: list[File]) -> None:
    """Upload the files that have not arrived yet. Raises MLflow's errors; files that arrived stay marked."""
    progress = run.store.progress
    waiting = [file for file in files if file[1] not in entry.parts]
    ahead = sum(path.stat().st_size for path, _ in waiting)
    progress.total += ahead
    for path, target in waiting:
        done_before, size = progress.done, path.stat().st_size
        progress.at(done_before)
        to = target.rpartition("/")[0]  # MLflow takes the name from the path: the last part of the target is the same
        try:
            with patient_uploads(progress):
                run.store.client.log_artifact(run.id, str(path), to or None)
        except Exception:
            progress.done, progress.total = done_before, progress.total - ahead
            raise
        progress.at(done_before + size)
        ahead -= size
        run.outbox.mark_part_delivered(entry, target)


@contextlib.contextmanager
def patient_uploads(progress: UploadProgress | None = None) -> Iterator[None]:
    """Within this context, the thread's uploads may take longer than other requests, and their bytes are counted."""
    # MLflow has one time limit for all requests (ours: 10 s), so its uploads get a request function of their own.
    module: Any = import_module("mlflow.store.artifact.http_artifact_repo")
    with _changed:
        if not isinstance(module.http_request, _PatientRequest):
            module.http_request = _PatientRequest(module.http_request)
    _patience.progress = progress or UploadProgress()
    try:
        yield
    finally:
        _patience.progress = None


class _PatientRequest:
    """MLflow's `http_request`; in an uploading thread with its own time limit and counted bytes."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self._original = original

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        progress = getattr(_patience, "progress", None)
        if progress is None:
            return self._original(*arguments, **keywords)
        file: Any = keywords.get("data")
        done_before = progress.done
        if hasattr(file, "fileno"):
            # The position is asked for, not the bytes summed up: a request that is sent again reads from the start.
            keywords["data"] = CallbackIOWrapper(lambda _: progress.at(done_before + file.tell()), file)
        return partial(self._original, timeout=(10.0, ANSWER_SECONDS))(*arguments, **keywords)


LINK_FROM_BYTES = 1 << 20  # linking a smaller file saves nothing, and a copy cannot change under MLflow


def local_path(uri: str) -> Path | None:
    """The local directory that an artifact URI names; None if it is not on this machine."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri)


def place_file(source: Path, target: Path) -> None:
    """Put a file into the artifacts; a big one as a hard link, if both are on one disk."""
    if target.exists() and target.samefile(source):
        return
    source = source.resolve()

    def link_or_copy(temporary: Path) -> None:
        if source.stat().st_size >= LINK_FROM_BYTES:
            with contextlib.suppress(OSError):  # another disk, or one without links
                os.link(source, temporary)
                return
        shutil.copy2(source, temporary)

    _replace(target, link_or_copy)


def write_text(target: Path, text: str) -> None:
    _replace(target, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Write a temporary file beside the target and rename it; MLflow's listings leave out its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_path(target.with_name(f"artifact.uploading.{target.name}.{threading.get_ident()}"))
    try:
        write(temporary)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
