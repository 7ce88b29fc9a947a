"""Look up a version of a registered model by number or alias. Only reads, and creates no database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ttrain.core.redact import without_user
from ttrain.errors import UsageError
from ttrain.tracking.calls import attempt, code_of, first_line
from ttrain.tracking.client import is_installed, silence, tracking_uri
from ttrain.tracking.database import database_of, open_client
from ttrain.tracking.uploads import local_path

CHAMPION: Final = "champion"  # alias of the set of models that is in use


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model; `source` is None if its files are not on a disk of this machine."""

    name: str
    version: str
    source: Path | None
    tags: Mapping[str, str]
    run_id: str | None = None


def find_version(home: Path, name: str, *, version: str | None = None, alias: str | None = None) -> ModelVersion:
    """The version with this number, or this alias. Raises UsageError that lists what is registered."""
    if not is_installed():
        raise UsageError(
            f"'{name}' is looked up in MLflow, which is not installed; pip install mlflow, or name a run or stage"
        )
    silence()
    home = home.resolve()
    uri = tracking_uri(home)
    reference = f"{name}@{alias}" if alias else f"{name}/{version}"
    if uri == f"sqlite:///{database_of(home)}" and not database_of(home).exists():
        raise UsageError(f"there is no registered model '{reference}': nothing is registered in {home} yet")
    client, error = attempt(lambda: open_client(uri, home))
    if client is None:
        raise UsageError(f"MLflow at {without_user(uri)} cannot be queried for '{reference}': {error and first_line(error)}")

    def ask() -> Any:
        return client.get_model_version_by_alias(name, alias) if alias else client.get_model_version(name, str(version))

    entity, error = attempt(ask)
    if entity is None:
        unknown = error is not None and code_of(error) in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
        if not unknown:
            raise UsageError(
                f"MLflow at {without_user(uri)} cannot be queried for '{reference}': {error and first_line(error)}"
            )
        raise UsageError(
            f"there is no registered model '{reference}'; registered are {_describe_models(client) or 'none'}{_fix(alias)}"
        )
    return ModelVersion(name, str(entity.version), local_path(entity.source), dict(entity.tags), entity.run_id or None)


def _fix(alias: str | None) -> str:
    return (
        "; no set of models is champion before `ttrain models promote` or a nightly run promotes one"
        if alias == CHAMPION
        else ""
    )


def _describe_models(client: Any) -> str:
    """Names, newest version and aliases: "a/3 (champion: 2), b/1"."""
    models, _ = attempt(lambda: client.search_registered_models(max_results=50))
    lines = []
    for model in models or ():
        newest = max((int(version.version) for version in model.latest_versions or ()), default=0)
        aliases = ", ".join(f"{alias}: {number}" for alias, number in sorted(model.aliases.items()))
        lines.append(f"{model.name}/{newest}" + (f" ({aliases})" if aliases else ""))
    return ", ".join(lines)
