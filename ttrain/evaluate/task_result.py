"""Task results with metrics as quotients of sums over items, so that each has an interval. Loads no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ttrain.core.files import JsonDict, read_object, write_json
from ttrain.core.hashing import digest_of

if TYPE_CHECKING:
    from ttrain.config import Promotion

LN2 = math.log(2)

Shown = Literal["exp"] | None  # how the quotient of a metric is displayed: as its exponential, or as it is


@dataclass(frozen=True)
class Metric:
    """A number with each item's share in it: `factor * sum(sums) / sum(sizes)`, or its exponential if `shown` is "exp".

    accuracy: sums are 0 or 1, sizes 1; bits per byte: nats over bytes with factor 1/ln 2; perplexity: nats over tokens,
    shown as "exp". An item whose size is 0 does not count.
    """

    name: str
    sums: tuple[float, ...]
    sizes: tuple[float, ...]
    higher_is_better: bool
    unit: str
    factor: float = 1.0
    shown: Shown = None

    def __post_init__(self) -> None:
        assert len(self.sums) == len(self.sizes), f"{self.name} has {len(self.sums)} sums and {len(self.sizes)} sizes"

    @property
    def value(self) -> float:
        """The displayed value; NaN if no item counts."""
        size = math.fsum(self.sizes)
        return self.transform(self.factor * math.fsum(self.sums) / size) if size else math.nan

    def transform(self, value: float) -> float:
        """Convert the quotient to the displayed value; monotonic, so that it applies to the ends of an interval too."""
        if self.shown is None:
            return value
        return math.exp(value) if value < 700 else math.inf  # e^709 is the largest double

    def restricted(self, numbers: tuple[int, ...]) -> Metric:
        """The same metric over some of the items."""
        return replace(self, sums=tuple(self.sums[n] for n in numbers), sizes=tuple(self.sizes[n] for n in numbers))


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
    """Collects the parts and metrics of one evaluation."""

    def __init__(self) -> None:
        self._parts: dict[str, JsonDict] = {}
        self._metrics: dict[str, JsonDict] = {}

    def part(self, name: str, records: Sequence[object], sizes: Sequence[int] = ()) -> None:
        """Add records to score; `sizes` are their bytes, if bytes count. Records are identified by digests of their content,
        which does not depend on a tokenizer."""
        names = [record_name(record) for record in records]
        self._parts[name] = {"records": names, "bytes": list(sizes), "tokens": [], "nats": {}}

    def figure(
        self,
        metric: str,
        part_name: str,
        model: str,
        scored: Sequence[tuple[float, int]],
        *,
        per: str,
        factor: float = 1.0,
        higher_is_better: bool = False,
    ) -> float:
        """Add and return a model's metric, from (nats, tokens) of each record of the part; `per` is bytes or tokens."""
        entry = self._parts[part_name]
        entry["nats"][model], entry["tokens"] = [nats for nats, _ in scored], [tokens for _, tokens in scored]
        direction = {"higher_is_better": True} if higher_is_better else {}
        self._metrics[metric] = {"part": part_name, "model": model, "per": per, "factor": factor, **direction}
        return factor * sum(nats for nats, _ in scored) / max(1, int(sum(entry[per])))

    def groups(self, metric: str, groups: Mapping[str, Sequence[int]]) -> dict[str, float]:
        """Add and return the metric over the records of each group ("lang=zh" -> record numbers), by metric name."""
        values = {}
        for group, numbers in groups.items():
            name = metric_of(metric, group)
            self._metrics[name] = {**self._metrics[metric], "rows": list(numbers)}
            values[name] = self._figure(name).value
        return values

    def outcome(self, outcome: TaskResult) -> None:
        """Add a task result: every metric, and the primary one over each group of items."""
        part_name = f"suite/{outcome.task}"
        entry = self._parts.setdefault(part_name, {"records": list(outcome.items), "bytes": [], "tokens": [], "nats": {}})
        for figure in outcome.figures:
            name = f"{figure.name}/{outcome.subject}"
            entry["nats"][name], entry[f"sizes/{name}"] = list(figure.sums), list(figure.sizes)
            self._metrics[f"{outcome.task}/{name}"] = {
                "part": part_name, "model": name, "per": f"sizes/{name}", "factor": figure.factor,
                "higher_is_better": figure.higher_is_better, "shown": figure.shown,
            }  # fmt: skip
        self.groups(f"{outcome.task}/{outcome.primary.name}/{outcome.subject}", outcome.groups)

    def figures(self) -> dict[str, Metric]:
        """Every metric by its name."""
        return {metric: self._figure(metric) for metric in self._metrics}

    def _figure(self, metric: str) -> Metric:
        scores = scores_in({"parts": self._parts, "metrics": self._metrics}, metric)
        assert scores is not None, "each metric has a part"
        return scores.figure

    def write(self, directory: Path) -> None:
        """Write the file."""
        write_json(directory / FILE, {"parts": self._parts, "metrics": self._metrics})


@dataclass(frozen=True)
class Scores:
    """One model's metric as an evaluation recorded it, with the sums and sizes of each record that it is computed from.

    The metric is `sum(sums) / sum(sizes)`: bits over bytes, or nats over tokens; if `shown` is "exp", its exponential, a
    perplexity. Without records only its value is known.
    """

    metric: str
    value: float
    sums: tuple[float, ...] = ()
    sizes: tuple[float, ...] = ()
    records: tuple[str, ...] = ()  # digests of the scored records
    higher_is_better: bool | None = None  # None: the evaluation does not say
    shown: Shown = None

    @property
    def figure(self) -> Metric:
        """The metric with the share of each record."""
        return Metric(self.metric, self.sums, self.sizes, bool(self.higher_is_better), unit="", shown=self.shown)

    def sign(self, settings: Promotion) -> float:
        """1 if higher values are better, else -1."""
        higher_is_better = settings.higher_is_better if self.higher_is_better is None else self.higher_is_better
        return 1.0 if higher_is_better else -1.0


def read_scores(directory: Path, metric: str, value: float = math.nan) -> Scores | None:
    """Read a metric of the evaluation in this directory, which says that it is `value`; None if it has no sums."""
    return scores_in(read_object(directory / FILE), metric, value)


def scores_in(contents: JsonDict, metric: str, value: float = math.nan) -> Scores | None:
    """Get a metric from the file's contents; None if it has no sums."""
    entry = contents.get("metrics", {}).get(metric)
    if entry is None:
        return None
    scored_part = contents["parts"][entry["part"]]
    records = scored_part["records"]
    costs, sizes = scored_part["nats"][entry["model"]], scored_part[entry["per"]]
    if (rows := entry.get("rows")) is not None:
        costs, sizes, records = ([values[row] for row in rows] for values in (costs, sizes, records))
    sums, is_higher_better = tuple(entry["factor"] * nats for nats in costs), entry.get("higher_is_better")
    return Scores(metric, value, sums, tuple(map(float, sizes)), tuple(records), is_higher_better, entry.get("shown"))
