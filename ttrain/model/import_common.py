"""What the importers of foreign models share: their source, their result, checks of sizes."""

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
class Converted:
    """A model in transformers' names.

    assumed       values that neither the weights nor a config beside them tell
    second_head   what predicts the token after the next one, which never lies among the weights
    """

    layout: str
    config: PretrainedConfig
    weights: dict[str, Tensor]
    assumed: dict[str, Any]
    second_head: dict[str, Tensor] = field(default_factory=dict)


class Source:
    """The tensors of a state dict, each taken once, so that what nobody took is noticed."""

    def __init__(self, weights: Mapping[str, Tensor], where: str) -> None:
        self._left, self._where = dict(weights), where
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor in fp32; zeros, and a note for `finish`, where it is not there, has another shape, or is no weight:
        of whole numbers, as quantized ones are, or with one that is not finite."""
        tensor = self._left.pop(name, None)
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

    def linear(self, name: str, to: str, out: int, into: int, *, bias: bool) -> dict[str, Tensor]:
        """A linear layer's weight, and bias where it has one, under another name."""
        found = {f"{to}.weight": self.take(f"{name}.weight", out, into)}
        return found | ({f"{to}.bias": self.take(f"{name}.bias", out)} if bias else {})

    def stacked(self, names: Iterable[str], *shape: int) -> Tensor:
        """Tensors of one shape, one above the other in a new first dimension."""
        return torch.stack([self.take(name, *shape) for name in names])

    def finish(self) -> None:
        """Raises ArtifactError, with every name and shape, unless exactly what was taken was there."""
        left = [f"unexpected: {name} {[*tensor.shape]}" for name, tensor in sorted(self._left.items())]
        if problems := [*self._missing, *self._wrong, *left]:
            raise ArtifactError(f"the weights in {self._where} do not fit their layout:\n  " + "\n  ".join(problems))


def told(settings: Mapping[str, Any], name: str, default: Any, assumed: dict[str, Any]) -> Any:
    """A setting; where the config does not say it, the default, which is noted in `assumed`."""
    if settings.get(name) is not None:
        return settings[name]
    assumed[name] = default
    return default


def agree(settings: Mapping[str, Any], shapes: Mapping[str, int], where: str) -> None:
    """Raises ArtifactError where the config says another size than the weights have."""
    wrong = [
        f"{name} is {settings[name]!r}, but the weights have {size}"
        for name, size in shapes.items() if settings.get(name) is not None and settings[name] != size
    ]  # fmt: skip
    if wrong:
        raise ArtifactError(f"the config of {where} does not fit its weights: {'; '.join(wrong)}; give the right --config")
