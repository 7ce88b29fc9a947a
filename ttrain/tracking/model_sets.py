"""The models of one run as one set: a version of the registered model that is named after the pipeline."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from ttrain.core.files import parse_json
from ttrain.core.hashing import digest_of
from ttrain.tracking.calls import unless_there
from ttrain.tracking.loading_snippets import LOADS
from ttrain.tracking.model_description import describe, marked
from ttrain.tracking.registry import CHAMPION, Version
from ttrain.tracking.runs import Run

CHALLENGER: Final = "challenger"
KIND: Final = "ttrain.kind"
SET: Final = "set"
IDENTITY: Final = "ttrain.set"
RUN_ID = "ttrain.run_id"  # MLflow's, of the pipeline's run; the version itself names the run of its last model
MEMBER, KEY = "ttrain.member.", "ttrain.key."  # followed by the stage's name
METRICS: Final = "ttrain.metrics"
DECISION: Final = "ttrain.decision"
LAST_FIRST: Final = ("lora", "sft", "pretrain")  # which of a set's models is the one to talk to


@dataclass(frozen=True)
class Member:
    """One model of a set: the version of a registered model, and the artifact that it is."""

    name: str
    version: str
    stage: str
    key: str


@dataclass(frozen=True)
class ModelSet:
    """The registered models of one run: `members` by stage, and the keys of all artifacts of that run by stage."""

    name: str
    version: str
    members: Mapping[str, Member]
    keys: Mapping[str, str]
    run: str  # name of the pipeline's run
    run_id: str | None  # MLflow's, of the same run
    created: float  # seconds since 1970
    metrics: Mapping[str, float]  # of its evaluation
    decision: Mapping[str, Any] | None  # the last one about it, as `promotion.Decision.to_json` gives it
    aliases: tuple[str, ...] = ()
    tags: Mapping[str, str] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What `models list --json` prints."""
        return {
            "name": self.name,
            "version": self.version,
            "aliases": list(self.aliases),
            "models": {stage: f"{member.name}/{member.version}" for stage, member in sorted(self.members.items())},
            "keys": dict(sorted(self.keys.items())),
            "run": self.run,
            "run_id": self.run_id,
            "created_unix": self.created,
            "metrics": dict(self.metrics),
            "decision": self.decision,
        }


def set_of(version: Any, aliases: Iterable[str]) -> ModelSet:
    """The set that MLflow's entity of a version describes."""
    tags: dict[str, str] = dict(version.tags)
    return ModelSet(
        name=version.name,
        version=str(version.version),
        members=members_of(tags),
        keys=keys_of(tags),
        run=tags.get("ttrain.run", ""),
        run_id=version.tags.get(RUN_ID) or version.run_id or None,
        created=version.creation_timestamp / 1000,
        metrics=_object(tags.get(METRICS)) or {},
        decision=_object(tags.get(DECISION)),
        aliases=tuple(sorted(aliases)),
        tags=tags,
    )


def keys_of(tags: Mapping[str, str]) -> dict[str, str]:
    """Keys of the artifacts of the run that made a set, by stage, from the tags of the set."""
    return {tag.removeprefix(KEY): value for tag, value in tags.items() if tag.startswith(KEY)}


def members_of(tags: Mapping[str, str]) -> dict[str, Member]:
    """The members that the tags of a set name, by stage."""
    found = {}
    for tag, value in tags.items():
        if tag.startswith(MEMBER):
            stage, (name, _, version) = tag.removeprefix(MEMBER), value.rpartition("/")
            found[stage] = Member(name, version, stage, tags.get(f"{KEY}{stage}", ""))
    return found


def last_of(version: Version) -> Member | None:
    """The model at the end of the chain, where the version is a set: the adapter, else the SFT model, else the base."""
    members = members_of(version.tags) if version.tags.get(KIND) == SET else {}
    return next((members[stage] for stage in LAST_FIRST if stage in members), None)


def tags_of(
    run: str, members: Iterable[Member], contents: Mapping[str, str], keys: Mapping[str, str], metrics: Mapping[str, float]
) -> dict[str, str]:
    """The tags of a version that is a set. `contents` are the digests of what the members hold, by stage."""
    members = list(members)
    return {
        KIND: SET,
        IDENTITY: digest_of({member.stage: [member.key, contents[member.stage]] for member in members}),
        "ttrain.run": run,
        METRICS: json.dumps(dict(metrics), sort_keys=True),
        **{f"{MEMBER}{member.stage}": f"{member.name}/{member.version}" for member in members},
        **{f"{KEY}{stage}": key for stage, key in keys.items()},
    }


def register(client: Any, name: str, run: Run, tags: Mapping[str, str], description: str = "", about: str = "") -> str:
    """The version that is this set; one of the same models is taken, and told of its newest evaluation.

    `about` is told of the registered model, once. The set becomes challenger unless it is the champion. Raises ValueError
    where models of another pipeline bear the name.
    """
    unless_there(partial(client.create_registered_model, name, description=marked(about) if about else None))
    versions = _versions(client, name)
    if any(version.tags.get(KIND) != SET for version in versions):
        raise ValueError(f"the registered model {name} holds models of another pipeline; set another `name`")
    same = [version for version in versions if version.tags.get(IDENTITY) == tags[IDENTITY]]
    if same:
        number = str(min(int(version.version) for version in same))
        known = next(version for version in same if str(version.version) == number)
        for tag, value in tags.items():
            if known.tags.get(tag) != value and tag != "ttrain.run":
                client.set_model_version_tag(name, number, tag, value)
    else:
        source, made_by = _source(client, tags) or (run.artifact_uri, run.id)
        noted = {**tags, RUN_ID: str(run.id)}
        made = client.create_model_version(name, source, made_by, tags=noted, await_creation_for=0)
        equals = [version for version in _versions(client, name) if version.tags.get(IDENTITY) == tags[IDENTITY]]
        known = min(equals, key=lambda version: int(version.version), default=made)
        number = str(known.version)
        if number != str(made.version):  # another home registered it between the question and the answer
            client.delete_model_version(name, str(made.version))
    describe(client, known, description)
    champion = client.get_registered_model(name).aliases.get(CHAMPION)
    if champion is None or str(champion) != number:
        client.set_registered_model_alias(name, CHALLENGER, number)
    return number


def _source(client: Any, tags: Mapping[str, str]) -> tuple[str, str | None] | None:
    """The last of the models that MLflow can open (the adapter with its base, or else the full model): what the whole set
    opens as. It is named, not copied, with the run that made it: a server takes no other one. None where there is none."""
    members = members_of(tags)
    for stage in LAST_FIRST:
        member = members.get(stage)
        version = client.get_model_version(member.name, member.version) if member else None
        if member and version and version.tags.get(LOADS):
            return f"models:/{member.name}/{member.version}", version.run_id or None
    return None


def lock_of(home: Path) -> Path:
    """Held by whoever registers or promotes sets."""
    return home / "mlflow" / "sets.lock"


def _versions(client: Any, name: str) -> list[Any]:
    return all_pages(partial(client.search_model_versions, f"name = '{name}'"))


def all_pages(search: Callable[..., Any]) -> list[Any]:
    """Everything that a search of MLflow finds."""
    page = search()
    found = list(page)
    while page.token:
        page = search(page_token=page.token)
        found += page
    return found


def _object(text: str | None) -> dict[str, Any] | None:
    """The JSON object in a tag, which anyone can edit; None where it is none."""
    with contextlib.suppress(ValueError):
        value = parse_json(text or "null")
        return value if isinstance(value, dict) else None
    return None
