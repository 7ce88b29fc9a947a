"""JSON state of a checkpoint, and the check whether a run may continue from it."""

from __future__ import annotations

import json
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ttrain.data.loader import Loader
from ttrain.data.order import Order
from ttrain.errors import ArtifactError, UsageError
from ttrain.train.callbacks import CallbackList
from ttrain.train.checkpoint import Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.optim import Optimizers
from ttrain.train.precision import LossScale, Precision
from ttrain.train.task import TrainingTask

log = logging.getLogger("ttrain")


class Resumable(Protocol):
    """The part of the trainer that its checkpoints describe."""

    steps: int
    first: int  # step at which it begins
    task: TrainingTask
    loader: Loader
    counters: Counters
    loss_scale: LossScale
    callback_list: CallbackList
    optimizers: Optimizers
    identity: dict[str, Any]
    ranks: Ranks
    precision: Precision


def state_of(trainer: Resumable, step: int) -> dict[str, Any]:
    """The JSON part of a snapshot; `rows` are those consumed."""
    order = trainer.loader.order
    return {
        "steps": trainer.steps,
        "counters": asdict(trainer.counters),
        "loss_scale": dict(vars(trainer.loss_scale)),
        "callbacks": trainer.callback_list.state(),
        "task": trainer.task.state(),
        "rows": min(step * order.rows_per_step, order.total_rows),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers.optimizers],
        "identity": trainer.identity,
        "world": trainer.ranks.world,
        "precision": trainer.precision.word,
    }


def check_resumable(trainer: Resumable, snapshot: Snapshot, allow: frozenset[str]) -> int:
    """The step at which this run continues from the snapshot: consumed rows are not read again.

    Raises UsageError with the differences if it was made under other settings that may not change.
    """
    state = snapshot.state
    differences = {
        name: (state["identity"].get(name), trainer.identity.get(name))
        for name in sorted({*state["identity"], *trainer.identity})
        if state["identity"].get(name) != trainer.identity.get(name)
    }
    refused = {name: pair for name, pair in differences.items() if name not in allow}
    if refused:
        changes = "; ".join(f"{name}: {old} → {new}" for name, (old, new) in refused.items())
        raise UsageError(
            f"the checkpoint of step {snapshot.step} was made under other settings ({changes}); restore them, "
            f"start a new run in another output directory, or allow the change of {', '.join(refused)} (--allow)"
        )
    for name, (old, new) in differences.items():
        log.warning("continues with another %s: %s → %s", name, old, new)
    if state["precision"] != trainer.precision.word:
        log.warning("continues in %s what was computed in %s: not the same bits", trainer.precision.word, state["precision"])
    return _resume_step(snapshot, trainer.loader.order)


def check_optimizers(trainer: Resumable, snapshot: Snapshot) -> None:
    """Raise UsageError if the state belongs to other optimizers."""
    old, new = snapshot.state["optimizers"], [type(optimizer).__name__ for optimizer in trainer.optimizers.optimizers]
    if old != new:
        raise UsageError(
            f"the checkpoint of step {snapshot.step} holds the state of {' and '.join(old)}, which {' and '.join(new)} "
            f"cannot continue; restore optim.kind, or start a new run in another output directory"
        )


def check_same(trainer: Resumable, snapshot: Snapshot | None) -> None:
    """Check that all ranks continue from the same checkpoint. Raises ArtifactError if one could not read it."""
    fingerprint = [float(trainer.first), float(_digest(snapshot))]
    if any(
        total != value * trainer.ranks.world
        for total, value in zip(trainer.ranks.sum(fingerprint), fingerprint, strict=True)
    ):
        raise ArtifactError(
            f"the ranks start at different steps, rank {trainer.ranks.rank} at step {trainer.first}; all ranks must be able "
            f"to read the checkpoints"
        )


def _digest(snapshot: Snapshot | None) -> int:
    """32-bit digest of a checkpoint's state; sums of it over ranks are exact in fp64."""
    if snapshot is None:
        return 0
    return zlib.crc32(json.dumps({**snapshot.state, "step": snapshot.step}, sort_keys=True).encode())


def _resume_step(snapshot: Snapshot, order: Order) -> int:
    rows = int(snapshot.state["rows"])
    if rows % order.rows_per_step and rows != order.total_rows:
        raise UsageError(
            f"the checkpoint of step {snapshot.step} has consumed {rows} rows, which is not a multiple of the "
            f"{order.rows_per_step} rows of a step now; use a tokens_per_step that divides it, or start a new run in "
            f"another output directory"
        )
    return -(-rows // order.rows_per_step)


@dataclass
class LogWindow:
    """Sums since the last logging step; saved too, so that a resumed run logs the same curve."""

    loss: float = 0.0
    live_tokens: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    sums: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Counters:
    """Sums and last figures of a run."""

    window: LogWindow = field(default_factory=LogWindow)
    live_tokens: int = 0
    tokens: int = 0  # of the rows that were read
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0
    last_loss: float | None = None
    validation_loss: float | None = None
    best_loss: float = math.inf

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Counters:
        """Restore counters from the state in a checkpoint."""
        return cls(**{**state, "window": LogWindow(**state["window"])})

    def add(
        self,
        loss: float,
        live_tokens: float,
        grad_norm: float,
        parts: Mapping[str, float],
        sums: Mapping[str, Sequence[float]],
    ) -> None:
        """Add a step with a finite gradient; all values are sums over ranks, `sums` those that are not parts of the loss."""
        window = self.window
        window.loss += loss
        window.live_tokens += live_tokens
        window.grad_norm += grad_norm
        window.steps += 1
        for name, value in parts.items():
            window.parts[name] = window.parts.get(name, 0.0) + value
        for name, vector in sums.items():
            accumulated = window.sums.get(name, [0.0] * len(vector))
            window.sums[name] = [first + second for first, second in zip(accumulated, vector, strict=True)]

    @property
    def loss(self) -> float | None:
        """Mean per target since the last logging step, or up to it where no step came after it."""
        window = self.window
        return window.loss / window.live_tokens if window.steps else self.last_loss

    def close_window(self) -> dict[str, float]:
        """Means since the last logging step; a new window begins. Empty where every step was skipped."""
        window, self.window = self.window, LogWindow()
        if not window.steps:
            return {}
        self.last_loss = window.loss / window.live_tokens
        parts = {f"loss_{name}": value / window.live_tokens for name, value in sorted(window.parts.items())}
        return {"loss": self.last_loss, **parts, "grad_norm": window.grad_norm / window.steps}

    def validated(self, loss: float) -> bool:
        """Record a validation loss; returns whether it is the best so far. NaN never is."""
        self.validation_loss = loss
        improved = loss < self.best_loss
        self.best_loss = min(self.best_loss, loss)
        return improved
