"""MLflow's registered models as a view of the home's registry: versions, aliases, descriptions; what moved there comes back.

A version here and one in MLflow are the same if they have the same identity, the digest of the keys and contents of their
models. Their numbers are equal where nobody registered or deleted others there.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.core.files import parse_object
from ttrain.core.hashing import digest_of
from ttrain.store.registry import CHAMPION, ModelSet, Registry, Version
from ttrain.tracking.book import Book
from ttrain.tracking.client import cannot_be_asked, database_of, is_installed, own_uri, plain, tracking_uri
from ttrain.tracking.mirror import Mirror

log = logging.getLogger("ttrain")

IDENTITY = "ttrain.id"  # tag of a version
FACTS = "ttrain.set"  # tag of a set: what another home needs to take it over
TAG_CHARACTERS = 4900  # of a version's tag, by MLflow's limit
CHARACTERS = 5000  # of a description, by the limit of MLflow's database
MARK = re.compile(r"\n\n<!-- ttrain ([0-9a-f]{12}) -->\Z")  # ends a description that ttrain wrote
MARK_CHARACTERS = 30


@dataclass(frozen=True)
class Registration:
    """A version as MLflow shall show it. `about`: of the registered model, set once."""

    name: str
    identity: str
    source: str  # location of its files
    run_id: str | None  # MLflow's, of the run that holds them
    description: str = ""
    about: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


def identity_of(version: Version | ModelSet) -> str:
    """Digest of the model, or models, that a version is."""
    if isinstance(version, Version):
        return digest_of([version.key, version.content])
    return digest_of({stage: [member.key, member.content] for stage, member in version.members.items()})


def facts_of(model_set: ModelSet) -> dict[str, str]:
    """The tag of a set, without its metrics where they are too many for a tag."""
    members = {stage: [one.name, one.version, one.key, one.content] for stage, one in model_set.members.items()}
    facts = {"run": model_set.run, "keys": dict(model_set.keys), "members": members, "metrics": dict(model_set.metrics)}
    text = json.dumps(facts)
    return {FACTS: text if len(text) <= TAG_CHARACTERS else json.dumps({**facts, "metrics": {}})}


def register(mirror: Mirror, version: Registration) -> str:
    """Bring one version up to date, creating it if there is none of its identity; returns MLflow's number of it."""
    entity = _versions(mirror, version.name).get(version.identity)
    if entity is None:
        _create_model(mirror, version.name, version.about)
        tags = {IDENTITY: version.identity, **version.tags}
        entity = mirror.call(
            "create_model_version", version.name, version.source, version.run_id, tags=tags, await_creation_for=0
        )
    number = str(entity.version)
    for tag, value in version.tags.items():
        if entity.tags.get(tag) != value:
            mirror.call("set_model_version_tag", version.name, number, tag, value)
    text = marked(version.description.replace("<NAME/VERSION>", f"{version.name}/{number}"))
    if version.description and text != entity.description and is_ours(entity.description):
        mirror.call("update_model_version", version.name, number, text)
    return number


def number_of(mirror: Mirror, version: Version | ModelSet) -> str | None:
    """MLflow's number of a version; None if it has none of this identity."""
    entity = _versions(mirror, version.name).get(identity_of(version))
    return str(entity.version) if entity else None


def push_aliases(mirror: Mirror, registry: Registry, name: str) -> None:
    """Bring the aliases of a pipeline's sets, and of their members, up to date."""
    book = Book(mirror.home, mirror.uri)
    sets = registry.sets(name)
    identities_by_model: dict[str, dict[str, str]] = {name: {}}
    for member in (member for model_set in sets for member in model_set.members.values()):
        identities_by_model.setdefault(member.name, {})
    for model_set in sets:
        for alias in model_set.aliases:
            identities_by_model[name][alias] = identity_of(model_set)
            for member in model_set.members.values():
                identities_by_model[member.name][alias] = identity_of(member)
    for model, identities in identities_by_model.items():
        numbers = {identity: str(one.version) for identity, one in _versions(mirror, model).items()}
        aliases = {alias: numbers[identity] for alias, identity in identities.items() if identity in numbers}
        theirs = _aliases(mirror, model)
        for alias in theirs.keys() & {CHAMPION, "challenger"} - aliases.keys():
            mirror.call("delete_registered_model_alias", model, alias)
        for alias, number in aliases.items():
            if theirs.get(alias) != number:
                mirror.call("set_registered_model_alias", model, alias, number)
        book.note_aliases(model, aliases)


def push_champion(home: Path, name: str) -> None:
    """Bring the aliases of a pipeline's sets up to date where MLflow has runs of this home; a failure is a warning."""
    uri = tracking_uri(home)
    if not is_installed() or not Book(home, uri).runs:
        return
    try:
        push_aliases(Mirror(home, uri), Registry(home), name)
        Book(home, uri).note_seen()
    except Exception as error:  # MLflow may raise anything
        log.warning("%s; the next run of %s brings its aliases there", cannot_be_asked(uri, error), name)


def take_over_champions(home: Path, model: str | None = None) -> Registry:
    """Make the sets champion here whose alias somebody moved on MLflow's page, or another home on a shared server: of this
    pipeline, `model`, or of all that are registered here. Returns the registry, as it is then.

    If MLflow does not answer, the home's own champions stay.
    """
    uri, state = tracking_uri(home), Registry(home).read()
    names = {*state["sets"], *([model] if model and model not in state["models"] else [])}
    book, is_own = Book(home, uri), uri == own_uri(home)
    if not names or not is_installed() or (is_own and (not database_of(home).exists() or book.is_seen())):
        return Registry(home)
    try:
        mirror = Mirror(home, uri)
        for name in sorted(names):
            take_over_champion(mirror, name)
        book.note_seen()
    except Exception as error:  # MLflow may raise anything
        log.warning("whether the champion was moved in MLflow is not known: %s", cannot_be_asked(uri, error))
    return Registry(home)


def take_over_champion(mirror: Mirror, name: str) -> None:
    """Take over the champion that MLflow has of a pipeline, if it is another than was pushed last.

    An alias that was removed there does not count, nor one of the home's own database whose pushes are not known.
    """
    number, noted = _aliases(mirror, name).get(CHAMPION), Book(mirror.home, mirror.uri).aliases(name)
    if number is None or number == (noted or {}).get(CHAMPION) or (noted is None and mirror.is_own):
        return
    _promote(Registry(mirror.home), name, mirror.call("get_model_version", name, number))
    push_aliases(mirror, Registry(mirror.home), name)


def _promote(registry: Registry, name: str, version: Any) -> None:
    """Make the set of a version of MLflow champion, after taking it over if it is not of this home."""
    identity = version.tags.get(IDENTITY)
    model_set = next((one for one in registry.sets(name) if identity_of(one) == identity), None)
    facts = parse_object(version.tags.get(FACTS, ""))
    if model_set is None and facts:
        members = {
            stage: Version(model, number, stage, key, content, facts["run"])
            for stage, (model, number, key, content) in facts["members"].items()
        }
        created = version.creation_timestamp / 1000
        model_set = registry.adopt(
            ModelSet(name, str(version.version), members, facts["keys"], facts["run"], created, facts["metrics"])
        )
    if model_set is not None:
        log.warning("%s/%s is the champion, as its alias was moved in MLflow", name, model_set.version)
        registry.promote(name, model_set.version)


def _versions(mirror: Mirror, name: str) -> dict[str, Any]:
    """The versions of a registered model by identity, the first one of each."""
    versions = all_pages(partial(mirror.call, "search_model_versions", f"name = '{name}'"))
    versions.sort(key=lambda version: int(version.version), reverse=True)
    return {version.tags[IDENTITY]: version for version in versions if IDENTITY in version.tags}


def _aliases(mirror: Mirror, name: str) -> dict[str, str]:
    models = mirror.call("search_registered_models", f"name = '{name}'")
    return {alias: str(number) for model in models for alias, number in model.aliases.items()}


def _create_model(mirror: Mirror, name: str, about: str) -> None:
    try:
        mirror.call("create_registered_model", name, description=marked(about) if about else None)
    except Exception as error:
        if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
            raise


def all_pages(search: Any) -> list[Any]:
    """All results of an MLflow search, from all pages."""
    page = search()
    entities = list(page)
    while page.token:
        page = search(page_token=page.token)
        entities += page
    return entities


def marked(text: str) -> str:
    """A description by ttrain, cut to MLflow's limit, with its digest in a comment that the pages hide."""
    text = plain(text)[: CHARACTERS - MARK_CHARACTERS]
    return f"{text}\n\n<!-- ttrain {digest_of(text)[:12]} -->"


def is_ours(description: str | None) -> bool:
    """Whether the description is empty or as ttrain wrote it: a user's own text stays."""
    match = MARK.search(description or "")
    return not description or (match is not None and marked(description[: match.start()]) == description)
