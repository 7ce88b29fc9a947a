"""One MLflow run: its curves, figures, parameters and files."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

from ttrain.tracking.calls import clean, is_refusal, outcome, shown
from ttrain.tracking.files import local_path, place, place_tree, with_parent, write_text

if TYPE_CHECKING:
    from ttrain.tracking.store import Store

log = logging.getLogger("ttrain")
Row = Mapping[str, Any]
Point = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step

METRICS_PER_BATCH: Final = 1000  # MLflow refuses more; it splits parameters and tags (100 each) by itself
VALUE_CHARACTERS: Final = 6000  # of a parameter, by MLflow's rule


@final
class Run:
    """One MLflow run; made by `Store.start_run`."""

    def __init__(self, store: Store, entity: Any) -> None:
        self.store = store
        self.id: str = entity.info.run_id
        self.artifact_uri: str = entity.info.artifact_uri
        self.page = f"#/experiments/{entity.info.experiment_id}/runs/{self.id}"  # on whatever server shows this store
        self.url = f"{shown(store.uri).rstrip('/')}/{self.page}" if store.is_http else None
        self._params, self._values = dict(entity.data.params), dict(entity.data.metrics)
        # MLflow's own record of each metric's last step: right even when a kill came between a send and our note of it
        self.steps: dict[str, int] = {metric.key: metric.step for metric in entity.data.to_proto().metrics}
        self._sending = threading.Lock()

    def log_metrics(self, rows: Iterable[Row]) -> bool:
        """Logs rows of `metrics.jsonl`; a step that a metric has already passed is not logged again.

        False when MLflow did not take them all; what it took is remembered, so the same rows can be given again.
        """
        with self._sending:
            seen, batch = dict(self.steps), []
            for row in rows:
                for key, value in _values_of(row):
                    if row["step"] > seen.get(key, -1):
                        seen[key] = row["step"]
                        batch.append((key, value, int(1000 * (row.get("time") or time.time())), row["step"]))
                    if len(batch) == METRICS_PER_BATCH:
                        if not self._send(batch):
                            return False
                        batch = []
            return self._send(batch)

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Logs figures of the whole run, at step 0; one that the run has already is left as it is."""
        cleaned = dict(_values_of({"metrics": values}))
        fresh = {key: value for key, value in cleaned.items() if self._values.get(key) != value}
        self._values.update(fresh)
        now = int(1000 * time.time())
        batch = [(key, value, now, 0) for key, value in fresh.items()]
        if batch:
            self.store.later("logging a summary", lambda: self._log_batch(batch))

    def log_params(self, params: Mapping[str, object]) -> None:
        """Logs parameters; one that the run has with another value keeps it, since MLflow's cannot change."""
        given = {clean(key): str(value)[:VALUE_CHARACTERS] for key, value in params.items()}
        for key, value in given.items():
            if self._params.get(key, value) != value:
                log.warning("MLflow run %s keeps %s = %s, now %s", self.id, key, self._params[key], value)
        fresh = {key: value for key, value in given.items() if key not in self._params}
        self._params.update(fresh)
        kind = import_module("mlflow.entities").Param
        entities = [kind(key, value) for key, value in fresh.items()]
        if entities:
            self.store.later("logging parameters", lambda: self.store.client.log_batch(self.id, params=entities))

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags, over old values."""
        kind = import_module("mlflow.entities").RunTag
        entities = [kind(clean(key), str(value)) for key, value in tags.items()]
        self.store.later("setting tags", lambda: self.store.client.log_batch(self.id, tags=entities))

    def log_file(self, path: Path, artifact_path: str = "") -> None:
        """Keeps a finished file under the run's directory `artifact_path`; linked, not copied, where that can be."""
        upload = partial(self.store.client.log_artifact, self.id, str(path), artifact_path or None)
        self._keep(path, lambda root: place(path, root / artifact_path / path.name), upload)

    def log_directory(self, directory: Path, artifact_path: str = "") -> None:
        """Keeps a finished directory's files under the run's `artifact_path`, as `log_file` does."""
        upload = partial(self.store.client.log_artifacts, self.id, str(directory), artifact_path or None)
        self._keep(directory, lambda root: place_tree(directory, root / artifact_path), upload)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keeps a text as the file `artifact_file` of the run."""
        upload = partial(self.store.client.log_text, self.id, text, artifact_file)
        self._keep(artifact_file, lambda root: write_text(with_parent(root / artifact_file), text), upload)

    def finish(self, status: str) -> None:
        """Ends the run as FINISHED, FAILED or KILLED; it can still be continued."""
        end = partial(self.store.client.set_terminated, self.id, status)
        self.store.later(f"ending the run as {status}", end, insist=True)

    def _keep(self, what: object, place: Callable[[Path], None], upload: Callable[[], object]) -> None:
        """Puts files where the run's artifacts are: by ourselves on a local disk, else through MLflow.

        Local work is done outside the turn: copying 10 GB must not hold up the others' metrics.
        """
        root = local_path(self.artifact_uri)
        if root is None and self.store.is_http:
            self.store.tried(f"uploading {what}", upload)
        elif (error := outcome(upload if root is None else partial(place, root))[1]) is not None:
            self.store.warn(f"keeping {what}", error)

    def _send(self, batch: list[Point]) -> bool:
        """One batch; one that MLflow refuses as invalid counts as taken, or nothing after it would pass."""
        if not batch:
            return True
        _, error = self.store.tried("sending metrics (they wait in their file)", lambda: self._log_batch(batch))
        taken = error is None or is_refusal(error)
        if taken:
            self.steps |= {key: step for key, _, _, step in batch}
        return taken

    def _log_batch(self, batch: list[Point]) -> None:
        kind = import_module("mlflow.entities").Metric
        self.store.client.log_batch(self.id, metrics=[kind(*metric) for metric in batch])


@final
class NullRun:
    """A run that is not tracked; `id` keeps the one that was to be continued, so that a later start still finds it."""

    url: str | None = None
    page: str | None = None

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id

    def _nothing(self, *_: object, **__: object) -> None:
        """Does nothing."""

    log_metrics = log_summary = log_params = set_tags = log_file = log_directory = log_text = finish = _nothing


def _values_of(row: Row) -> Iterator[tuple[str, float]]:
    """The finite figures of a row; `tokens` is one of them, so that curves can be compared by it."""
    for key, value in {"tokens": row.get("tokens"), **row["metrics"]}.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield clean(key), float(value)
