"""All artifacts behind an artifact, by their manifests."""

from collections.abc import Callable, Iterable

from ttrain.store.layout import Artifact
from ttrain.tasks import STAGES

Name = tuple[str, str]  # stage and key


def inputs_first(
    roots: Iterable[Name], read: Callable[[str, str], Artifact | None]
) -> list[Artifact]:
    """List artifacts of these names and all behind them, each once, right after its inputs.

    `read`: an artifact by stage and key; None if gone. Each is visited once, without recursion:
    paths double with every night.
    """
    artifacts: dict[Name, Artifact | None] = {}
    ordered: list[Artifact] = []
    waiting = [(name, False) for name in sorted(roots, key=_place, reverse=True)]
    while waiting:
        name, has_inputs = waiting.pop()
        if has_inputs:
            ordered += filter(None, [artifacts[name]])
        elif name not in artifacts:
            artifact = artifacts[name] = read(*name)
            used = inputs_of(artifact).values() if artifact else ()
            waiting.append((name, True))
            waiting.extend((each, False) for each in sorted(used, key=_place, reverse=True))
    return ordered


# The chain of models comes before its data, so that each model's data precede it.
def _place(name: Name) -> tuple[bool, int]:
    return name[0].startswith("shards-"), [name[0], *STAGES].index(name[0], name[0] in STAGES)


def inputs_of(artifact: Artifact) -> dict[str, Name]:
    """(stage, key) of an artifact's inputs, by name."""
    return {
        name: (used["stage"], used["key"]) for name, used in artifact.manifest["inputs"].items()
    }
