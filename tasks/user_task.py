"""The process of `ttrain train`: train a user's task in the way of the stages."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

import torch
import yaml
from torch import Tensor, nn

from ttrain.config import TaskConfig, TaskJob, flatten
from ttrain.config.loading import Override, settings_of_task, types_by_name
from ttrain.data.loader import Loader
from ttrain.data.order import ShuffledOrder
from ttrain.errors import DataError, TTrainError, UsageError
from ttrain.tasks.common import training
from ttrain.tasks.common.callbacks import training_callbacks
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.common.rows import validation_batches
from ttrain.train import precision, task
from ttrain.train.early_stopping import early_stopping
from ttrain.train.task import LossSum, MapStyle, TrainingTask, UserTask
from ttrain.train.training_options import Origin, TrainerOptions, Validation

SETTINGS = "settings.yaml"


def run(config: TaskJob, job: StageContext) -> Figures:
    """Train the task; leaves `model.safetensors`, `checkpoints/`, `settings.yaml` and curves."""
    kind = task_class(config.task)
    settings = settings_of_task(kind.Config, [Override(*override) for override in config.given])
    allow = allowed(config.allow, kind.Config)
    ranks = training.start(job.runtime)
    task = kind(settings)
    rows, heldout = (
        Batches(dataset, task.collate) for dataset in (task.rows(), task.heldout_rows() or ())
    )
    if len(rows) < settings.rows_per_step:
        raise DataError(
            f"rows_per_step is {settings.rows_per_step} but the task's rows() has only "
            f"{len(rows)} rows; "
            f"set rows_per_step={max(1, len(rows))} or less, or bring more rows"
        )
    order = ShuffledOrder(
        len(rows), settings.rows_per_step, math.ceil(settings.epochs * len(rows)), settings.seed
    )
    validation = validation_batches(heldout, settings.validation_rows, job.runtime.rows_per_device)
    torch.manual_seed(settings.seed)
    model = task.build_model()
    counts = {"rows": len(rows), "heldout_rows": len(heldout)}
    loader = Loader(
        rows, order, rows_per_device=job.runtime.rows_per_device, rank=ranks.rank, world=ranks.world
    )
    trained = training.TrainableModel(model, lambda: state(model), {}, directory=".")
    options = TrainerOptions(
        trained,
        ranks,
        precision.resolve_precision(settings.precision, ranks.device),
        validation=Validation(validation),
        origin=Origin(
            identity={
                "task": f"{kind.__module__}:{kind.__qualname__}",
                **counts,
                **dict(flatten(settings.model_dump(mode="json"))),
            },
            allow=allow,
        ),
    )
    callbacks = [
        *early_stopping(settings, validation),
        *training_callbacks(settings, job, loader, options),
        *(task.callbacks() if ranks.first else ()),
    ]
    adapted = cast("TrainingTask", Adapted(task, model))
    figures = training.train(adapted, trained, loader, options, job, callbacks)
    if ranks.first:
        (job.output / SETTINGS).write_text(
            yaml.safe_dump(settings.model_dump(mode="json"), sort_keys=False)
        )
    return {**figures, **counts}


# --- the task and its settings --------------------------------------------------------------------


def task_class(name: str) -> type[UserTask]:
    """Import the class of a task. Raises UsageError if that fails or it is not a runnable task."""
    point = task.find_task(name)
    if ":" in name:
        sys.path.insert(0, str(Path.cwd()))
    try:
        task_type = point.load()
    except (ModuleNotFoundError, AttributeError) as error:
        raise UsageError(f"the task is '{name}', which cannot be imported: {error}") from error
    if not (inspect.isclass(task_type) and issubclass(task_type, UserTask)):
        raise UsageError(
            f"the task is '{name}', which is not a subclass of ttrain.train.task.UserTask"
        )
    if inspect.isabstract(task_type):
        raise UsageError(
            f"the task {name} lacks {', '.join(sorted(task_type.__abstractmethods__))}; write them"
        )
    if not issubclass(task_type.Config, TaskConfig) or "runtime" in task_type.Config.model_fields:
        raise UsageError(
            f"the settings {name}.Config must derive from ttrain.config.TaskConfig, and have "
            f"no 'runtime'"
        )
    return task_type


def allowed(names: Sequence[str], root: type[TaskConfig]) -> frozenset[str]:
    """The settings that --allow names, with all below `optim`. Raises UsageError."""
    setting_names = [*types_by_name(root), "task"]
    allowed_names: set[str] = set()
    for name in names:
        meant = [key for key in setting_names if key == name or key.startswith(f"{name}.")]
        if not meant:
            raise UsageError(
                f"--allow is '{name}', but there is no such "
                f"setting{task.did_you_mean(name, setting_names)}"
            )
        allowed_names.update(meant)
    return frozenset(allowed_names)


# --- between the task and the trainer -------------------------------------------------------------


@dataclass(frozen=True)
class RowBatch:
    """A batch from the task's `collate`, and whether it counts in the loss."""

    content: Any
    counts: bool = True

    def without_targets(self) -> RowBatch:
        """The same rows, none of which counts in the loss."""
        return replace(self, counts=False)


@final
class Batches:
    """A map-style data set, read as batches."""

    def __init__(self, rows: MapStyle, collate: Callable[[list[Any]], Any]) -> None:
        self._rows = rows
        self._collate = collate

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, rows: Collection[int]) -> RowBatch:
        """The rows with these numbers."""
        numbers = [int(row) for row in rows]
        read_many = getattr(self._rows, "__getitems__", None)
        return RowBatch(
            self._collate(
                read_many(numbers) if read_many else [self._rows[number] for number in numbers]
            )
        )


@final
class Adapted:
    """A user's task as the trainer calls it, with its model built once."""

    def __init__(self, task: UserTask, model: nn.Module) -> None:
        self._task = task
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def build_model(self) -> nn.Module:
        return self._model

    def train_step(self, model: nn.Module, batch: RowBatch, device: torch.device) -> LossSum:
        return self._checked(
            "train_step", self._task.train_step(model, batch.content, device), batch
        )

    def validation_step(self, model: nn.Module, batch: RowBatch, device: torch.device) -> LossSum:
        return self._checked(
            "validation_step", self._task.validation_step(model, batch.content, device), batch
        )

    def _checked(self, method: str, loss: LossSum, batch: RowBatch) -> LossSum:
        # The loss, or zero for a batch that does not count. Raises TTrainError where it is not a
        # summed LossSum.
        if not isinstance(loss, LossSum):
            raise TTrainError(
                f"{type(self._task).__name__}.{method} returned a {type(loss).__name__}; "
                f"return LossSum(sum of the losses, their number)"
            )
        if batch.counts:
            return loss
        return LossSum(
            loss.total * 0.0,
            0,
            {name: value * 0 for name, value in loss.parts.items()},
            {name: value * 0 for name, value in loss.sums.items()},
        )


def state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; a tensor with two names appears once, under the first."""
    first = {name for name, _ in model.named_parameters()}
    again = {name for name, _ in model.named_parameters(remove_duplicate=False)} - first
    return {name: tensor for name, tensor in model.state_dict().items() if name not in again}
