"""What an evaluation found: figures that are quotients of sums over items, so that every one has an interval. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

LN2 = math.log(2)
REFUSED = re.compile(r"[^\w.: -]")  # in the name of a metric, by MLflow; a slash has a meaning


@dataclass(frozen=True)
class Figure:
    """A number, and what each item adds to it: `factor * sum(sums) / sum(sizes)`, of which `shown` may take the exponential.

    accuracy: sums are 0 or 1, sizes 1; bits per byte: nats over bytes with factor 1/ln 2; perplexity: nats over tokens,
    shown as "exp". An item whose size is 0 does not count.
    """

    name: str
    sums: tuple[float, ...]
    sizes: tuple[float, ...]
    higher_is_better: bool
    unit: str
    factor: float = 1.0
    shown: Literal["exp"] | None = None

    def __post_init__(self) -> None:
        if len(self.sums) != len(self.sizes):
            raise AssertionError(f"{self.name} has {len(self.sums)} sums and {len(self.sizes)} sizes")

    @property
    def value(self) -> float:
        """What a table shows; not a number where no item counts."""
        size = math.fsum(self.sizes)
        return self.transform(self.factor * math.fsum(self.sums) / size) if size else math.nan

    def transform(self, value: float) -> float:
        """From the quotient to what is shown; it keeps the order, so that it applies to the ends of an interval too."""
        if self.shown is None:
            return value
        return math.exp(value) if value < 700 else math.inf  # e^709 is the largest double

    def restricted(self, numbers: tuple[int, ...]) -> Figure:
        """The same figure over some of the items alone."""
        return replace(self, sums=tuple(self.sums[n] for n in numbers), sizes=tuple(self.sizes[n] for n in numbers))


@dataclass(frozen=True)
class Outcome:
    """What one model made of one task.

    task       its name in the suite
    kind       text, chats, choices, last_word, generation or harness
    subject    the model's name
    items      digests of what was asked, the same for every model: what is compared item by item
    figures    the first is the one that stands for the task; each has an entry per item
    rows       per item, as JSON: what was asked, what was said, whether it was right
    left_out   how many rows were not used, by reason
    groups     "lang=zh" -> numbers of the items that belong to it: figures of a part of the items
    baselines  what the primary figure would be without the model, by name: zlib, chance
    """

    task: str
    kind: str
    subject: str
    items: tuple[str, ...]
    figures: tuple[Figure, ...]
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for figure in self.figures:
            if len(figure.sums) != len(self.items):
                raise AssertionError(f"{self.task}/{figure.name} has {len(figure.sums)} sums for {len(self.items)} items")

    @property
    def primary(self) -> Figure:
        """The figure that stands for the task."""
        return self.figures[0]


def metric_of(metric: str, group: str) -> str:
    """The name of a figure over the items of a group: "bits_per_byte" of "lang=zh" is bits_per_byte/lang:zh."""
    return f"{metric}/{REFUSED.sub('_', group.replace('=', ':', 1))}"
