"""Registered models: a version for each artifact, and the keys behind them, which garbage collection must keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from ttrain.config.data import LEARNT
from ttrain.tracking.calls import all_pages
from ttrain.tracking.client import cannot_be_queried, need_mlflow, tracking_uri
from ttrain.tracking.database import is_missing, open_client
from ttrain.tracking.model_description import set_description
from ttrain.tracking.model_sets import KEY, first_version, register_version
from ttrain.tracking.outbox import undelivered_keys
from ttrain.tracking.registry import CHAMPION, MEMBER
from ttrain.tracking.runs import TrackedRun

ARTIFACT: Final = ("ttrain.key", "ttrain.content")  # tags that name the artifact of a version

INPUTS: Final = ("base", "tokenizer")  # a model is useless without them, but not without its training data

WITH_A_SET: Final = ("evaluate",)  # metrics that are compared with those of the next set
# The files that the champion was trained on, and the held-out rows: the next night needs both.
WITH_A_CHAMPION: Final = tuple(f"shards-{dataset}" for dataset in LEARNT)


def registered_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts behind registered models, of their inputs, and of those that wait to be uploaded.

    Raises TrackingError if MLflow cannot be queried.
    """
    need_mlflow("registered models are listed by")
    home = home.resolve()
    waiting, uri = undelivered_keys(home), tracking_uri(home)
    if is_missing(uri, home):
        return waiting  # nothing was ever tracked; a query would create the database
    try:
        client = open_client(uri, home)
        versions = all_pages(partial(client.search_model_versions, ""))
        models = all_pages(client.search_registered_models)  # only these have the aliases
    except Exception as error:
        raise cannot_be_queried(uri, "which models are registered", error) from None
    champions = {model.name: str(model.aliases.get(CHAMPION)) for model in models}
    return waiting.union(
        key for version in versions for key in _keys_of(version.tags, champions.get(version.name) == str(version.version))
    )


def _keys_of(tags: Mapping[str, str], is_champion: bool) -> Iterator[str]:
    names = ["ttrain.key", *(f"ttrain.input.{name}" for name in INPUTS), *(f"{KEY}{stage}" for stage in WITH_A_SET)]
    names += [f"{KEY}{stage}" for stage in WITH_A_CHAMPION if is_champion]
    names += [f"{KEY}{tag.removeprefix(MEMBER)}" for tag in tags if tag.startswith(MEMBER)]
    yield from (tags[name] for name in names if tags.get(name))


def version_of(client: Any, name: str, tags: Mapping[str, str]) -> str | None:
    """The first version of the artifact that these tags name."""
    version = first_version(client, name, tags, ARTIFACT)
    return str(version.version) if version else None


def register(run: TrackedRun, model: Mapping[str, Any]) -> str:
    """Register the files under `artifact_path` of the run; a version of the same artifact is reused, and described anew."""
    assert run.artifact_uri is not None, "the run is created in MLflow first"
    client, path = run.store.client, model["artifact_path"]
    # A plain directory is a fine source. "runs:/..." would be one too, but MLflow copies that into a temporary
    # directory at each download, where an absolute location is used in place.
    source = f"{run.artifact_uri}/{quote(path) if run.artifact_uri.startswith('file:') else path}"
    version = register_version(
        client, model["name"], model["tags"], ARTIFACT, lambda: (source, run.id), about=model.get("about", "")
    )
    set_description(client, version, model.get("description", ""))
    return str(version.version)
