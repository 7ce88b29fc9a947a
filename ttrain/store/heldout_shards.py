"""The shards whose held-out part an evaluation of a model reads."""

from ttrain.config.training import TRAINING_STAGES
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.integrity import verify_artifact
from ttrain.store.layout import Artifact


def heldout_shards(artifact: Artifact | None, store: ArtifactStore) -> dict[str, Artifact]:
    """The shards that a model and its base models were trained on, by part."""
    parts = {f"shards-{row.name}": row.part for row in TRAINING_STAGES.values()}
    shard_artifacts: dict[str, Artifact] = {}
    visited: set[tuple[str, str]] = (
        set()
    )  # the paths through the inputs of nights double every night
    waiting = [artifact] if artifact else []
    while waiting:
        for used in waiting.pop().manifest["inputs"].values():
            name = (used["stage"], used["key"])
            ancestor = None if name in visited else store.find(*name)
            visited.add(name)
            if ancestor is None:
                continue
            waiting.append(ancestor)
            part_name = parts.get(ancestor.stage)
            if part_name and not any(name.startswith("heldout/") for name in ancestor.absent):
                verify_artifact(ancestor, ("heldout",))
                shard_artifacts.setdefault(part_name, ancestor)
    return shard_artifacts
