"""Tasks of users: a model, a loss and rows of their own, trained by `ttrain train --task`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.utils.data import default_collate

from ttrain.config import TaskConfig
from ttrain.train.task import TrainingTask


class MapStyle(Protocol):
    """Rows as PyTorch's map-style data sets have them; `__getitems__`, where there is one, reads many at a time."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Any: ...


class UserTask(TrainingTask):
    """A task that brings its own rows and settings; docs/tasks.md shows one.

    Rows are read in a thread, in an order that only the seed decides, and may be read again: row n must always be the same.
    """

    Config: ClassVar[type[TaskConfig]] = TaskConfig
    config: TaskConfig

    def __init__(self, config: TaskConfig) -> None:
        self.config = config

    @abstractmethod
    def rows(self) -> MapStyle:
        """The rows to learn from."""

    def heldout_rows(self) -> MapStyle | None:
        """Rows on which the loss is measured, and nothing is learnt from; None: it is not measured."""
        return None

    def collate(self, rows: list[Any]) -> Any:
        """Rows to the batch that the steps are given: by default as PyTorch's DataLoader does, stacked into tensors."""
        return default_collate(rows)

    @cached_property
    def criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        """What `build_criterion` gave."""
        return self.build_criterion()
