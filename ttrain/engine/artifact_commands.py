"""The `artifacts` commands: find by key prefix, list, verify every byte, adopt across a code change."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import link_or_copy, remove_tree
from ttrain.core.hashing import sha256_file
from ttrain.engine.graph import Planned
from ttrain.engine.planner import key_of
from ttrain.engine.resume import partial_runs
from ttrain.errors import ArtifactError, UsageError
from ttrain.store import references, runs
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import differences
from ttrain.store.layout import MANIFEST, Artifact
from ttrain.tasks import STAGES


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
