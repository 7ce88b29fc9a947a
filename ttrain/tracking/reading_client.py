"""Runs by MLflow's API: from a server, or from another database than the home's own."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, final

from ttrain.tracking.calls import is_refusal
from ttrain.tracking.model_sets import all_pages
from ttrain.tracking.reading_database import input_of
from ttrain.tracking.store import open_reader
from ttrain.tracking.views import Tracked

RUNS_PER_PAGE = 1000


@final
class Client:
    """One MLflow, for questions alone. Raises what MLflow does; a silent server costs one probe."""

    def __init__(self, home: Path) -> None:
        self._store = open_reader(home)
        self._experiments: list[str] = []

    def runs(self, ids: Iterable[str]) -> dict[str, Tracked]:
        """The runs of these ids that there are and that were not deleted, by id."""
        found = {}
        for run_id in dict.fromkeys(ids):
            try:
                run = self._asked(lambda: self._store.client.get_run(run_id))  # noqa: B023
            except Exception as error:
                if is_refusal(error):
                    continue
                raise
            if run.info.lifecycle_stage == "active":
                found[run_id] = _tracked(run)
        return found

    def with_tags(self, key: str, values: Iterable[str]) -> list[str]:
        """Ids of the runs whose tag has one of these values, the newest first."""
        found: list[Any] = []
        for value in dict.fromkeys(values):
            if "'" in value:
                continue  # MLflow's language has no way to write it, and none of ours contains one
            found += self._search(f"tags.`{key}` = '{value}'")
        return [run.info.run_id for run in sorted(found, key=lambda run: run.info.start_time or 0, reverse=True)]

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds since 1970, value) of a metric, as it was logged; of all pages."""
        found = self._asked(lambda: self._store.client.get_metric_history(run_id, metric))
        return sorted((point.step, point.timestamp, point.value) for point in found)

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step; the figures of a whole run stand at step 0."""
        run = self._asked(lambda: self._store.client.get_run(run_id))
        return sorted(metric.key for metric in run.data.to_proto().metrics if metric.step > 0)

    def text(self, run_id: str, path: str) -> str:
        """A text among the run's files."""
        with tempfile.TemporaryDirectory() as folder:
            found = self._asked(lambda: self._store.client.download_artifacts(run_id, path, folder))
            return Path(found).read_text(encoding="utf-8", errors="replace")

    def files(self, run_id: str, under: str) -> list[str]:
        """Paths of the run's files below a directory."""
        found: list[str] = []
        for entry in self._asked(lambda: self._store.client.list_artifacts(run_id, under or None)):
            found += self.files(run_id, entry.path) if entry.is_dir else [entry.path]
        return found

    def _search(self, wanted: str) -> list[Any]:
        if not self._experiments:
            self._experiments = [one.experiment_id for one in self._asked(self._store.client.search_experiments)]
        where, pages = self._experiments, RUNS_PER_PAGE

        def page(page_token: str | None = None) -> Any:
            return self._store.client.search_runs(where, wanted, max_results=pages, page_token=page_token)

        return self._asked(lambda: all_pages(page)) if where else []

    def _asked(self, action: Callable[[], Any]) -> Any:
        found, error = self._store.asking.once(action)
        if error is not None:
            raise error
        return found


def _tracked(run: Any) -> Tracked:
    inputs = []
    for one in run.inputs.dataset_inputs if run.inputs else ():
        context = next((tag.value for tag in one.tags if tag.key == "mlflow.data.context"), "")
        data = one.dataset
        inputs.append(input_of(data.name, data.digest, context, data.source, data.profile))
    info = run.info
    return Tracked(
        info.run_id,
        info.run_name or "",
        info.status,
        (info.start_time or 0) / 1000,
        info.end_time / 1000 if info.end_time else None,
        info.artifact_uri,
        str(info.experiment_id),
        dict(run.data.params),
        dict(run.data.metrics),
        dict(run.data.tags),
        tuple(sorted(inputs, key=lambda one: one.name)),
    )
