"""Any number of ranks takes the same steps: the same rows, and the same gradients but for the order of sums."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.comparing import digest, distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    ALONE,
    Recorder,
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)

from ttrain.config import Optim
from ttrain.train.distributed import Ranks
from ttrain.train.training_options import Cadence

LIVE = [16, 1, 7, 2, 16, 3, 11, 5, 1, 9, 4, 2, 13]


def fit(ranks: Ranks, *, directory: Path | None = None, **options: Any) -> dict[str, Any]:
    """Train a model with dropout, 13 rows, 7 a step, one a micro-batch; the sixth and last step has 5."""
    config = settings_of_training(
        tokens=42 * 16, tokens_per_step=7 * 16, optim=Optim(lr=1e-2, clip=1e9)
    )
    model = tiny_model(
        seed=1 + ranks.rank, layers=1, dropout=0.1
    )  # ranks begin with different weights: rank 0's count
    task = WatchedTask(config, model)
    recorder = Recorder()
    trainer = make_trainer(
        config,
        model,
        NumberedRows(13, live=LIVE),
        rows_per_device=1,
        total_rows=40,
        ranks=ranks,
        task=task,
        callbacks=[recorder],
        cadence=Cadence(log=1, checkpoint=100),
        directory=directory,
        **options,
    )
    result = trainer.fit()
    assert task.optimizers is not None
    return {
        "weights": trainer.weights.state(),
        "state": trainer.optimizers.state(),
        "gradients": task.optimizers.gradients,
        "losses": recorder.figures("loss"),
        "rows": recorder.rows(),
        "step": result.step,
        "first": result.resumed_from_step,
    }


def test_any_number_of_ranks_continues_one_run(tmp_path: Path) -> None:
    straight = fit(ALONE)
    place, seen = tmp_path / "checkpoints", dict[int, list[int]]()
    for world, stop in ((2, 2), (1, 1)):

        def part(ranks: Ranks, stop: int = stop) -> dict[str, Any]:
            return fit(ranks, directory=place, stop_after=stop)

        found = part(ALONE) if world == 1 else in_ranks(world, tmp_path / "stores", part)[0]
        assert found["first"] == len(seen)
        seen |= found["rows"]
    assert found["step"] == 3

    three = in_ranks(3, tmp_path / "stores", lambda ranks: fit(ranks, directory=place))
    for rank in three:
        assert digest(rank["weights"]) == digest(three[0]["weights"])
        assert distance(straight["gradients"][3], rank["gradients"][0]) < 1e-6, (
            "the weights are equal, so are the gradients"
        )
    assert (three[0]["first"], three[0]["step"]) == (3, 6)
    assert three[0]["losses"] == pytest.approx(straight["losses"][3:], rel=1e-5)
    assert seen | three[0]["rows"] == straight["rows"]
    consumed = np.concatenate([straight["rows"][step] for step in sorted(straight["rows"])])
    for epoch in range(3):
        assert sorted(consumed[epoch * 13 : epoch * 13 + 13]) == list(range(13))
