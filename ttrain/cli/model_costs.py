"""What a model of these settings is and costs, from the real architecture on torch's meta device: no weight is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ttrain.config import Model, Optim, Settings
from ttrain.config import model_presets as sizes
from ttrain.errors import UsageError
from ttrain.model import factory
from ttrain.train import optim
from ttrain.train.flops import flops_per_token, looked_up_weights, visited_shares

NUMBER = 4  # bytes of a weight, a gradient and a number of the optimizer's state: master weights are fp32
STATE = {"AdamW": 2, "Muon": 1, "StackedMuon": 1}  # numbers that an optimizer keeps for each weight
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # which tokens these are changes no size


@dataclass(frozen=True)
class Cost:
    """Parameters, FLOPs of a token and bytes, of one model."""

    kind: str
    vocab_size: int
    row_length: int
    parameters: int
    active_parameters: int  # that a token meets: without the experts that it does not visit
    embedding_parameters: int  # of tables that are looked up, and of the output head
    second_head_parameters: int  # of `model.multi_token`; trained beside the model and counted in no figure above
    flops_per_token: float  # forward and backward
    memory_bytes: Mapping[str, int]  # weights, gradients and state, by optimizer
    checkpoint_bytes: Mapping[str, int]  # weights and state, by optimizer
    model_bytes: int  # of the weights that a stage leaves

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def cost(config: Model, *, vocab_size: int, row_length: int) -> Cost:
    """What a model costs. Raises UsageError where its architecture cannot be had in these sizes."""
    with torch.device("meta"):
        model = factory.construct(config, vocab_size=vocab_size, ids=IDS)
    own: Any = model
    second = own.get_output_embeddings().weight.numel() if config.multi_token else 0
    total = sum(p.numel() for p in model.parameters())
    shares = visited_shares(model)
    active = sum(round(p.numel() * shares.get(name, 1.0)) for name, p in model.named_parameters())
    state = {kind: _state(model, kind) + STATE["AdamW"] * second for kind in ("adamw", "muon")}
    trained = total + second
    return Cost(
        kind=model.config.model_type,
        vocab_size=vocab_size,
        row_length=row_length,
        parameters=total,
        active_parameters=active,
        embedding_parameters=_embeddings(model),
        second_head_parameters=second,
        flops_per_token=flops_per_token(model, row_length) + 6 * second,
        memory_bytes={kind: NUMBER * (2 * trained + numbers) for kind, numbers in state.items()},
        checkpoint_bytes={kind: NUMBER * (trained + numbers) for kind, numbers in state.items()},
        model_bytes=NUMBER * total,
    )


def of_settings(settings: Settings, *, vocab_size: int | None = None) -> Cost:
    """What the model of these settings costs; `vocab_size` instead of `tokenizer.vocab_size`.

    Raises UsageError where it is no new model, whose sizes the settings do not know.
    """
    if settings.existing_model:
        raise UsageError(
            f"{settings.trainings[0]}.start_from is {settings.existing_model}, but this shows new models, of the sizes in "
            f"model.*; leave it out"
        )
    return cost(
        settings.model, vocab_size=vocab_size or settings.tokenizer.vocab_size, row_length=settings.pretrain.row_length
    )


def of_presets() -> dict[str, Cost]:
    """What every preset costs, each with the vocabulary that its name was counted with."""
    row_length = Settings().pretrain.row_length
    return {
        name: cost(Model(preset=name), vocab_size=sizes.vocab_size_of(name), row_length=row_length) for name in sizes.names()
    }


def _state(model: nn.Module, kind: Any) -> int:
    """Numbers of the optimizer's state."""
    groups = optim.build(model, Optim(kind=kind)).groups()
    return sum(STATE[group["optimizer"]] * group["parameters"] for group in groups)


def _embeddings(model: nn.Module) -> int:
    own: Any = model
    tables = looked_up_weights(model)
    heads = [module.weight for module in (own.get_input_embeddings(), own.get_output_embeddings()) if module is not None]
    found = {id(p): p.numel() for name, p in model.named_parameters() if name in tables}
    return sum({**found, **{id(weight): weight.numel() for weight in heads}}.values())
