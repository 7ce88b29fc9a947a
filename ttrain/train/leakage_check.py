"""Before a training: whether this architecture keeps to the past, and to its own record of a packed row.

Masks do both where layers attend. A recurrent layer (mamba, rwkv) carries its state from one record into the next, and
no mask tells it not to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import Training
from ttrain.data.packing import IGNORE
from ttrain.errors import UsageError

RECORD = 6  # tokens of each of the two records in the row that is tried
SLACK = 3e-6  # of the loss: masks leave it as it is to the last bit; of eleven recurrent models the least moved it by 9e-6


def check(objective: nn.Module, config: Training) -> None:
    """Raises UsageError where the model cannot be trained on such rows. `objective`: a language model with its loss.

    Four forward passes of twelve tokens without dropout. The model stays as it was, and no random number is drawn.
    """
    was_training = objective.training
    objective.eval()
    try:
        with torch.no_grad():
            future, neighbour = _moved(objective)
    except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{_name(objective)} cannot be called with the mask and the positions of packed rows: {message}; choose another "
            f"model.kind, such as llama or qwen3"
        ) from error
    finally:
        objective.train(was_training)
    if future > SLACK:
        raise UsageError(
            f"{_name(objective)} sees the tokens that it should predict: another token moves the loss before it by "
            f"{future:.1e} of itself; choose another model.kind, such as llama or qwen3"
        )
    if neighbour > SLACK and config.packing != "none":
        raise UsageError(
            f"{config.prefix}packing is {config.packing}, but {_name(objective)} carries what it read from one record of a "
            f"row into the next: another first record moves the loss of the second by {neighbour:.1e} of itself; set "
            f"{config.prefix}packing=none"
        )


def _moved(objective: nn.Module) -> tuple[float, float]:
    """By what share of itself a loss moves where a later token, and where another record of the row, is another one."""
    causal: Any = getattr(objective, "causal", objective)
    embedding = causal.get_input_embeddings()
    vocab, device = embedding.num_embeddings, embedding.weight.device
    ids_BT = (torch.arange(2 * RECORD, device=device) * 7 % (vocab - 1))[None] + 1
    segments_BT = (torch.arange(2 * RECORD, device=device) // RECORD)[None]
    positions_BT = (torch.arange(2 * RECORD, device=device) % RECORD)[None]
    labels_BT = ids_BT.roll(-1, 1)
    labels_BT[:, :RECORD] = IGNORE
    labels_BT[:, -2:] = IGNORE

    def loss(ids: Tensor) -> float:
        return float(objective(ids, positions_BT, segments_BT, labels_BT, next_only=True)[0])

    later, other = ids_BT.clone(), ids_BT.clone()
    later[:, -1] = ids_BT[:, -1] % (vocab - 1) + 1
    other[:, :RECORD] = ids_BT[:, :RECORD] % (vocab - 1) + 1
    usual = loss(ids_BT)
    return tuple(abs(loss(ids) - usual) / max(abs(usual), 1e-9) for ids in (later, other))  # type: ignore[return-value]


def _name(objective: nn.Module) -> str:
    return type(getattr(objective, "causal", objective)).__name__
