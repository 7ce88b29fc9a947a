"""Keys of the artifacts behind registered models, which garbage collection must keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, final
from urllib.parse import quote

from ttrain.config.data import LEARNT
from ttrain.core.redact import without_user
from ttrain.errors import TrackingError
from ttrain.tracking import model_sets
from ttrain.tracking.calls import attempt, create_if_missing, first_line
from ttrain.tracking.database import is_missing, open_client
from ttrain.tracking.model_description import marked, set_description
from ttrain.tracking.model_sets import KEY, all_pages
from ttrain.tracking.registry import CHAMPION, MEMBER
from ttrain.tracking.runs import TrackedRun

INPUTS: Final = ("base", "tokenizer")  # a model is useless without them, but not without its training data

WITH_A_SET: Final = ("evaluate",)  # metrics that are compared with those of the next set
# The files that the champion was trained on, and the held-out rows: the next night needs both.
WITH_A_CHAMPION: Final = tuple(f"shards-{dataset}" for dataset in LEARNT)


def registered_keys(home: Path, uri: str) -> frozenset[str]:
    """Keys of the artifacts behind all registered models. Raises TrackingError if MLflow cannot be queried."""
    if is_missing(uri, home):
        return frozenset()  # nothing was ever tracked; a query would create the database

    def ask() -> tuple[list[Any], list[Any]]:
        client = open_client(uri, home)
        versions = all_pages(partial(client.search_model_versions, ""))
        return versions, all_pages(client.search_registered_models)  # only these have the aliases

    listing, error = attempt(ask)
    if listing is None:
        raise TrackingError(
            f"MLflow at {without_user(uri)} cannot be queried which models are registered: {error and first_line(error)}; "
            f"start it, or set MLFLOW_TRACKING_URI to the one that holds them"
        )
    versions, models = listing
    champions = {model.name: str(model.aliases.get(CHAMPION)) for model in models}
    return frozenset(
        key for version in versions for key in _keys_of(version.tags, champions.get(version.name) == str(version.version))
    )


def _keys_of(tags: Mapping[str, str], is_champion: bool) -> Iterator[str]:
    names = ["ttrain.key", *(f"ttrain.input.{name}" for name in INPUTS), *(f"{KEY}{stage}" for stage in WITH_A_SET)]
    names += [f"{KEY}{stage}" for stage in WITH_A_CHAMPION if is_champion]
    names += [f"{KEY}{tag.removeprefix(MEMBER)}" for tag in tags if tag.startswith(MEMBER)]
    yield from (tags[name] for name in names if tags.get(name))


@final
class ModelRegistry:
    """The registered models of one MLflow. Every method raises MLflow's errors."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def find(self, name: str, tags: Mapping[str, str]) -> str | None:
        """The first version whose tags `ttrain.key` and `ttrain.content` are these."""
        version = self._first_version(name, tags)
        return str(version.version) if version else None

    def _first_version(self, name: str, tags: Mapping[str, str]) -> Any:
        versions = model_sets.all_pages(partial(self._client.search_model_versions, f"name='{name}'"))
        same = [
            version
            for version in versions
            if all(tag in tags and version.tags.get(tag) == tags[tag] for tag in ("ttrain.key", "ttrain.content"))
        ]
        return min(same, key=lambda version: int(version.version), default=None)

    def register(
        self,
        name: str,
        run: TrackedRun,
        artifact_path: str,
        tags: Mapping[str, str],
        description: str = "",
        model_description: str = "",
    ) -> str:
        """Register the files under the run's `artifact_path`; a version with the same tags is reused, and described anew.

        `model_description` is set on the registered model, once.
        """
        assert run.artifact_uri is not None, "the run is created in MLflow first"
        # A plain directory is a fine source. "runs:/..." would be one too, but MLflow copies that into a temporary
        # directory at each download, where an absolute location is used in place.
        source = f"{run.artifact_uri}/{quote(artifact_path) if run.artifact_uri.startswith('file:') else artifact_path}"
        create_if_missing(
            partial(
                self._client.create_registered_model,
                name,
                description=marked(model_description) if model_description else None,
            )
        )
        first = self._first_version(name, tags)
        if first is None:
            created = self._client.create_model_version(name, source, run.id, tags=dict(tags), await_creation_for=0)
            first = self._first_version(name, tags) or created
            if str(first.version) != str(created.version):  # another home registered it between the question and the answer
                self._client.delete_model_version(name, str(created.version))
        set_description(self._client, first, description)
        return str(first.version)
