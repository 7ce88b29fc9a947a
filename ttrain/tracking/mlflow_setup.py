"""Which MLflow is meant, whether the package is installed, and what keeps it quiet. Imports no MLflow."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from ttrain.errors import TrackingError
from ttrain.store.server_records import with_token
from ttrain.tracking.database import database_of

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
    """MLFLOW_TRACKING_URI where it is set and not empty, else the SQLite file under this home.

    With the token as its password where it is the home's own server, so write it nowhere but through `without_user`.
    """
    named = os.environ.get("MLFLOW_TRACKING_URI")
    return with_token(home, named) if named else f"sqlite:///{database_of(home)}"


def is_installed() -> bool:
    """Whether MLflow can be imported."""
    spec = find_spec("mlflow")
    return spec is not None and spec.origin is not None  # without one it is a mere directory, such as the home's own


def check_installed() -> None:
    """Raises TrackingError where MLflow is not installed."""
    if not is_installed():
        raise TrackingError("what waits is told to MLflow, which is not installed; pip install mlflow")


def silence() -> None:
    """Keep MLflow and what it stands on away from the terminal; what matters comes through our own logger."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic", "sqlalchemy"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [logging.NullHandler()], False
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns at each retry
