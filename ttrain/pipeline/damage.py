"""Sets damaged artifacts aside, with what may have been computed from their wrong bytes.

An artifact whose manifest says `inputs_verified` was made from the published bytes alone. For one of an earlier version that
is shown by the bytes of its input, where they still are what it recorded; where they are not, it may be wrong.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.hashing import sha256_file
from ttrain.stages import STAGES
from ttrain.store.artifacts import SHOWN_KEY, Store
from ttrain.store.layout import MANIFEST, Artifact


@dataclass(frozen=True)
class Removal:
    """An artifact that is to be set aside, or was; `artifact` is None where its manifest cannot be read."""

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


def set_aside(store: Store, damaged: Sequence[Removal]) -> list[Removal]:
    """Move the damaged artifacts out of the store, and before them those that `suspects` names; returns all that were moved.

    The damaged ones go last: after a kill in between, they are still there to be found again. What MLflow has of a suspect
    is not taken in its place, nor what it has of a damaged one under a second name of the same file.
    """
    moved = []
    for removal in [*suspects(store, damaged), *damaged]:
        artifact = removal.artifact
        present = store.at(removal.path)
        if artifact and present and present.manifest["published"] != artifact.manifest["published"]:
            continue  # it was built anew meanwhile
        if removal not in damaged or (artifact and _has_second_names(artifact)):
            store.distrust(removal.stage, removal.key, artifact.manifest["published"] if artifact else time.time())
        with contextlib.suppress(FileNotFoundError):  # another run found the same
            store.set_aside(removal.stage, removal.key)
            moved.append(removal)
    return moved[::-1]


def suspects(store: Store, damaged: Sequence[Removal]) -> list[Removal]:
    """What was made from the damaged artifacts, directly or not, and is not known to be of the right bytes; the last made
    comes first."""
    artifacts = store.everything()
    found: list[Removal] = []
    waiting, seen = [*damaged], {removal.path for removal in damaged}
    while waiting:
        source = waiting.pop(0)
        for artifact in artifacts:
            if artifact.path not in seen and (why := _suspicion(artifact, source, is_damaged=source in damaged)):
                seen.add(artifact.path)
                found.append(Removal(artifact.path, why, artifact))
                waiting.append(found[-1])
    return found[::-1]


def _suspicion(artifact: Artifact, source: Removal, *, is_damaged: bool) -> str | None:
    """Why an artifact may have been made from wrong bytes of `source`; None where it was not."""
    for name, entry in artifact.manifest.get("inputs", {}).items():
        if (entry["stage"], entry["key"]) != (source.stage, source.key):
            continue
        names = STAGES[artifact.stage].inputs.get(name, ()) if artifact.stage in STAGES else ()
        recorded = artifact.manifest["ingredients"].get("inputs", {}).get(name) or entry["content"]
        if is_damaged:
            if not artifact.manifest.get("inputs_verified") and _digest_on_disk(source.path, names) != recorded:
                return f"made from {source.stage} {source.key[:SHOWN_KEY]} without a look at its digests"
        elif source.artifact and source.artifact.part(names) == recorded:
            return f"made from {source.stage} {source.key[:SHOWN_KEY]}, which may be wrong"
    return None


def _digest_on_disk(directory: Path, names: tuple[str, ...]) -> str | None:
    """Digest of the named files and directories as they are now; None where one cannot be read."""
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    artifact = Artifact("", "", directory, {"files": {name: {} for name in paths if name != MANIFEST}})
    try:
        files: dict[str, Any] = {name: {"sha256": sha256_file(paths[name])} for name in artifact.files_of(names)}
    except OSError:
        return None
    return Artifact("", "", directory, {"files": files}).part(names)


def _has_second_names(artifact: Artifact) -> bool:
    """Whether files of an artifact are elsewhere, too, such as in MLflow's folder: the same bytes, as damaged as here."""
    return any(_links(artifact.path / name) > 1 for name in artifact.files_of(()))


def _links(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_nlink
    return 0
