"""Puts files where a run's artifacts are, on this machine's disks."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from ttrain.tracking.safe_names import below

LINK_FROM_BYTES: Final = 1 << 20  # linking a smaller file saves nothing, and a copy cannot change under MLflow


def local_path(uri: str) -> Path | None:
    """The directory that an artifact URI names, where it is one of this machine."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri)


def place(source: Path, target: Path) -> None:
    """Puts a file into the artifacts; a big one as a second name of the same file, where both are on one disk."""
    if target.exists() and target.samefile(source):
        return
    source = source.resolve()

    def link_or_copy(part: Path) -> None:
        if source.stat().st_size >= LINK_FROM_BYTES:
            with contextlib.suppress(OSError):  # another disk, or one without links
                os.link(source, part)
                return
        shutil.copy2(source, part)

    _replace(with_parent(target), link_or_copy)


def place_tree(directory: Path, target: Path, root: Path) -> None:
    """Puts a directory's files below `target`. Raises ValueError where a place would be outside `root`."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            relative = (target / path.relative_to(directory)).relative_to(root)
            place(path, below(root, relative.as_posix()))


def with_parent(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def write_text(target: Path, text: str) -> None:
    _replace(target, lambda part: part.write_text(text, encoding="utf-8"))


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Writes beside the target and renames; the name is one that MLflow's listings leave out."""
    part = target.with_name(f".artifact.uploading.{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        write(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
