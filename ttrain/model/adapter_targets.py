"""Which of a model's weights a low-rank adapter goes onto: names and presets from the settings, names that PEFT matches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ttrain.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALL_LINEAR, ATTENTION = "all-linear", "attention"
PRESETS = (ALL_LINEAR, ATTENTION)


@dataclass(frozen=True)
class Targets:
    """What PEFT is told: suffixes of layers and of parameters, which match `layers` and `parameters` and nothing else.

    `parameters` are weights that are adapted as they stand: experts stacked in three dimensions, mostly.
    """

    layers: frozenset[str]
    parameters: frozenset[str]
    layer_suffixes: tuple[str, ...]
    parameter_suffixes: tuple[str, ...]
    transposed: bool  # whether any is GPT-2's Conv1D, whose weight is [in, out]


def find(model: PreTrainedModel, names: Sequence[str]) -> Targets:
    """The targets that `lora.targets` names. Raises UsageError, with all names there are, for one that the model has not.

    `all-linear`: every linear layer and every stack of experts but the output head (arXiv:2305.14314, section 4);
    `attention`: the linear layers within attention; else the last parts of a name, such as q_proj or mlp.down_proj.
    """
    linear, head, stacked = linear_layers(model), output_head(model), expert_stacks(model)
    body = [name for name in linear if name != head]
    wanted: set[str] = set()
    unknown = []
    for name in names:
        found = (
            [*body, *stacked] if name == ALL_LINEAR
            else _within_attention(model, body) if name == ATTENTION
            else [full for full in (*linear, *stacked) if _ends_with(full, name)]
        )  # fmt: skip
        wanted |= {*found}
        if not found:
            unknown.append(name)
    if unknown:
        choices = sorted({full.rpartition(".")[2] for full in (*linear, *stacked)})
        raise UsageError(
            f"lora.targets names {', '.join(unknown)}, but the model's linear layers are {', '.join(choices)}; "
            f"name some of them, or write {' or '.join(PRESETS)}"
        )
    if head in wanted and model.config.get_text_config().tie_word_embeddings:
        raise UsageError(
            f"lora.targets names the output head {head}, but model.tie_embeddings makes it the embedding too, which an "
            f"adapter must not change; leave it out"
        )
    renamed = _renamed_by_peft(model, {name.rpartition(".")[2] for name in linear})
    layers = {name for name in wanted - {*stacked} if name.rpartition(".")[2] not in renamed}
    parameters = {f"{name}.weight" if name in linear else name for name in wanted - layers}
    return Targets(
        frozenset(layers),
        frozenset(parameters),
        _shortest_suffixes(layers, [name for name, _ in model.named_modules()]),
        _shortest_suffixes(parameters, [name for name, _ in model.named_parameters()]),
        any(_is_conv1d(linear[name]) for name in layers),
    )


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer by its full name, the output head among them."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear) or _is_conv1d(layer)}


def expert_stacks(model: nn.Module) -> list[str]:
    """Full names of weights in three dimensions, [experts, out, in], that no layer of torch's owns (its convolutions do)."""
    return [
        f"{name}.{parameter}" for name, module in model.named_modules() if not type(module).__module__.startswith("torch.nn")
        for parameter, weight in module.named_parameters(recurse=False) if weight.ndim == 3
    ]  # fmt: skip


def output_head(model: PreTrainedModel) -> str | None:
    """Full name of the layer that makes logits."""
    head: Any = model.get_output_embeddings()
    return next((name for name, module in model.named_modules() if module is head), None)


def _renamed_by_peft(model: PreTrainedModel, names: set[str]) -> set[str]:
    """Names that PEFT takes for those that the experts had in transformers 4.

    It adapts the stacked experts in their stead, at twice the rank, so that shared experts and dense layers of a mixture of
    experts would go without. Told of the parameter instead of the layer, it adapts them.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = LoraConfig(target_modules=sorted(names))
    convert_peft_config_for_transformers(probe, model, None)
    return names - {*(probe.target_modules or ())}


def _within_attention(model: nn.Module, linear: Iterable[str]) -> list[str]:
    """Layers inside a module whose class is called some attention, as every architecture of transformers calls it."""
    inside = [f"{name}." for name, module in model.named_modules() if "attention" in type(module).__name__.lower()]
    return [name for name in linear if name.startswith(tuple(inside))]


def _shortest_suffixes(wanted: set[str], everything: Iterable[str]) -> tuple[str, ...]:
    """The shortest ends of the names that match the wanted and no other: q_proj, but attn.c_proj beside mlp.c_proj."""
    others = {*everything} - wanted
    suffixes = set()
    for name in wanted:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        suffixes.add(next(end for end in ends if not any(_ends_with(other, end) for other in others)))
    return tuple(sorted(suffixes))


def _ends_with(name: str, suffix: str) -> bool:
    """As PEFT matches: the whole name, or its last parts."""
    return name == suffix or name.endswith(f".{suffix}")


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"
