"""Versions of registered models: found by what they are, made once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, final
from urllib.parse import quote

from ttrain.tracking import model_sets
from ttrain.tracking.calls import unless_there
from ttrain.tracking.model_description import describe, marked
from ttrain.tracking.runs import Run


@final
class Versions:
    """The registered models of one MLflow. Every method raises what MLflow does."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def find(self, name: str, tags: Mapping[str, str]) -> str | None:
        """The first version whose tags `ttrain.key` and `ttrain.content` are these."""
        found = self._found(name, tags)
        return str(found.version) if found else None

    def _found(self, name: str, tags: Mapping[str, str]) -> Any:
        versions = model_sets.all_pages(partial(self._client.search_model_versions, f"name='{name}'"))
        same = [
            version
            for version in versions
            if all(tag in tags and version.tags.get(tag) == tags[tag] for tag in ("ttrain.key", "ttrain.content"))
        ]
        return min(same, key=lambda version: int(version.version), default=None)

    def register(
        self, name: str, run: Run, artifact_path: str, tags: Mapping[str, str], description: str = "", about: str = ""
    ) -> str:
        """The version whose files the run holds under `artifact_path`; one with the same tags is taken, and described anew.

        `about` is told of the registered model, once.
        """
        assert run.artifact_uri is not None, "the run is bound"
        # A plain directory is a fine source. "runs:/..." would be one too, but MLflow copies that into a temporary
        # directory at each download, where an absolute location is used in place.
        source = f"{run.artifact_uri}/{quote(artifact_path) if run.artifact_uri.startswith('file:') else artifact_path}"
        unless_there(partial(self._client.create_registered_model, name, description=marked(about) if about else None))
        first = self._found(name, tags)
        if first is None:
            made = self._client.create_model_version(name, source, run.id, tags=dict(tags), await_creation_for=0)
            first = self._found(name, tags) or made
            if str(first.version) != str(made.version):  # another home registered it between the question and the answer
                self._client.delete_model_version(name, str(made.version))
        describe(self._client, first, description)
        return str(first.version)
