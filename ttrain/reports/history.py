"""What a model card says of an artifact in the home: what it was made of, its evaluation, the public sources of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ttrain.config.training import TRAININGS
from ttrain.data.existing import HUB_REFERENCE
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact

BASE_MODEL = "base-model"  # the stage that imports an existing model


@dataclass(frozen=True)
class History:
    """The artifacts behind a model, inputs first and itself last, and its evaluation."""

    artifacts: tuple[Artifact, ...]
    evaluation: Artifact | None
    locations: Mapping[str, tuple[str, ...]]  # the public sources (URLs, the Hub) of each data set
    base: str | None = None  # the Hub's name of the model that it started from

    @classmethod
    def of(cls, artifact: Artifact | None, home: ArtifactStore) -> History:
        """Collect it from the manifests in a store; an input that no longer exists is left out."""
        if artifact is None:
            return cls((), None, {})
        artifacts = tuple(_artifacts_behind(artifact, home))
        stages = [(candidate.stage, candidate.provenance.get("settings", {})) for candidate in artifacts]
        evaluation = next(iter(home.made_from(artifact, "evaluate")), None)
        return cls(artifacts, evaluation, _public_locations(stages), _started_from(stages))


def _artifacts_behind(artifact: Artifact, home: ArtifactStore) -> Iterator[Artifact]:
    """Yield what an artifact was made from, inputs first, then the artifact itself; each once."""
    begun = {(artifact.stage, artifact.key)}

    def begin(current: Artifact) -> Iterator[Artifact]:
        for used in current.manifest["inputs"].values():
            name = (used["stage"], used["key"])
            if name not in begun and (source := home.read(home.path(*name))):
                begun.add(name)
                yield source

    yield from inputs_first(artifact, begin)


Node = TypeVar("Node")


def inputs_first(root: Node, begin: Callable[[Node], Iterator[Node]]) -> Iterator[Node]:
    """Yield what `begin` gives of each node, and of those again, before the node itself. It gives each node once.

    A night compares its documents with those of all nights before it: the paths through the inputs double every night, and
    the longest has all nights, so it is walked without recursion.
    """
    path = [(root, begin(root))]  # each with the inputs that are left to walk
    while path:
        current, remaining_inputs = path[-1]
        for source in remaining_inputs:
            path.append((source, begin(source)))
            break
        else:
            path.pop()
            yield current


def _public_locations(stages: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, tuple[str, ...]]:
    """The public sources of each data set; paths on the user's disk stay private. `stages`: (stage, settings)."""
    locations: dict[str, tuple[str, ...]] = {}
    for stage, settings in stages:
        if dataset := stage.partition("shards-")[2]:
            sources = settings.get("data", {}).get(dataset)
            entries = [sources] if isinstance(sources, str) else sources or []
            paths = [entry["path"] if isinstance(entry, dict) else str(entry) for entry in entries]
            locations[dataset] = tuple(path for path in paths if "://" in path and not path.startswith("file:"))
    return locations


def _started_from(stages: Iterable[tuple[str, Mapping[str, Any]]]) -> str | None:
    """The Hub name of the model that training started from; a path stays private."""
    for stage, settings in stages:
        if stage == BASE_MODEL:
            names = [settings.get(training, {}).get("start_from") or "" for training in TRAININGS]
            matches = [match[1] for name in names if (match := HUB_REFERENCE.fullmatch(name)) and not Path(name).is_dir()]
            return matches[0] if matches else None
    return None


def seed_of(stage: str, settings: Mapping[str, Any]) -> int | None:
    """The seed of the stage's own section, else `reading.seed`."""
    section = "pretrain" if stage == "new-model" else stage
    seed = settings.get(f"{section}.seed", settings.get("reading.seed"))
    return int(seed) if seed is not None else None
