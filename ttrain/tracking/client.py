"""MLflow's client: which MLflow, the home's own database, and the names that it accepts.

If MLflow refuses to open the home's database (damaged, of another version), it is renamed aside and
made again; the pushes fill it.
"""

import contextlib
import logging
import os
import re
import sqlite3
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from ttrain.core import redact
from ttrain.core.files import exclusive, private_directory
from ttrain.core.sqlite_files import damage_of, set_aside
from ttrain.store.server_records import with_token

log = logging.getLogger("ttrain")

# Set unless the user did. MLflow's own 7 retries of 120 s block for 246 s if the server is dead.
ENVIRONMENT = {
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_CONFIGURE_LOGGING": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the next push is the retry
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
KEY_CHARACTERS = 250  # of a name, by MLflow's rule
LOCK_SECONDS = 30
NO_ANSWER = re.compile(
    "failed with (timeout )?exception|Max retries exceeded|Connection (refused|aborted)"
    "|Read timed out"
)
NO_FAULT_OF_THE_FILE = re.compile(
    "locked|unable to open|readonly|disk (I/O|is full)|no space|permission denied", re.IGNORECASE
)
# Columns of MLflow's database that hold locations on disk (3.17)
LOCATIONS = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("model_versions", "source"),
    ("model_versions", "storage_location"),
)


def tracking_uri(home: Path) -> str:
    """MLFLOW_TRACKING_URI, or the SQLite file under this home.

    It may contain the home's token as its password: print it only through `without_user`.
    """
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    return with_token(home, uri) if uri else own_uri(home)


def own_uri(home: Path) -> str:
    return f"sqlite:///{database_of(home)}"


def database_of(home: Path) -> Path:
    return home.resolve() / "mlflow" / "mlflow.db"


def artifacts_of(home: Path) -> str:
    """The artifact root as a URI: a plain path with a space, % or # would be misread."""
    return (home.resolve() / "mlflow" / "artifacts").as_uri()


def silence() -> None:
    """Keep logs of MLflow and its libraries off the terminal."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name in ("mlflow", "alembic", "sqlalchemy"):
        logger = logging.getLogger(name)
        logger.handlers = [logging.NullHandler()]
        logger.propagate = False


def open_client(uri: str, home: Path) -> Any:
    """MLflow's client; creates the home's own database if needed. Raises MLflow's errors."""
    silence()
    if uri != own_uri(home):
        return import_module("mlflow").MlflowClient(uri, uri)
    database = database_of(home)
    private_directory(database.parent)
    # two that start at once would both make the tables
    with exclusive(database.with_name("mlflow.lock")):
        is_new = not database.exists() or not database.stat().st_size  # an empty file is none
        try:
            if damage := damage_of(database):
                raise sqlite3.DatabaseError(damage)
            client = _open_own(uri, is_new=is_new)
        except Exception as error:
            if is_new or NO_FAULT_OF_THE_FILE.search(str(error)):
                raise
            log.warning(
                "MLflow's database could not be used (%s): it is kept as %s, "
                "and made anew from the home",
                first_line(error),
                set_aside(database),
            )
            client = _open_own(uri, is_new=True)
        _move_into(home, client)
    return client


_made = Counter[str]()  # by URI of a database: how often this process made it


def _open_own(uri: str, *, is_new: bool) -> Any:
    # MLflow keeps its connections by address, also those to a file that was replaced. So a new file
    # has another address, which differs in the seconds for which SQLite waits for a lock.
    _made[uri] += is_new
    address = f"{uri}?timeout={LOCK_SECONDS + _made[uri]}"
    client = import_module("mlflow").MlflowClient(address, address)
    client.search_experiments(max_results=1)
    client.search_registered_models(
        max_results=1
    )  # opens the registry's half too, before threads start
    return client


def _move_into(home: Path, client: Any) -> None:
    # MLflow stores absolute locations and cannot change them: those of a home that was moved or
    # copied are rewritten in its database
    place = artifacts_of(home)
    theirs = {experiment.artifact_location for experiment in client.search_experiments()} - {place}
    for old in (location for location in theirs if location.endswith("/mlflow/artifacts")):
        with (
            contextlib.closing(sqlite3.connect(database_of(home), timeout=10)) as database,
            database,
        ):
            for table, column in LOCATIONS:
                database.execute(
                    f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (old, place)
                )


def server_app(home: Path) -> Any:
    """MLflow's server application over the home's own database, for uvicorn.

    `mlflow server` would import all of MLflow twice. Raises MLflow's errors.
    """
    names: Any = import_module("mlflow.server.constants")
    uri = own_uri(home)
    artifacts = artifacts_of(home)
    os.environ[names.BACKEND_STORE_URI_ENV_VAR] = uri
    os.environ[names.ARTIFACT_ROOT_ENV_VAR] = os.environ[names.ARTIFACTS_DESTINATION_ENV_VAR] = (
        artifacts
    )
    os.environ[names.SERVE_ARTIFACTS_ENV_VAR] = "true"
    import_module("mlflow.server.handlers").initialize_backend_stores(uri, uri, artifacts)
    return import_module("mlflow.server.fastapi_app").app


def unreachable_message(uri: str, error: Exception) -> str:
    """One line: which MLflow, its answer, a fix."""
    cause = " does not answer" if NO_ANSWER.search(str(error)) else f": {first_line(error)}"
    fix = "; start it, or set MLFLOW_TRACKING_URI to another one" if uri.startswith("http") else ""
    if "error code 401 " in cause or "error code 403 " in cause:
        fix = (
            "; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        )
    return f"MLflow at {redact.without_user(uri)}{cause}{fix}"


def first_line(error: Exception) -> str:
    """The error on one line; of a long one the beginning and the end, where the cause is."""
    text = redact.text(str(error).split("\n")[0])
    return (text if len(text) <= 300 else f"{text[:140]} ... {text[-150:]}") or type(error).__name__


def local_path(uri: str) -> Path | None:
    """The path of a location on this machine's disks; None for any other location."""
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return None if parts.scheme else Path(uri)


def clean(key: str) -> str:
    """A name that MLflow accepts: only its characters, no upward path, no empty segments."""
    parts = re.sub(r"[^/\w.\- :]", "_", key).split("/")
    name = "/".join(segment for segment in parts if segment.strip(". "))[:KEY_CHARACTERS]
    return name.rstrip("/ ") or "_"


def plain(value: object) -> str:
    """A text that databases and JSON accept: without NUL and lone surrogates."""
    return str(value).replace("\0", "\ufffd").encode("utf-8", "replace").decode()
