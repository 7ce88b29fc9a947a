"""Shared parts of the importers of foreign models: source tensors, result, checks of sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ttrain.errors import ArtifactError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class ConvertedModel:
    """A model in transformers' names.

    assumed       values found neither in the weights nor in a config beside them
    second_head   the head that predicts the token after the next one, never among the weights
    """

    layout: str
    config: PretrainedConfig
    weights: dict[str, Tensor]
    assumed: dict[str, Any]
    second_head: dict[str, Tensor] = field(default_factory=dict)


class StateDictReader:
    """The tensors of a state dict, each taken once, so that left-over ones are reported."""

    def __init__(self, weights: Mapping[str, Tensor], origin: str) -> None:
        self._remaining, self._origin = dict(weights), origin
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        """Take a tensor in fp32; zeros, and an entry for `finish`, if it is missing, has another shape, or is not a weight:
        an integer type, as quantized ones are, or a non-finite value."""
        tensor = self._remaining.pop(name, None)
        if tensor is None:
            self._missing.append(f"missing: {name} {[*shape]}")
        elif tensor.shape != shape:
            self._wrong.append(f"mis-shaped: {name} is {[*tensor.shape]} but must be {[*shape]}")
        elif not tensor.is_floating_point():
            self._wrong.append(f"no weights: {name} holds {str(tensor.dtype).removeprefix('torch.')}")
        elif not torch.isfinite(tensor).all():
            self._wrong.append(f"no weights: {name} holds numbers that are not finite")
        else:
            return tensor.to(torch.float32)
        return torch.zeros(shape)

    def linear(self, name: str, to: str, out: int, into: int) -> dict[str, Tensor]:
        """Take a linear layer's weight and bias under another name."""
        return {f"{to}.weight": self.take(f"{name}.weight", out, into), f"{to}.bias": self.take(f"{name}.bias", out)}

    def stacked(self, names: Iterable[str], *shape: int) -> Tensor:
        """Take tensors of one shape, stacked in a new first dimension."""
        return torch.stack([self.take(name, *shape) for name in names])

    def finish(self) -> None:
        """Raise ArtifactError, with every name and shape, unless exactly the taken tensors existed."""
        unexpected = [f"unexpected: {name} {[*tensor.shape]}" for name, tensor in sorted(self._remaining.items())]
        if problems := [*self._missing, *self._wrong, *unexpected]:
            raise ArtifactError(f"the weights in {self._origin} do not fit their layout:\n  " + "\n  ".join(problems))


def setting_or_default(settings: Mapping[str, Any], name: str, default: Any, assumed: dict[str, Any]) -> Any:
    """A setting of the config, else the default, which is then recorded in `assumed`."""
    if settings.get(name) is not None:
        return settings[name]
    assumed[name] = default
    return default


def check_sizes(settings: Mapping[str, Any], shapes: Mapping[str, int], origin: str) -> None:
    """Raise ArtifactError if a size in the config differs from that of the weights."""
    wrong = [
        f"{name} is {settings[name]!r}, but the weights have {size}"
        for name, size in shapes.items() if settings.get(name) is not None and settings[name] != size
    ]  # fmt: skip
    if wrong:
        raise ArtifactError(f"the config of {origin} does not fit its weights: {'; '.join(wrong)}; give the right --config")
