"""Damaged artifacts, which are moved out of the store so that the next run builds them again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.layout import Artifact


@dataclass(frozen=True)
class DamagedArtifact:
    """An artifact to set aside, or already set aside; `artifact` is None if its manifest cannot be read."""

    path: Path
    why: str
    artifact: Artifact | None = None

    @property
    def stage(self) -> str:
        return self.path.parent.name

    @property
    def key(self) -> str:
        return self.path.name

    def __str__(self) -> str:
        return f"{self.stage} {self.key[:SHOWN_KEY]} ({self.why})"


def set_aside(store: ArtifactStore, damaged: Sequence[DamagedArtifact]) -> list[DamagedArtifact]:
    """Move damaged artifacts out of the store; return those that were moved.

    MLflow's copy of one is not fetched in its place if it is a hard link to the same file. What was made from it stays:
    each stage verifies what it reads.
    """
    moved = []
    for removal in damaged:
        artifact = removal.artifact
        present = store.at(removal.path)
        if artifact and present and present.manifest["published"] != artifact.manifest["published"]:
            continue  # it was rebuilt meanwhile
        paths = (artifact.path / name for name in artifact.files_of(())) if artifact else ()
        # hard-linked elsewhere, such as in MLflow's folder, and thus damaged there too
        if artifact and any(path.stat().st_nlink > 1 for path in paths if path.exists()):
            store.distrust(removal.stage, removal.key, artifact.manifest["published"])
        with contextlib.suppress(FileNotFoundError):  # another run has already moved it
            store.set_aside(removal.stage, removal.key)
            moved.append(removal)
    return moved
