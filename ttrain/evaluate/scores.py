"""The metrics of an evaluation in its files, with the share of each held-out record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ttrain.core.files import write_json
from ttrain.core.text import short_digest
from ttrain.errors import ArtifactError, UsageError
from ttrain.evaluate.task_result import Metric
from ttrain.store.layout import Artifact

FILE = "scores.json"  # of an evaluation


def write(directory: Path, metrics: Iterable[Metric]) -> None:
    """Write the metrics with their records, as a list."""
    write_json(directory / FILE, [vars(metric) for metric in metrics])


def read(file: Path) -> dict[str, Metric]:
    """The metrics of the file, by name. Raises ArtifactError if an earlier version wrote it."""
    metrics: dict[str, Metric] = {}
    try:
        for entry in json.loads(file.read_bytes()):
            lists = {name: tuple(entry[name]) for name in ("sums", "sizes", "records")}
            metrics[entry["name"]] = Metric(**{**entry, **lists})
    except (TypeError, KeyError, ValueError):
        raise ArtifactError(
            f"{file} is no list of metrics with their records, since an earlier version of ttrain "
            f"made it; evaluate again with `ttrain pipeline rerun evaluate`"
        ) from None
    return metrics


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an evaluation, and those of them that have records."""

    metrics: Mapping[str, float]
    scores: Mapping[str, Metric]

    @classmethod
    def of(cls, artifact: Artifact) -> Evaluation:
        """That of an artifact. Raises ArtifactError if its records were not fetched, or do not give its metrics."""
        metrics: Mapping[str, float] = artifact.result["metrics"]
        if FILE in artifact.absent:  # without them it would be compared like a metric without records
            raise ArtifactError(
                f"{FILE} of {artifact.stage} {short_digest(artifact.key)} is missing; it was not fetched yet"
            )
        file = artifact.path / FILE
        scores = read(file)
        for name, metric in scores.items():
            if len(metric.sums) != len(metric.records):
                raise ArtifactError(f"{file} does not have a sum, a size and a digest for each record")
            if math.isfinite(metric.value) and not math.isclose(metric.value, metrics[name], rel_tol=1e-9):
                raise ArtifactError(f"{file} gives {name} {metric.value}, but the evaluation says {metrics[name]}")
        return cls(metrics, scores)

    def metric(self, name: str) -> Metric:
        """A metric, with its records if it has them. Raises UsageError if there is no such metric."""
        if name not in self.metrics:
            raise UsageError(
                f"promotion.metric is {name}, which the evaluation does not have; choose one of "
                f"{', '.join(sorted(self.metrics))}"
            )
        return self.scores.get(name) or Metric(name, (self.metrics[name],), (1.0,), None)

    def sources(self, metric: str) -> dict[str, tuple[str, ...]]:
        """What identifies the records of each source, as far as the evaluation has groups of them."""
        prefix = f"{metric}/source:"
        names = [name for name in self.scores if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.scores[name].records for name in names}
