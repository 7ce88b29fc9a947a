"""A second output head on the same hidden state, for the token after the next one (arXiv:2404.19737), as in TinySeek.

It is trained with the model and saved beside its weights, in `multi_token.safetensors` ("weight" [V, D], maybe "bias" [V]),
never among them. The model's config records how it is trained, so that a stage starting from these files continues it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ttrain.config.model import MultiToken
from ttrain.errors import ArtifactError
from ttrain.model import factory
from ttrain.store.model_files import SECOND_HEAD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "multi_token"  # of the head among the model's modules, where the loss looks for it
WEIGHT, KEEP = "multi_token_loss_weight", "multi_token_keep_head"  # in the model's config
SEED_OFFSET = 0x5EC0  # a separate generator, so that the model's own weights are the same with and without it


class SecondHead(nn.Linear):
    """Logits of the token after the next one; `loss_weight` times its loss is added to that of the first head."""

    def __init__(self, width: int, entries: int, *, bias: bool, loss_weight: float) -> None:
        super().__init__(width, entries, bias=bias)
        self.loss_weight = loss_weight


def attach(model: PreTrainedModel, settings: MultiToken, seed: int) -> None:
    """Give the model a new head, drawn under the seed like its output head; if it has one, only the settings."""
    head = getattr(model, NAME, None)
    if head is None:
        first = model.get_output_embeddings()
        head = _put(model, bias=first.bias is not None, settings=settings)
        generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
        with torch.no_grad():
            head.weight.normal_(0.0, float(getattr(model.config, "initializer_range", 0.02)), generator=generator)
            if head.bias is not None:
                head.bias.zero_()
    _note(model, head, settings)


def attach_from(model: PreTrainedModel, directory: Path) -> bool:
    """Load the second head saved beside the weights; returns whether there is one.

    Raises ArtifactError if the file cannot be read, or its sizes are not the model's.
    """
    path = directory / SECOND_HEAD
    if not path.is_file():
        return False
    stored_settings = {"weight": getattr(model.config, WEIGHT, None), "keep_head": getattr(model.config, KEEP, None)}
    settings = MultiToken.model_validate({name: value for name, value in stored_settings.items() if value is not None})
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot load the second head {path}: {error}") from None
    head = _put(model, bias="bias" in weights, settings=settings)
    factory.overwrite(dict(head.named_parameters()), weights)
    _note(model, head, settings)
    return True


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights, and the head's under the names FILE/NAME, so that they get a file of their own."""
    tensors = factory.state(model)
    return {
        f"{SECOND_HEAD}/{name.partition('.')[2]}" if name.startswith(f"{NAME}.") else name: tensor
        for name, tensor in tensors.items()
    }


def discarded_files(model: PreTrainedModel) -> frozenset[str]:
    """Files of weights that are in checkpoints but not in the finished model."""
    return frozenset() if getattr(model.config, KEEP, True) else frozenset({SECOND_HEAD})


def _put(model: PreTrainedModel, *, bias: bool, settings: MultiToken) -> SecondHead:
    entries, width = model.get_output_embeddings().weight.shape
    head = SecondHead(width, entries, bias=bias, loss_weight=settings.weight)
    setattr(model, NAME, head)
    return head


def _note(model: PreTrainedModel, head: nn.Module, settings: MultiToken) -> None:
    assert isinstance(head, SecondHead), f"model.{NAME} is a {type(head).__name__}"
    head.loss_weight = settings.weight
    setattr(model.config, WEIGHT, settings.weight)
    setattr(model.config, KEEP, settings.keep_head)
