"""The progress that a stage reports, for bars, lines of a log and other processes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ttrain.core.text import format_duration


@dataclass(frozen=True)
class StageProgress:
    """`done` of `total` `unit`s (0: unknown); `first` of them were done `seconds` ago."""

    done: float
    total: float
    unit: str
    first: float = 0.0
    seconds: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)

    @property
    def part(self) -> float | None:
        """The finished part, from 0 to 1."""
        return self.done / self.total if self.total else None

    @property
    def per_second(self) -> float | None:
        """Since the stage began or continued."""
        new = self.done - self.first
        return new / self.seconds if new > 0 and self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """The time left at the present rate."""
        rate = self.per_second
        return (self.total - self.done) / rate if rate and self.total else None

    @property
    def details(self) -> str:
        """Figures, speed and the time left."""
        rate = self.per_second
        left = self.seconds_left
        parts = [f"{label.replace('_', ' ')} {value:.3f}" for label, value in self.figures.items()]
        is_rate = self.unit == "tokens" and rate is not None
        parts.append(f"{rate:,.0f} tokens/s" if is_rate else f"{self.done:,.0f} {self.unit}")
        if left is not None:
            parts.append(f"{format_duration(left)} left")
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.details if self.part is None else f"{100 * self.part:.0f} %, {self.details}"

    def to_json(self) -> dict[str, Any]:
        """What `ttrain pipeline status --json` prints."""
        return {
            "done": self.done,
            "unit": self.unit,
            "percent": None if self.part is None else 100 * self.part,
            "per_second": self.per_second,
            "seconds_left": self.seconds_left,
        }


def progress_of(stage: Mapping[str, Any]) -> StageProgress | None:
    """The progress of a recorded stage; None if it does not run or has reported nothing."""
    is_shown = stage["outcome"] == "running" and stage.get("progress")
    return StageProgress(**stage["progress"]) if is_shown else None
