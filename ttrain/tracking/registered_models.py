"""Which artifacts the registered models are, so that cleaning leaves them alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from ttrain.core.redact import without_user
from ttrain.errors import TrackingError
from ttrain.tracking.calls import first_line, outcome
from ttrain.tracking.database import database_of, open_client
from ttrain.tracking.model_sets import KEY, MEMBER, all_pages
from ttrain.tracking.registry import CHAMPION

INPUTS: Final = ("base", "tokenizer")  # what a model is of no use without; what it was trained on is another matter
WITH_A_SET: Final = ("evaluate",)  # figures that are compared with those of the next set
# Which files the champion has learnt, and what was held out: the next night asks for both.
WITH_A_CHAMPION: Final = ("shards-pretrain", "shards-sft", "shards-lora")


def registered_keys(home: Path, uri: str) -> frozenset[str]:
    """Keys of the artifacts behind all versions of all registered models. Raises TrackingError where nobody can be asked."""
    if uri == f"sqlite:///{database_of(home)}" and not database_of(home).exists():
        return frozenset()  # nothing was ever tracked; asking would make the database

    def ask() -> tuple[list[Any], list[Any]]:
        client = open_client(uri, home)
        versions = all_pages(partial(client.search_model_versions, ""))
        return versions, all_pages(client.search_registered_models)  # only these tell the aliases

    found, error = outcome(ask)
    if found is None:
        raise TrackingError(
            f"MLflow at {without_user(uri)} cannot be asked which models are registered: {error and first_line(error)}; "
            f"start it, or set MLFLOW_TRACKING_URI to the one that holds them"
        )
    versions, models = found
    champions = {model.name: str(model.aliases.get(CHAMPION)) for model in models}
    return frozenset(
        key for version in versions for key in _keys_of(version.tags, champions.get(version.name) == str(version.version))
    )


def _keys_of(tags: Mapping[str, str], is_champion: bool) -> Iterator[str]:
    names = ["ttrain.key", *(f"ttrain.input.{name}" for name in INPUTS), *(f"{KEY}{stage}" for stage in WITH_A_SET)]
    names += [f"{KEY}{stage}" for stage in WITH_A_CHAMPION if is_champion]
    names += [f"{KEY}{tag.removeprefix(MEMBER)}" for tag in tags if tag.startswith(MEMBER)]
    yield from (tags[name] for name in names if tags.get(name))
