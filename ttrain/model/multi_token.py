"""A second output head for the token after the next one (arXiv:2404.19737), as in TinySeek."""
# It is trained with the model and saved in a file of its own, `multi_token.safetensors` ("weight"
# [V, D], maybe "bias" [V]). The model's config records how, so that a stage that starts from these
# files continues it.

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from ttrain.config.model import MultiToken
from ttrain.errors import ArtifactError
from ttrain.model import factory
from ttrain.store.model_files import SECOND_HEAD

NAME = "multi_token"  # of the head among the model's modules, where the loss looks for it
WEIGHT = "multi_token_loss_weight"
KEEP = "multi_token_keep_head"  # in the model's config
# A separate generator, so that the model's own weights are the same with and without it.
SEED_OFFSET = 0x5EC0


def attach(model: PreTrainedModel, settings: MultiToken, seed: int) -> None:
    """Give the model a new head, drawn under the seed; if it has one, only the settings."""
    if not hasattr(model, NAME):
        head = _put(model, bias=model.get_output_embeddings().bias is not None)
        generator = torch.Generator().manual_seed(seed + SEED_OFFSET)
        with torch.no_grad():
            head.weight.normal_(
                0.0, float(getattr(model.config, "initializer_range", 0.02)), generator=generator
            )
            if head.bias is not None:
                head.bias.zero_()
    _note(model, settings)


def attach_from(model: PreTrainedModel, directory: Path) -> bool:
    """Load the second head saved with the weights; returns whether there is one.

    Raises ArtifactError if the file cannot be read, or its sizes are not the model's.
    """
    path = directory / SECOND_HEAD
    if not path.is_file():
        return False
    stored_settings = {
        "weight": getattr(model.config, WEIGHT, None),
        "keep_head": getattr(model.config, KEEP, None),
    }
    settings = MultiToken.model_validate(
        {name: value for name, value in stored_settings.items() if value is not None}
    )
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot load the second head {path}: {error}") from None
    factory.overwrite(dict(_put(model, bias="bias" in weights).named_parameters()), weights)
    _note(model, settings)
    return True


def state(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights, and the head's under FILE/NAME, so that they get their own file."""
    return {
        f"{SECOND_HEAD}/{name.partition('.')[2]}" if name.startswith(f"{NAME}.") else name: tensor
        for name, tensor in factory.state(model).items()
    }


def discarded_files(model: PreTrainedModel) -> frozenset[str]:
    """Files of weights that are in checkpoints but not in the finished model."""
    return frozenset() if getattr(model.config, KEEP, True) else frozenset({SECOND_HEAD})


def _put(model: PreTrainedModel, *, bias: bool) -> nn.Linear:
    entries, width = model.get_output_embeddings().weight.shape
    head = nn.Linear(width, entries, bias=bias)
    setattr(model, NAME, head)
    return head


def _note(model: PreTrainedModel, settings: MultiToken) -> None:
    getattr(model, NAME).loss_weight = settings.weight
    setattr(model.config, WEIGHT, settings.weight)
    setattr(model.config, KEEP, settings.keep_head)
