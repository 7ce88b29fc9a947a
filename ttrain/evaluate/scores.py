"""One model's metric as an evaluation recorded it, with the share of each held-out record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ttrain.config import Promotion
from ttrain.core.files import read_object
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate import task_result
from ttrain.evaluate.task_result import Metric, Shown
from ttrain.store.layout import Artifact


@dataclass(frozen=True)
class Scores:
    """One model's metric, with the sums and sizes of each record that it is computed from.

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
        """The metric with the share of each record; its direction is the caller's matter."""
        return Metric(self.metric, self.sums, self.sizes, True, unit="", shown=self.shown)

    def sign(self, settings: Promotion) -> float:
        """1 if higher values are better, else -1."""
        higher_is_better = settings.higher_is_better if self.higher_is_better is None else self.higher_is_better
        return 1.0 if higher_is_better else -1.0


@dataclass(frozen=True)
class Evaluation:
    """The files of an evaluation, and its metrics."""

    directory: Path
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, artifact: Artifact) -> Evaluation:
        """That of an artifact. Raises ArtifactError if its records were not fetched."""
        if task_result.FILE in artifact.absent:  # without them it would be compared like a metric without records
            raise ArtifactError(
                f"{task_result.FILE} of {artifact.stage} {artifact.key[:12]} is missing; it was not fetched yet"
            )
        return cls(artifact.path, artifact.result["metrics"])

    @classmethod
    def at(cls, directory: Path) -> Evaluation:
        """That of the directory of a stage's input."""
        return cls(directory, read_object(directory / "evaluation.json").get("metrics", {}))

    def scores(self, metric: str) -> Scores:
        """A metric, with its records if it has them.

        Raises UsageError if there is no such metric, and ArtifactError if its value does not follow from its records.
        """
        if metric not in self.metrics:
            raise UsageError(
                f"promotion.metric is {metric}, which the evaluation does not have; choose one of "
                f"{', '.join(sorted(self.metrics))}"
            )
        value = float(self.metrics[metric])
        stored = task_result.sums_of(self.directory, metric)
        if stored is None:
            return Scores(metric, value)
        file = self.directory / task_result.FILE
        if not len(stored.sums) == len(stored.sizes) == len(stored.records):
            raise ArtifactError(f"{file} does not have a sum, a size and a digest for each record")
        scored = Scores(metric, value, *stored)
        again = scored.figure.value
        if math.isfinite(value) and not math.isclose(again, value, rel_tol=1e-9):
            raise ArtifactError(f"{file} gives {metric} {again}, but the evaluation says {value}")
        return scored

    def sources(self, metric: str) -> dict[str, tuple[str, ...]]:
        """What identifies the records of each source, as far as the evaluation has groups of them."""
        prefix, contents = f"{metric}/source:", read_object(self.directory / task_result.FILE)
        groups = {
            name: task_result.sums_in(contents, name) for name in contents.get("metrics", {}) if name.startswith(prefix)
        }
        return {name.removeprefix(prefix): group.records for name, group in groups.items() if group}
