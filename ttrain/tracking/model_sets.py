"""Registered models: a version for each artifact, and a set of them for each run, a version of the registered model that is
named after the pipeline; the keys behind them, which garbage collection must keep; the version that a name means."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pydantic import TypeAdapter, ValidationError

from ttrain.config.data import LEARNT
from ttrain.config.training import MODEL_STAGES
from ttrain.core.files import PRIVATE_FILE, JsonDict, JsonObject, parse_object, read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.redact import without_user
from ttrain.errors import UsageError
from ttrain.store.references import BEGIN, Registered, unknown
from ttrain.tracking.calls import Tags, all_pages, attempt, create_if_missing, first_line, is_refusal
from ttrain.tracking.client import cannot_be_queried, is_installed, need_mlflow, silence, tracking_uri
from ttrain.tracking.database import is_missing, open_client
from ttrain.tracking.model_description import LOADS, marked, set_description
from ttrain.tracking.outbox import undelivered_keys
from ttrain.tracking.runs import TrackedRun
from ttrain.tracking.uploads import local_path

log = logging.getLogger("ttrain")

CHAMPION = "champion"  # alias of the set of models that is in use
MEMBER = "ttrain.member."  # tag of a set, followed by the stage's name: NAME/VERSION of its member
CHALLENGER = "challenger"
KIND = "ttrain.kind"
SET = "set"
SETS = "sets.json"  # beside a home's own database: its sets, in the state that the file names
IDENTITY = "ttrain.set"
RUN_ID = "ttrain.run_id"  # MLflow's, of the pipeline's run; the version itself names the run of its last model
KEY = "ttrain.key."  # followed by the stage's name
METRICS = "ttrain.metrics"
DECISION = "ttrain.decision"
LAST_FIRST = MODEL_STAGES[::-1]  # which of a set's models to chat with, the first that exists


@dataclass(frozen=True)
class ModelVersion:
    """One version of a registered model; `source` is None if its files are not on a disk of this machine."""

    name: str
    version: str
    source: Path | None
    tags: Tags
    run_id: str | None = None


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
    decision: JsonObject | None  # the last decision about it, as `promotion.Decision.to_json` gives it
    aliases: tuple[str, ...] = ()
    tags: Tags = field(default_factory=dict, repr=False)

    def to_json(self) -> JsonDict:
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
    """The set that a model version of MLflow describes."""
    tags: dict[str, str] = dict(version.tags)
    return ModelSet(
        name=version.name,
        version=str(version.version),
        members=members_of(tags),
        keys=keys_of(tags),
        run=tags.get("ttrain.run", ""),
        run_id=version.tags.get(RUN_ID) or version.run_id or None,
        created=version.creation_timestamp / 1000,
        metrics=parse_object(tags.get(METRICS, "")),
        decision=parse_object(tags.get(DECISION, "")) or None,
        aliases=tuple(sorted(aliases)),
        tags=tags,
    )


def copy_sets(database: Path, sets: Iterable[ModelSet]) -> None:
    """Keep the sets of a database in a file beside it, with the state of the database; no file if it cannot be written."""
    with contextlib.suppress(OSError):
        copied = {"state": _state_of(database), "sets": [asdict(model_set) for model_set in sets]}
        write_json(database.with_name(SETS), copied, PRIVATE_FILE)


def read_copied_sets(database: Path) -> list[ModelSet] | None:
    """The sets in the file beside a database; None if that has changed since, or there is no such file."""
    try:
        copied = read_object(database.with_name(SETS))
        if copied["state"] != _state_of(database):
            return None
        return TypeAdapter(list[ModelSet]).validate_python(copied["sets"])
    except (OSError, KeyError, ValidationError):
        return None


def _state_of(database: Path) -> list[int]:
    """Size and modification time of a database and of its journal, which another process may be writing."""
    journal = database.with_name(f"{database.name}-journal")
    return [*(database.stat().st_size, database.stat().st_mtime_ns), int(journal.exists())]


def keys_of(tags: Tags) -> dict[str, str]:
    """Artifact keys of the run that made a set, by stage, from the set's tags."""
    return {tag.removeprefix(KEY): value for tag, value in tags.items() if tag.startswith(KEY)}


def members_of(tags: Tags) -> dict[str, Member]:
    """The members in the tags of a set, by stage."""
    members = {}
    for tag, value in tags.items():
        if tag.startswith(MEMBER):
            stage, (name, _, version) = tag.removeprefix(MEMBER), value.rpartition("/")
            members[stage] = Member(name, version, stage, tags.get(f"{KEY}{stage}", ""))
    return members


def last_of(version: ModelVersion) -> Member | None:
    """The last model of a set: the adapter, else the SFT model, else the base; None if the version is not a set."""
    members = members_of(version.tags) if version.tags.get(KIND) == SET else {}
    return next((members[stage] for stage in LAST_FIRST if stage in members), None)


def tags_of(
    run: str, members: Iterable[Member], contents: Mapping[str, str], keys: Mapping[str, str], metrics: Mapping[str, float]
) -> dict[str, str]:
    """The tags of a version that is a set. `contents` are the members' content digests, by stage."""
    members = list(members)
    return {
        KIND: SET,
        IDENTITY: digest_of({member.stage: [member.key, contents[member.stage]] for member in members}),
        "ttrain.run": run,
        METRICS: json.dumps(dict(metrics), sort_keys=True),
        **{f"{MEMBER}{member.stage}": f"{member.name}/{member.version}" for member in members},
        **{f"{KEY}{stage}": key for stage, key in keys.items()},
    }


def register_set(
    client: Any, name: str, run: TrackedRun, tags: Tags, description: str = "", model_description: str = ""
) -> str:
    """Register a set and return its version; a version with the same models is reused, with the newest evaluation.

    `model_description` is set on the registered model, once. The set becomes challenger unless it is the champion. Raises
    ValueError if models of another pipeline bear the name.
    """
    versions = all_pages(partial(client.search_model_versions, f"name = '{name}'"))
    if any(version.tags.get(KIND) != SET for version in versions):
        raise ValueError(f"the registered model {name} holds models of another pipeline; set another `name`")
    new_tags = {**tags, RUN_ID: str(run.id)}
    registered = register_version(
        client, name, new_tags, (IDENTITY,), lambda: _source(client, tags) or (run.artifact_uri, run.id), model_description
    )
    number = str(registered.version)
    for tag, value in tags.items():
        if registered.tags.get(tag) != value and tag != "ttrain.run":
            client.set_model_version_tag(name, number, tag, value)
    set_description(client, registered, description)
    champion = client.get_registered_model(name).aliases.get(CHAMPION)
    if champion is None or str(champion) != number:
        client.set_registered_model_alias(name, CHALLENGER, number)
    return number


def _source(client: Any, tags: Tags) -> tuple[str, str | None] | None:
    """The set's last model that MLflow can load (the adapter with its base, or else the full model): it is loaded for the
    whole set. It is referenced, not copied, with its own run: a server accepts no other run. None if there is none."""
    members = members_of(tags)
    for stage in LAST_FIRST:
        member = members.get(stage)
        version = client.get_model_version(member.name, member.version) if member else None
        if member and version and version.tags.get(LOADS):
            return f"models:/{member.name}/{member.version}", version.run_id or None
    return None


def lock_of(home: Path) -> Path:
    """The lock file for registering or promoting sets."""
    return home / "mlflow" / "sets.lock"


def first_version(client: Any, name: str, tags: Tags, identity: Sequence[str]) -> Any:
    """The first version of a registered model with these values of the tags `identity`; None if there is none."""
    versions = all_pages(partial(client.search_model_versions, f"name = '{name}'"))
    same = [version for version in versions if all(tag in tags and version.tags.get(tag) == tags[tag] for tag in identity)]
    return min(same, key=lambda version: int(version.version), default=None)


def register_version(
    client: Any,
    name: str,
    tags: Tags,
    identity: Sequence[str],
    source: Callable[[], tuple[str | None, str | None]],
    about: str,
) -> Any:
    """The first version with these values of the tags `identity`, created if there is none from (location, id of the run).

    `about` is the description of the registered model, which is set once.
    """
    create_if_missing(partial(client.create_registered_model, name, description=marked(about) if about else None))
    version = first_version(client, name, tags, identity)
    if version is None:
        created = client.create_model_version(name, *source(), tags=dict(tags), await_creation_for=0)
        version = first_version(client, name, tags, identity) or created
        if str(version.version) != str(created.version):  # another home registered it between the question and the answer
            client.delete_model_version(name, str(created.version))
    return version


ARTIFACT = ("ttrain.key", "ttrain.content")  # tags that name the artifact of a version

INPUTS = ("base", "tokenizer")  # a model is useless without them, but not without its training data

WITH_A_SET = ("evaluate",)  # metrics that are compared with those of the next set
# The files that the champion was trained on, and the held-out rows: the next night needs both.
WITH_A_CHAMPION = tuple(f"shards-{dataset}" for dataset in LEARNT)


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
    keys = set(waiting)
    for version in versions:
        names = ["ttrain.key", *(f"ttrain.input.{name}" for name in INPUTS), *(f"{KEY}{stage}" for stage in WITH_A_SET)]
        if champions.get(version.name) == str(version.version):
            names += [f"{KEY}{stage}" for stage in WITH_A_CHAMPION]
        names += [f"{KEY}{tag.removeprefix(MEMBER)}" for tag in version.tags if tag.startswith(MEMBER)]
        keys.update(version.tags[name] for name in names if version.tags.get(name))
    return frozenset(keys)


def register_model(run: TrackedRun, model: JsonObject) -> str:
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


LISTED_MODELS = 50


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
        is_set = model.alias == CHAMPION
        also = (
            "; no set of models is champion before `ttrain models promote` or a nightly run promotes one" if is_set else ""
        )
        raise unknown("registered model", str(model), _names(models), shown=LISTED_MODELS, also=also)
    return ModelVersion(model.name, str(entity.version), local_path(entity.source), dict(entity.tags), entity.run_id or None)


def _version_by_alias(client: Any, name: str, alias: str) -> Any:
    """The version with this alias. For NAME-STAGE the `champion` and `challenger` of the set NAME decide, as MLflow's
    page moves them alone; another alias of the set counts for a model that has none of its own."""

    def ask(query: Callable[..., Any], *arguments: str) -> tuple[Any, Exception | None]:
        answer, error = attempt(partial(query, *arguments))
        if error is not None and not is_refusal(error):
            raise error
        return answer, error

    own, refusal = ask(client.get_model_version_by_alias, name, alias)
    if own is not None and (alias not in (CHAMPION, CHALLENGER) or own.tags.get(KIND) == SET):
        return own
    set_name = name.rpartition("-")[0]
    holder, _ = ask(client.get_model_version_by_alias, set_name, alias)
    members = members_of(holder.tags).values() if holder else ()
    version = next((member.version for member in members if member.name == name), None)
    if refusal is not None and version is None:
        raise refusal
    if own is not None and version != str(own.version) and ask(client.get_registered_model, set_name)[0]:
        log.warning(
            f"{name}@{alias}: its alias in MLflow is on version {own.version}, but the set {set_name}@{alias}, which "
            f"decides, has {f'version {version}' if version else 'none'}: version {version or own.version} is used, and "
            f"`ttrain models list` aligns the alias"
        )
    return own if version is None else client.get_model_version(name, version)


def _names(models: Iterable[Any]) -> Iterator[str]:
    """NAME/VERSION of the newest version of each model, and NAME@ALIAS of each alias."""
    for model in models:
        newest = max((int(version.version) for version in model.latest_versions or ()), default=0)
        yield f"{model.name}/{newest}"
        yield from (f"{model.name}@{alias}" for alias in sorted(model.aliases))
