"""What a run may continue, what it may not, and that all ranks continue the same."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from support.tiny_data import NumberedRows
from support.tiny_trainers import (
    WatchedTask,
    in_ranks,
    make_trainer,
    settings_of_training,
    tiny_model,
)
from torch import nn

from ttrain.config import Optim, Schedule
from ttrain.errors import ArtifactError, TTrainError, UsageError
from ttrain.train.distributed import Ranks
from ttrain.train.precision import LossScale
from ttrain.train.task import LossSum
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence


def trainer(
    directory: Path, *, changes: Mapping[str, Any] = MappingProxyType({}), **options: Any
) -> Trainer:
    config = settings_of_training(
        **{"schedule": Schedule(kind="constant", warmup_steps=2), "tokens": 8 * 96, **changes}
    )
    cadence = Cadence(log=1, checkpoint=2)
    return make_trainer(
        config, tiny_model(), NumberedRows(52), directory=directory, cadence=cadence, **options
    )


def test_a_loss_scale_is_not_carried_over_to_another_precision(tmp_path: Path) -> None:
    trainer(tmp_path, stop_after=2).fit()
    half = trainer(tmp_path, changes={"precision": "fp16"})
    assert (half.first, half.loss_scale.enabled, half.loss_scale.scale) == (2, True, 2.0**16)
    half.loss_scale.scale = 4.0
    half.stop_requested = lambda: half.loader.consumed >= 4
    half.fit()
    assert trainer(tmp_path, changes={"precision": "fp16"}).loss_scale == LossScale(
        4.0, enabled=True, good_steps=2
    )
    assert not trainer(tmp_path).loss_scale.enabled, (
        "in fp32 a loss that is no number must not be taken for an overflow"
    )


def test_larger_steps_leave_no_checkpoint_that_passes_for_a_later_one(tmp_path: Path) -> None:
    trainer(tmp_path, total_rows=60, stop_after=6).fit()
    larger = trainer(tmp_path, total_rows=60, changes={"tokens_per_step": 192})
    assert larger.first == 3
    assert (tmp_path / "step-00000006").exists(), (
        "nothing is removed before the new count is on disk"
    )
    larger.stop_requested = lambda: larger.loader.consumed >= 4
    larger.fit()
    assert [path.name for path in sorted(tmp_path.glob("step-*"))] == [
        "step-00000003",
        "step-00000004",
    ]
    assert trainer(tmp_path, total_rows=60, changes={"tokens_per_step": 192}).first == 4


def test_a_run_that_ended_within_a_step_is_not_lengthened_with_rows_lost(tmp_path: Path) -> None:
    trainer(tmp_path, total_rows=10).fit()  # a step of six rows and one of four
    assert trainer(tmp_path, total_rows=10).first == 2, "it is finished"
    with pytest.raises(UsageError, match="consumed 10 rows, which is not a multiple of the 6 rows"):
        trainer(tmp_path, total_rows=60)


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    trainer(tmp_path, stop_after=1, changes={"optim": Optim(kind="muon")}).fit()
    with pytest.raises(
        UsageError, match="holds the state of Muon and AdamW, which AdamW cannot continue"
    ):
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
    late = False

    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        loss = super().train_step(model, batch, device)
        parts = {"all": loss.total.detach()}
        if self.late and self.passes > 4:
            parts["new"] = loss.total.detach()
        return LossSum(loss.total, loss.count, parts)


def test_ranks_with_no_micro_batch_of_a_step_sum_the_same_parts(tmp_path: Path) -> None:
    def fit(ranks: Ranks) -> int:
        config, model = settings_of_training(), tiny_model()
        run = make_trainer(
            config,
            model,
            NumberedRows(52),
            task=InParts(config, model),
            rows_per_device=3,
            total_rows=7,
            ranks=ranks,
        )
        return run.fit().step

    assert in_ranks(2, tmp_path, fit) == [2, 2]


def test_a_part_that_the_first_step_had_not_is_named() -> None:
    config, model = settings_of_training(), tiny_model()
    task = InParts(config, model)
    task.late = True
    with pytest.raises(
        TTrainError, match="the loss has the part 'new', which the first step did not have"
    ):
        make_trainer(config, model, NumberedRows(52), task=task).fit()


def test_running_statistics_are_those_of_rank_0_on_all_ranks(tmp_path: Path) -> None:
    """Batch normalization on two ranks: what a checkpoint keeps is what every rank has."""

    def statistics(ranks: Ranks) -> Any:
        from ttrain.train.parallel import place

        module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        way, _ = place(module, ranks, "ddp", None)
        for step in range(3):
            torch.manual_seed(step * 2 + ranks.rank)
            way.module(torch.randn(4, 3)).sum().backward()
            way.finish()
        return module[1].running_mean.clone()

    first, second = in_ranks(2, tmp_path, statistics)
    assert torch.allclose(first, second)
