"""The metrics of an evaluation, from its files, with the share of each held-out record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ttrain.core.files import read_object
from ttrain.core.text import short_digest
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate.task_result import FILE, Metric, recorded_metric, scores_in
from ttrain.store.layout import Artifact
from ttrain.store.results import EvaluationResult


@dataclass(frozen=True)
class Evaluation:
    """The files of an evaluation, and its metrics."""

    directory: Path
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, artifact: Artifact) -> Evaluation:
        """That of an artifact. Raises ArtifactError if its records were not fetched."""
        if FILE in artifact.absent:  # without them it would be compared like a metric without records
            raise ArtifactError(
                f"{FILE} of {artifact.stage} {short_digest(artifact.key)} is missing; it was not fetched yet"
            )
        return cls(artifact.path, EvaluationResult.of(artifact.result).metrics)

    @classmethod
    def at(cls, directory: Path) -> Evaluation:
        """That of the directory of a stage's input."""
        return cls(directory, read_object(directory / "evaluation.json").get("metrics", {}))

    def metric(self, name: str) -> Metric:
        """A metric, with its records if it has them.

        Raises UsageError if there is no such metric, and ArtifactError if its value does not follow from its records.
        """
        if name not in self.metrics:
            raise UsageError(
                f"promotion.metric is {name}, which the evaluation does not have; choose one of "
                f"{', '.join(sorted(self.metrics))}"
            )
        value, file = float(self.metrics[name]), self.directory / FILE
        metric = scores_in(read_object(file), name, value)
        if metric is None:
            return recorded_metric(name, value)
        if len(metric.sums) != len(metric.records):
            raise ArtifactError(f"{file} does not have a sum, a size and a digest for each record")
        again = replace(metric, recorded=None).value
        if math.isfinite(value) and not math.isclose(again, value, rel_tol=1e-9):
            raise ArtifactError(f"{file} gives {name} {again}, but the evaluation says {value}")
        return metric

    def sources(self, metric: str) -> dict[str, tuple[str, ...]]:
        """What identifies the records of each source, as far as the evaluation has groups of them."""
        prefix, contents = f"{metric}/source:", read_object(self.directory / FILE)
        sources = {}
        for name in contents.get("metrics", {}):
            if name.startswith(prefix) and (group := scores_in(contents, name)):
                sources[name.removeprefix(prefix)] = group.records
        return sources
