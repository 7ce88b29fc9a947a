"""What a model card says of an artifact in the home: what it was made of, its evaluation, the public sources of its data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ttrain.config.training import TRAININGS
from ttrain.data.existing import HUB_REFERENCE
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES

BASE_MODEL = "base-model"  # the stage that imports an existing model
Name = tuple[str, str]  # stage and key


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
        root = (artifact.stage, artifact.key)

        def read(*name: str) -> Artifact | None:
            return artifact if name == root else home.read(home.path(*name))

        artifacts = inputs_first([root], read)
        locations, base = dict[str, tuple[str, ...]](), None
        for made in artifacts:
            settings = made.provenance.get("settings", {})
            if dataset := made.stage.partition("shards-")[2]:
                sources = settings.get("data", {}).get(dataset) or ()
                paths = (entry["path"] if isinstance(entry, dict) else entry for entry in sources)
                public = (path for path in paths if "://" in path and not path.startswith("file:"))
                locations[dataset] = tuple(public)
            for training in TRAININGS if made.stage == BASE_MODEL else ():
                start = settings.get(training, {}).get("start_from") or ""
                on_hub = HUB_REFERENCE.fullmatch(start)
                if on_hub and not Path(start).is_dir():
                    base = base or on_hub[1]
        evaluation = next(iter(home.made_from(artifact, "evaluate")), None)
        return cls(tuple(artifacts), evaluation, locations, base)


def inputs_first(
    roots: Iterable[Name],
    read: Callable[[str, str], Artifact | None],
) -> list[Artifact]:
    """List the artifacts of these names and all that they were made from, each once, inputs first.

    `read` gives an artifact by stage and key; None where it is gone. A night compares its documents
    with those of all nights before it: the paths through the inputs double every night, and the
    longest has all nights, so they are walked once and without recursion.
    """
    ordered, begun = list[Artifact](), set[Name]()
    waiting: list[tuple[Name, Artifact | None]] = [(name, None) for name in _last_first(roots)]
    while waiting:
        name, artifact = waiting.pop()
        if artifact:  # its inputs are listed
            ordered.append(artifact)
        elif name not in begun:
            begun.add(name)
            if artifact := read(*name):
                waiting.append((name, artifact))
                waiting += ((used, None) for used in _last_first(inputs_of(artifact).values()))
    return ordered


def inputs_of(artifact: Artifact) -> dict[str, Name]:
    """(stage, key) of what an artifact was made from, by the name of the input."""
    inputs = artifact.manifest["inputs"].items()
    return {name: (used["stage"], used["key"]) for name, used in inputs}


def _last_first(names: Iterable[Name]) -> list[Name]:
    """Sort the chain of models before its data, so that each model's data precede it; reversed."""
    stages = list(STAGES)

    def position(name: Name) -> tuple[bool, int]:
        stage = name[0]
        return stage.startswith("shards-"), stages.index(stage) if stage in STAGES else -1

    return sorted(names, key=position)[::-1]
