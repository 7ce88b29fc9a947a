"""The parts that a stage trains with, as arguments of the checks, so that tests can spoil them."""

# Letters in names: B rows, T positions.

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ttrain.config import Runtime, Training
from ttrain.data.loader import Loader
from ttrain.data.order import ShuffledOrder
from ttrain.data.packing import IGNORE, Batch, Rows
from ttrain.data.pair_rows import PairBatch, finished_pairs
from ttrain.tasks.common.training import TrainableModel
from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.distributed import Ranks
from ttrain.train.precision import Precision, resolve_precision
from ttrain.train.preference_tuning import score_answers
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, Speed, TrainerOptions

# Of a row, in the checks that need no more: several blocks of the attention on CPUs, of 32 and 64.
POSITIONS = 192
PAIR_ROWS = 8  # that are scored
NEVER = 1 << 30  # steps between events that must not happen
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


class InMemoryRows:
    """A few of the user's rows. `references`: log-probabilities by the numbers of answers."""

    def __init__(self, whole: Batch, references: npt.NDArray[np.float64] | None = None) -> None:
        self.whole = whole
        self.references = references
        self.row_length = whole.input_ids_BT.shape[1]

    def __len__(self) -> int:
        return len(self.whole.input_ids_BT)

    def batch(self, rows: Collection[int]) -> Batch:
        """A batch of the rows with these numbers."""
        names = [array.name for array in fields(self.whole) if array.name.endswith("_BT")]
        numbers = np.asarray(rows, np.int64)
        batch = replace(self.whole, **{name: getattr(self.whole, name)[numbers] for name in names})
        if not isinstance(batch, PairBatch):
            return batch
        answer_ids = np.append(batch.answer_ids_A, -1)  # -1: no answer
        pairs = finished_pairs(replace(batch, answers_BT=answer_ids[batch.answers_BT]))
        if self.references is None:
            return pairs
        return replace(pairs, references_A=self.references[pairs.answer_ids_A])


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


def select_rows(
    rows: Rows | InMemoryRows,
    count: int,
    positions: int | None = POSITIONS,
) -> InMemoryRows:
    """`count` of the rows, evenly spread, cut to `positions` around their first target."""
    step = max(1, len(rows) // count)
    batch = rows.batch([number * step % len(rows) for number in range(count)])
    if not batch.divisible:
        return InMemoryRows(batch, getattr(rows, "references", None))
    width = batch.input_ids_BT.shape[1]
    length = min(positions or width, width)
    firsts_B = (batch.labels_BT != IGNORE).argmax(axis=1)
    starts_B = np.clip(firsts_B - length // 2, 0, width - length)
    places_BT = starts_B[:, None] + np.arange(length)
    whole = (getattr(batch, array.name) for array in fields(batch))
    arrays = [np.take_along_axis(array, places_BT, axis=1) for array in whole]
    return InMemoryRows(Batch(*arrays))


def unevenly_masked(rows: InMemoryRows) -> InMemoryRows:
    """The rows with all, 1/2, 1/4, 1/8 of their targets: the mean of means is then not the mean."""
    if not rows.whole.divisible:
        return rows  # whose loss counts pairs, of which rows have different numbers
    labels_BT = rows.whole.labels_BT.copy()
    for row, labels in enumerate(labels_BT):
        labels[np.delete(np.flatnonzero(labels != IGNORE), np.s_[:: 1 << row % 4])] = IGNORE
    return InMemoryRows(replace(rows.whole, labels_BT=labels_BT))


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
