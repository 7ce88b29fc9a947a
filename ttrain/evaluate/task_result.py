"""Task results with metrics as quotients of sums over items, so that each has an interval. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ttrain.core.files import JsonDict, write_json
from ttrain.core.hashing import digest_of

LN2 = math.log(2)

Shown = Literal["exp"] | None  # how the quotient of a metric is displayed: as its exponential, or as it is


@dataclass(frozen=True)
class Metric:
    """A quantity with each item's share in it: `factor * sum(sums) / sum(sizes)`, or its exponential if `shown` is "exp".

    accuracy: sums are 0 or 1, sizes 1; bits per byte: nats over bytes with factor 1/ln 2; perplexity: nats over tokens,
    shown as "exp". An item whose size is 0 does not count.

    records           digests of the items; empty where the task result has them
    recorded          the value that an evaluation recorded; without items nothing else is known
    higher_is_better  None: the evaluation does not say
    """

    name: str
    sums: tuple[float, ...]
    sizes: tuple[float, ...]
    higher_is_better: bool | None
    unit: str
    factor: float = 1.0
    shown: Shown = None
    records: tuple[str, ...] = ()
    recorded: float | None = None

    def __post_init__(self) -> None:
        assert len(self.sums) == len(self.sizes), f"{self.name} has {len(self.sums)} sums and {len(self.sizes)} sizes"

    @property
    def value(self) -> float:
        """The displayed value; NaN if no item counts."""
        if self.recorded is not None:
            return self.recorded
        size = math.fsum(self.sizes)
        return self.transform(self.factor * math.fsum(self.sums) / size) if size else math.nan

    def transform(self, value: float) -> float:
        """Convert the quotient to the displayed value; monotonic, so that it applies to the ends of an interval too."""
        if self.shown is None:
            return value
        return math.exp(value) if value < 700 else math.inf  # e^709 is the largest double

    def restricted(self, numbers: Sequence[int]) -> Metric:
        """The same metric over some of the items."""
        sums, sizes = ([values[number] for number in numbers] for values in (self.sums, self.sizes))
        records = tuple(self.records[number] for number in numbers) if self.records else ()
        return replace(self, sums=tuple(sums), sizes=tuple(sizes), records=records, recorded=None)


def recorded_metric(name: str, value: float | None, **fields: Any) -> Metric:
    """A metric as an evaluation recorded it, with the fields of Metric that are known."""
    known = {"sums": (), "sizes": (), "higher_is_better": None, "unit": "", **fields}
    return Metric(name, recorded=value, **known)


def mean(name: str, values: Iterable[float], unit: str = "share", *, higher: bool = True, shown: Shown = None) -> Metric:
    """The metric that is the mean of one value of each item."""
    sums = tuple(map(float, values))
    return Metric(name, sums, (1.0,) * len(sums), higher_is_better=higher, unit=unit, shown=shown)


Groups = Mapping[str, tuple[int, ...]]  # "lang=zh" -> numbers of the items that belong to it


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

    def __post_init__(self) -> None:
        for figure in self.figures:
            if len(figure.sums) != len(self.items):
                raise AssertionError(f"{self.task}/{figure.name} has {len(figure.sums)} sums for {len(self.items)} items")

    @property
    def primary(self) -> Metric:
        """The task's primary metric."""
        return self.figures[0]

    @property
    def names(self) -> dict[str, str]:
        """The name of each metric among those of an evaluation."""
        return {metric.name: f"{self.task}/{metric.name}/{self.subject}" for metric in self.figures}


def metric_of(metric: str, group: str) -> str:
    """Name of a metric over the items of a group: "bits_per_byte" of "lang=zh" is bits_per_byte/lang:zh.

    It has the group's own value in every character: a tracker that refuses some of them makes a name of its own.
    """
    return f"{metric}/{group.replace('=', ':', 1)}"


FILE = "scores.json"  # of an evaluation

DIGEST_CHARACTERS = 16  # 64 bits: among a million records two have the same with a probability of 3e-8


def record_name(record: object) -> str:
    """What identifies a record among the scores: a digest of its content, such as a document's text."""
    return digest_of(record)[:DIGEST_CHARACTERS]


class ScoreTable:
    """Collects the records and metrics of one evaluation."""

    def __init__(self) -> None:
        self.metrics: dict[str, Metric] = {}
        self._parts: dict[str, JsonDict] = {}
        self._entries: dict[str, JsonDict] = {}

    def part(self, name: str, records: Sequence[str]) -> None:
        """Add records, by what identifies them, which depends on no tokenizer."""
        self._parts[name] = {"records": list(records)}

    def add(self, part_name: str, metric: Metric) -> float:
        """Add a metric over the records of the part; returns its value."""
        self.metrics[metric.name] = metric
        self._entries[metric.name] = {
            "part": part_name, "sums": [metric.factor * item_sum for item_sum in metric.sums], "sizes": list(metric.sizes),
            "higher_is_better": metric.higher_is_better, "shown": metric.shown,
        }  # fmt: skip
        return metric.value

    def groups(self, metric: str, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Add and return the metric over the records of each group ("lang=zh" -> record numbers), by metric name."""
        values = {}
        for group, numbers in groups.items():
            name = metric_of(metric, group)
            self.metrics[name] = replace(self.metrics[metric].restricted(numbers), name=name)
            self._entries[name] = {"of": metric, "rows": list(numbers)}
            values[name] = self.metrics[name].value
        return values

    def result(self, part_name: str, result: TaskResult, names: Mapping[str, str]) -> dict[str, float]:
        """Add the metrics of a task result that `names` has, with their names there, and the primary one over each group of
        items; returns their values by name."""
        self.part(part_name, result.items)
        named = [replace(metric, name=names[metric.name]) for metric in result.figures if metric.name in names]
        values = {metric.name: self.add(part_name, metric) for metric in named}
        return values | self.groups(names[result.primary.name], result.groups)

    def write(self, directory: Path) -> None:
        """Write the file."""
        write_json(directory / FILE, {"parts": self._parts, "metrics": self._entries})


def scores_in(contents: JsonDict, metric: str, value: float | None = None) -> Metric | None:
    """Get a metric, whose recorded value is `value`, from the file's contents; None if it has no items."""
    entry = contents.get("metrics", {}).get(metric)
    if entry is None:
        return None
    whole = contents["metrics"][entry["of"]] if "of" in entry else entry
    if "sums" not in whole:
        return None
    recorded = recorded_metric(
        metric, value, sums=tuple(map(float, whole["sums"])), sizes=tuple(map(float, whole["sizes"])),
        records=tuple(contents["parts"][whole["part"]]["records"]), higher_is_better=whole["higher_is_better"],
        shown=whole["shown"],
    )  # fmt: skip
    return replace(recorded.restricted(entry["rows"]), recorded=value) if "rows" in entry else recorded
