"""The `artifacts` commands: find by key prefix, list, verify every byte, adopt across a code change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ttrain.config import Settings
from ttrain.core.files import link_or_copy, remove_tree
from ttrain.core.hashing import sha256_file
from ttrain.errors import ArtifactError, UsageError
from ttrain.pipeline.graph import Planned
from ttrain.pipeline.plan import key_of
from ttrain.pipeline.resume import partial_runs
from ttrain.store import references, runs
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import differences
from ttrain.store.layout import MANIFEST, Artifact, Elsewhere
from ttrain.tasks import STAGES

HEX = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class ArtifactRow:
    """One row of `artifacts list`: a finished artifact, or unfinished work that can be resumed."""

    stage: str
    key: str
    state: str  # "finished", "damaged: ..." or "unfinished at step N"
    path: Path
    bytes: int
    published_unix: float | None = None  # seconds since 1970
    run: str | None = None  # the newest run that made or used it


def artifact_rows(store: ArtifactStore, stage: str | None = None) -> list[ArtifactRow]:
    """List all artifacts, or those of a stage, newest first, then the unfinished work that can be resumed."""
    users: dict[str, str] = {}
    for run in runs.history(store.root):
        for entry in run["stages"]:
            users.setdefault(entry.get("key") or "", run["run"])
    listed = []
    for artifact in store.artifacts(stage or "*"):
        damage = store.damage(artifact)
        listed.append(
            ArtifactRow(
                artifact.stage,
                artifact.key,
                f"damaged: {damage}" if damage else "finished",
                artifact.path,
                size_of(artifact),
                float(artifact.manifest["published"]),
                users.get(artifact.key),
            )
        )
    for path, problem in store.unreadable(stage or "*").items():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        listed.append(ArtifactRow(path.parent.name, path.name, f"damaged: {problem}", path, size))
    for name in [stage] if stage else [name for name in STAGES if STAGES[name].uses_ranks]:
        for work in partial_runs(store, name):
            size = sum(path.stat().st_size for path in work.path.rglob("*") if path.is_file())
            state = f"unfinished at step {work.step}"
            listed.append(ArtifactRow(name, work.key, state, work.path, size, run=users.get(work.key)))
    return listed


def size_of(artifact: Artifact) -> int:
    """Total size of the artifact's files that are on this disk."""
    absent = artifact.absent
    return sum(entry["bytes"] for name, entry in artifact.manifest["files"].items() if name not in absent)


def find_artifact(store: ArtifactStore, stage: str, prefix: str = "") -> Artifact:
    """Return the stage's artifact with this key prefix; without a prefix, the newest undamaged one.

    Raises UsageError if no artifact matches, or several do.
    """
    references.need_stage(stage, STAGES)
    if not prefix:
        return store.latest(stage)
    artifacts = store.artifacts(stage)
    matches = [artifact for artifact in artifacts if artifact.key.startswith(prefix)]
    if len(matches) == 1:
        return matches[0]
    keys = [artifact.key[:SHOWN_KEY] for artifact in matches or artifacts]
    if not matches:
        shows = f"; `ttrain artifacts list {stage}` shows them"
        raise references.unknown("artifact with the key", prefix, keys, owner=stage, also=shows)
    raise references.ambiguous(prefix, f"keys of {stage}", keys)


# --- verify -------------------------------------------------------------------------------------------------------------
def verify(artifact: Artifact) -> list[str]:
    """Read every byte of an artifact and list its problems."""
    problems = []
    if key_of(artifact.manifest["ingredients"]) != artifact.key:
        problems.append(f"{MANIFEST} says that it was made of other things than its key does")
    absent = artifact.absent
    for name, entry in artifact.manifest["files"].items():
        if name in absent:
            continue
        try:
            size = (artifact.path / name).stat().st_size
            if size != entry["bytes"]:
                problems.append(f"{name} has {size} bytes where {entry['bytes']} were published")
            elif sha256_file(artifact.path / name) != entry["sha256"]:
                problems.append(f"{name} was altered after it was published")
        except OSError as error:
            problems.append(f"{name} cannot be read: {error.strerror}")
    return problems


# --- adopt --------------------------------------------------------------------------------------------------------------
def adopt(store: ArtifactStore, planned: Planned, prefix: str) -> Artifact:
    """Publish an artifact under the key that the plan would build, if only code differs.

    Its files are hard-linked under the new key, or copied where the disk has no links, and its manifest records in `adopted`
    the old key and the differences. Raises UsageError if more differs, ArtifactError if it is damaged.
    """
    stage = planned.stage.name
    if planned.key is None:
        raise UsageError(f"stage {stage} {planned.why[0]}, so its key is not known yet; adopt or run that first")
    old = find_artifact(store, stage, prefix)
    if old.key == planned.key:
        raise UsageError(f"{stage} {old.key[:SHOWN_KEY]} is what the plan takes already; there is nothing to adopt")
    if refused := differences({**old.manifest["ingredients"], "code": {}}, {**planned.ingredients, "code": {}}):
        raise UsageError(
            f"{stage} {old.key[:SHOWN_KEY]} cannot be adopted, since more than code differs: {'; '.join(refused)}; "
            f"give the settings that it was made with (`ttrain artifacts show {stage} {old.key[:SHOWN_KEY]}`)"
        )
    if old.absent:
        raise ArtifactError(f"{stage} {old.key[:SHOWN_KEY]} was fetched in part; only a whole one is adopted")
    if problems := verify(old):
        raise ArtifactError(f"{stage} {old.key[:SHOWN_KEY]} is damaged, so it is not adopted: {'; '.join(problems)}")
    with store.lock(stage, planned.key):
        if store.find(stage, planned.key):
            raise UsageError(f"{stage} {planned.key[:SHOWN_KEY]} is there already; there is nothing to adopt")
        output = store.work(stage, planned.key).with_name(f"{planned.key}.adopted")
        remove_tree(output)
        for name in old.manifest["files"]:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(old.path / name, output / name)
        entry = {
            "key": old.key,
            "differences": differences(old.manifest["ingredients"], planned.ingredients),
            "adopted_unix": time.time(),
        }
        earlier = old.manifest.get("adopted", [])
        manifest = {**old.manifest, "ingredients": dict(planned.ingredients), "adopted": [*earlier, entry]}
        return store.publish(stage, planned.key, output, manifest)


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


@dataclass
class InTracker:
    """Artifacts in MLflow of one experiment (None: of all); a `ttrain.store.layout.Elsewhere`.

    MLflow is loaded at the first key that the store lacks.
    """

    _home: Path
    _experiment: str | None = None

    def manifest(self, stage: str, key: str) -> Mapping[str, Any] | None:
        return self._tracked.manifest(stage, key)

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        self._tracked.fetch(stage, key, name, to)

    @cached_property
    def _tracked(self) -> Elsewhere:
        from ttrain.tracking.artifact_source import MlflowArtifacts

        return MlflowArtifacts(self._home, self._experiment)


def store_of(home: Path, settings: Settings) -> ArtifactStore:
    """The store of a home; if tracking is enabled, missing artifacts are looked up in MLflow."""
    tracking = settings.tracking
    return ArtifactStore(home, InTracker(home, tracking.experiment) if tracking.enabled else None)
