"""The metrics of an evaluation in its file, with the share of each held-out record."""

from __future__ import annotations

import json
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
    """The metrics of the file, by name."""
    metrics: dict[str, Metric] = {}
    for entry in json.loads(file.read_bytes()):
        lists = {name: tuple(entry[name]) for name in ("sums", "sizes", "records")}
        metrics[entry["name"]] = Metric(**{**entry, **lists})
    return metrics


@dataclass(frozen=True)
class Evaluation:
    """The metrics of an evaluation, by name."""

    metrics: Mapping[str, Metric]

    @classmethod
    def of(cls, artifact: Artifact) -> Evaluation:
        """That of an artifact. Raises ArtifactError if its file was not fetched."""
        if FILE in artifact.absent:
            raise ArtifactError(
                f"{FILE} of {artifact.stage} {short_digest(artifact.key)} is missing; it was not fetched yet"
            )
        return cls(read(artifact.path / FILE))

    def metric(self, name: str) -> Metric:
        """A metric. Raises UsageError if there is no such metric."""
        if name not in self.metrics:
            raise UsageError(
                f"promotion.metric is {name}, which the evaluation does not have; choose one of "
                f"{', '.join(sorted(self.metrics))}"
            )
        return self.metrics[name]

    def sources(self, metric: str) -> dict[str, tuple[str, ...]]:
        """What identifies the records of each source, as far as the evaluation has groups of them."""
        prefix = f"{metric}/source:"
        names = [name for name in self.metrics if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.metrics[name].records for name in names}
