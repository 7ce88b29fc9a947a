"""Whether a model keeps apart what shares a row: the future, records, answers of a pair."""
# Letters in names: B rows, T positions.

from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import Training
from ttrain.data.packing import IGNORE
from ttrain.errors import UsageError

# Tokens of each of the two records in the test row; prompt and answers of a pair have a third of
# the row each.
RECORD = 6

SLACK = 3e-6  # relative change of the loss: 0 with masks; at least 9e-6 in eleven recurrent models


def check(objective: nn.Module, config: Training, *, branches: bool = False) -> None:
    """Raise UsageError if a language model with its loss cannot be trained on packed rows.

    With `branches` also if it mixes the answers of a pair. Changes nothing and draws no random
    number.
    """
    was_training = objective.training
    name = type(_causal(objective)).__name__
    objective.eval()
    try:
        with torch.no_grad():
            future, neighbour, answer = _shifts(objective, branches=branches)
    except Exception as error:
        raise UsageError(
            f"{name} cannot be called with the mask and the positions of packed rows: "
            f"{' '.join(str(error).split()) or type(error).__name__}; "
            "choose another model.kind, such as llama or qwen3"
        ) from error
    finally:
        objective.train(was_training)
    if future > SLACK:
        raise UsageError(
            f"{name} sees the tokens that it should predict: changing a token changes the loss "
            f"before it by {future:.1e} (relative); choose another model.kind, such as llama or "
            "qwen3"
        )
    if answer > SLACK:
        raise UsageError(
            f"{name} does not keep the two answers of a pair apart, which lie in one row: "
            f"changing the chosen answer changes the loss of the rejected one by {answer:.1e} "
            "(relative); choose another model.kind, such as llama or qwen3"
        )
    if neighbour > SLACK and config.packing != "none":
        raise UsageError(
            f"{config.prefix}packing is {config.packing}, but {name} carries state from one "
            "record of a row into the next: changing the first record changes the loss of the "
            f"second by {neighbour:.1e} (relative); set {config.prefix}packing=none"
        )


def _shifts(objective: nn.Module, *, branches: bool) -> tuple[float, float, float]:
    """Relative changes of the loss by a later token, another record, and the other answer."""
    embedding = _causal(objective).get_input_embeddings()
    place_T = torch.arange(2 * RECORD, device=embedding.weight.device)
    ids_BT = (place_T * 7 % (embedding.num_embeddings - 1))[None] + 1
    others_BT = ids_BT % (embedding.num_embeddings - 1) + 1
    segment_T = place_T // RECORD
    third_T = place_T // (2 * RECORD // 3)  # third: prompt, chosen, rejected

    def shift(
        changed_T: Tensor,
        learnt_T: Tensor,
        positions_T: Tensor,
        segments_T: Tensor,
        **options: Tensor,
    ) -> float:
        labels_BT = torch.where(learnt_T, ids_BT.roll(-1, 1), IGNORE)
        usual, changed = (
            float(
                objective(
                    ids, positions_T[None], segments_T[None], labels_BT, next_only=True, **options
                )[0].sum()
            )
            for ids in (ids_BT, torch.where(changed_T, others_BT, ids_BT))
        )
        return abs(changed - usual) / max(abs(usual), 1e-9)

    row = ((segment_T == 1) & (place_T < 2 * RECORD - 2), place_T % RECORD, segment_T)
    answer = 0.0
    if branches:
        positions_T = place_T - (third_T == 2) * (2 * RECORD // 3)
        answer = shift(
            third_T == 1,
            third_T == 2,
            positions_T,
            torch.zeros_like(place_T),
            branches_BT=third_T[None],
        )
    return shift(place_T == 2 * RECORD - 1, *row), shift(segment_T == 0, *row), answer


def _causal(objective: nn.Module) -> Any:
    return getattr(objective, "causal", objective)
