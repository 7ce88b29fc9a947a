"""Look up a version of a registered model by number or alias. Only reads, and creates no database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.core.redact import without_user
from ttrain.errors import UsageError
from ttrain.store.references import BEGIN, Registered, unknown
from ttrain.tracking.calls import attempt, first_line, is_refusal
from ttrain.tracking.client import is_installed, silence, tracking_uri
from ttrain.tracking.database import is_missing, open_client
from ttrain.tracking.uploads import local_path

CHAMPION = "champion"  # alias of the set of models that is in use
MEMBER = "ttrain.member."  # tag of a set, followed by the stage's name: NAME/VERSION of its member
LISTED_MODELS = 50


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model; `source` is None if its files are not on a disk of this machine."""

    name: str
    version: str
    source: Path | None
    tags: Mapping[str, str]
    run_id: str | None = None


def find_version(home: Path, model: Registered) -> ModelVersion:
    """The version of this name. Raises UsageError that lists what is registered."""
    if not is_installed():
        raise UsageError(
            f"'{model}' is looked up in MLflow, which is not installed; pip install mlflow, or name a run or stage"
        )
    silence()
    home = home.resolve()
    uri = tracking_uri(home)
    if is_missing(uri, home):
        raise unknown("registered model", str(model), (), begin=f"nothing is registered in {home}: {BEGIN}")

    def ask() -> tuple[Any, list[Any]]:
        client = open_client(uri, home)
        try:
            if model.alias:
                return _version_by_alias(client, model.name, model.alias), []
            return client.get_model_version(model.name, model.version), []
        except Exception as error:
            if not is_refusal(error):
                raise
            return None, client.search_registered_models(max_results=LISTED_MODELS)

    answer, error = attempt(ask)
    if answer is None:
        raise UsageError(f"MLflow at {without_user(uri)} cannot be queried for '{model}': {error and first_line(error)}")
    entity, models = answer
    if entity is None:
        raise unknown("registered model", str(model), _names(models), shown=LISTED_MODELS, also=_fix(model.alias))
    return ModelVersion(model.name, str(entity.version), local_path(entity.source), dict(entity.tags), entity.run_id or None)


def _version_by_alias(client: Any, name: str, alias: str) -> Any:
    """The version with this alias; if NAME-STAGE has no such alias, the member of the set NAME@ALIAS."""
    try:
        return client.get_model_version_by_alias(name, alias)
    except Exception as error:
        set_name = name.rpartition("-")[0]
        if not set_name or not is_refusal(error):
            raise
        tags = client.get_model_version_by_alias(set_name, alias).tags
        members = [value.rpartition("/") for tag, value in tags.items() if tag.startswith(MEMBER)]
        version = next((version for model, _, version in members if model == name), None)
        if version is None:
            raise
    return client.get_model_version(name, version)


def _fix(alias: str | None) -> str:
    return (
        "; no set of models is champion before `ttrain models promote` or a nightly run promotes one"
        if alias == CHAMPION
        else ""
    )


def _names(models: Iterable[Any]) -> Iterator[str]:
    """NAME/VERSION of the newest version of each model, and NAME@ALIAS of each alias."""
    for model in models:
        newest = max((int(version.version) for version in model.latest_versions or ()), default=0)
        yield f"{model.name}/{newest}"
        yield from (f"{model.name}@{alias}" for alias in sorted(model.aliases))
