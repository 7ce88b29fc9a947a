"""The parts that a stage trains with, which are passed to the checks, so that tests can pass wrong ones.

Letters in names: B rows, T positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ttrain.config import Runtime, Training
from ttrain.core.text import first_line
from ttrain.data.loader import Loader, ShuffledOrder
from ttrain.data.packing import IGNORE, Array, Batch, Counts, Rows
from ttrain.data.pair_rows import PairBatch, finished_pairs
from ttrain.errors import TTrainError, UsageError
from ttrain.stages.trainable_model import TrainableModel
from ttrain.train.callbacks import Callback, StepRecord
from ttrain.train.distributed import Ranks
from ttrain.train.precision import Precision, resolve_precision
from ttrain.train.task import TrainingTask
from ttrain.train.trainer import Trainer
from ttrain.train.training_options import Cadence, TrainerOptions

POSITIONS = 192  # of a row, in the checks that need no more: several blocks of the attention on CPUs, which have 32 and 64

NEVER = 1 << 30  # steps between events that must not happen

BATCH_ARRAYS = tuple(field.name for field in fields(Batch))  # those that all batches have


@dataclass(frozen=True)
class Learner:
    """How a stage trains. Its functions are top-level ones of modules, so that they can be sent to other processes.

    `build` gives the same weights every time; `trainer` makes a Trainer of the arguments of one.
    """

    config: Training
    runtime: Runtime
    build: Callable[[], TrainableModel]
    task: Callable[[Training, nn.Module, Runtime], TrainingTask]
    trainer: Callable[..., Trainer] = Trainer

    def prepared(
        self, device: torch.device, model: nn.Module | None = None, **changes: Any
    ) -> tuple[TrainingTask, nn.Module]:
        """The task, with these settings changed, and its model on the device, which does not train; a new one by default."""
        task = self.task(self.config.replaced(changes), model or self.build().model, self.runtime)
        return task, task.build_model().to(device).eval()


class InMemoryRows(Rows):
    """Rows in memory: a few of the user's. `references`: log-probabilities by the numbers of pairs' answers."""

    def __init__(self, batch: Batch, references: npt.NDArray[np.float64] | None = None) -> None:
        self.whole, self.row_length, self.pad_id = batch, batch.input_ids_BT.shape[1], 0
        self.batch_type, self.references = type(batch), references

    def __len__(self) -> int:
        return len(self.whole.input_ids_BT)

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        for name in BATCH_ARRAYS:
            getattr(batch, name)[lines] = getattr(self.whole, name)[rows]
        if isinstance(self.whole, PairBatch) and isinstance(batch, PairBatch):
            batch.branches_BT[lines] = self.whole.branches_BT[rows]
            batch.answers_BT[lines] = numbered_answers(self.whole)[rows]

    def finished(self, batch: Batch) -> Batch:
        if not isinstance(batch, PairBatch):
            return batch
        pairs = finished_pairs(batch)
        return pairs if self.references is None else replace(pairs, references_A=self.references[pairs.answer_ids_A])

    def counts(self) -> Counts:
        return {"rows": len(self), "records": len(self)}


def select_rows(rows: Rows, count: int, positions: int | None = POSITIONS) -> InMemoryRows:
    """`count` of the rows, evenly spread (again from the first where there are fewer), each cut to so many positions.

    The cut lies around the row's first target, so that there is something to learn in it.
    """
    numbers = [number * len(rows) // count if len(rows) >= count else number % len(rows) for number in range(count)]
    batch = rows.batch(numbers)
    if not batch.divisible:
        return InMemoryRows(batch, getattr(rows, "references", None))
    width = batch.input_ids_BT.shape[1]
    length = min(positions or width, width)
    firsts_B = (batch.labels_BT != IGNORE).argmax(axis=1)
    starts_B = np.clip(firsts_B - length // 2, 0, width - length)
    places_BT = starts_B[:, None] + np.arange(length)
    return InMemoryRows(Batch(*(np.take_along_axis(getattr(batch, name), places_BT, axis=1) for name in BATCH_ARRAYS)))


def unevenly_masked(rows: InMemoryRows) -> InMemoryRows:
    """The rows with all, 1/2, 1/4 and 1/8 of their targets, in turn: so that the mean of means is not the mean."""
    if not rows.whole.divisible:
        return rows  # whose loss counts pairs, of which rows have different numbers
    labels_BT = rows.whole.labels_BT.copy()
    for row, labels in enumerate(labels_BT):
        labels[np.delete(np.flatnonzero(labels != IGNORE), np.s_[:: 1 << row % 4])] = IGNORE
    return InMemoryRows(replace(rows.whole, labels_BT=labels_BT))


def numbered_answers(batch: PairBatch) -> Array:
    """`answers_BT` with the numbers that answers have in the whole set."""
    answer_ids = np.append(batch.answer_ids_A, -1)  # -1: no answer
    return np.asarray(answer_ids[batch.answers_BT])


def without_dropout(model: nn.Module) -> None:
    """Turn off dropout and routers' noise, which follow the micro-batches, so that gradients depend on the rows alone."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]  # a number of transformers' modules
        if isinstance(getattr(module, "noise_scale", None), float):
            module.noise_scale = 0.0  # type: ignore[assignment]  # a number of routers


class LossRecorder(Callback):
    """The loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step_end(self, record: StepRecord) -> None:
        self.losses.append(record.loss)


def trainer_of(
    learner: Learner,
    subject: TrainableModel,
    rows: Rows,
    *,
    ranks: Ranks,
    precision: Precision,
    rows_per_step: int,
    rows_per_device: int,
    steps: int,
    save_every: int = NEVER,
    changes: Mapping[str, Any] = MappingProxyType({}),
    **parts: Any,
) -> Trainer:
    """The stage's trainer for `steps` steps of these rows. `changes`: other settings of the stage; `parts`: callbacks and
    other arguments of the trainer."""
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
    precision = resolve_precision(precision.word, ranks.device)  # which also sets how fp32 matrices are multiplied
    return learner.trainer(
        learner.task(config, subject.model, learner.runtime),
        Loader(rows, order, rows_per_device=rows_per_device, rank=ranks.rank, world=ranks.world),
        ranks=ranks,
        precision=precision,
        weights=subject,
        cadence=Cadence(log=NEVER, checkpoint=save_every),
        options=TrainerOptions(False, learner.runtime.parallel),
        **parts,
    )


Result = TypeVar("Result", bound="Check | None")


@dataclass(frozen=True)
class Check:
    """`figure`: what was measured. `cure` (its name in the JSON): how to fix it, where it is not ok."""

    name: str
    ok: bool
    figure: float | str
    cure: str | None = None


def make_check(name: str, ok: bool, figure: float | str, fix: str) -> Check:
    """A check, with the fix where it is not ok."""
    return Check(name, ok, figure, None if ok else fix)


def run_check(name: str, examine: Callable[[], Result]) -> Result | Check:
    """Run a check; an exception becomes a failed check, so that it does not hide the checks after it.

    UsageError is not caught: the settings are wrong, and there is nothing to examine.
    """
    try:
        return examine()
    except UsageError:
        raise
    except TTrainError as error:
        return Check(name, False, str(error), "do what the message says; training would fail with it too")
    except Exception as error:
        figure = f"{type(error).__name__}: {first_line(error)}"
        return Check(name, False, figure, "training would fail with it too; report it")
