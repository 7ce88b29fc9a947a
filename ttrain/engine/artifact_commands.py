"""The `artifacts` commands: find by key prefix, list, verify every byte, adopt across a code
change.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import link_or_copy, remove_tree
from ttrain.core.text import format_duration
from ttrain.engine.graph import Plan, Planned
from ttrain.engine.planner import key_of, plan_stage
from ttrain.engine.resume import changes_besides, partial_runs
from ttrain.errors import ArtifactError
from ttrain.store import integrity, name_syntax, runs
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
    """List all artifacts, or those of a stage, newest first, then the unfinished work that can be
    resumed.
    """
    users: dict[str, str] = {
        entry.get("key") or "": run["run"]
        for run in reversed(runs.history(store.root))
        for entry in run["stages"]
    }
    rows = []
    for artifact in store.artifacts(stage or "*"):
        damage = store.damage(artifact)
        state = f"damaged: {damage}" if damage else "finished"
        rows.append(
            ArtifactRow(
                artifact.stage,
                artifact.key,
                state,
                artifact.path,
                size_of(artifact),
                artifact.manifest["published"],
                users.get(artifact.key),
            )
        )
    others = {
        path: f"damaged: {problem}" for path, problem in store.unreadable(stage or "*").items()
    }
    trainings = [name for name, row in STAGES.items() if row.uses_ranks and stage in (None, name)]
    for work in (work for name in trainings for work in partial_runs(store, name)):
        others[work.path] = f"unfinished at step {work.step}"
    for path, state in others.items():
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        rows.append(
            ArtifactRow(path.parent.name, path.name, state, path, size, run=users.get(path.name))
        )
    return rows


def size_of(artifact: Artifact) -> int:
    """Total size of the artifact's files that are on this disk."""
    files = artifact.manifest["files"]
    return sum(files[name]["bytes"] for name in files.keys() - artifact.absent)


def find_artifact(store: ArtifactStore, stage: str, prefix: str = "") -> Artifact:
    """The stage's artifact with this key prefix, else its newest one. Raises UsageError."""
    name_syntax.need_stage(stage, STAGES)
    if not prefix:
        return store.latest(stage)
    artifacts = {artifact.key: artifact for artifact in store.artifacts(stage)}
    key = name_syntax.matching(prefix, [*artifacts], "key")
    if key is None:
        raise name_syntax.unknown(
            "artifact with the key",
            prefix,
            [key[:SHOWN_KEY] for key in artifacts],
            owner=stage,
            also=f"; `ttrain artifacts list {stage}` shows them",
        )
    return artifacts[key]


def verify(artifact: Artifact) -> list[str]:
    """Read every byte of an artifact and list its problems."""
    problems = list(integrity.problems(artifact))
    if key_of(artifact.manifest["ingredients"]) != artifact.key:
        problems.insert(0, f"{MANIFEST} says that it was made of other things than its key does")
    return problems


def adopt(plan: Plan, stage: str = "") -> list[Artifact]:
    """Adopt what the plan would build again only for changed code, inputs first; returns what was
    adopted.

    Raises ArtifactError for a damaged artifact.
    """
    adopted = list[Artifact]()
    artifacts: dict[str, Artifact | None] = {}
    for name, node in plan.graph.items():
        inputs = node.inputs(artifacts)
        if len(inputs) < len(node.sources):
            continue
        planned = plan_stage(node.stage, plan.settings, plan.store, inputs)
        artifacts[name] = planned.artifact
        old = made_by_other_code(plan.store, planned) if stage in ("", name) else None
        if old:
            artifacts[name] = artifact = _adopted(plan.store, planned, old)
            adopted.append(artifact)
    return adopted


def made_by_other_code(store: ArtifactStore, planned: Planned) -> Artifact | None:
    """The newest artifact that differs in code alone from what the plan would build."""
    if planned.key is None or planned.state == "cached" or planned.forced:
        return None
    return next(
        (
            artifact
            for artifact in store.artifacts(planned.name)
            if not artifact.absent
            and not changes_besides(
                frozenset(), artifact.manifest["ingredients"], planned.ingredients
            )
        ),
        None,
    )


def remarks_on_code(plan: Plan) -> list[str]:
    """What to ask before a run rebuilds, only for changed code, what took long."""
    remarks = []
    for planned in plan:
        old = made_by_other_code(plan.store, planned)
        seconds = old.manifest.get("seconds", 0.0) if old else 0.0
        if seconds > LONG_SECONDS:
            remarks.append(
                f"{planned.name}, which took {format_duration(seconds)}, is built again for "
                f"changed code alone: "
                f"`ttrain artifacts adopt --all`, with the same settings, keeps it"
            )
    return remarks


def _adopted(store: ArtifactStore, planned: Planned, old: Artifact) -> Artifact:
    # Files are hard-linked under the new key, or copied where the disk has no links; the manifest
    # records the old key and the differences.
    if problems := verify(old):
        name = f"{old.stage} {old.key[:SHOWN_KEY]}"
        raise ArtifactError(f"{name} is damaged, so it is not adopted: {'; '.join(problems)}")
    key = planned.known_key
    entry = {
        "key": old.key,
        "differences": differences(old.manifest["ingredients"], planned.ingredients),
        "adopted_unix": time.time(),
    }
    manifest = {
        **old.manifest,
        "ingredients": dict(planned.ingredients),
        "adopted": [*old.manifest.get("adopted", []), entry],
    }
    with store.lock(planned.name, key):
        output = store.work(planned.name, key).with_name(f"{key}.adopted")
        remove_tree(output)
        for name in old.manifest["files"]:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            link_or_copy(old.path / name, output / name)
        return store.publish(planned.name, key, output, manifest)
