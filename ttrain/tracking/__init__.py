"""The only interface to MLflow: runs, curves, artifacts, registered models. No other package imports mlflow.

It runs in the orchestrating process; training children write `metrics.jsonl` and a follower sends it to MLflow, which is
imported when a store is opened (0.9 s, its SQL store 0.5 s, a fresh schema 0.6 s more), never by importing this module.

The pipeline's result does not depend on the tracker, so each failure becomes one warning, never an exception: everything
for MLflow stays in the run's outbox in the home (`outbox`), curves in their file, until the server accepts it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ttrain.core.redact import masked, without_user
from ttrain.errors import TrackingError, is_disk_full
from ttrain.tracking.calls import all_pages, attempt, first_line, is_out_of_use
from ttrain.tracking.champions import Champions, champion_keys_here, list_sets
from ttrain.tracking.client import ENVIRONMENT, cannot_be_queried, is_installed, need_mlflow, silence, tracking_uri
from ttrain.tracking.database import (
    OtherVersionError,
    artifacts_of,
    database_of,
    is_missing,
    open_client,
    repair_moved_home,
    set_damaged_aside,
)
from ttrain.tracking.datasets import data_of, of_tasks, read_by
from ttrain.tracking.delivery import log_result, status_of
from ttrain.tracking.mlflow_views import NOTE, Addresses, addresses_of, refresh_views, source_tags
from ttrain.tracking.model_description import CARD, LoadableModel
from ttrain.tracking.model_sets import CHAMPION, Member, ModelSet, find_version, last_of, registered_keys
from ttrain.tracking.reading import read_local, read_run, read_runs
from ttrain.tracking.runs import ID as IDENTITY
from ttrain.tracking.runs import AnyRun, NullRun, NullStore, TrackedRun
from ttrain.tracking.sync import MetricsFollower, SampleFollower, sync, undelivered_runs
from ttrain.tracking.tracker import AnyStore, MlflowStore, note_run_id, open_reader
from ttrain.tracking.views import Point, RunView

__all__ = [
    "CARD",
    "CHAMPION",
    "ENVIRONMENT",
    "NOTE",
    "Addresses",
    "AnyRun",
    "AnyStore",
    "Champions",
    "LoadableModel",
    "Member",
    "MetricsFollower",
    "MlflowStore",
    "ModelSet",
    "NullRun",
    "NullStore",
    "Point",
    "RunView",
    "SampleFollower",
    "TrackedRun",
    "addresses",
    "champion_keys_here",
    "data_of",
    "database_of",
    "delivered_identities",
    "find_version",
    "last_of",
    "list_sets",
    "log_result",
    "masked",
    "note_run_id",
    "of_tasks",
    "open_own_store",
    "open_reader",
    "open_store",
    "prepare",
    "read_by",
    "read_local",
    "read_run",
    "read_runs",
    "refresh_views",
    "registered_keys",
    "repair_moved_home",
    "server_app",
    "set_damaged_aside",
    "source_tags",
    "status_of",
    "sync",
    "tracking_uri",
    "undelivered_runs",
]
log = logging.getLogger("ttrain")


def open_store(home: Path, experiment: str) -> AnyStore:
    """Open the tracker after creating, migrating or repairing its database; call it once, before threads share the store.

    A server that does not answer still gives a MlflowStore, which tries again at each run.
    """
    home = home.resolve()
    if not is_installed():
        log.info("MLflow is not installed, so nothing is tracked; to track runs: pip install mlflow")
        return NullStore()
    uri = tracking_uri(home)
    silence()
    store = MlflowStore(uri, home, experiment)
    _, error = attempt(lambda: store.client)
    if error is not None and not (is_out_of_use(error) or is_disk_full(error)):
        log.warning("MLflow at %s cannot be opened, nothing is tracked: %s", without_user(uri), first_line(error))
        return NullStore()
    store.caller.is_silent |= error is not None
    _, error = store.caller.try_call(store.experiment_id)
    if error is not None:
        store.caller.warn("opening the experiment", error)
    store.deliver_orphans()
    return store


def open_own_store(home: Path, experiment: str) -> MlflowStore:
    """Open the home's own database, whatever MLFLOW_TRACKING_URI says, to restore its runs. Raises TrackingError."""
    home = home.resolve()
    need_mlflow("nothing can be delivered to")
    store = MlflowStore(f"sqlite:///{database_of(home)}", home, experiment)
    _, error = attempt(lambda: store.client)
    if error is not None:
        raise TrackingError(f"MLflow's database cannot be opened: {first_line(error)}") from error
    return store


def delivered_identities(home: Path) -> frozenset[str]:
    """Identities of the runs that are complete in the home's own database, also of deleted ones. Raises TrackingError."""
    if not database_of(home).exists():
        return frozenset()
    client = open_own_store(home, "").client
    everything = import_module("mlflow.entities").ViewType.ALL

    try:
        experiments = all_pages(partial(client.search_experiments, view_type=everything))
        ids = [experiment.experiment_id for experiment in experiments]
        runs = all_pages(partial(client.search_runs, ids, "tags.`ttrain.outcome` != ''", run_view_type=everything))
    except Exception as error:
        raise cannot_be_queried(f"sqlite:///{database_of(home)}", "for its runs", error) from error
    return frozenset(run.data.tags[IDENTITY] for run in runs if IDENTITY in run.data.tags)


def addresses(home: Path, experiments: Iterable[str], run_ids: Sequence[str] = ()) -> Addresses | None:
    """Addresses of MLflow's pages for these runs, else for the first of these experiments that exists, after updating its
    views. None if none exists. Raises TrackingError if MLflow does not answer."""
    need_mlflow("pages are shown by")
    uri = tracking_uri(home.resolve())
    if is_missing(uri, home):
        return None
    store, error = attempt(lambda: open_reader(home))
    pages = None
    if store is not None:
        pages, error = store.caller.try_call(lambda: addresses_of(store.client, experiments, run_ids))
    if error is not None:
        raise cannot_be_queried(uri, "for its pages", error) from error
    return pages


def prepare(home: Path) -> None:
    """Create, migrate or repair the home's own database before a server opens it, which would do neither by our rules.

    Raises OtherVersionError: no server can open that database.
    """
    home = home.resolve()
    if not is_installed():
        return
    silence()
    _, error = attempt(lambda: open_client(f"sqlite:///{database_of(home)}", home))
    if isinstance(error, OtherVersionError):
        raise error
    if error is not None:
        log.warning("MLflow's database %s cannot be prepared: %s", database_of(home), first_line(error))


def server_app(home: Path) -> Any:
    """MLflow's server application over the home's own database and files, as `mlflow server` runs it, for uvicorn.

    Used instead of that command, which imports all of MLflow once more before it starts this. Raises MLflow's errors.
    """
    names: Any = import_module("mlflow.server.constants")
    uri, artifacts = f"sqlite:///{database_of(home)}", artifacts_of(home)
    os.environ[names.BACKEND_STORE_URI_ENV_VAR] = uri
    os.environ[names.ARTIFACT_ROOT_ENV_VAR] = os.environ[names.ARTIFACTS_DESTINATION_ENV_VAR] = artifacts
    os.environ[names.SERVE_ARTIFACTS_ENV_VAR] = "true"
    import_module("mlflow.server.handlers").initialize_backend_stores(uri, uri, artifacts)
    return import_module("mlflow.server.fastapi_app").app
