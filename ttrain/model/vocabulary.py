"""More tokens than a model was made for: rows of its embedding and of its output heads for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ttrain.model import multi_token

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def grow(model: PreTrainedModel, size: int, pieces: Mapping[int, Sequence[int]]) -> None:
    """Give the model `size` rows, where it has fewer, and new values to the rows of `pieces`; all others keep theirs.

    `pieces` names, for each token that the model has never seen, those whose mean it begins as; none named: all that the
    model has seen. A mean lies where embeddings lie, so that the first steps need not undo noise; one of a token's own
    words, rather than the same mean for all, since an adapter leaves the embeddings as they are, and tokens with equal
    rows would be one token to it for ever. Nothing is random.
    """
    old = rows_of(model)
    if size > old:
        model.resize_token_embeddings(size, mean_resizing=False)
        for head in _second_heads(model):
            _lengthen(head, size)
    seen = [number for number in range(old) if number not in pieces]
    tables = {id(table): table for table in _tables(model)}  # tied: one table twice
    with torch.no_grad():
        for table in tables.values():
            values = {number: _mean(table, chosen or seen) for number, chosen in pieces.items()}
            for number, value in values.items():
                table[number] = value


def rows_of(model: PreTrainedModel) -> int:
    """How many tokens the model has an embedding for."""
    return int(model.get_input_embeddings().weight.shape[0])


def _tables(model: PreTrainedModel) -> list[Tensor]:
    """What has a row, or one number, a token: [V, D] or [V]."""
    heads = [model.get_output_embeddings(), *_second_heads(model)]
    of_heads = [tensor for head in heads if head is not None for tensor in (head.weight, getattr(head, "bias", None))]
    return [model.get_input_embeddings().weight, *(tensor for tensor in of_heads if tensor is not None)]


def _second_heads(model: PreTrainedModel) -> list[nn.Linear]:
    head = getattr(model, multi_token.NAME, None)
    return [] if head is None else [head]


def _lengthen(head: nn.Linear, rows: int) -> None:
    """Rows of zeros at the end, in place."""
    for name, tensor in list(head.named_parameters()):
        more = tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])
        setattr(head, name, nn.Parameter(torch.cat([tensor.detach(), more])))
    head.out_features = rows


def _mean(table: Tensor, rows: Sequence[int]) -> Tensor:
    return table[list(rows)].mean(dim=0)
