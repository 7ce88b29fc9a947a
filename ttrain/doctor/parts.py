"""What a stage trains with, as parts that the checks take: in a test, each can be one that is wrong.

Letters in names: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import nn

from ttrain.config import Runtime, Training
from ttrain.data.loader import Loader
from ttrain.data.packing import IGNORE, Batch, Counts, Rows
from ttrain.data.samplers import ShuffledOrder
from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.checkpoint import Checkpoints, Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.precision import Precision, resolve
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import Cadence, How, Trainer, Weights

POSITIONS = 192  # of a row, in the checks that need no more: more than one block of the attention on CPUs, which has 128
NEVER = 1 << 30  # steps between things that shall not happen


class Subject(Weights, Protocol):
    """A model about to be trained, and how it is kept."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def files(self) -> Mapping[str, bytes]: ...

    @property
    def weights_file(self) -> str: ...


@dataclass(frozen=True)
class Learner:
    """How a stage trains. Its functions stand at the top of modules, so that other processes can be sent them.

    `build` gives the same weights every time; `trainer` makes a Trainer of the arguments of one.
    """

    config: Training
    runtime: Runtime
    build: Callable[[], Subject]
    task: Callable[[Training, nn.Module, Runtime], TrainingTask]
    trainer: Callable[..., Trainer] = Trainer


class HeldRows(Rows):
    """Rows in memory: a few of the user's."""

    def __init__(self, batch: Batch) -> None:
        self.whole, self.row_length, self.pad_id = batch, batch.input_ids_BT.shape[1], 0

    def __len__(self) -> int:
        return len(self.whole.input_ids_BT)

    def fill(self, row: int, batch: Batch, at: int) -> None:
        batch.input_ids_BT[at] = self.whole.input_ids_BT[row]
        batch.labels_BT[at] = self.whole.labels_BT[row]
        batch.positions_BT[at] = self.whole.positions_BT[row]
        batch.segments_BT[at] = self.whole.segments_BT[row]

    def counts(self) -> Counts:
        return {"rows": len(self), "records": len(self)}


def held(rows: Rows, count: int, positions: int | None = POSITIONS) -> HeldRows:
    """`count` of the rows, evenly spread (again from the first where there are fewer), each cut to so many positions.

    The cut lies around the row's first target, so that there is something to learn in it.
    """
    numbers = [number * len(rows) // count if len(rows) >= count else number % len(rows) for number in range(count)]
    batch = rows.batch(numbers)
    width = batch.input_ids_BT.shape[1]
    length = min(positions or width, width)
    firsts_B = (batch.labels_BT != IGNORE).argmax(axis=1)
    starts_B = np.clip(firsts_B - length // 2, 0, width - length)
    places_BT = starts_B[:, None] + np.arange(length)
    return HeldRows(Batch(*(np.take_along_axis(array, places_BT, axis=1) for array in _arrays(batch))))


def unevenly_masked(rows: HeldRows) -> HeldRows:
    """The rows with all, 1/2, 1/4 and 1/8 of their targets, in turn: so that the mean of means is not the mean."""
    labels_BT = rows.whole.labels_BT.copy()
    for row, labels in enumerate(labels_BT):
        labels[np.delete(np.flatnonzero(labels != IGNORE), np.s_[:: 1 << row % 4])] = IGNORE
    whole = rows.whole
    return HeldRows(Batch(whole.input_ids_BT, labels_BT, whole.positions_BT, whole.segments_BT))


def without_dropout(model: nn.Module) -> None:
    """So that gradients are a function of the rows alone: dropout's masks and routers' noise follow the micro-batches."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # a number of transformers' modules
        if isinstance(getattr(module, "noise_scale", None), float):
            module.noise_scale = 0.0  # type: ignore[assignment]  # a number of routers


class Losses(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.found: list[float] = []

    def step_end(self, record: StepRecord) -> None:
        self.found.append(record.loss)


def trainer_of(
    learner: Learner,
    subject: Subject,
    rows: Rows,
    *,
    ranks: Ranks,
    precision: Precision,
    rows_per_step: int,
    rows_per_device: int,
    steps: int,
    callbacks: Sequence[Callback] = (),
    checkpoints: Checkpoints | None = None,
    save_every: int = NEVER,
    start: Snapshot | None = None,
    **changes: Any,
) -> Trainer:
    """The stage's trainer for `steps` steps of these rows; `changes` are other settings of the stage."""
    changed = {
        "tokens": steps * rows_per_step * rows.row_length,
        "epochs": None,
        "tokens_per_step": rows_per_step * rows.row_length,
        "row_length": rows.row_length,
        "early_stopping": None,
        "nonfinite": "raise",
    }
    config = learner.config.model_copy(update={**changed, **changes})
    order = ShuffledOrder(len(rows), rows_per_step, steps * rows_per_step, config.seed)
    precision = resolve(precision.word, ranks.device)  # which also sets how fp32 matrices are multiplied
    return learner.trainer(
        learner.task(config, subject.model, learner.runtime),
        Loader(rows, order, rows_per_device=rows_per_device, rank=ranks.rank, world=ranks.world, prefetch_steps=0),
        ranks=ranks,
        precision=precision,
        weights=subject,
        checkpoints=checkpoints,
        callbacks=callbacks,
        cadence=Cadence(log=NEVER, checkpoint=save_every),
        how=How(False, learner.runtime.parallel, learner.runtime.reduction),
        start=start,
    )


def _arrays(batch: Batch) -> tuple[np.ndarray[Any, Any], ...]:
    return batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT
