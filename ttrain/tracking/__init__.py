"""MLflow behind one door: runs, curves, artifacts, registered models. No other module imports mlflow.

It runs in the orchestrating process; training children write `metrics.jsonl` and a follower carries it over. MLflow is
imported when a store is opened (0.9 s, its SQL store 0.5 s, a fresh schema 0.6 s more), never by importing this module.

The pipeline's result does not depend on the tracker, so its troubles become one warning each, never an exception: all
that a run has to tell stands in its outbox in the home (`outbox`), curves in their file, until the server takes it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ttrain.errors import TrackingError, UsageError
from ttrain.tracking.calls import first_line, is_locked, outcome, shown
from ttrain.tracking.champions import Champions
from ttrain.tracking.database import Later, artifacts_of, database_of, mend_moved_home, open_client
from ttrain.tracking.follower import MetricsFollower
from ttrain.tracking.inputs import data_of, of_tasks, read_by
from ttrain.tracking.loadable import CARD, Loadable
from ttrain.tracking.outboxes import waiting_keys
from ttrain.tracking.reading import read_local, read_run, read_runs
from ttrain.tracking.reading_database import Database
from ttrain.tracking.registered import registered_keys as _registered_keys
from ttrain.tracking.registry import CHAMPION, Version
from ttrain.tracking.registry import find_version as _find_version
from ttrain.tracking.runs import Run
from ttrain.tracking.safety import masked
from ttrain.tracking.sets import Member, ModelSet, keys_of, last_of
from ttrain.tracking.showing import NOTE, Addresses, addresses_of, refresh_views, source_tags
from ttrain.tracking.store import Store
from ttrain.tracking.syncing import Waiting
from ttrain.tracking.syncing import sync as _sync
from ttrain.tracking.syncing import waiting as _waiting
from ttrain.tracking.untracked import NullRun, NullStore
from ttrain.tracking.views import Point, RunView

__all__ = [
    "CARD",
    "CHAMPION",
    "ENVIRONMENT",
    "NOTE",
    "Addresses",
    "Loadable",
    "Member",
    "MetricsFollower",
    "ModelSet",
    "NullRun",
    "NullStore",
    "Point",
    "Run",
    "RunView",
    "Store",
    "addresses",
    "champion",
    "champion_keys_here",
    "data_of",
    "database_of",
    "find_set",
    "find_version",
    "keys_beginning",
    "last_of",
    "list_sets",
    "log_decision",
    "masked",
    "mend_moved_home",
    "of_tasks",
    "open_reader",
    "open_store",
    "prepare",
    "promote",
    "read_by",
    "read_local",
    "read_run",
    "read_runs",
    "refresh_views",
    "registered_keys",
    "rollback",
    "server_app",
    "source_tags",
    "sync",
    "tracking_uri",
    "waiting",
]
log = logging.getLogger("ttrain")

# Set unless the user did. MLflow's own 7 retries of 120 s block for 246 s and more when the server is dead.
ENVIRONMENT: Final = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # a run whose making was asked for twice is there twice
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


def tracking_uri(home: Path) -> str:
    """MLFLOW_TRACKING_URI where it is set and not empty, else the SQLite file under this home."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database_of(home)}"


def open_store(home: Path, experiment: str) -> Store | NullStore:
    """Opens the tracker, with its database made, migrated and mended; call it once, before threads share the store.

    A server that does not answer still gives a Store, which asks again at each run.
    """
    home = home.resolve()
    if not _is_installed():
        log.info("MLflow is not installed, nothing is tracked; to change that: pip install mlflow")
        return NullStore()
    uri = tracking_uri(home)
    _quieten()
    client, error = outcome(lambda: open_client(uri, home))
    if error is not None and not is_locked(error):
        log.warning("MLflow at %s cannot be opened, nothing is tracked: %s", shown(uri), first_line(error))
        return NullStore()
    store = Store(Later(uri, home) if error else client, uri, home, experiment)
    store.asking.is_silent |= error is not None
    store.asking.tried("opening the experiment", store.experiment_id)
    store.tell_earlier()
    return store


def open_reader(home: Path) -> Store:
    """The tracker for questions alone: no experiment is made. Raises what MLflow does where it cannot be opened."""
    home = home.resolve()
    uri = tracking_uri(home)
    _quieten()
    return Store(open_client(uri, home), uri, home, "")


def addresses(home: Path, experiments: Iterable[str], run_ids: Sequence[str] = ()) -> Addresses | None:
    """Where MLflow's pages show these runs, or else the first of these experiments that there is; its views are brought up
    to date. None where there is none of them. Raises TrackingError where MLflow does not answer."""
    if not _is_installed():
        raise TrackingError("MLflow is not installed; pip install mlflow")
    uri = tracking_uri(home.resolve())
    if uri == f"sqlite:///{database_of(home)}" and not database_of(home).exists():
        return None
    store, error = outcome(lambda: open_reader(home))
    found = None
    if store is not None:
        found, error = store.asking.once(lambda: addresses_of(store.client, experiments, run_ids))
    if error is not None:
        cure = "; unset MLFLOW_TRACKING_URI to see what is in the home itself" if "MLFLOW_TRACKING_URI" in os.environ else ""
        raise TrackingError(f"MLflow at {shown(uri)} cannot be asked: {first_line(error)}{cure}") from error
    return found


def find_version(home: Path, name: str, *, version: str | None = None, alias: str | None = None) -> Version:
    """A registered model's version, by its number or its alias. Raises UsageError that lists what is registered."""
    if not _is_installed():
        raise UsageError(
            f"'{name}' is looked up in MLflow, which is not installed; pip install mlflow, or name a run or stage"
        )
    _quieten()
    home = home.resolve()
    return _find_version(home, tracking_uri(home), name, version=version, alias=alias)


def keys_beginning(home: Path, stage: str | None, prefix: str) -> list[tuple[str, str]]:
    """(stage, key) of the artifacts that MLflow holds whose keys begin so; [] where it does not answer."""
    from ttrain.tracking.fetching import Tracked

    return Tracked(home).keys_beginning(stage, prefix)


def champion(home: Path, name: str) -> ModelSet | None:
    """The set of models that is champion of this pipeline; None where none was promoted.

    Raises TrackingError where MLflow cannot be asked, as all that follow do: no answer is not the answer none.
    """
    return _champions(home).champion(name)


def champion_keys_here(home: Path, name: str) -> dict[str, str]:
    """Keys of the champion's artifacts by stage, read from the home's own database in milliseconds; {} where none was
    promoted, where MLflow is elsewhere, and where it cannot be read: who asks goes on without it."""
    if tracking_uri(home) != f"sqlite:///{database_of(home)}" or not database_of(home).exists():
        return {}
    with contextlib.suppress(sqlite3.Error):
        return keys_of(Database(home).tags_under(name, CHAMPION))
    return {}


def list_sets(home: Path, name: str | None = None) -> list[ModelSet]:
    """All sets of models, of one pipeline or of all, the newest first; mends what a kill left between two writes."""
    return _champions(home).sets(name)


def find_set(home: Path, name: str, version: str) -> ModelSet:
    """One set of models. Raises UsageError that lists what there is."""
    return _champions(home).find(name, version)


def promote(home: Path, name: str, version: str) -> ModelSet:
    """Makes a set the champion; done twice it is done once. Raises UsageError where there is no such set."""
    return _champions(home).promote(name, version)


def rollback(home: Path, name: str) -> ModelSet:
    """Makes the champion before the present one champion again. Raises UsageError where there is none."""
    return _champions(home).rollback(name)


def log_decision(
    home: Path, name: str, version: str, decision: Mapping[str, Any], table: str, *, run_id: str | None = None
) -> None:
    """Puts a decision, as JSON and as a markdown table, on a set and on the run `run_id`, else on the set's own run."""
    _champions(home).log_decision(name, version, decision, table, run_id)


def _champions(home: Path) -> Champions:
    if not _is_installed():
        raise TrackingError("champions are aliases in MLflow, which is not installed; pip install mlflow")
    _quieten()
    home = home.resolve()
    return Champions(home, tracking_uri(home))


def registered_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts that the registered models are, of what these need, and of those that wait to be uploaded.

    Raises TrackingError.
    """
    if not _is_installed():
        raise TrackingError("which models are registered is told by MLflow, which is not installed; pip install mlflow")
    _quieten()
    home = home.resolve()
    return _registered_keys(home, tracking_uri(home)) | waiting_keys(home)


def waiting(home: Path, run: str | None = None) -> list[Waiting]:
    """What runs have yet to tell MLflow, all or one; imports no MLflow. Raises UsageError where no run is called so."""
    return _waiting(home, run)


def sync(home: Path, run: str | None = None, told: Callable[[int, int], object] = lambda done, total: None) -> list[Waiting]:
    """Tells MLflow what ended runs could not; what became of each. Raises TrackingError, and UsageError as `waiting`.

    `told(bytes done, bytes in all)` is called while files are uploaded.
    """
    if not _is_installed():
        raise TrackingError("what waits is told to MLflow, which is not installed; pip install mlflow")
    _quieten()
    home, named = home.resolve(), os.environ.get("MLFLOW_TRACKING_URI", "")

    def uri_of(tracker: str) -> str:
        if not tracker:
            return f"sqlite:///{database_of(home)}"
        return named if shown(named) == tracker else tracker  # an outbox holds no password

    return _sync(home, uri_of, run, told)


def prepare(home: Path) -> None:
    """Makes the home's own database, or migrates and mends it, for a server that would do neither by our rules."""
    home = home.resolve()
    if not _is_installed():
        return
    _quieten()
    _, error = outcome(lambda: open_client(f"sqlite:///{database_of(home)}", home))
    if error is not None:
        log.warning("MLflow's database %s cannot be prepared: %s", database_of(home), first_line(error))


def server_app(home: Path) -> Any:
    """MLflow's server application over the home's own database and files, as `mlflow server` runs it, for uvicorn.

    Without that command, which imports all of MLflow once more before it starts this. Raises what MLflow does.
    """
    names: Any = import_module("mlflow.server.constants")
    uri, artifacts = f"sqlite:///{database_of(home)}", artifacts_of(home)
    os.environ[names.BACKEND_STORE_URI_ENV_VAR] = uri
    os.environ[names.ARTIFACT_ROOT_ENV_VAR] = os.environ[names.ARTIFACTS_DESTINATION_ENV_VAR] = artifacts
    os.environ[names.SERVE_ARTIFACTS_ENV_VAR] = "true"
    import_module("mlflow.server.handlers").initialize_backend_stores(uri, uri, artifacts)
    return import_module("mlflow.server.fastapi_app").app


def _is_installed() -> bool:
    spec = find_spec("mlflow")
    return spec is not None and spec.origin is not None  # without one it is a mere directory, such as the home's own


def _quieten() -> None:
    """Keeps MLflow and what it stands on away from the terminal; what matters comes through our own logger."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic", "sqlalchemy"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns at each retry
