"""`runtime.tune=auto`: which sizes the search tries, and what a stage makes of the choice."""

import pytest
import torch
from support.comparing import copies, same
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, settings_of_training, tiny_model

from ttrain.data.order import ShuffledOrder
from ttrain.tasks.common import tuning
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.precision import Precision


@pytest.mark.parametrize(
    ("best", "is_slower", "tried"),
    [(4, True, [1, 2, 4, 8]), (4, False, [1, 2, 4, 8]), (24, False, [1, 2, 4, 8, 16, 24])],
)
def test_the_search_doubles_rows(best: int, is_slower: bool, tried: list[int]) -> None:
    """Until more are slower, or there is no memory for them, or a step has no more."""
    calls: list[int] = []

    def measured(size: int) -> float:
        calls.append(size)
        if size > best and not is_slower:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return 10.0 / min(size, best) + (size > best)

    assert tuning.fastest(measured, ShuffledOrder(40, 24, 120, seed=1), ALONE) == best
    assert calls == tried


def test_measuring_leaves_weights_gradients_and_random_numbers_as_they_are() -> None:
    module = tiny_model()
    task = LanguageModeling(settings_of_training(), module)
    order = ShuffledOrder(40, 6, 120, seed=1)
    before, state = copies(module.state_dict()), torch.get_rng_state()
    precision = Precision("fp32", torch.device("cpu"))
    assert tuning.step_seconds(task, NumberedRows(40), order, precision, ALONE, 2) > 0
    assert same(before, module.state_dict())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())
