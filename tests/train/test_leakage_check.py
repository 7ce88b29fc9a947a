"""What no mask can keep apart is refused before it is trained."""

from typing import Any

import pytest
import torch
from support.comparing import copies, same
from support.tiny_trainers import settings_of_training, tiny_model
from torch import Tensor, nn

from ttrain.errors import UsageError
from ttrain.train.language_modeling import NextTokenLoss
from ttrain.train.leakage_check import check
from ttrain.train.losses import token_loss_sum

PACKED, UNPACKED = settings_of_training(), settings_of_training(packing="none")
SLIDING = {"kind": "gemma2", "fields": {"sliding_window": 5}}
EXPERTS = {"kind": "qwen3", "moe": {"experts": 8}}


def objective_of(**options: Any) -> NextTokenLoss:
    return NextTokenLoss(tiny_model(**{"hidden_size": 32, **options}))


@pytest.mark.parametrize("options", [{"dropout": 0.1}, SLIDING, EXPERTS], ids=str)
def test_a_model_that_keeps_records_apart_is_left_as_it_was(options: dict[str, Any]) -> None:
    objective = objective_of(**options).train()
    weights, random = copies(objective.state_dict()), torch.get_rng_state()
    check(objective, PACKED)
    assert objective.training
    assert same(weights, objective.state_dict())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in objective.parameters())


@pytest.mark.parametrize("kind", ["rwkv", "minimax"])
def test_a_recurrent_model_needs_rows_of_one_record(kind: str) -> None:
    objective = objective_of(kind=kind)
    with pytest.raises(UsageError, match=r"training\.packing.*packing=none"):
        check(objective, PACKED)
    check(objective, UNPACKED)


class Seeing(nn.Module):
    """An objective whose loss of a position is that of the token two places on."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = self.model = tiny_model()

    def forward(self, ids: Tensor, places: Any, records: Any, labels: Tensor, **_: Any) -> Any:
        return (token_loss_sum(self.model(input_ids=ids.flip(1)).logits.flip(1), labels),)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        (lambda: objective_of(kind="mamba"), r"MambaForCausalLM.*llama"),  # takes no mask
        (Seeing, "should predict"),
    ],
    ids=["no mask", "sees the future"],
)
def test_what_no_mask_can_keep_apart_is_refused(objective: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(objective(), UNPACKED)
