"""Base class of training tasks: the model, its optimizer, its loss as a sum and a count."""

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, entry_points
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from ttrain.config import TaskConfig, Training
from ttrain.data.packing import Rows
from ttrain.errors import UsageError
from ttrain.train import optim, schedules
from ttrain.train.callbacks import Callback

Metrics = Mapping[str, float]
Sums = Mapping[str, Sequence[float]]  # of vectors
Criterion = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets)


GROUP = "ttrain.tasks"


@dataclass(frozen=True)
class LossSum:
    """A loss as a sum over `count` targets, to be divided once, by the targets of the global step.

    `parts`: sums that are divided and logged like it, as `loss_NAME`. `sums`: other sums over the
    rows, as vectors.
    """

    total: Tensor
    count: int
    parts: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, Tensor] = field(default_factory=dict)


class TrainingTask(ABC):
    """What the trainer needs to know about what it trains."""

    config: Training | TaskConfig

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model, in fp32, on the CPU."""

    def build_optimizer(self, model: nn.Module) -> optim.Optimizers:
        """The optimizers of the model's trainable parameters."""
        return optim.build(model, self.config.optim)

    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        """Factor of the learning rate at a step, counted from 0."""
        return schedules.schedule(self.config.schedule, steps)

    @abstractmethod
    def train_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        """Forward pass and loss of one micro-batch."""

    @abstractmethod
    def validation_step(self, model: nn.Module, batch: Any, device: torch.device) -> LossSum:
        """Forward pass and loss of one validation batch, without gradients."""

    def check_rows(self, rows: Rows) -> None:  # noqa: B027  # most tasks learn from any rows
        """Raise UsageError where the task cannot learn from rows of this kind."""

    def after_step(self, sums: Sums) -> None:  # noqa: B027  # most tasks have nothing to do
        """Update tensors that no optimizer trains, after a step that was not skipped.

        `sums`: those of the step, over micro-batches and ranks. Called on every rank.
        """

    def state(self) -> dict[str, float]:
        """What the task remembers from step to step, for a checkpoint."""
        return {}

    def load_state(self, state: Metrics) -> None:  # noqa: B027  # most tasks remember nothing
        """Restore the state of a checkpoint."""

    def figures(self, sums: Sums) -> Metrics:
        """Metrics for the log, from the sums since the last logging step."""
        return {}

    def derived(self, losses: Metrics) -> Metrics:
        """Metrics for the log, from the means of the loss and its parts (`loss`, `loss_NAME`)."""
        return {}


def installed_tasks() -> dict[str, EntryPoint]:
    """The tasks of the installed packages, by name."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def find_task(name: str) -> EntryPoint:
    """The entry point of a task, not imported. Raises UsageError with the known names."""
    if ":" in name:
        return EntryPoint(name, name, GROUP)
    tasks = installed_tasks()
    if name in tasks:
        return tasks[name]
    raise UsageError(
        f"there is no task '{name}'{did_you_mean(name, [*tasks])}; the tasks are {describe_tasks()}"
    )


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """A hint " (did you mean ...?)" with the closest name, or ""."""
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    return f" (did you mean '{close[0]}'?)" if close else ""


def describe_tasks() -> str:
    """All tasks, for an error message."""
    return (
        f"{', '.join(installed_tasks()) or 'none'}, or any module:Class; a package adds one by an "
        f"entry point of the group {GROUP}"
    )


class MapStyle(Protocol):
    """Rows as PyTorch's map-style data sets; an optional `__getitems__` reads many at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class UserTask(TrainingTask):
    """A task that brings its own rows and settings; docs/tasks.md shows one.

    Rows are read in a thread, in an order by the seed, and may be read again: row n must not
    change.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    config: TaskConfig

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def build_criterion(self) -> Criterion:
        """Summed loss of outputs and targets."""

    @abstractmethod
    def rows(self) -> MapStyle:
        """The rows to learn from."""

    def heldout_rows(self) -> MapStyle | None:
        """Rows for validation only; None: no validation."""
        return None

    def collate(self, rows: list[Any]) -> Any:
        """Combine rows to a batch, by default stacked as PyTorch's DataLoader does."""
        return default_collate(rows)

    def callbacks(self) -> Sequence[Callback]:
        """Own callbacks, requested on rank 0; docs/tasks.md names the hooks."""
        return ()

    @cached_property
    def criterion(self) -> Criterion:
        """The result of `build_criterion`, cached."""
        return self.build_criterion()
