"""Any number of ranks takes the same steps: the same rows, and the same gradients up to the order
of sums."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import tiny_trainers
from support.comparing import digest, distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, Recorder, WatchedTask, in_ranks, tiny_model

from ttrain.config import Optim
from ttrain.train.distributed import Ranks
from ttrain.train.training_options import Cadence

LIVE = [16, 1, 7, 2, 16, 3, 11, 5, 1, 9, 4, 2, 13]
CONFIG = tiny_trainers.settings_of_training(
    tokens=42 * 16, tokens_per_step=7 * 16, optim=Optim(lr=1e-2, clip=1e9)
)


def fit(ranks: Ranks, **options: Any) -> dict[str, Any]:
    """13 rows, 7 a step, one a micro-batch; the sixth and last step has 5."""
    model = tiny_model(seed=1 + ranks.rank, layers=1, dropout=0.1)  # rank 0's weights count
    task, recorder, cadence = WatchedTask(CONFIG, model), Recorder(), Cadence(log=1, checkpoint=100)
    options |= {"task": task, "callbacks": [recorder], "cadence": cadence, "ranks": ranks}
    rows = NumberedRows(13, live=LIVE)
    trainer = tiny_trainers.make_trainer(
        CONFIG, model, rows, rows_per_device=1, total_rows=40, **options
    )
    result = trainer.fit()
    assert task.optimizers is not None
    return {
        "weights": trainer.weights.state(),
        "gradients": task.optimizers.gradients,
        "losses": recorder.figures("loss"),
        "rows": recorder.rows(),
        "step": result.step,
        "first": result.resumed_from_step,
    }


def test_any_number_of_ranks_continues_one_run(tmp_path: Path) -> None:
    straight, place, stores = fit(ALONE), tmp_path / "checkpoints", tmp_path / "stores"
    begun = in_ranks(2, stores, lambda ranks: fit(ranks, directory=place, stop_after=2))[0]
    alone = fit(ALONE, directory=place, stop_after=1)
    assert (begun["first"], alone["first"], alone["step"]) == (0, 2, 3)
    three = in_ranks(3, stores, lambda ranks: fit(ranks, directory=place))
    for rank in three:
        assert digest(rank["weights"]) == digest(three[0]["weights"])
        # The weights are equal, and so are the gradients.
        assert distance(straight["gradients"][3], rank["gradients"][0]) < 1e-6
    assert (three[0]["first"], three[0]["step"]) == (3, 6)
    assert three[0]["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert begun["rows"] | alone["rows"] | three[0]["rows"] == straight["rows"]
    consumed = np.concatenate([straight["rows"][step] for step in sorted(straight["rows"])])
    for epoch in range(3):
        assert sorted(consumed[epoch * 13 : epoch * 13 + 13]) == list(range(13))
