"""What an artifact was made from: all artifacts behind it, by their manifests."""

from collections.abc import Callable, Iterable

from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES

Name = tuple[str, str]  # stage and key


def inputs_first(
    roots: Iterable[Name], read: Callable[[str, str], Artifact | None]
) -> list[Artifact]:
    """List the artifacts of these names and all that they were made from, each once, right after its inputs.

    `read` gives an artifact by stage and key; None where it is gone. A night compares its documents
    with those of all nights before it: the paths through the inputs double every night, and the
    longest has all nights, so each artifact is visited once, and without recursion.
    """
    artifacts, ordered = dict[Name, Artifact | None](), list[Artifact]()
    waiting = [(name, False) for name in sorted(roots, key=_place, reverse=True)]
    while waiting:
        name, has_inputs = waiting.pop()
        if has_inputs:
            ordered += filter(None, [artifacts[name]])
        elif name not in artifacts:
            artifact = artifacts[name] = read(*name)
            used = sorted(
                inputs_of(artifact).values() if artifact else (), key=_place, reverse=True
            )
            waiting += [(name, True), *((each, False) for each in used)]
    return ordered


def _place(name: Name) -> tuple[bool, int]:
    """Where an input is listed: the chain of models before its data, so that each model's data precede it."""
    return name[0].startswith("shards-"), [name[0], *STAGES].index(name[0], name[0] in STAGES)


def inputs_of(artifact: Artifact) -> dict[str, Name]:
    """(stage, key) of what an artifact was made from, by the name of the input."""
    return {
        name: (used["stage"], used["key"]) for name, used in artifact.manifest["inputs"].items()
    }
