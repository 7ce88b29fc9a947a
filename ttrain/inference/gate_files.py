"""The directory of a gate: `gate.json` names the experts by path and digest, `model.safetensors` is the router.

Loads no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ttrain.config import Expert, Gate
from ttrain.core.files import read_json, write_json
from ttrain.errors import ArtifactError, UsageError
from ttrain.store.model_reference import Reference
from ttrain.store.weights import ADAPTER, MODEL, weights_digest

GATE, WEIGHTS = "gate.json", "model.safetensors"
FORMAT = 1


@dataclass(frozen=True)
class GateFile:
    """What `gate.json` holds.

    settings    those that the router was trained with
    figures     how well it does on held-out records, see `ttrain.evaluate.routing`
    router      sha256 of the router's weights
    """

    experts: tuple[Expert, ...]
    settings: Gate
    figures: Mapping[str, Any]
    router: str


def write(directory: Path, gate: GateFile) -> None:
    """Write `gate.json`, last of all: without it the directory is no gate."""
    tree = {
        "format": FORMAT,
        "experts": [expert.model_dump(mode="json") for expert in gate.experts],
        "settings": gate.settings.model_dump(mode="json"),
        "figures": gate.figures,
        "router_sha256": gate.router,
    }
    write_json(directory / GATE, tree)


def read(directory: Path) -> GateFile:
    """The gate of a directory. Raises UsageError where there is none, and ArtifactError where it cannot be read."""
    path = directory / GATE
    if not path.is_file():
        raise UsageError(f"{directory} holds no gate; `ttrain gate train --experts A,B --out {directory}` makes one")
    tree = read_json(path)
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise ArtifactError(f"{path} is damaged, or of another version of ttrain; train the gate again")
    try:
        experts = tuple(Expert.model_validate(expert) for expert in tree["experts"])
        return GateFile(experts, Gate.model_validate(tree["settings"]), tree["figures"], tree["router_sha256"])
    except (ValidationError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is damaged: {error}; train the gate again") from None


def expert_of(reference: Reference) -> Expert:
    """The expert that a reference leads to. Reads its weights, for their digests."""
    adapter = reference.adapter
    return Expert(
        reference=reference.text,
        model=str(reference.model),
        weights_sha256=weights_digest(reference.model),
        adapter=str(adapter) if adapter else None,
        adapter_sha256=weights_digest(adapter, name=ADAPTER) if adapter else None,
    )


def reference_of(expert: Expert) -> Reference:
    """Where the expert's files lie, for what loads models."""
    return Reference(expert.reference, Path(expert.model), Path(expert.adapter) if expert.adapter else None)


def digest(expert: Expert) -> str:
    """12 digits that tell an expert from any other."""
    return "+".join(part[:12] for part in (expert.weights_sha256, expert.adapter_sha256) if part)


def change(expert: Expert) -> str | None:
    """What is no longer as it was when the gate was trained; None where nothing is. Reads the expert's weights."""
    wanted = [(expert.model, MODEL, expert.weights_sha256)]
    if expert.adapter and expert.adapter_sha256:
        wanted.append((expert.adapter, ADAPTER, expert.adapter_sha256))
    for directory, name, known in wanted:
        try:
            found = weights_digest(Path(directory), name=name)
        except ArtifactError:
            return f"{directory} holds no weights any more"
        if found != known:
            return f"the weights in {directory} are {found[:12]}, no longer {known[:12]}"
    return None


def check(experts: Sequence[Expert]) -> None:
    """Raise ArtifactError where one of the experts is no longer what the gate knows."""
    for expert in experts:
        if wrong := change(expert):
            raise ArtifactError(f"the expert {expert.reference} is not the one that the gate knows: {wrong}")
