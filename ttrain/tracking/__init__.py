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
from pathlib import Path
from typing import Any

from ttrain.core.redact import masked, without_user
from ttrain.errors import TrackingError
from ttrain.store.server_records import with_token
from ttrain.tracking.calls import first_line, is_out_of_use, outcome
from ttrain.tracking.champions import Champions
from ttrain.tracking.database import Later, artifacts_of, database_of, mend_moved_home, open_client
from ttrain.tracking.database import set_damaged_aside as _set_damaged_aside
from ttrain.tracking.datasets import data_of, of_tasks, read_by
from ttrain.tracking.loading_snippets import CARD, Loadable
from ttrain.tracking.metrics_follower import MetricsFollower
from ttrain.tracking.mlflow_setup import ENVIRONMENT, check_installed, is_installed, silence, tracking_uri
from ttrain.tracking.mlflow_views import NOTE, Addresses, addresses_of, refresh_views, source_tags
from ttrain.tracking.model_sets import Member, ModelSet, keys_of, last_of
from ttrain.tracking.null_tracker import NullRun, NullStore
from ttrain.tracking.outbox import FOLDER
from ttrain.tracking.outboxes import waiting_keys
from ttrain.tracking.published import log_result
from ttrain.tracking.reading import read_local, read_run, read_runs
from ttrain.tracking.reading_database import Database
from ttrain.tracking.records import note_run_id
from ttrain.tracking.registered_models import registered_keys as _registered_keys
from ttrain.tracking.registry import CHAMPION, find_version
from ttrain.tracking.runs import Run
from ttrain.tracking.store import Store, open_reader
from ttrain.tracking.sync import Waiting
from ttrain.tracking.sync import sync as _sync
from ttrain.tracking.sync import waiting as _waiting
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
    "is_waiting",
    "keys_beginning",
    "last_of",
    "list_sets",
    "log_decision",
    "log_result",
    "masked",
    "mend_moved_home",
    "note_tracked",
    "of_tasks",
    "open_own_store",
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
    "set_damaged_database_aside",
    "source_tags",
    "sync",
    "told_identities",
    "tracking_uri",
    "waiting",
]
log = logging.getLogger("ttrain")


def open_store(home: Path, experiment: str) -> Store | NullStore:
    """Opens the tracker, with its database made, migrated and mended; call it once, before threads share the store.

    A server that does not answer still gives a Store, which asks again at each run.
    """
    home = home.resolve()
    if not is_installed():
        log.info("MLflow is not installed, nothing is tracked; to change that: pip install mlflow")
        return NullStore()
    uri = tracking_uri(home)
    silence()
    client, error = outcome(lambda: open_client(uri, home))
    if error is not None and not is_out_of_use(error):
        log.warning("MLflow at %s cannot be opened, nothing is tracked: %s", without_user(uri), first_line(error))
        return NullStore()
    store = Store(Later(uri, home) if error else client, uri, home, experiment)
    store.asking.is_silent |= error is not None
    store.asking.tried("opening the experiment", store.experiment_id)
    store.tell_earlier()
    return store


def open_own_store(home: Path, experiment: str) -> Store:
    """The home's own database, whatever MLFLOW_TRACKING_URI says, to be told what the home knows. Raises TrackingError."""
    home = home.resolve()
    check_installed()
    silence()
    uri = f"sqlite:///{database_of(home)}"
    client, error = outcome(lambda: open_client(uri, home))
    if error is not None:
        raise TrackingError(f"MLflow's database cannot be opened: {first_line(error)}") from error
    return Store(client, uri, home, experiment)


def set_damaged_database_aside(home: Path) -> tuple[str, Path] | None:
    """What is wrong with the home's own database and where it is now; None where it is whole, or there is none."""
    return _set_damaged_aside(home.resolve())


def told_identities(home: Path) -> frozenset[str]:
    """Identities of the runs that the home's own database was told to their end. Raises TrackingError."""
    home = home.resolve()
    try:
        return Database(home).told_identities() if database_of(home).exists() else frozenset()
    except sqlite3.Error as error:
        raise TrackingError(f"MLflow's database {database_of(home)} cannot be read: {error}") from error


def is_waiting(home: Path, identity: str | None) -> bool:
    """Whether the run of this identity has an outbox, which holds what it was begun with."""
    return bool(identity) and (home / FOLDER / str(identity) / "run.json").exists()


def note_tracked(home: Path, run: Run | NullRun) -> None:
    """The record of a pipeline's run names the run that MLflow has of it now."""
    if isinstance(run, Run):
        note_run_id(home, run.box.about)


def addresses(home: Path, experiments: Iterable[str], run_ids: Sequence[str] = ()) -> Addresses | None:
    """Where MLflow's pages show these runs, or else the first of these experiments that there is; its views are brought up
    to date. None where there is none of them. Raises TrackingError where MLflow does not answer."""
    if not is_installed():
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
        raise TrackingError(f"MLflow at {without_user(uri)} cannot be asked: {first_line(error)}{cure}") from error
    return found


def keys_beginning(home: Path, stage: str | None, prefix: str) -> list[tuple[str, str]]:
    """(stage, key) of the artifacts that MLflow holds whose keys begin so; [] where it does not answer."""
    from ttrain.tracking.artifact_source import Tracked

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
    if not is_installed():
        raise TrackingError("champions are aliases in MLflow, which is not installed; pip install mlflow")
    silence()
    home = home.resolve()
    return Champions(home, tracking_uri(home))


def registered_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts that the registered models are, of what these need, and of those that wait to be uploaded.

    Raises TrackingError.
    """
    if not is_installed():
        raise TrackingError("which models are registered is told by MLflow, which is not installed; pip install mlflow")
    silence()
    home = home.resolve()
    return _registered_keys(home, tracking_uri(home)) | waiting_keys(home)


def waiting(home: Path, run: str | None = None) -> list[Waiting]:
    """What runs have yet to tell MLflow, all or one; imports no MLflow. Raises UsageError where no run is called so."""
    return _waiting(home, run)


def sync(home: Path, run: str | None = None, told: Callable[[int, int], object] = lambda done, total: None) -> list[Waiting]:
    """Tells MLflow what ended runs could not; what became of each. Raises TrackingError, and UsageError as `waiting`.

    `told(bytes done, bytes in all)` is called while files are uploaded.
    """
    check_installed()
    silence()
    home = home.resolve()
    named = tracking_uri(home)

    def uri_of(tracker: str) -> str:
        if not tracker:
            return f"sqlite:///{database_of(home)}"
        return named if without_user(named) == tracker else with_token(home, tracker)  # an outbox holds no password

    return _sync(home, uri_of, run, told)


def prepare(home: Path) -> None:
    """Makes the home's own database, or migrates and mends it, for a server that would do neither by our rules."""
    home = home.resolve()
    if not is_installed():
        return
    silence()
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
