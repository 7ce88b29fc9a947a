"""Looks registered models up: a version by its number or its alias. Reads only, and makes no database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ttrain.core.redact import without_user
from ttrain.errors import UsageError
from ttrain.tracking.atomic_files import local_path
from ttrain.tracking.calls import code_of, first_line, outcome
from ttrain.tracking.database import database_of, open_client
from ttrain.tracking.mlflow_setup import is_installed, silence, tracking_uri

CHAMPION: Final = "champion"  # alias of the set of models that is in use


@dataclass(frozen=True)
class Version:
    """One version of a registered model; `source` is None where its files lie on no disk of this machine."""

    name: str
    version: str
    source: Path | None
    tags: Mapping[str, str]
    run_id: str | None = None


def find_version(home: Path, name: str, *, version: str | None = None, alias: str | None = None) -> Version:
    """The version with this number, or this alias. Raises UsageError that lists what is registered."""
    if not is_installed():
        raise UsageError(
            f"'{name}' is looked up in MLflow, which is not installed; pip install mlflow, or name a run or stage"
        )
    silence()
    home = home.resolve()
    uri = tracking_uri(home)
    asked = f"{name}@{alias}" if alias else f"{name}/{version}"
    if uri == f"sqlite:///{database_of(home)}" and not database_of(home).exists():
        raise UsageError(f"there is no registered model '{asked}': nothing is registered in {home} yet")
    client, error = outcome(lambda: open_client(uri, home))
    if client is None:
        raise UsageError(f"MLflow at {without_user(uri)} cannot be asked for '{asked}': {error and first_line(error)}")

    def ask() -> Any:
        return client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, str(version))

    found, error = outcome(ask)
    if found is None:
        unknown = error is not None and code_of(error) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        if not unknown:
            raise UsageError(f"MLflow at {without_user(uri)} cannot be asked for '{asked}': {error and first_line(error)}")
        raise UsageError(f"there is no registered model '{asked}'; registered are {_listed(client) or 'none'}{_cure(alias)}")
    return Version(name, str(found.version), local_path(found.source), dict(found.tags), found.run_id or None)


def _cure(alias: str | None) -> str:
    return (
        "; no set of models is champion before `ttrain models promote`, or a night, makes it so" if alias == CHAMPION else ""
    )


def _listed(client: Any) -> str:
    """Names, newest version and aliases: "a/3 (champion: 2), b/1"."""
    models, _ = outcome(lambda: client.search_registered_models(max_results=50))
    lines = []
    for model in models or ():
        newest = max((int(version.version) for version in model.latest_versions or ()), default=0)
        aliases = ", ".join(f"{alias}: {number}" for alias, number in sorted(model.aliases.items()))
        lines.append(f"{model.name}/{newest}" + (f" ({aliases})" if aliases else ""))
    return ", ".join(lines)
