"""Task results: metrics as quotients of sums over items, which have intervals. Loads no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from ttrain.config.nightly import FEWEST_RECORDS
from ttrain.core.files import JsonDict, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.text import short_digest
from ttrain.errors import ArtifactError, UsageError
from ttrain.store.layout import Artifact

LN2 = math.log(2)
ANSWER_BITS = "bits_per_byte"  # of the right answer, beside an accuracy
DIGEST_CHARACTERS = (
    16  # 64 bits: among a million records two have the same with a probability of 3e-8
)

Shown = (
    Literal["exp"] | None
)  # how the quotient of a metric is displayed: as its exponential, or as it is
SCORES = "scores.json"  # of an evaluation


@dataclass(frozen=True)
class Metric:
    """A quantity with each item's share: `factor * sum(sums) / sum(sizes)`, or its exponential.

    higher_is_better  None: the evaluation does not say
    records           digests of the items
    group             "lang=zh": of these items alone
    """

    # accuracy: sums are 0 or 1, sizes 1; bits per byte: nats over bytes with factor 1/ln 2;
    # perplexity: nats over tokens, shown as "exp". An item whose size is 0 does not count.

    name: str
    sums: tuple[float, ...]
    sizes: tuple[float, ...]
    higher_is_better: bool | None
    unit: str = ""
    factor: float = 1.0
    shown: Shown = None
    records: tuple[str, ...] = ()
    group: str = ""

    @classmethod
    def of_value(cls, name: str, value: float) -> Metric:
        """A metric of which only the value is known."""
        return cls(name, (value,), (1.0,), None)

    @property
    def value(self) -> float:
        """The displayed value; NaN if no item counts."""
        size = math.fsum(self.sizes)
        return self.transform(self.factor * math.fsum(self.sums) / size) if size else math.nan

    @property
    def items(self) -> int:
        """Number of items that count."""
        return sum(size > 0 for size in self.sizes)

    @property
    def suffix(self) -> str:
        """The group in the name of a recorded metric: /lang:zh."""
        return f"/{self.group.replace('=', ':', 1)}" if self.group else ""

    def transform(self, value: float) -> float:
        """Convert the quotient to the displayed value; monotonic, so also for intervals."""
        if self.shown is None:
            return value
        return math.exp(value) if value < 700 else math.inf  # e^709 is the largest double

    def restricted(self, numbers: Sequence[int], group: str = "") -> Metric:
        """The same metric over some of the items."""
        return replace(
            self,
            sums=tuple(self.sums[number] for number in numbers),
            sizes=tuple(self.sizes[number] for number in numbers),
            records=tuple(self.records[number] for number in numbers) if self.records else (),
            group=group,
        )

    def half(self, which: bool) -> Metric:
        """The same metric over one of two halves of its records, by their digests."""
        return self.restricted(
            [
                number
                for number, name in enumerate(self.records)
                if (int(name[-1], 16) % 2 == 1) is which
            ]
        )


def mean(
    name: str,
    values: Iterable[float],
    unit: str = "share",
    *,
    higher: bool = True,
    shown: Shown = None,
) -> Metric:
    """The metric that is the mean of one value of each item."""
    sums = tuple(map(float, values))
    return Metric(name, sums, (1.0,) * len(sums), higher_is_better=higher, unit=unit, shown=shown)


@dataclass(frozen=True)
class TaskResult:
    """The result of one model on one task; made by `Items.result`.

    figures    the primary metric, that of each group, the other metrics
    rows       per item, as JSON: prompt, answer, whether it was right
    baselines  values without the model: zlib, chance
    """

    items: Any  # `Items`, whose module imports this one
    subject: str
    figures: tuple[Metric, ...]
    rows: list[JsonDict]
    baselines: Mapping[str, float]

    @property
    def task(self) -> str:
        """The task's name in the suite."""
        return str(self.items.task)

    @property
    def primary(self) -> Metric:
        """The task's primary metric."""
        return self.figures[0]

    @property
    def compared(self) -> tuple[Metric, ...]:
        """The metrics on which models are compared: the primary one, and answers' bits per byte."""
        # The latter next to an accuracy: they separate small models while accuracies are at chance.
        answers = (
            metric for metric in self.figures[1:] if metric.name == ANSWER_BITS and not metric.group
        )
        return (self.primary, *answers) if self.primary.unit == "share" else (self.primary,)

    def recorded(self, names: Mapping[str, str], prefix: str = "") -> dict[str, Metric]:
        """The metrics by `names` and their group's suffix, and baselines by prefix and name."""
        named = {
            names[metric.name] + metric.suffix: metric
            for metric in self.figures
            if metric.name in names
        }
        named |= {
            prefix + name: Metric.of_value(name, value) for name, value in self.baselines.items()
        }
        return {name: replace(metric, name=name) for name, metric in named.items()}


def record_name(record: object) -> str:
    """Digest of a record's content, which identifies it among the scores."""
    return digest_of(record)[:DIGEST_CHARACTERS]


def too_few(count: int, least: int = FEWEST_RECORDS, *, noun: str = "held-out records") -> str:
    """How many records there are of how many that are needed; "" where there are enough."""
    # 20 are the fewest on which a model that is better on three of four records is so by more than
    # chance (sign test: p = 0.04; on 16 of them 0.08).
    return "" if count >= least else f"{count:,} of {least:,} {noun}"


def not_judged(count: int, *, noun: str = "held-out records") -> str:
    """The text in place of a winner, a star or a percentage; "" where there are enough records."""
    few = too_few(count, noun=noun)
    return f"not judged ({few})" if few else ""


def write_scores(directory: Path, metrics: Iterable[Metric]) -> None:
    """Write the metrics with their records, as a list."""
    write_json(directory / SCORES, [vars(metric) for metric in metrics])


def read_scores(file: Path) -> dict[str, Metric]:
    """The metrics of the file, by name."""
    metrics: dict[str, Metric] = {}
    for entry in json.loads(file.read_bytes()):
        entry |= {name: tuple(entry[name]) for name in ("sums", "sizes", "records")}
        metrics[entry["name"]] = Metric(**entry)
    return metrics


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an evaluation, by name."""

    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, artifact: Artifact) -> Evaluation:
        """The evaluation of an artifact. Raises ArtifactError if its file was not fetched."""
        if SCORES in artifact.absent:
            raise ArtifactError(
                f"{SCORES} of {artifact.stage} {short_digest(artifact.key)} is missing; "
                "it was not fetched yet"
            )
        return cls(read_scores(artifact.path / SCORES))

    def metric(self, name: str) -> Metric:
        """A metric. Raises UsageError if there is no such metric."""
        if name not in self.metrics:
            raise UsageError(
                f"promotion.metric is {name}, which the evaluation does not have; choose one of "
                f"{', '.join(sorted(self.metrics))}"
            )
        return self.metrics[name]

    def sources(self, metric: str) -> dict[str, tuple[str, ...]]:
        """Digests of the records of each source that the evaluation has groups of."""
        prefix = f"{metric}/source:"
        return {
            name.removeprefix(prefix): of_source.records
            for name, of_source in self.metrics.items()
            if name.startswith(prefix)
        }
