"""The parts that a stage trains with, as arguments of the checks, so that tests can spoil them."""

# Letters in names: B rows, T positions.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from ttrain.config import Runtime, Training
from ttrain.data.loader import Loader
from ttrain.data.order import ShuffledOrder
from ttrain.data.packing import Rows
from ttrain.data.pair_rows import PairBatch
from ttrain.tasks.common.training import TrainableModel
from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.distributed import Ranks
from ttrain.train.memory_rows import InMemoryRows, select_rows
from ttrain.train.precision import Precision, resolve_precision
from ttrain.train.preference_tuning import score_answers
from ttrain.train.task import TrainingTask
from ttrain.train.timing import NEVER
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed, TrainerOptions

PAIR_ROWS = 8  # that are scored
DROPOUT = ("p", "attention_dropout")  # probabilities, of modules


@dataclass(frozen=True)
class Finding:
    """What a check measured; `fix` is what to do where it is not ok."""

    ok: bool
    measured: str
    fix: str = ""

    def to_json(self) -> dict[str, Any]:
        """The form that `--json` prints."""
        return {"ok": self.ok, "measured": self.measured, "fix": None if self.ok else self.fix}


@dataclass(frozen=True, eq=False)
class Learner:
    """How a stage trains, and on what. Its functions are top-level ones, which can be pickled.

    build       makes the model; the same weights every time
    is_trained  whether the base is a trained model
    steps       of the long run
    home        where the run will write
    """

    config: Training
    runtime: Runtime
    build: Callable[[], TrainableModel]
    task: Callable[[Training, nn.Module, Runtime], TrainingTask]
    rows: Rows | InMemoryRows
    precision: Precision
    is_trained: bool = False
    steps: int = 1
    home: Path = Path()
    trainer: Callable[..., Trainer] = Trainer

    def changed(self, **settings: Any) -> Learner:
        """The same learner with other settings of its stage."""
        return replace(self, config=self.config.model_copy(update=settings))

    def prepared(self) -> tuple[TrainingTask, Any]:
        """The task, and its model on the device in eval mode."""
        task = self.task(self.config, self.build().model, self.runtime)
        return task, task.build_model().to(self.precision.device).eval()


def with_references(learner: Learner) -> Learner:
    """The learner with a few of its pairs, scored by the model before its first step."""
    sample = select_rows(learner.rows, PAIR_ROWS)
    device = learner.precision.device
    references = np.full(1 + cast("PairBatch", sample.whole).answer_ids_A.max(), np.nan)
    _, scored = learner.prepared()
    with torch.no_grad():
        for number in range(len(sample)):
            batch = cast("PairBatch", sample.batch([number]))
            references[batch.answer_ids_A] = score_answers(scored, batch, device)[0].cpu().numpy()
    return replace(learner, rows=InMemoryRows(sample.whole, references))


def silence(model: nn.Module, *names: str) -> None:
    """Set attributes of modules to 0, so that no random numbers change gradients."""
    for module in model.modules():
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


class LossRecorder(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step_end(self, record: StepRecord) -> None:
        self.losses.append(record.loss)


def trainer_of(
    learner: Learner,
    subject: TrainableModel,
    rows: Rows | InMemoryRows,
    order: ShuffledOrder,
    rows_per_device: int,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> Trainer:
    """The stage's trainer for these rows. `options` replace those of the stage."""
    config = learner.config.model_copy(
        update={
            "tokens": order.total_rows * rows.row_length,
            "epochs": None,
            "tokens_per_step": order.rows_per_step * rows.row_length,
            "row_length": rows.row_length,
            "early_stopping": None,
            "nonfinite": "raise",
        }
    )
    ranks = options.get("ranks") or Ranks(0, 1, learner.precision.device)
    usual = TrainerOptions(
        subject,
        ranks,
        # Which also sets how fp32 matrices are multiplied.
        resolve_precision(learner.precision.word, ranks.device),
        cadence=Cadence(log=NEVER, checkpoint=NEVER),
        speed=Speed(parallel=learner.runtime.parallel),
    )
    return learner.trainer(
        learner.task(config, subject.model, learner.runtime),
        Loader(rows, order, rows_per_device=rows_per_device, rank=ranks.rank, world=ranks.world),
        replace(usual, **options),
        callbacks,
    )
