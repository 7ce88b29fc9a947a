"""The embeddings of an existing model, grown to another tokenizer's tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ttrain.model import multi_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grow(model: PreTrainedModel, size: int, pieces: Mapping[int, Sequence[int]]) -> None:
    """Grow the model to at least `size` rows, and set the rows of `pieces`; deterministic.

    `pieces`: by new token the tokens whose mean it starts from (empty: all known ones). Means lie
    within the embeddings; they differ, since an adapter cannot tell equal frozen rows apart.
    """
    old = embedding_rows(model)
    if size > old:
        model.resize_token_embeddings(size, mean_resizing=False)
        if hasattr(
            model, multi_token.NAME
        ):  # it has no row for them; `model.multi_token` makes another
            delattr(model, multi_token.NAME)
    seen_ids = [number for number in range(old) if number not in pieces]
    head = model.get_output_embeddings()
    # With a row, or one number, per token: [V, D] or [V]; of tied ones one table twice
    tables = {
        id(table): table for table in (model.get_input_embeddings().weight, head.weight, head.bias)
    }
    with torch.no_grad():
        for table in tables.values():
            if table is not None:
                means = {
                    number: table[list(chosen or seen_ids)].mean(dim=0)
                    for number, chosen in pieces.items()
                }
                for number, mean in means.items():
                    table[number] = mean


def embedding_rows(model: PreTrainedModel) -> int:
    """How many tokens the model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])
