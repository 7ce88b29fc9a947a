"""The metrics of an evaluation, from its files, with the share of each held-out record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import read_object
from ttrain.core.text import short_digest
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate import task_result
from ttrain.evaluate.task_result import Scores
from ttrain.store.layout import Artifact


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
                f"{task_result.FILE} of {artifact.stage} {short_digest(artifact.key)} is missing; it was not fetched yet"
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
        scores = task_result.read_scores(self.directory, metric, value)
        if scores is None:
            return Scores(metric, value)
        file = self.directory / task_result.FILE
        if not len(scores.sums) == len(scores.sizes) == len(scores.records):
            raise ArtifactError(f"{file} does not have a sum, a size and a digest for each record")
        if math.isfinite(value) and not math.isclose(again := scores.figure.value, value, rel_tol=1e-9):
            raise ArtifactError(f"{file} gives {metric} {again}, but the evaluation says {value}")
        return scores

    def sources(self, metric: str) -> dict[str, tuple[str, ...]]:
        """What identifies the records of each source, as far as the evaluation has groups of them."""
        prefix, contents = f"{metric}/source:", read_object(self.directory / task_result.FILE)
        groups = {
            name: task_result.scores_in(contents, name) for name in contents.get("metrics", {}) if name.startswith(prefix)
        }
        return {name.removeprefix(prefix): group.records for name, group in groups.items() if group}
