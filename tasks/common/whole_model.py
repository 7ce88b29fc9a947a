"""A model all of whose weights a stage trains.

Not in `training.py`, which a user's task imports: its key must not depend on stages' models.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.model import factory, multi_token
from ttrain.tasks.common.training import TrainableModel
from ttrain.tasks.new_model import tokenizer_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def whole_model(
    model: PreTrainedModel, tokenizer: Path, identity: Mapping[str, Any] | None = None
) -> TrainableModel:
    """All weights of a model with this tokenizer; `identity`: as in `TrainableModel`."""
    return TrainableModel(
        model,
        state=lambda: multi_token.state(model),
        files={**factory.files(model), **tokenizer_files(tokenizer)},
        left_out=multi_token.discarded_files(model),
        identity=identity or {},
    )
