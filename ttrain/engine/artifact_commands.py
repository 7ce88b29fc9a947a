"""The `artifacts` commands: find by key prefix, list, verify every byte, adopt across a code change."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import link_or_copy, remove_tree
from ttrain.core.hashing import sha256_file
from ttrain.core.text import format_duration
from ttrain.engine.graph import Planned
from ttrain.engine.plan import Plan
from ttrain.engine.planner import key_of, plan_stage
from ttrain.engine.resume import partial_runs
from ttrain.errors import ArtifactError, UsageError
from ttrain.store import references, runs
from ttrain.store.artifacts import SHOWN_KEY, ArtifactStore
from ttrain.store.differences import differences
from ttrain.store.layout import MANIFEST, Artifact
from ttrain.tasks import STAGES

LONG_SECONDS = 600.0  # of a stage that is not built again for changed code without asking


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

    Raises UsageError if more differs, ArtifactError if it is damaged.
    """
    stage = planned.stage.name
    if planned.key is None:
        raise UsageError(f"stage {stage} {planned.why[0]}, so its key is not known yet; adopt or run that first")
    old = find_artifact(store, stage, prefix)
    if planned.state == "cached":
        raise UsageError(f"{stage} {planned.key[:SHOWN_KEY]} is there already; there is nothing to adopt")
    if refused := _changes_besides_code(old, planned):
        raise UsageError(
            f"{stage} {old.key[:SHOWN_KEY]} cannot be adopted, since more than code differs: {'; '.join(refused)}; "
            f"give the settings that it was made with (`ttrain artifacts show {stage} {old.key[:SHOWN_KEY]}`)"
        )
    return _adopted(store, planned, old)


def adopt_all(plan: Plan) -> list[Artifact]:
    """Adopt what the stages of the plan would build again for changed code alone, inputs first; returns what was adopted.

    A stage that was adopted has the bytes that it had, so that the keys of those that read it are known then.
    """
    settings, store, adopted = plan.settings, plan.store, list[Artifact]()
    artifacts: dict[str, Artifact] = {}
    for name, node in plan.graph.items():
        sources = {input_name: artifacts.get(of) if isinstance(of, str) else of for input_name, of in node.sources.items()}
        inputs = {input_name: artifact for input_name, artifact in sources.items() if artifact}
        if len(inputs) < len(sources):
            continue
        planned = plan_stage(node.stage, settings, store, inputs)
        artifact = planned.artifact
        if artifact is None and (old := made_by_other_code(store, planned)):
            artifact = _adopted(store, planned, old)
            adopted.append(artifact)
        if artifact:
            artifacts[name] = artifact
    return adopted


def made_by_other_code(store: ArtifactStore, planned: Planned) -> Artifact | None:
    """The newest artifact that differs in code alone from what the plan would build."""
    if planned.key is None or planned.state == "cached" or planned.forced:
        return None
    stored = (artifact for artifact in store.artifacts(planned.stage.name) if not artifact.absent)
    return next((artifact for artifact in stored if not _changes_besides_code(artifact, planned)), None)


def remarks_on_code(plan: Plan) -> list[str]:
    """What a person is asked about before a run builds again, for changed code alone, what took long."""
    remarks = []
    for planned in plan.stages:
        old = made_by_other_code(plan.store, planned)
        seconds = old.manifest.get("seconds", 0.0) if old else 0.0
        if seconds > LONG_SECONDS:
            remarks.append(
                f"{planned.stage.name}, which took {format_duration(seconds)}, is built again for changed code alone: "
                f"`ttrain artifacts adopt --all`, with the same settings, keeps it"
            )
    return remarks


def _changes_besides_code(old: Artifact, planned: Planned) -> list[str]:
    return differences({**old.manifest["ingredients"], "code": {}}, {**planned.ingredients, "code": {}})


def _adopted(store: ArtifactStore, planned: Planned, old: Artifact) -> Artifact:
    """Publish the artifact under the key of the plan.

    Its files are hard-linked under the new key, or copied where the disk has no links, and its manifest records in `adopted`
    the old key and the differences. Raises ArtifactError if it is damaged.
    """
    stage, key = planned.stage.name, planned.known_key
    if old.absent:
        raise ArtifactError(f"{stage} {old.key[:SHOWN_KEY]} was fetched in part; only a whole one is adopted")
    if problems := verify(old):
        raise ArtifactError(f"{stage} {old.key[:SHOWN_KEY]} is damaged, so it is not adopted: {'; '.join(problems)}")
    with store.lock(stage, key):
        output = store.work(stage, key).with_name(f"{key}.adopted")
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
        return store.publish(stage, key, output, manifest)
