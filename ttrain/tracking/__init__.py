"""MLflow behind one door: runs, curves, artifacts, registered models. No other module imports mlflow.

It runs in the orchestrating process; training children write `metrics.jsonl` and a follower carries it over. MLflow is
imported when a store is opened (0.9 s, its SQL store 0.5 s, a fresh schema 0.6 s more), never by importing this module.

The pipeline's result does not depend on the tracker, so its troubles become one warning each, never an exception: what
is small (parameters, tags, summaries, states) waits in `Store` for the server to come back, curves wait in their file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from ttrain.errors import TrackingError, UsageError
from ttrain.tracking.calls import first_line, outcome, shown
from ttrain.tracking.champions import Champions, lock_of
from ttrain.tracking.database import database_of, mend_moved_home, open_client
from ttrain.tracking.follower import MetricsFollower
from ttrain.tracking.registered import registered_keys as _registered_keys
from ttrain.tracking.registry import Version
from ttrain.tracking.registry import find_version as _find_version
from ttrain.tracking.runs import NullRun, Run
from ttrain.tracking.sets import CHALLENGER, CHAMPION, Member, ModelSet, last_of, tags_of
from ttrain.tracking.store import NullStore, Store

__all__ = [
    "CHALLENGER",
    "CHAMPION",
    "ENVIRONMENT",
    "Member",
    "MetricsFollower",
    "ModelSet",
    "NullRun",
    "NullStore",
    "Run",
    "Store",
    "Version",
    "champion",
    "find_set",
    "find_version",
    "last_of",
    "list_sets",
    "lock_of",
    "log_decision",
    "mend_moved_home",
    "open_reader",
    "open_store",
    "prepare",
    "promote",
    "registered_keys",
    "rollback",
    "tags_of",
    "tracking_uri",
]
log = logging.getLogger("ttrain")

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
    store, error = outcome(lambda: Store(open_client(uri, home), uri, home, experiment))
    if store is None or error is not None:
        log.warning("MLflow at %s cannot be opened, nothing is tracked: %s", shown(uri), error and first_line(error))
        return NullStore()
    store.tried("opening the experiment", store.experiment_id)
    return store


def open_reader(home: Path) -> Store:
    """The tracker for questions alone: no experiment is made. Raises what MLflow does where it cannot be opened."""
    home = home.resolve()
    uri = tracking_uri(home)
    _quieten()
    return Store(open_client(uri, home), uri, home, "")


def find_version(home: Path, name: str, *, version: str | None = None, alias: str | None = None) -> Version:
    """A registered model's version, by its number or its alias. Raises UsageError that lists what is registered."""
    if not _is_installed():
        raise UsageError(
            f"'{name}' is looked up in MLflow, which is not installed; pip install mlflow, or name a run or stage"
        )
    _quieten()
    home = home.resolve()
    return _find_version(home, tracking_uri(home), name, version=version, alias=alias)


def champion(home: Path, name: str) -> ModelSet | None:
    """The set of models that is champion of this pipeline; None where none was promoted.

    Raises TrackingError where MLflow cannot be asked, as all that follow do: no answer is not the answer none.
    """
    return _champions(home).champion(name)


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
    """Keys of the artifacts that the registered models are, and of what these need. Raises TrackingError."""
    if not _is_installed():
        raise TrackingError("which models are registered is told by MLflow, which is not installed; pip install mlflow")
    _quieten()
    home = home.resolve()
    return _registered_keys(home, tracking_uri(home))


def prepare(home: Path) -> None:
    """Makes the home's own database, or migrates and mends it, for a server that would do neither by our rules."""
    home = home.resolve()
    if not _is_installed():
        return
    _quieten()
    _, error = outcome(lambda: open_client(f"sqlite:///{database_of(home)}", home))
    if error is not None:
        log.warning("MLflow's database %s cannot be prepared: %s", database_of(home), first_line(error))


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
