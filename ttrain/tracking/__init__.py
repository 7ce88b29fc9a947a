"""MLflow behind one door: runs, curves, artifacts, registered models. No other module imports mlflow.

It runs in the orchestrating process; training children write `metrics.jsonl` and a follower carries it over. MLflow is
imported when a store is opened (0.9 s, its SQL store 0.5 s, a fresh schema 0.6 s more), never by importing this module.

The pipeline's result does not depend on the tracker, so its troubles become one warning each, never an exception: what
is small (parameters, tags, summaries, states) waits in `Store` for the server to come back, curves wait in their file.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ttrain.errors import UsageError
from ttrain.tracking.calls import first_line, outcome, shown
from ttrain.tracking.database import database_of, mend_moved_home, open_client
from ttrain.tracking.follower import MetricsFollower
from ttrain.tracking.registry import Version
from ttrain.tracking.registry import find_version as _find_version
from ttrain.tracking.runs import NullRun, Run
from ttrain.tracking.store import NullStore, Store

__all__ = [
    "ENVIRONMENT",
    "MetricsFollower",
    "NullRun",
    "NullStore",
    "Run",
    "Store",
    "Version",
    "find_version",
    "mend_moved_home",
    "open_store",
    "prepare",
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


def find_version(home: Path, name: str, *, version: str | None = None, alias: str | None = None) -> Version:
    """A registered model's version, by its number or its alias. Raises UsageError that lists what is registered."""
    if not _is_installed():
        raise UsageError(
            f"'{name}' is looked up in MLflow, which is not installed; pip install mlflow, or name a run or stage"
        )
    _quieten()
    home = home.resolve()
    return _find_version(home, tracking_uri(home), name, version=version, alias=alias)


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
