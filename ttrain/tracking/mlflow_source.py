"""Read runs and files that are not in the home, by MLflow's client. Creates nothing there."""

from __future__ import annotations

import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ttrain.store.layout import MANIFEST
from ttrain.tracking.calls import all_pages
from ttrain.tracking.tracker import open_reader

RUNS_PER_PAGE, RUNS_PER_QUERY = 1000, 100


@dataclass(frozen=True)
class StoredRun:
    """One MLflow run as it is stored."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    started: float  # seconds since 1970
    ended: float | None
    artifact_uri: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]  # last values
    tags: Mapping[str, str]


class MlflowSource:
    """Read-only access to one MLflow, or to one experiment. Raises MLflow's errors; a silent server costs one probe."""

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._store, self._experiment = open_reader(home), experiment

    def runs(self, ids: Iterable[str]) -> dict[str, StoredRun]:
        """The existing runs with these ids, without deleted ones, by id."""
        run_ids = [*dict.fromkeys(ids)]
        batches = [run_ids[start : start + RUNS_PER_QUERY] for start in range(0, len(run_ids), RUNS_PER_QUERY)]
        queries = ("attributes.run_id IN ({})".format(", ".join(f"'{run_id}'" for run_id in batch)) for batch in batches)
        return {run.run_id: run for query in queries for run in self.search(query)}

    def with_tags(self, key: str, values: Iterable[str]) -> list[StoredRun]:
        """The runs whose tag has one of these values, the newest first."""
        # MLflow's filter language cannot escape a quote, and no value of ttrain contains one
        queries = (f"tags.`{key}` = '{value}'" for value in dict.fromkeys(values) if "'" not in value)
        return sorted((run for query in queries for run in self.search(query)), key=lambda run: run.started, reverse=True)

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds since 1970, value) of a metric, as logged; from all pages."""
        points = self._call("get_metric_history", run_id, metric)
        return sorted((point.step, point.timestamp, point.value) for point in points)

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step; the metrics of a whole run are at step 0."""
        metrics = self._call("get_run", run_id).data.to_proto().metrics
        return sorted(metric.key for metric in metrics if metric.step > 0)

    def text(self, run_id: str, path: str) -> str:
        """The text of one of the run's files."""
        with tempfile.TemporaryDirectory() as folder:
            return self.download(run_id, path, folder).read_text(encoding="utf-8", errors="replace")

    def download(self, run_id: str, path: str, folder: str) -> Path:
        """Write one of the run's files below a folder; return its path there."""
        return Path(self._call("download_artifacts", run_id, path, folder))

    def files(self, run_id: str, under: str) -> dict[str, int]:
        """Bytes of the run's files below a directory, by path."""
        sizes: dict[str, int] = {}
        for entry in self._call("list_artifacts", run_id, under or None):
            sizes |= self.files(run_id, entry.path) if entry.is_dir else {entry.path: entry.file_size}
        return sizes

    def search(self, query: str) -> list[StoredRun]:
        """The runs that match a query in MLflow's language, without deleted ones."""
        if not self._experiments:
            return []
        page = partial(self._store.client.search_runs, self._experiments, query, max_results=RUNS_PER_PAGE)
        return [_stored_run(run) for run in self._answer(lambda: all_pages(page))]

    @cached_property
    def _experiments(self) -> list[str]:
        name = self._experiment
        answer = [self._call("get_experiment_by_name", name)] if name else self._call("search_experiments")
        return [experiment.experiment_id for experiment in answer if experiment]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._answer(lambda: getattr(self._store.client, method)(*arguments))

    def _answer(self, action: Callable[[], Any]) -> Any:
        answer, error = self._store.caller.try_call(action)
        if error is not None:
            raise error
        return answer


def _stored_run(run: Any) -> StoredRun:
    info, data = run.info, run.data
    return StoredRun(
        info.run_id,
        info.run_name or "",
        info.status,
        (info.start_time or 0) / 1000,
        info.end_time / 1000 if info.end_time else None,
        info.artifact_uri,
        dict(data.params),
        dict(data.metrics),
        dict(data.tags),
    )


class LocalCopies:
    """Directories `mlflow/artifacts/RUN_ID/artifacts/STAGE` of a home; each is listed once."""

    def __init__(self, home: Path) -> None:
        self._root = home / "mlflow" / "artifacts"

    @property
    def is_empty(self) -> bool:
        """Whether no run has files in the home: if it has a database, the files are elsewhere."""
        return not self._by_stage

    def find(self, stage: str | None, key: str) -> list[Path]:
        """The directories whose manifest holds this key, or the beginning of one, newest first; for None, of all stages."""
        stages = [stage] if stage else [*self._by_stage]
        matches = (path for name in stages for path in self._by_stage.get(name, ()) if f'"{key}' in _manifest_text(path))
        return sorted(matches, key=lambda path: (path / MANIFEST).stat().st_mtime, reverse=True)

    @cached_property
    def _by_stage(self) -> dict[str, list[Path]]:
        directories: dict[str, list[Path]] = defaultdict(list)
        for path in self._runs(self._root):
            for stage in _names(path / "artifacts"):
                directories[stage].append(path / "artifacts" / stage)
        return dict(directories)

    def _runs(self, root: Path) -> Iterator[Path]:
        """The directories of runs; those that a server of this home logged lie one level deeper, by experiment."""
        for name in _names(root):
            yield from (root / name / run for run in _names(root / name)) if len(name) < 32 else [root / name]


def _manifest_text(directory: Path) -> str:
    with contextlib.suppress(OSError):
        return (directory / MANIFEST).read_text(encoding="utf-8", errors="replace")
    return ""


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in directory.iterdir()]
    return []
