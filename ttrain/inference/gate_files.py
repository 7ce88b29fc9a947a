"""The directory of a gate: `gate.json` names the experts, `model.safetensors` is the router.

Does not import torch.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config import Expert, Gate, Section
from ttrain.core.files import read_json
from ttrain.errors import ArtifactError, UsageError
from ttrain.store.model_files import ADAPTER, Reference, weights_digest

GATE = "gate.json"
WEIGHTS = "model.safetensors"


class GateFile(Section):
    """Contents of `gate.json`: experts, the router's settings, its metrics and its digest."""

    experts: tuple[Expert, ...]
    settings: Gate
    figures: Mapping[str, Any]
    router_sha256: str


def read(directory: Path) -> GateFile:
    """Read the gate of a directory. Raises UsageError if there is none."""
    path = directory / GATE
    if not path.is_file():
        raise UsageError(
            f"{directory} holds no gate; `ttrain gate train --experts A,B --out {directory}` "
            "makes one"
        )
    return GateFile.model_validate(read_json(path))


def expert_of(reference: Reference) -> Expert:
    """The expert of a model reference. Reads its weights for their digests."""
    adapter = reference.adapter
    return Expert(
        reference=reference.text,
        model=str(reference.model),
        weights_sha256=weights_digest(reference.model),
        adapter=str(adapter) if adapter else None,
        adapter_sha256=weights_digest(adapter, name=ADAPTER) if adapter else None,
    )


def reference_of(expert: Expert) -> Reference:
    """The model reference of an expert, for loading it."""
    return Reference(
        expert.reference, Path(expert.model), Path(expert.adapter) if expert.adapter else None
    )


def check(expert: Expert) -> None:
    """Raise ArtifactError if an expert's weights changed since the gate was trained. Reads them."""
    if expert_of(reference_of(expert)) != expert:
        raise ArtifactError(
            f"the expert {expert.reference} is not the one that the gate knows: the weights in "
            f"{expert.adapter or expert.model} have changed; train the gate again"
        )
