"""Task results with metrics as quotients of sums over items, so that each has an interval. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ttrain.core.files import JsonDict
from ttrain.core.hashing import digest_of

LN2 = math.log(2)
DIGEST_CHARACTERS = 16  # 64 bits: among a million records two have the same with a probability of 3e-8

Shown = Literal["exp"] | None  # how the quotient of a metric is displayed: as its exponential, or as it is
Groups = Mapping[str, tuple[int, ...]]  # "lang=zh" -> numbers of the items that belong to it


@dataclass(frozen=True)
class Metric:
    """A quantity with each item's share in it: `factor * sum(sums) / sum(sizes)`, or its exponential if `shown` is "exp".

    accuracy: sums are 0 or 1, sizes 1; bits per byte: nats over bytes with factor 1/ln 2; perplexity: nats over tokens,
    shown as "exp". An item whose size is 0 does not count.

    records           digests of the items; empty where the task result has them
    higher_is_better  None: the evaluation does not say
    """

    name: str
    sums: tuple[float, ...]
    sizes: tuple[float, ...]
    higher_is_better: bool | None
    unit: str = ""
    factor: float = 1.0
    shown: Shown = None
    records: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.sums) == len(self.sizes), f"{self.name} has {len(self.sums)} sums and {len(self.sizes)} sizes"

    @property
    def value(self) -> float:
        """The displayed value; NaN if no item counts."""
        size = math.fsum(self.sizes)
        return self.transform(self.factor * math.fsum(self.sums) / size) if size else math.nan

    @property
    def items(self) -> int:
        """Number of items that count."""
        return sum(size > 0 for size in self.sizes)

    def transform(self, value: float) -> float:
        """Convert the quotient to the displayed value; monotonic, so that it applies to the ends of an interval too."""
        if self.shown is None:
            return value
        return math.exp(value) if value < 700 else math.inf  # e^709 is the largest double

    def restricted(self, numbers: Sequence[int]) -> Metric:
        """The same metric over some of the items."""
        sums = tuple(self.sums[number] for number in numbers)
        sizes = tuple(self.sizes[number] for number in numbers)
        records = tuple(self.records[number] for number in numbers) if self.records else ()
        return replace(self, sums=sums, sizes=sizes, records=records)


def mean(name: str, values: Iterable[float], unit: str = "share", *, higher: bool = True, shown: Shown = None) -> Metric:
    """The metric that is the mean of one value of each item."""
    sums = tuple(map(float, values))
    return Metric(name, sums, (1.0,) * len(sums), higher_is_better=higher, unit=unit, shown=shown)


@dataclass(frozen=True)
class TaskResult:
    """The result of one model on one task.

    task       its name in the suite
    kind       text, chats, pairs, choices, last_word, generation or harness
    subject    the model's name
    items      digests of the items, the same for every model, for comparisons item by item
    figures    metrics with an entry per item; the first one is primary
    rows       per item, as JSON: prompt, answer, whether it was right
    left_out   number of unused rows, by reason
    groups     "lang=zh" -> numbers of the items that belong to it, for metrics of a part of the items
    baselines  values of the primary metric without the model, by name: zlib, chance
    """

    task: str
    kind: str
    subject: str
    items: tuple[str, ...]
    figures: tuple[Metric, ...]
    rows: list[JsonDict] = field(default_factory=list)
    left_out: Mapping[str, int] = field(default_factory=dict)
    groups: Groups = field(default_factory=dict)
    baselines: Mapping[str, float] = field(default_factory=dict)

    @property
    def primary(self) -> Metric:
        """The task's primary metric."""
        return self.figures[0]

    def by_group(self) -> dict[str, Metric]:
        """The primary metric over the items of each group."""
        return {group: self.primary.restricted(numbers) for group, numbers in self.groups.items()}

    def recorded(self, names: Mapping[str, str] | None = None) -> dict[str, Metric]:
        """The metrics as an evaluation records them, with the digests of their items, and the primary one of each group.

        `names`: which ones, and their names there; by default all as TASK/METRIC/MODEL. A group's metric is
        bits_per_byte/lang:zh, with the group's own value in every character.
        """
        if names is None:
            names = {metric.name: f"{self.task}/{metric.name}/{self.subject}" for metric in self.figures}
        shown = [metric for metric in self.figures if metric.name in names]
        whole = [replace(metric, name=names[metric.name], records=self.items) for metric in shown]
        metrics = {metric.name: metric for metric in whole}
        for group, numbers in self.groups.items():
            name = f"{whole[0].name}/{group.replace('=', ':', 1)}"
            metrics[name] = replace(whole[0].restricted(numbers), name=name)
        return metrics


def record_name(record: object) -> str:
    """What identifies a record among the scores: a digest of its content, such as a document's text."""
    return digest_of(record)[:DIGEST_CHARACTERS]
