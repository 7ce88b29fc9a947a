"""The counters of a run, as its checkpoints hold them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass
class LogWindow:
    """Sums since the last logging step; saved, so that a resumed run logs the same curve."""

    loss: float = 0.0
    live_tokens: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    sums: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Counters:
    """Sums and latest metrics of a run."""

    window: LogWindow = field(default_factory=LogWindow)
    live_tokens: int = 0
    tokens: int = 0  # of the rows that were read
    skipped: int = 0  # steps whose gradient was not finite
    skipped_in_a_row: int = 0
    last_loss: float | None = None
    validation_loss: float | None = None
    best_loss: float = math.inf

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Self:
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
        """Add a step with a finite gradient: sums over ranks; `sums` are no parts of the loss."""
        window = self.window
        window.loss += loss
        window.live_tokens += live_tokens
        window.grad_norm += grad_norm
        window.steps += 1
        for name, value in parts.items():
            window.parts[name] = window.parts.get(name, 0.0) + value
        for name, vector in sums.items():
            accumulated = window.sums.get(name, [0.0] * len(vector))
            window.sums[name] = [
                first + second for first, second in zip(accumulated, vector, strict=True)
            ]

    @property
    def loss(self) -> float | None:
        """Mean per target since the last logging step, or up to it where no step came after it."""
        window = self.window
        return window.loss / window.live_tokens if window.steps else self.last_loss

    def close_window(self) -> dict[str, float]:
        """Means since the last logging step, {} without any; begins a new window."""
        window = self.window
        self.window = LogWindow()
        if not window.steps:
            return {}
        self.last_loss = window.loss / window.live_tokens
        parts = {
            f"loss_{name}": value / window.live_tokens
            for name, value in sorted(window.parts.items())
        }
        return {"loss": self.last_loss, **parts, "grad_norm": window.grad_norm / window.steps}

    def validated(self, loss: float) -> bool:
        """Record a validation loss; returns whether it is the best so far. NaN never is."""
        self.validation_loss = loss
        improved = loss < self.best_loss
        self.best_loss = min(self.best_loss, loss)
        return improved
