"""MLflow behind one door: runs, curves, artifacts, registered models. No other module imports mlflow.

It runs in the orchestrating process; training children write `metrics.jsonl` and a follower carries it over. MLflow is
imported when a store is opened (0.9 s, its SQL store 0.5 s, a fresh schema 0.6 s more), never by importing this module.

The pipeline's result does not depend on the tracker, so its troubles become one warning each, never an exception: what
is small (parameters, tags, summaries, states) waits here for the server to come back, curves wait in their file.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from http import HTTPStatus
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar, final
from urllib.parse import quote, unquote, urlsplit

log = logging.getLogger("ttrain")
Result = TypeVar("Result")
Row = Mapping[str, Any]
Point = tuple[str, float, int, int]  # name, value, milliseconds since 1970, step

METRICS_PER_BATCH: Final = 1000  # MLflow refuses more; it splits parameters and tags (100 each) by itself
VALUE_CHARACTERS: Final = 6000  # of a parameter, by MLflow's rule
LINK_FROM_BYTES: Final = 1 << 20  # linking a smaller file saves nothing, and a copy cannot change under MLflow
READ_BYTES: Final = 1 << 22
PROBE_SECONDS = 3.0  # one question to a silent server, instead of the client's two times ten seconds
REST_SECONDS = 10.0  # between questions on behalf of what can wait: a hung server costs a stage a quarter of its time
PATIENCE_SECONDS = 15.0

# Set unless the user did. MLflow's own 7 retries of 120 s block for 246 s and more when the server is dead.
ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}

# Every column of MLflow 3.17's schema that holds a place on disk; a test reads the schema and names a new one.
LOCATIONS: Final = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
    ("logged_models", "artifact_location"),
    ("workspaces", "default_artifact_root"),
    ("workspaces", "trace_archival_location"),
    ("trace_tags", "value"),
    ("datasets", "dataset_source"),
)


def tracking_uri(home: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set and not empty, else the SQLite file under this home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{_database(home)}"


def open_store(home: Path, experiment: str) -> Store | NullStore:
    """Opens the tracker, with its database made, migrated and mended; call it once, before threads share the store.

    A server that does not answer still gives a Store, which asks again at each run.
    """
    home = home.resolve()
    spec = find_spec("mlflow")
    if spec is None or spec.origin is None:  # without one it is a mere directory of that name, such as the home's own
        log.info("MLflow is not installed, nothing is tracked; to change that: pip install mlflow")
        return NullStore()
    uri = tracking_uri(home)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _quieten()
    store, error = _outcome(lambda: Store(_opened(uri, home), uri, home, experiment))
    if store is None or error is not None:
        log.warning("MLflow at %s cannot be opened, nothing is tracked: %s", _shown(uri), error and _first_line(error))
        return NullStore()
    store.tried("opening the experiment", store.experiment_id)
    return store


def mend_moved_home(home: Path) -> int:
    """Points the database of a moved or copied home at this home instead of the one it was recorded under.

    MLflow stores absolute locations, so a copy would go on writing into the original. Only this database is touched, in
    one transaction with the record. Returns the number of values rewritten. Call it before a server opens the database.
    """
    home, changed = home.resolve(), 0
    if not _database(home).exists():
        return 0
    with contextlib.closing(sqlite3.connect(_database(home), timeout=30, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE IF NOT EXISTS ttrain_home (path TEXT NOT NULL)")
        recorded = db.execute("SELECT path FROM ttrain_home").fetchone()
        if recorded is None:
            # MLflow puts the Default experiment, which it makes by itself, under the working directory
            place = f"{_artifacts(home)}/0"
            unused = "experiment_id = 0 AND NOT EXISTS (SELECT 1 FROM runs WHERE experiment_id = 0)"
            db.execute(f"UPDATE experiments SET artifact_location = ? WHERE {unused}", (place,))
        elif recorded[0] != str(home):
            changed = sum(_rewrite(db, table, column, Path(recorded[0]), home) for table, column in LOCATIONS)
        if recorded is None or recorded[0] != str(home):
            db.execute("DELETE FROM ttrain_home")
            db.execute("INSERT INTO ttrain_home VALUES (?)", (str(home),))
        db.execute("COMMIT")
    return changed


@final
class Store:
    """One experiment of one MLflow, shared by threads; made by `open_store`."""

    def __init__(self, client: Any, uri: str, home: Path, experiment: str) -> None:
        self.client, self.uri = client, uri
        self.is_http = uri.startswith(("http://", "https://"))
        self.gave_up = False
        self._experiment, self._experiment_id = experiment, ""
        # A server chooses the place itself; everything else would write below the working directory
        self._place = None if self.is_http or uri.startswith(("databricks", "uc")) else _artifacts(home)
        self._silent = self.is_http  # until /health has answered
        self._ask_again = 0.0
        self._warned: set[str] = set()
        self._waiting: deque[tuple[str, Callable[[], object]]] = deque()
        self._queue = threading.Lock()
        # SQLite has one writer anyway; without turns, threads met "database is locked" in 6 of 1803 (mlflow #20014)
        turn: contextlib.AbstractContextManager[object] = threading.RLock()
        self._turn = contextlib.nullcontext() if self.is_http else turn

    def start_run(
        self,
        name: str,
        *,
        run_id: str | None,
        parent_run_id: str | None,
        tags: Mapping[str, str],
        params: Mapping[str, object],
    ) -> Run | NullRun:
        """A new run, or the one of `run_id` continued; a NullRun that keeps `run_id` when MLflow fails."""
        parent = {"mlflow.parentRunId": parent_run_id} if parent_run_id else {}  # the tag by which the UI nests
        all_tags = {_clean(key): str(value) for key, value in {**tags, **parent}.items()}
        what = f"starting the run {name}"
        entity, _ = self.tried(what, lambda: self._continued(run_id) or self._created(name, all_tags))
        if entity is None:
            return NullRun(run_id)
        run = Run(self, entity)
        if run.id == run_id:
            run.set_tags(all_tags)
        run.log_params(params)
        return run

    def register_model(self, name: str, *, run: Run | NullRun, artifact_path: str, tags: Mapping[str, str]) -> str | None:
        """The version of the registered model whose files the run holds under `artifact_path`; None when MLflow fails.

        A version with the same tags `ttrain.key` and `ttrain.content` is returned instead of making another.
        """
        if isinstance(run, NullRun):
            return None
        return self.tried(f"registering {name}", lambda: self._register(name, run, artifact_path, tags))[0]

    def experiment_id(self) -> str:
        """Id of the experiment, which is made or restored where needed; raises when MLflow does."""
        if not self._experiment_id:
            found = self.client.get_experiment_by_name(self._experiment)
            if found is None:
                _unless_there(partial(self.client.create_experiment, self._experiment, self._place))
                found = self.client.get_experiment_by_name(self._experiment)
            if found.lifecycle_stage == "deleted":
                self.client.restore_experiment(found.experiment_id)  # MLflow lets no other take its name
            self._experiment_id = str(found.experiment_id)
        return self._experiment_id

    def tried(self, what: str, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        """Runs one call, after those that wait; warns of its error and returns it. Soon back from a silent server."""
        if not self._rests():
            self._deliver()
        result, error = self._once(action)
        if error is not None:
            self.warn(what, error)
        return result, error

    def later(self, what: str, action: Callable[[], object], *, insist: bool = False) -> None:
        """Runs a small call now, or when the server answers again; to insist is to ask one that was just silent."""
        self._waiting.append((what, action))
        if insist or not self._rests():
            self._deliver()

    def warn(self, what: str, error: Exception) -> None:
        """Warns once about each thing, and once about a server that does not answer."""
        kind = "silent" if self._silent else what
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning("MLflow at %s: %s failed, the pipeline goes on: %s", _shown(self.uri), what, _first_line(error))

    def _rests(self) -> bool:
        return self._silent and time.monotonic() < self._ask_again

    def _deliver(self) -> None:
        """Runs what waits; a refused call is dropped, a failed one goes to the end, where it blocks no other."""
        with self._queue:
            for _ in range(len(self._waiting)):
                what, action = self._waiting.popleft()
                _, error = self._once(action)
                if error is not None:
                    self.warn(what, error)
                    if not _is_refusal(error):
                        self._waiting.append((what, action))
                    if self._rests():
                        return

    def _once(self, action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
        if self._silent and (silence := self._probe()) is not None:
            return None, silence
        with self._turn:
            result, error = _outcome(action)
        self._silent = self.is_http and error is not None and not _is_refusal(error)
        return result, error

    def _probe(self) -> Exception | None:
        """One short question to the server; None when it answers."""
        request, host = import_module("mlflow.utils.rest_utils"), import_module("mlflow.utils.credentials")
        ask = partial(request.http_request, timeout=PROBE_SECONDS, max_retries=0, raise_on_status=False)
        answer, error = _outcome(lambda: ask(host.get_default_host_creds(self.uri), "/health", "GET"))
        if answer is not None and answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            error = ConnectionError(f"the server answers with HTTP {answer.status_code}")
        self._silent = error is not None
        self._ask_again = time.monotonic() + REST_SECONDS
        return error

    def _created(self, name: str, tags: Mapping[str, str]) -> Any:
        return self.client.create_run(self.experiment_id(), run_name=name, tags=tags)

    def _continued(self, run_id: str | None) -> Any:
        """The run, set to RUNNING; None where it is gone or was deleted by the user."""
        if run_id is None:
            return None
        try:
            run = self.client.get_run(run_id)
        except Exception as error:
            if _code(error) == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        if run.info.lifecycle_stage != "active":
            return None
        self.client.update_run(run_id, status="RUNNING")
        return run

    def _register(self, name: str, run: Run, artifact_path: str, tags: Mapping[str, str]) -> str:
        # A plain directory is a fine source. "runs:/..." would be one too, but MLflow copies that into a temporary
        # directory at each download, where an absolute location is used in place.
        source = f"{run.artifact_uri}/{quote(artifact_path) if run.artifact_uri.startswith('file:') else artifact_path}"
        _unless_there(partial(self.client.create_registered_model, name))
        for version in self.client.search_model_versions(f"name='{name}'"):
            if all(tag in tags and version.tags.get(tag) == tags[tag] for tag in ("ttrain.key", "ttrain.content")):
                return str(version.version)
        made = self.client.create_model_version(name, source, run.id, tags=dict(tags), await_creation_for=0)
        return str(made.version)


@final
class Run:
    """One MLflow run; made by `Store.start_run`."""

    def __init__(self, store: Store, entity: Any) -> None:
        self.store = store
        self.id: str = entity.info.run_id
        self.artifact_uri: str = entity.info.artifact_uri
        page = f"{_shown(store.uri).rstrip('/')}/#/experiments/{entity.info.experiment_id}/runs/{self.id}"
        self.url = page if store.is_http else None
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
        given = {_clean(key): str(value)[:VALUE_CHARACTERS] for key, value in params.items()}
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
        entities = [kind(_clean(key), str(value)) for key, value in tags.items()]
        self.store.later("setting tags", lambda: self.store.client.log_batch(self.id, tags=entities))

    def log_file(self, path: Path, artifact_path: str = "") -> None:
        """Keeps a finished file under the run's directory `artifact_path`; linked, not copied, where that can be."""
        upload = partial(self.store.client.log_artifact, self.id, str(path), artifact_path or None)
        self._keep(path, lambda root: _place(path, root / artifact_path / path.name), upload)

    def log_directory(self, directory: Path, artifact_path: str = "") -> None:
        """Keeps a finished directory's files under the run's `artifact_path`, as `log_file` does."""
        upload = partial(self.store.client.log_artifacts, self.id, str(directory), artifact_path or None)
        self._keep(directory, lambda root: _place_tree(directory, root / artifact_path), upload)

    def log_text(self, text: str, artifact_file: str) -> None:
        """Keeps a text as the file `artifact_file` of the run."""
        upload = partial(self.store.client.log_text, self.id, text, artifact_file)
        self._keep(artifact_file, lambda root: _write_text(_with_parent(root / artifact_file), text), upload)

    def finish(self, status: str) -> None:
        """Ends the run as FINISHED, FAILED or KILLED; it can still be continued."""
        end = partial(self.store.client.set_terminated, self.id, status)
        self.store.later(f"ending the run as {status}", end, insist=True)

    def _keep(self, what: object, place: Callable[[Path], None], upload: Callable[[], object]) -> None:
        """Puts files where the run's artifacts are: by ourselves on a local disk, else through MLflow.

        Local work is done outside the turn: copying 10 GB must not hold up the others' metrics.
        """
        root = _local_path(self.artifact_uri)
        if root is None and self.store.is_http:
            self.store.tried(f"uploading {what}", upload)
        elif (error := _outcome(upload if root is None else partial(place, root))[1]) is not None:
            self.store.warn(f"keeping {what}", error)

    def _send(self, batch: list[Point]) -> bool:
        """One batch; one that MLflow refuses as invalid counts as taken, or nothing after it would pass."""
        if not batch:
            return True
        _, error = self.store.tried("sending metrics (they wait in their file)", lambda: self._log_batch(batch))
        taken = error is None or _is_refusal(error)
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

    def __init__(self, run_id: str | None = None) -> None:
        self.id = run_id

    def _nothing(self, *_: object, **__: object) -> None:
        """Does nothing."""

    log_metrics = log_summary = log_params = set_tags = log_file = log_directory = log_text = finish = _nothing


@final
class NullStore:
    """Stands in where MLflow is missing or switched off."""

    def start_run(self, name: str, *, run_id: str | None, **_: object) -> NullRun:
        """A run that is not tracked."""
        return NullRun(run_id)

    def register_model(self, name: str, **_: object) -> str | None:
        """Registers nothing."""
        return None


@final
class MetricsFollower:
    """Sends the lines that a stage appends to its `metrics.jsonl` to a run, about once a second, from its own thread.

    `state_file` remembers which step each metric reached, for this run. A resumed stage may cut the file back to its
    checkpoint and write the same steps again: they are passed over, and no step is logged twice or left out. A
    half-written last line is left for the next look. Starts at once; `stop()` before the files move.
    """

    def __init__(self, path: Path, run: Run | NullRun, state_file: Path, *, seconds: float = 1.0) -> None:
        self._path, self._run, self._state_file, self._seconds = path, run, state_file, seconds
        self._offset, self._tail = 0, b""
        self._stopping, self._drained, self._deadline = threading.Event(), False, math.inf
        self._thread: threading.Thread | None = None
        if isinstance(run, Run):
            self._recall(run)
            self._thread = threading.Thread(target=self._follow, args=(run,), name="metrics-follower", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Sends what is there; gives up on a dead server after 15 s, or after one probe where another follower did."""
        if self._thread is None or not isinstance(self._run, Run):
            return
        patience = PROBE_SECONDS + 1 if self._run.store.gave_up else PATIENCE_SECONDS
        self._deadline = time.monotonic() + patience
        self._stopping.set()
        self._thread.join(patience)
        self._thread = None
        if not self._drained:
            self._run.store.gave_up = True
            last = max(self._run.steps.values(), default=None)
            uri = _shown(self._run.store.uri)
            log.warning("MLflow at %s has the metrics up to step %s; the rest remains in %s", uri, last, self._path)

    def _follow(self, run: Run) -> None:
        pause = self._seconds
        while not self._drained and time.monotonic() < self._deadline:
            stopping = self._stopping.is_set()  # asked before the look, so that the last look sees every line
            taken = self._drain(run)
            self._drained = taken and stopping
            pause = self._seconds if taken else min(2 * pause, 30)
            if stopping and not taken:
                time.sleep(0.5)
            self._stopping.wait(pause)

    def _drain(self, run: Run) -> bool:
        while chunk := self._read():
            if not run.log_metrics(row for line in chunk.splitlines() if (row := _parse(line)) is not None):
                return False
            self._offset, self._tail = self._offset + len(chunk), (self._tail + chunk)[-256:]
            with contextlib.suppress(OSError):  # MLflow's own record of the steps is enough
                _write_text(self._state_file, json.dumps({"run": run.id, "steps": run.steps}))
        return True

    def _read(self) -> bytes:
        """The whole lines after the last ones sent; from the start again when the file was cut or replaced."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset - len(self._tail))
                if file.read(len(self._tail)) != self._tail:
                    self._offset, self._tail = 0, b""
                    file.seek(0)
                chunk = file.read(READ_BYTES)
        except OSError:
            return b""
        return chunk[: chunk.rfind(b"\n") + 1]

    def _recall(self, run: Run) -> None:
        """Adds the steps of the state file to those that MLflow reported, where both speak of this run."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
            for key, step in state["steps"].items() if state["run"] == run.id else ():
                run.steps[key] = max(int(step), run.steps.get(key, -1))


def _database(home: Path) -> Path:
    return home.resolve() / "mlflow" / "mlflow.db"


def _artifacts(home: Path) -> str:
    """As a URI, for a path with a space, % or # would be read wrongly."""
    return (home.resolve() / "mlflow" / "artifacts").as_uri()


def _opened(uri: str, home: Path) -> Any:
    """A client; the home's own database is made, migrated and mended under a lock, since two may start at once."""
    database = _database(home)
    if uri != f"sqlite:///{database}":
        return _client(uri)
    if "?" in str(database):
        raise ValueError("a home whose path contains '?' cannot be named in a database URL; move it")
    from filelock import FileLock

    import_module("mlflow.store.tracking.sqlalchemy_store")  # 1.5 s that another process need not wait for
    database.parent.mkdir(parents=True, exist_ok=True)
    os.environ["SQLITE_TMPDIR"] = str(database.parent)
    with FileLock(database.with_name("mlflow.lock")):
        _migrate(database)
        client = _client(uri)
        mend_moved_home(home)
    return client


def _client(uri: str) -> Any:
    client = import_module("mlflow").MlflowClient(uri, uri)
    if not uri.startswith(("http://", "https://")):
        client.search_registered_models(max_results=1)  # the registry's half is opened here too, before threads come
    return client


def _migrate(database: Path) -> None:
    """Makes the schema, or upgrades an older one after keeping a copy."""
    tools = import_module("mlflow.store.db.utils")
    if not database.exists() or not database.stat().st_size:
        _make(database, tools)
    elif (found := _revision(database)) != tools._get_latest_schema_revision():
        backup = database.with_name(f"mlflow-{found}.db")
        with contextlib.closing(sqlite3.connect(database)) as db, contextlib.closing(sqlite3.connect(backup)) as copy:
            db.backup(copy)
        engine = tools.create_sqlalchemy_engine(f"sqlite:///{database}")
        tools._upgrade_db(engine)
        engine.dispose()
        log.info("MLflow's schema is upgraded; the database as it was is kept in %s", backup)


def _make(database: Path, tools: Any) -> None:
    """A fresh database, made beside and renamed: a kill during the 67 migrations leaves what MLflow cannot go on from.

    So it need not be safe before the rename, and the disk is spared some 400 flushes: 1 s, not 6 s, on a busy one.
    """
    part = database.with_name("mlflow.db.part")
    part.unlink(missing_ok=True)
    engine = tools.create_sqlalchemy_engine(f"sqlite:///{part}")
    hasty = "PRAGMA synchronous = OFF; PRAGMA journal_mode = MEMORY"
    import_module("sqlalchemy").event.listen(engine, "connect", lambda connection, _: connection.executescript(hasty))
    tools._initialize_tables(engine)
    engine.dispose()
    with part.open("rb") as file:
        os.fsync(file.fileno())
    part.replace(database)


def _revision(database: Path) -> str:
    with contextlib.closing(sqlite3.connect(database)) as db:
        return str(db.execute("SELECT version_num FROM alembic_version").fetchone()[0])


def _rewrite(db: sqlite3.Connection, table: str, column: str, old: Path, new: Path) -> int:
    """Rewrites one column, as a path, as a URI and inside JSON; returns the number of values."""
    if column not in {row[1] for row in db.execute(f"PRAGMA table_info({table})")}:
        return 0
    changed = 0
    for before, after in ((f"{old}/", f"{new}/"), (f"{old.as_uri()}/", f"{new.as_uri()}/")):
        prefix = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
        changed += db.execute(prefix, (after, len(before) + 1, len(before), before)).rowcount
        inside = f"UPDATE {table} SET {column} = replace({column}, ?, ?) WHERE instr({column}, ?)"
        changed += db.execute(inside, (f'"{before}', f'"{after}', f'"{before}')).rowcount
    return changed


def _quieten() -> None:
    """Keeps MLflow and what it stands on away from the terminal; what matters comes through our own logger."""
    for name in ("mlflow", "alembic", "sqlalchemy"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns at each retry


def _outcome(action: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    """What a call gave, or its error as a value: nothing settles what MLflow may raise, and none of it may pass."""
    try:
        return action(), None
    except Exception as error:
        log.debug("from MLflow", exc_info=True)
        return None, error


def _is_refusal(error: Exception) -> bool:
    """Whether MLflow understood and said no, so that asking again is of no use."""
    return _code(error) in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST")


def _unless_there(create: Callable[[], object]) -> None:
    """Creates what another thread or process may be creating, too."""
    try:
        create()
    except Exception as error:
        if _code(error) != "RESOURCE_ALREADY_EXISTS":
            raise


def _code(error: Exception) -> str:
    return getattr(error, "error_code", "")


def _first_line(error: Exception) -> str:
    return _shown(str(error).partition("\n")[0])[:300] or type(error).__name__


def _shown(text: str) -> str:
    """Without the user name and password that a URI can carry."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def _clean(key: str) -> str:
    """A name that MLflow takes."""
    return re.sub(r"[^/\w.\- :]", "_", key)[:250]


def _values_of(row: Row) -> Iterator[tuple[str, float]]:
    """The finite figures of a row; `tokens` is one of them, so that curves can be compared by it."""
    for key, value in {"tokens": row.get("tokens"), **row["metrics"]}.items():
        if isinstance(value, int | float) and math.isfinite(value):
            yield _clean(key), float(value)


def _parse(line: bytes) -> Row | None:
    """The row of a line; None for a line that is none, which a crash of the machine can leave."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    kinds = {"step": int, "metrics": dict, "time": int | float | None}
    good = isinstance(row, dict) and all(isinstance(row.get(name), kind) for name, kind in kinds.items())
    return row if good else None


def _local_path(uri: str) -> Path | None:
    """The directory that an artifact URI names, where it is one of this machine."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri)


def _place(source: Path, target: Path) -> None:
    """Puts a file into the artifacts; a big one as a second name of the same file, where both are on one disk."""
    if target.exists() and target.samefile(source):
        return
    source = source.resolve()

    def link_or_copy(part: Path) -> None:
        if source.stat().st_size >= LINK_FROM_BYTES:
            with contextlib.suppress(OSError):  # another disk, or one without links
                os.link(source, part)
                return
        shutil.copy2(source, part)

    _replace(_with_parent(target), link_or_copy)


def _place_tree(directory: Path, target: Path) -> None:
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            _place(path, target / path.relative_to(directory))


def _with_parent(target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def _write_text(target: Path, text: str) -> None:
    _replace(target, lambda part: part.write_text(text, encoding="utf-8"))


def _replace(target: Path, write: Callable[[Path], object]) -> None:
    """Writes beside the target and renames; the name is one that MLflow's listings leave out."""
    part = target.with_name(f".artifact.uploading.{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        write(part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
