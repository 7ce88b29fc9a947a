"""What a run carries from step to step beside weights and optimizer; saved in its checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Window:
    """Sums since the last logging step; saved too, so that a resumed curve is the same curve."""

    loss: float = 0.0
    live_tokens: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    sums: dict[str, list[float]] = field(default_factory=dict)


@dataclass
class Counters:
    """Sums and last figures of a run."""

    window: Window = field(default_factory=Window)
    live_tokens: int = 0
    skipped: int = 0  # steps whose gradient was no number
    skipped_in_a_row: int = 0
    last_loss: float | None = None
    validation_loss: float | None = None
    best_loss: float = math.inf

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Counters:
        """From what a checkpoint keeps."""
        return cls(**{**state, "window": Window(**state["window"])})

    def add(
        self,
        loss: float,
        live_tokens: float,
        grad_norm: float,
        parts: Mapping[str, float],
        sums: Mapping[str, Sequence[float]],
    ) -> None:
        """A step whose gradient was a number; all are sums over ranks, `sums` those that are no parts of the loss."""
        window = self.window
        window.loss += loss
        window.live_tokens += live_tokens
        window.grad_norm += grad_norm
        window.steps += 1
        for name, value in parts.items():
            window.parts[name] = window.parts.get(name, 0.0) + value
        for name, more in sums.items():
            before = window.sums.get(name, [0.0] * len(more))
            window.sums[name] = [first + second for first, second in zip(before, more, strict=True)]

    def close_window(self) -> dict[str, float]:
        """Means since the last logging step; a new window begins. Empty where every step was skipped."""
        window, self.window = self.window, Window()
        if not window.steps:
            return {}
        self.last_loss = window.loss / window.live_tokens
        parts = {f"loss_{name}": value / window.live_tokens for name, value in sorted(window.parts.items())}
        return {"loss": self.last_loss, **parts, "grad_norm": window.grad_norm / window.steps}

    def validated(self, loss: float) -> bool:
        """Note a validation; returns whether it is the best so far. NaN never is."""
        self.validation_loss = loss
        improved = loss < self.best_loss
        if improved:
            self.best_loss = loss
        return improved
