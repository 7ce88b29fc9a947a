"""MLflow's registered models as a view of the home's registry; a champion chosen there comes back.

Versions here and in MLflow are the same if they have the same identity, a digest of the keys and
contents of their models. A tag of the registered model has the champion that was pushed last, which
shows whether somebody moved the alias on MLflow's page.
"""

import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.config.training import PRIMARY_METRICS
from ttrain.core.hashing import digest_of
from ttrain.core.text import short_digest
from ttrain.engine.execution import REGISTERED
from ttrain.store.registry import CHALLENGER, CHAMPION, ModelSet, Registry, Version
from ttrain.tracking.client import database_of, own_uri, plain, tracking_uri, unreachable_message
from ttrain.tracking.mlflow_mirror import ID, Bound, Mirror
from ttrain.tracking.tracked_runs import RunContent, id_of

log = logging.getLogger("ttrain")

# Tag of a registered model: its champion's version at the last push, of each home
PUSHED_CHAMPION = "ttrain.champion"
CHARACTERS = 4900  # of the description of a version, by MLflow's limit
MOST_VERSIONS = 10_000  # that MLflow gives in one answer
ABOUT = (  # the description of every registered model
    "Of the pipeline `{name}`, a version for each that a run made. `champion` is what was "
    "promoted, `challenger` the newest other one. `ttrain models list` shows them, "
    "`ttrain models promote` moves the alias, with `--previous` back."
)


def identity_of(version: Version | ModelSet) -> str:
    """Digest of the model, or models, that a version is."""
    if isinstance(version, Version):
        return digest_of([version.key, version.content])
    return digest_of({stage: [one.key, one.content] for stage, one in version.members.items()})


def register(mirror: Mirror, content: RunContent, bound: Bound) -> None:
    """Bring the versions that a run registered up to date, and the aliases of its sets."""
    numbers: dict[str, str] = {}
    for version in content.versions():
        entity = _versions(mirror, version.name).get(identity_of(version))
        if entity is None:
            entity = _create(
                mirror, content, version, _place(mirror, content, version, bound, numbers)
            )
        numbers[version.name] = str(entity.version)
    for name in Registry(content.home).read()["sets"]:
        take_over_champion(mirror, name)  # before the home's own alias replaces it
    for name in {model_set.name for model_set in content.sets}:
        push_aliases(mirror, name)


def _place(
    mirror: Mirror,
    content: RunContent,
    version: Version | ModelSet,
    bound: Bound,
    numbers: Mapping[str, str],
) -> tuple[str, str]:
    if isinstance(version, ModelSet):
        last = version.last
        of_last = (
            f"models:/{last.name}/{numbers[last.name]}" if last and last.name in numbers else ""
        )
        return of_last or bound.artifact_uri, bound.run_id
    stage = version.stage
    holder = mirror.bound.get(id_of(content.record, stage)) if stage in content.made else None
    if holder is None:
        holder = bound
        mirror.place_files(content.model_files(stage), bound)
    return "/".join(filter(None, (holder.artifact_uri, stage, REGISTERED[stage][1]))), holder.run_id


def _create(
    mirror: Mirror, content: RunContent, version: Version | ModelSet, place: tuple[str, str]
) -> Any:
    name = version.name
    if not mirror.client.search_registered_models(f"name = '{name}'"):
        mirror.client.create_registered_model(
            name, description=ABOUT.format(name=content.record["settings"]["name"])
        )
    tags = {ID: identity_of(version)}
    if isinstance(version, Version):
        tags["ttrain.key"] = f"{version.stage}/{version.key}"
    return mirror.client.create_model_version(
        name,
        *place,
        tags=tags,
        description=plain(_description(content, version))[:CHARACTERS],
        await_creation_for=0,
    )


def _description(content: RunContent, version: Version | ModelSet) -> str:
    members = version.members if isinstance(version, ModelSet) else {version.stage: version}
    metric = ""
    metrics = content.record["metrics"]
    for stage, judged in PRIMARY_METRICS.items():
        if stage in members and judged.of_run in metrics:
            metric = f"{judged.label} **{metrics[judged.of_run]:.3f}**"
    note = " ".join(str(content.record.get("note") or "").split())
    models = (
        f"- `{one.name}`: {one.stage}, key `{short_digest(one.key)}`" for one in members.values()
    )
    parts = [
        ". ".join(filter(None, (metric, note))),
        "\n".join((f"Of the run `{version.run}`:", *models)),
        f"What it was made of: `ttrain lineage {version}`; "
        f"the same again: `ttrain reproduce {version}`.",
    ]
    return "\n\n".join(filter(None, parts))


def push_aliases(mirror: Mirror, name: str) -> None:
    """Bring the aliases of a pipeline's sets, and of their members, up to date."""
    wanted: dict[str, dict[str, str]] = defaultdict(dict)  # identity by alias, of each model
    for model_set in Registry(mirror.home).sets(name):
        of_set: list[Version | ModelSet] = [model_set, *model_set.members.values()]
        for version in of_set:
            wanted[version.name] |= dict.fromkeys(model_set.aliases, identity_of(version))
    for model, identities in wanted.items():
        theirs = _aliases(mirror, model)
        versions = _versions(mirror, model)
        ours = {
            alias: str(versions[one].version)
            for alias, one in identities.items()
            if one in versions
        }
        if CHALLENGER in theirs.keys() - ours.keys():
            mirror.client.delete_registered_model_alias(model, CHALLENGER)
        for alias, number in ours.items() - theirs.items():
            mirror.client.set_registered_model_alias(model, alias, number)
    if champion := _aliases(mirror, name).get(CHAMPION):
        mirror.client.set_registered_model_tag(name, _pushed_tag(mirror), champion)


def _pushed_tag(mirror: Mirror) -> str:
    # Of this home: several may share an MLflow, and another one's champion is taken over
    return f"{PUSHED_CHAMPION}.{digest_of(str(mirror.home))[:8]}"


def take_over_champions(home: Path) -> Registry:
    """Make the sets champion whose alias somebody moved on MLflow's page.

    Returns the registry after that. If MLflow does not answer, the home's champions stay.
    """
    uri = tracking_uri(home)
    registry = Registry(home)
    seen = seen_file(home)
    names = registry.read()["sets"]
    changed, known = (
        path.stat().st_mtime_ns if path.exists() else 0 for path in (database_of(home), seen)
    )
    if not names or (uri == own_uri(home) and changed <= known):  # then MLflow need not be loaded
        return registry
    try:
        mirror = Mirror(home)
        for name in names:
            take_over_champion(mirror, name)
        seen.touch()
    except Exception as error:  # MLflow may raise anything
        log.warning(
            "whether MLflow has another champion is not known: %s", unreachable_message(uri, error)
        )
    return registry


def take_over_champion(mirror: Mirror, name: str) -> None:
    """Take over MLflow's champion of a pipeline, if it is not the one pushed last.

    A removed alias does not count.
    """
    for model in mirror.client.search_registered_models(f"name = '{name}'"):
        number = model.aliases.get(CHAMPION)
        if number is None or str(number) == model.tags.get(_pushed_tag(mirror)):
            continue
        identity = mirror.client.get_model_version(name, number).tags.get(ID)
        registry = Registry(mirror.home)
        for one in registry.sets(name):
            if identity_of(one) == identity:
                log.warning(
                    "%s/%s is the champion, as its alias was moved in MLflow", name, one.version
                )
                registry.promote(name, one.version)
        push_aliases(mirror, name)


def _versions(mirror: Mirror, name: str) -> dict[str, Any]:
    versions = mirror.client.search_model_versions(f"name = '{name}'", max_results=MOST_VERSIONS)
    ordered = sorted(versions, key=lambda version: int(version.version), reverse=True)
    return {version.tags[ID]: version for version in ordered if ID in version.tags}


def _aliases(mirror: Mirror, name: str) -> dict[str, str]:
    return {
        alias: str(number)
        for model in mirror.client.search_registered_models(f"name = '{name}'")
        for alias, number in model.aliases.items()
    }


def seen_file(home: Path) -> Path:
    """The file whose mtime is that of the last comparison with the home's own database."""
    return home / "mlflow" / "seen"
