"""What an artifact was made from: all artifacts behind it, by their manifests."""

from collections.abc import Callable, Iterable
from graphlib import TopologicalSorter

from ttrain.store.layout import Artifact

Name = tuple[str, str]  # stage and key


def inputs_first(roots: Iterable[Name], read: Callable[[str, str], Artifact | None]) -> list[Artifact]:
    """List the artifacts of these names and all that they were made from, each once, inputs first.

    `read` gives an artifact by stage and key; None where it is gone. A night compares its documents
    with those of all nights before it, so that the paths through the inputs double every night: each
    artifact is visited once.
    """
    artifacts = dict[Name, Artifact | None]()
    graph = TopologicalSorter[Name]()
    waiting = [*roots]
    while waiting:
        name = waiting.pop()
        if name in artifacts:
            continue
        artifact = artifacts[name] = read(*name)
        used = inputs_of(artifact).values() if artifact else ()
        graph.add(name, *used)
        waiting += used
    return [artifact for artifact in map(artifacts.get, graph.static_order()) if artifact]


def inputs_of(artifact: Artifact) -> dict[str, Name]:
    """(stage, key) of what an artifact was made from, by the name of the input."""
    return {name: (used["stage"], used["key"]) for name, used in artifact.manifest["inputs"].items()}
