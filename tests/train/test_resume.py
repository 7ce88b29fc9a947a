"""What a run may continue, what it may not, and that all ranks continue the same."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_data import NumberedRows
from support.tiny_trainers import WatchedTask, in_ranks, make_trainer, tiny_model
from support.tiny_trainers import settings_of_training as settings_of
from torch import nn

from ttrain.config import Optim, Schedule
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.train.distributed import Ranks
from ttrain.train.parallel import place
from ttrain.train.precision import LossScale
from ttrain.train.task import LossSum
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence

CONSTANT = Schedule(kind="constant", warmup_steps=2)
FP16, LARGER, MUON = {"precision": "fp16"}, {"tokens_per_step": 192}, {"optim": Optim(kind="muon")}


def trainer(directory: Path, changes: Any = (), **options: Any) -> Trainer:
    config = settings_of(**{"schedule": CONSTANT, "tokens": 8 * 96, **dict(changes)})
    options |= {"directory": directory, "cadence": Cadence(log=1, checkpoint=2)}
    return make_trainer(config, tiny_model(), NumberedRows(52), **options)


def fit_to(step: int, run: Trainer) -> None:
    run.stop_requested = lambda: run.loader.consumed >= step
    run.fit()


def test_a_loss_scale_is_not_carried_over_to_another_precision(tmp_path: Path) -> None:
    trainer(tmp_path, stop_after=2).fit()
    half = trainer(tmp_path, FP16)
    assert (half.first, half.loss_scale.enabled, half.loss_scale.scale) == (2, True, 2.0**16)
    half.loss_scale.scale = 4.0
    fit_to(4, half)
    assert trainer(tmp_path, FP16).loss_scale == LossScale(4.0, enabled=True, good_steps=2)
    # In fp32 a loss that is not finite must not be taken for an overflow.
    assert not trainer(tmp_path).loss_scale.enabled


def test_larger_steps_leave_no_checkpoint_that_passes_for_a_later_one(tmp_path: Path) -> None:
    trainer(tmp_path, total_rows=60, stop_after=6).fit()
    larger = trainer(tmp_path, LARGER, total_rows=60)
    assert larger.first == 3
    assert (tmp_path / "step-00000006").exists(), "none is removed before the new one is on disk"
    fit_to(4, larger)
    names = [path.name for path in sorted(tmp_path.glob("step-*"))]
    assert names == ["step-00000003", "step-00000004"]
    assert trainer(tmp_path, LARGER, total_rows=60).first == 4


def test_a_run_that_ended_within_a_step_is_not_lengthened_with_rows_lost(tmp_path: Path) -> None:
    trainer(tmp_path, total_rows=10).fit()  # a step of six rows and one of four
    assert trainer(tmp_path, total_rows=10).first == 2, "it is finished"
    with pytest.raises(UsageError, match=r"\b10\b.*\b6 rows"):
        trainer(tmp_path, total_rows=60)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, MUON, stop_after=1).fit()
    with pytest.raises(UsageError, match=r"Muon.*AdamW.*AdamW"):
        trainer(tmp_path)


def test_ranks_that_would_begin_at_different_steps_end_with_an_error(tmp_path: Path) -> None:
    trainer(tmp_path / "0", stop_after=4).fit()
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(tmp_path / "1" / "step-00000004")

    def begins(ranks: Ranks) -> str:
        with pytest.raises(ArtifactError) as error:
            trainer(tmp_path / str(ranks.rank), ranks=ranks)
        return str(error.value)

    first, second = in_ranks(2, tmp_path, begins)
    assert "rank 0 at step 4" in first and "rank 1 at step 2" in second


class InParts(WatchedTask):
    """A task whose loss has a part, and after `late` passes another one."""

    late = 99

    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        loss = super().train_step(model, batch, device)
        names = ["all", "new"] if self.passes > self.late else ["all"]
        return LossSum(loss.total, loss.count, dict.fromkeys(names, loss.total.detach()))


def test_ranks_with_no_micro_batch_of_a_step_sum_the_same_parts(tmp_path: Path) -> None:
    def fit(ranks: Ranks) -> int:
        options: dict[str, Any] = {"rows_per_device": 3, "total_rows": 7, "ranks": ranks}
        task = InParts(settings_of(), model := tiny_model())
        return make_trainer(settings_of(), model, NumberedRows(52), task=task, **options).fit().step

    assert in_ranks(2, tmp_path, fit) == [2, 2]


def test_a_part_that_the_first_step_had_not_is_named() -> None:
    task = InParts(settings_of(), model := tiny_model())
    task.late = 4
    with pytest.raises(TTrainError, match="'new'"):
        make_trainer(settings_of(), model, NumberedRows(52), task=task).fit()


def test_running_statistics_are_those_of_rank_0_on_all_ranks(tmp_path: Path) -> None:
    """Batch normalization on two ranks: what a checkpoint keeps is what every rank has."""

    def statistics(ranks: Ranks) -> Any:
        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        placed, _ = place(module, ranks, "ddp", None)
        for step in range(3):
            torch.manual_seed(step * 2 + ranks.rank)
            placed.module(torch.randn(4, 3)).sum().backward()
            placed.finish()
        return module[1].running_mean.clone()

    first, second = in_ranks(2, tmp_path, statistics)
    assert torch.allclose(first, second)
