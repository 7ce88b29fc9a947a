"""What a model card says of an artifact in the home: what it was made of, its evaluation, the public sources of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
        """Collect it from the manifests in a store; an input that no longer exists is left out.

        Paths on the user's disk stay private.
        """
        if artifact is None:
            return cls((), None, {})
        begun = {(artifact.stage, artifact.key)}

        def begin(current: Artifact) -> Iterator[Artifact]:
            for used in current.manifest["inputs"].values():
                name = (used["stage"], used["key"])
                if name not in begun and (source := home.read(home.path(*name))):
                    begun.add(name)
                    yield source

        artifacts = tuple(inputs_first(artifact, begin))
        locations, starts = dict[str, tuple[str, ...]](), list[str]()
        for made in artifacts:
            settings = made.provenance.get("settings", {})
            if dataset := made.stage.partition("shards-")[2]:
                locations[dataset] = tuple(filter(_is_public, _paths(settings.get("data", {}).get(dataset))))
            if made.stage == BASE_MODEL:
                starts += [settings.get(training, {}).get("start_from") or "" for training in TRAININGS]
        on_hub = [match[1] for name in starts if (match := HUB_REFERENCE.fullmatch(name)) and not Path(name).is_dir()]
        evaluation = next(iter(home.made_from(artifact, "evaluate")), None)
        return cls(artifacts, evaluation, locations, next(iter(on_hub), None))


Node = TypeVar("Node")


def inputs_first(root: Node, begin: Callable[[Node], Iterator[Node]]) -> Iterator[Node]:
    """Yield what `begin` gives of each node, and of those again, before the node itself. It gives each node once.

    A night compares its documents with those of all nights before it: the paths through the inputs double every night, and
    the longest has all nights, so it is walked without recursion.
    """
    path = [(root, begin(root))]  # each with the inputs that are left to walk
    while path:
        current, remaining_inputs = path[-1]
        source = next(remaining_inputs, None)
        if source is not None:
            path.append((source, begin(source)))
        else:
            path.pop()
            yield current


def _paths(sources: Any) -> list[str]:
    """The paths of a data set's sources, as the settings have them."""
    entries = [sources] if isinstance(sources, str) else sources or []
    return [entry["path"] if isinstance(entry, dict) else str(entry) for entry in entries]


def _is_public(path: str) -> bool:
    return "://" in path and not path.startswith("file:")


def seed_of(stage: str, settings: Mapping[str, Any]) -> int | None:
    """The seed of the stage's own section, else `reading.seed`."""
    section = "pretrain" if stage == "new-model" else stage
    seed = settings.get(f"{section}.seed", settings.get("reading.seed"))
    return int(seed) if seed is not None else None
