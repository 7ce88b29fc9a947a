"""Any number of ranks takes the same steps: the same rows, the same gradients, and with `tree` the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, Recorder, WatchedTask, in_ranks, make_trainer, settings_of_training, tiny_model
from torch import Tensor

from ttrain.config import Optim
from ttrain.errors import UsageError
from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.distributed import Ranks
from ttrain.train.trainer import Cadence, TrainerOptions

TREE, FAST = TrainerOptions(reduction="tree"), TrainerOptions()
LIVE = [16, 1, 7, 2, 16, 3, 11, 5, 1, 9, 4, 2, 13]


class Consumed(Callback):
    """The rows of every step."""

    def __init__(self) -> None:
        self.steps: dict[int, list[int]] = {}

    def step_end(self, record: StepRecord) -> None:
        self.steps[record.step] = record.rows().tolist()


def digest(tensors: Mapping[str, Tensor]) -> str:
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


def fit(
    ranks: Ranks,
    how: TrainerOptions,
    *,
    rows_per_device: int = 1,
    directory: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train a model with dropout, 13 rows, 7 a step; the last step has 5."""
    changes = options.pop("changes", {})
    config = settings_of_training(tokens=70 * 16, tokens_per_step=7 * 16, optim=Optim(lr=1e-2, clip=1e9), **changes)
    model = tiny_model(seed=1 + ranks.rank, dropout=0.1)  # ranks begin with different weights: rank 0's count
    task = WatchedTask(config, model)
    recorder, consumed = Recorder(), Consumed()
    trainer = make_trainer(
        config, model, NumberedRows(13, live=LIVE), rows_per_device=rows_per_device, total_rows=68, ranks=ranks, how=how,
        task=task, callbacks=[recorder, consumed], cadence=Cadence(log=1, checkpoint=100), directory=directory, **options,
    )  # fmt: skip
    result = trainer.fit()
    if trainer.checkpoints:
        trainer.checkpoints.close()
    assert task.optimizers is not None
    return {
        "weights": trainer.weights.state(), "state": trainer.optimizers.state(), "gradients": task.optimizers.gradients,
        "losses": recorder.figures("loss"), "rows": consumed.steps, "step": result.step, "first": result.resumed_from_step,
    }  # fmt: skip


def test_with_a_tree_one_and_four_ranks_give_the_same_bits(tmp_path: Path) -> None:
    """Seven micro-batches a step: ranks have one or two of them, and in the last step one has none of five."""
    alone = fit(ALONE, TREE)
    assert alone["step"] == 10
    ranks = in_ranks(4, tmp_path, lambda ranks: fit(ranks, TREE))
    for found in ranks:
        assert digest(found["weights"]) == digest(alone["weights"])
        assert digest(found["state"]) == digest(alone["state"])
        assert [digest(g) for g in found["gradients"]] == [digest(g) for g in alone["gradients"]]
    assert ranks[0]["losses"] == alone["losses"]


def test_without_a_tree_the_order_of_sums_shows_in_the_last_bits(tmp_path: Path) -> None:
    """What makes the test above say something."""
    found = in_ranks(2, tmp_path, lambda ranks: fit(ranks, FAST))[0]
    assert digest(found["gradients"][0]) != digest(fit(ALONE, FAST)["gradients"][0])


def test_three_ranks_cannot_share_a_tree() -> None:
    with pytest.raises(UsageError, match=r"runtime\.reduction is tree but runtime\.devices is 3.*runtime\.devices=2"):
        fit(Ranks(0, 3, torch.device("cpu")), TREE)


def test_four_then_two_then_one_then_three_ranks_are_one_run(tmp_path: Path) -> None:
    """Every row once an epoch, the same global batches, and to the bit as long as the ranks share a tree."""
    straight = fit(ALONE, TREE)
    place = tmp_path / "checkpoints"
    seen: dict[int, list[int]] = {}
    for world, stop in ((4, 3), (2, 2), (1, 2)):

        def part(ranks: Ranks, stop: int = stop) -> dict[str, Any]:
            return fit(ranks, TREE, directory=place, stop_after=stop)

        found = part(ALONE) if world == 1 else in_ranks(world, tmp_path / "stores", part)[0]
        assert found["first"] == len(seen)
        seen |= found["rows"]
    assert found["step"] == 7
    assert [digest(g) for g in found["gradients"]] == [digest(g) for g in straight["gradients"][5:7]]
    last = in_ranks(3, tmp_path / "stores", lambda ranks: fit(ranks, FAST, directory=place))[0]
    assert (last["first"], last["step"]) == (7, 10)
    seen |= last["rows"]
    assert distance(straight["gradients"][7], last["gradients"][0]) < 1e-6, "the weights are equal, so are the gradients"
    assert seen == straight["rows"]
    consumed = np.concatenate([seen[step] for step in sorted(seen)])
    for epoch in range(5):
        assert sorted(consumed[epoch * 13 : epoch * 13 + 13]) == list(range(13))
    assert last["losses"] == pytest.approx(straight["losses"][7:], rel=1e-5)


def test_another_global_batch_is_refused_unless_allowed(tmp_path: Path) -> None:
    def run(tokens_per_step: int, **options: Any) -> dict[str, Any]:
        config = settings_of_training(tokens=12 * 96, tokens_per_step=tokens_per_step)
        consumed = Consumed()
        trainer = make_trainer(
            config, tiny_model(), NumberedRows(72), directory=tmp_path, callbacks=[consumed], total_rows=72,
            identity={"tokens_per_step": tokens_per_step, "optim.lr": 1e-2}, **options,
        )  # fmt: skip
        result = trainer.fit()
        return {"rows": consumed.steps, "first": result.resumed_from_step, "steps": result.step}

    before = run(96, stop_after=5)
    with pytest.raises(UsageError, match=r"tokens_per_step: 96 → 192.*allow the change of tokens_per_step"):
        run(192)
    with pytest.raises(UsageError, match="has consumed 30 rows, which is not a multiple of the 12 rows"):
        run(192, allow=frozenset({"tokens_per_step"}))
    after = run(48, allow=frozenset({"tokens_per_step"}))
    assert (after["first"], after["steps"]) == (10, 24)
    rows = [row for step in (before["rows"], after["rows"]) for number in sorted(step) for row in step[number]]
    assert sorted(rows) == list(range(72)), "no row is lost or repeated"
