"""One MLflow run: its curves, figures, parameters and files, each first in its outbox, and from there to MLflow."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

from ttrain.core.redact import masked, without_user
from ttrain.store.metric_rows import Row
from ttrain.tracking.calls import RefusedError, clean, code_of, outcome, plain
from ttrain.tracking.journal import Entry
from ttrain.tracking.outbox import Outbox
from ttrain.tracking.safe_names import artifact_path as checked

if TYPE_CHECKING:
    from ttrain.tracking.client import Asking
    from ttrain.tracking.datasets import DataInput

log = logging.getLogger("ttrain")
Point = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step

METRICS_PER_BATCH: Final = 1000  # MLflow refuses more
VALUE_CHARACTERS: Final = 6000  # of a parameter, by MLflow's rule
INLINE_CHARACTERS: Final = 20_000  # of a text; a longer one has a file of its own in the outbox


class TrackingStore(Protocol):
    """What a run needs of the store that made it: the MLflow that is asked, and the order in which it is told."""

    client: Any
    uri: str
    home: Path
    is_http: bool
    asking: Asking
    turn: contextlib.AbstractContextManager[object]
    versions: Any  # `model_versions.Versions`, and `uploads.Progress`: both need this module
    progress: Any

    @property
    def tracker(self) -> str: ...

    def told(self, what: str, action: Callable[[], object], run: Run) -> bool: ...

    def deliver(self, run: Run, *, uploads: bool = False, again: bool = False) -> bool: ...

    def deliver_soon(self, run: Run, entry: Entry) -> None: ...

    def relative(self, path: Path) -> str: ...

    def absolute(self, path: str) -> Path: ...

    def experiment_id(self, name: str | None = None) -> str: ...

    def parent_id(self, run: Run) -> str | None: ...

    def forget_experiments(self) -> None: ...

    def remove_twins(self, run: Run) -> None: ...


@final
class Run:
    """One MLflow run; made by `Store`. Until MLflow has it, `id`, `artifact_uri`, `page` and `url` are None."""

    def __init__(self, store: TrackingStore, box: Outbox, parent: Run | None = None) -> None:
        self.store, self.box, self.parent = store, box, parent
        self.id: str | None = box.about.get("run_id")
        self.artifact_uri: str | None = None
        self.page: str | None = None  # on whatever server shows this store
        self.is_bound = False
        self.is_again = False  # it was begun before: MLflow may have it already
        self.failed: set[int] = set()  # entries that are not tried again at once
        self.is_orphan = False  # its process has ended, and this one tells what that left
        self.steps: dict[str, int] = {}
        self.params: dict[str, str] = {}
        self.values: dict[str, float] = {}
        self.turn, self.upload_turn = threading.RLock(), threading.RLock()  # who tells MLflow of this run, and sends files
        self._flight = [tuple(point) for point in box.sent_last()]

    @property
    def identity(self) -> str:
        """By which this run is found again, also while MLflow has none."""
        return self.box.id

    @property
    def url(self) -> str | None:
        """Of its page, where the tracker is a server."""
        return f"{without_user(self.store.uri).rstrip('/')}/{self.page}" if self.store.is_http and self.page else None

    def bind(self, entity: Any) -> None:
        """MLflow has it. Its own record of each metric's last step is right even where a kill came after a send."""
        self.id, self.artifact_uri = entity.info.run_id, entity.info.artifact_uri
        self.page = f"#/experiments/{entity.info.experiment_id}/runs/{self.id}"
        self.params, self.values = dict(entity.data.params), dict(entity.data.metrics)
        for metric in entity.data.to_proto().metrics:
            self.steps[metric.key] = max(metric.step, self.steps.get(metric.key, -1))
        self.is_bound = True

    def log_metrics(self, rows: Iterable[Row]) -> bool:
        """Logs rows of `metrics.jsonl`; a step that a metric has already passed is not logged again.

        False when MLflow did not take them all; what it took is remembered, so the same rows can be given again.
        """
        with self.turn:
            if self._has_older_rows():  # of an earlier outage: their steps come first
                self.store.deliver(self, again=True)
                if self._has_older_rows():
                    return False
            return self.store.told("sending metrics (they wait on disk)", lambda: self.send(rows), run=self)

    def send(self, rows: Iterable[Row]) -> int:
        """Sends rows now, and before them again the batch of which nobody knows whether it arrived. Raises what MLflow does.

        That batch is sent as it was: MLflow's key of a point is its step, time and value, so it is there once. Its steps
        count as sent, also where training has made them anew meanwhile. Returns the number of points.
        """
        with self.turn:
            self._send(self._flight)
            sent, batch, seen = 0, list[Point](), dict(self.steps)
            for row in rows:
                for key, value in _values_of(row):
                    if row["step"] > seen.get(key, -1):
                        seen[key] = row["step"]
                        batch.append((key, value, int(1000 * (row.get("time") or time.time())), row["step"]))
                    if len(batch) == METRICS_PER_BATCH:
                        sent += self._send(batch)
                        batch = []
            return sent + self._send(batch)

    def log_summary(self, values: Mapping[str, float]) -> None:
        """Logs figures of the whole run, at step 0; one that the run has already is left as it is."""
        finite = {key: value for key, value in _values_of({"metrics": values}) if math.isfinite(value)}
        if finite:
            self._tell("summary", values=finite, time=int(1000 * time.time()))

    def log_params(self, params: Mapping[str, object]) -> None:
        """Logs parameters, without secrets; one that the run has with another value keeps it: MLflow's cannot change."""
        values = {clean(key): plain(value)[:VALUE_CHARACTERS] for key, value in masked(params).items()}
        if values:
            self._tell("params", values=values)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Sets tags, over old values."""
        self._tell("tags", values=clean_tags(tags))

    def log_inputs(self, inputs: Iterable[DataInput]) -> None:
        """Notes which data sets the run reads."""
        if listed := [asdict(one) for one in inputs]:
            self._tell("inputs", inputs=listed)

    def log_file(self, path: Path, artifact_path: str = "", *, changes: bool = False) -> None:
        """Keeps a file under the run's directory `artifact_path`; linked, not copied, where that can be.

        One that `changes`, or goes, is kept as it is now.
        """
        if self._may_be(f"{artifact_path}/{path.name}".lstrip("/")):
            content, error = outcome(path.read_bytes) if changes else (None, None)
            if error is not None:
                self.store.asking.warn(f"keeping {path}", error)
                return
            kept = None if content is None else self.box.keep("file", [content])
            self._tell("file", path=self.store.relative(path), to=artifact_path, name=path.name, kept=kept)

    def log_directory(self, directory: Path, artifact_path: str = "") -> None:
        """Keeps a finished directory's files under the run's `artifact_path`, as `log_file` does."""
        if self._may_be(artifact_path):
            self._tell("directory", path=self.store.relative(directory), to=artifact_path)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keeps a text as the file `artifact_file` of the run."""
        if self._may_be(artifact_file):
            kept = self.box.keep("text", [text.encode(errors="replace")]) if len(text) > INLINE_CHARACTERS else None
            self._tell("text", to=artifact_file, text=None if kept else text, kept=kept)

    def keep_rows(self, chunks: Iterable[bytes]) -> bool:
        """Keeps lines of a `metrics.jsonl` that are still to be sent; False where the disk takes none."""
        kept = self.box.keep("rows.jsonl", chunks)
        if kept:
            self._tell("rows", kept=kept)
        return kept is not None

    def note_stages(self, keys: Mapping[str, str]) -> None:
        """Notes the keys of the artifacts that the run's stages stand for, by their names."""
        if keys:
            self._tell("stages", values={stage: {"key": key} for stage, key in keys.items()})

    def link_to_parent(self, stage: str) -> None:
        """The parent names this run as the one of its stage."""
        self._tell("to_parent", stage=stage)

    def link_made_by(self, stage: str, key: str) -> None:
        """Names the run that made a stage's artifact, where one is found, as the one of this stage."""
        self._tell("made_by", stage=stage, key=key)

    def finish(self, status: str, *, at: float | None = None) -> None:
        """Ends the run as FINISHED, FAILED or KILLED, now or `at` an earlier time; it can still be continued."""
        self.box.note(ended=True)
        self._tell("end", status=status, time=int(1000 * (time.time() if at is None else at)))

    def waiting(self) -> list[Entry]:
        """What is to be told now: all but the curve that a follower still follows."""
        return [entry for entry in list(self.box.entries) if entry.what != "follow" or self.is_orphan]

    def _has_older_rows(self) -> bool:
        return any(entry.what == "rows" for entry in list(self.box.entries))

    def _tell(self, what: str, **data: Any) -> Entry:
        entry = self.box.add(what, **data)
        self.store.deliver_soon(self, entry)
        return entry

    tell = _tell  # for the store's own things: what to register, whom to point to

    def _may_be(self, path: str) -> bool:
        try:
            checked(path) if path else None
        except ValueError as error:
            self.store.asking.warn(f"keeping {path[:80]!a}", error)
            return False
        return True

    def _send(self, batch: list[Any]) -> int:
        """One batch. Where MLflow refuses it, its halves are sent, until what it refuses stands alone and is dropped."""
        if not batch:
            return 0
        if self.store.is_http:  # where a request may arrive, and its answer not
            self._flight = batch
            self.box.sending(batch)
        sent = self._send_parts(batch)
        self._flight = []
        for key, _, _, step in batch:
            self.steps[key] = max(step, self.steps.get(key, -1))
        return sent

    def _send_parts(self, batch: list[Any], *, whole: bool = True) -> int:
        try:
            self.log_batch(batch)
        except Exception as error:
            if code_of(error) != "INVALID_PARAMETER_VALUE":
                raise
            if whole and self.call("get_run", self.id).info.lifecycle_stage != "active":
                raise RefusedError("the run was deleted in MLflow; restored there, it takes what comes after") from None
            if len(batch) == 1:
                self.store.asking.warn(f"logging {batch[0][0]}", error)
                return 0
            half = len(batch) // 2
            return self._send_parts(batch[:half], whole=False) + self._send_parts(batch[half:], whole=False)
        return len(batch)

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        """Asks MLflow's client, in turn. Raises what MLflow does."""
        with self.store.turn:
            return getattr(self.store.client, method)(*arguments, **named)

    def log_batch(self, batch: list[Any]) -> None:
        """Points to MLflow, now."""
        kind = import_module("mlflow.entities").Metric
        self.call("log_batch", self.id, metrics=[kind(*metric) for metric in batch])


def clean_tags(tags: Mapping[str, str]) -> dict[str, str]:
    """Tags as MLflow takes them, without secrets."""
    return {clean(key): plain(value) for key, value in masked(tags).items()}


def _values_of(row: Row) -> Iterator[tuple[str, float]]:
    """The figures of a row; `tokens` is one of them, so that curves can be compared by it.

    What was no finite number, which JSON lines hold as null, is NaN: the curve has a gap there, and no straight line.
    """
    for key, value in {"tokens": row.get("tokens"), **row["metrics"]}.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield clean(key), float(value) if math.isfinite(value) else math.nan
        elif value is None and key != "tokens":
            yield clean(key), math.nan
