"""The files that MLflow keeps in the home, of artifacts that the store may lack: found by stage and key, without MLflow."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import final

from ttrain.store.layout import MANIFEST


@final
class LocalCopies:
    """Directories `mlflow/artifacts/RUN_ID/artifacts/STAGE` of a home; each is listed once."""

    def __init__(self, home: Path) -> None:
        self._root = home / "mlflow" / "artifacts"

    @property
    def is_empty(self) -> bool:
        """Whether no run has files in the home: if it has a database, the files are elsewhere."""
        return not self._by_stage

    def find(self, stage: str | None, key: str) -> list[Path]:
        """The directories whose manifest holds this key, or the beginning of one, newest first; for None, of all stages."""
        stages = [stage] if stage else [*self._by_stage]
        matches = (path for name in stages for path in self._by_stage.get(name, ()) if f'"{key}' in self._text(path))
        return sorted(matches, key=lambda path: (path / MANIFEST).stat().st_mtime, reverse=True)

    @cached_property
    def _by_stage(self) -> dict[str, list[Path]]:
        directories: dict[str, list[Path]] = defaultdict(list)
        for path in self._runs(self._root):
            for stage in _names(path / "artifacts"):
                directories[stage].append(path / "artifacts" / stage)
        return dict(directories)

    def _runs(self, root: Path) -> Iterator[Path]:
        """The directories of runs; those that a server of this home logged lie one level deeper, by experiment."""
        for name in _names(root):
            if len(name) < 32:
                yield from (root / name / run for run in _names(root / name))
            else:
                yield root / name

    def _text(self, directory: Path) -> str:
        with contextlib.suppress(OSError):
            return (directory / MANIFEST).read_text(encoding="utf-8", errors="replace")
        return ""


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        with os.scandir(directory) as entries:
            return [entry.name for entry in entries]
    return []
