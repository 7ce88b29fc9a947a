"""How each stage behind a model is made again: with the settings, ranks, threads and kernels that its manifest records."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Runtime, Settings, flatten
from ttrain.config.loading import Given, merge
from ttrain.core import libraries, redact
from ttrain.core.files import read_json
from ttrain.core.hashing import differences
from ttrain.errors import ArtifactError, TTrainError
from ttrain.pipeline import provenance
from ttrain.pipeline.earlier_settings import with_secrets
from ttrain.pipeline.input_files import HELDOUT, TRAIN, file_digests
from ttrain.pipeline.lineage import Lineage
from ttrain.pipeline.lineage_links import TAGS, Link
from ttrain.stages import STAGES, Stage
from ttrain.store import runs
from ttrain.store.artifacts import Store

ONE_MACHINE: Mapping[str, Any] = {"nodes": 1, "node_rank": 0, "rendezvous": None}
# What only watches, waits, stops a training, or names the GPUs of that machine.
UNNEEDED = ("timeout_seconds", "stages", "loggers", "tensorboard", "sample_every_steps", "eval_every_steps", "gpus")
SHOWN = 12


@dataclass(frozen=True)
class Recipe:
    """How one stage is made again."""

    link: Link
    stage: Stage
    settings: Settings
    remarks: tuple[str, ...] = field(default=())  # what is not as it was


def recipes_of(lineage: Lineage, home: Path) -> list[Recipe]:
    """How each stage is made again, inputs first.

    Raises ArtifactError with the reason where one cannot be: nothing is known of it but its name, its raw data are gone or
    have other bytes, or its settings are on record nowhere. `home` is where records of runs are looked for.
    """
    cache = Store(home)
    recipes = [_recipe(link, home) for link in lineage.links]
    problems = [problem for recipe in recipes for problem in _missing(recipe, cache)]
    cache.cache.save()
    if problems:
        raise ArtifactError(f"{lineage.named.name} cannot be made again: " + "; ".join(dict.fromkeys(problems)))
    return recipes


def _recipe(link: Link, home: Path) -> Recipe:
    """Raises ArtifactError where too little is on record."""
    if link.known_from == TAGS:
        raise ArtifactError(
            f"stage {link.stage or 'unknown'} {link.key[:SHOWN]} cannot be made again: its manifest is neither in the store "
            f"{home / 'store'} nor in MLflow, so its settings are not known"
        )
    made = link.manifest.get("provenance", {})
    tree = made.get("settings") or _recorded_settings(link, home)
    if tree is None:
        raise ArtifactError(
            f"stage {link.stage} {link.key[:SHOWN]} cannot be made again: neither its manifest nor the record of a run in "
            f"{home / 'runs'} says where its data were"
        )
    runtime, remarks = _runtime(link)
    own = {name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT}
    own = dict(with_secrets({"settings": own})["settings"])
    told = {**dict(flatten(own)), **_pinned(own.get("data", {}), link)}
    given = [Given(f"the manifest of {link.stage}", key, value) for key, value in told.items()]
    settings, _ = merge(Settings, given)
    settings = settings.model_copy(update={"runtime": runtime})
    return Recipe(link, STAGES[link.stage], settings, (*remarks, *_other_surroundings(link)))


def _pinned(data: Mapping[str, Any], link: Link) -> dict[str, list[str]]:
    """The very files that the stage read, as settings: a folder may hold more by now, the Hub another commit.

    Sources with weights stay as they were written, since a weight belongs to a source and not to its files; and so do URLs
    with secrets, which the record of the files does not have.
    """
    places, dataset = link.manifest.get("provenance", {}).get("files", {}), STAGES[link.stage].dataset
    if dataset is None:
        return {}
    name = "pretrain" if dataset == "tokenizer" and not data.get("tokenizer") else dataset
    found = {}
    for role, setting in ((TRAIN, name), (HELDOUT, f"{name}_heldout")):
        written = data.get(setting) or ()
        is_by_name = any(isinstance(entry, dict) or redact.url(entry) != entry for entry in written)
        if places.get(role) and written and not is_by_name:
            found[f"data.{setting}"] = list(places[role])
    return found


def _recorded_settings(link: Link, home: Path) -> dict[str, Any] | None:
    """Those of the run that made it; manifests of an earlier ttrain do not have them."""
    record = read_json(home / "runs" / f"{link.run}.json") if link.run else None
    if record is None:
        record = next((run for run in runs.newest_first(home) if _built(run, link.key)), None)
    return record["settings"] if record else None


def _built(run: Mapping[str, Any], key: str) -> bool:
    return any(stage.get("key") == key and stage["outcome"] == "completed" for stage in run["stages"])


def _runtime(link: Link) -> tuple[Runtime, list[str]]:
    """As it was: ranks, threads, micro-batches, kernels. Ranks of several machines become ranks of this one."""
    told = link.manifest.get("provenance", {}).get("runtime", {})
    recorded = {name: value for name, value in told.items() if name not in UNNEEDED}
    result, remarks = link.manifest["result"], []
    unknown = sorted(recorded.keys() - Runtime.model_fields.keys())
    if unknown:
        remarks.append(f"this ttrain has no runtime.{', runtime.'.join(unknown)}")
    nodes = recorded.get("nodes", 1)
    if nodes > 1:
        remarks.append(f"{nodes} machines trained together, here one does")
    if recorded.get("night"):
        remarks.append("it was trained with runtime.night, whose hours change the size of the micro-batches")
    values = {**{name: value for name, value in recorded.items() if name not in unknown}, **ONE_MACHINE}
    values["devices"] = result.get("ranks", recorded.get("devices", 1) * nodes)
    # Left to itself a stage takes all cores, of which this machine may have another number.
    cores = (link.manifest.get("provenance", {}).get("machine") or {}).get("cores")
    values["threads"] = result.get("threads") or recorded.get("threads") or cores
    values["device"] = result.get("device", recorded.get("device", "auto"))
    values["sharding"] = "processes"
    return Runtime.model_validate(values), remarks


def _missing(recipe: Recipe, cache: Store) -> Iterator[str]:
    """Why the raw data of a stage are not what they were: gone, unreadable, or of other bytes."""
    recorded = recipe.link.manifest["ingredients"]
    try:
        now = file_digests(recipe.stage, recipe.settings, cache)
    except TTrainError as error:
        yield f"{recipe.stage.name}: {error}"
        return
    changed = differences({"files": recorded.get("files", {})}, {"files": now})
    yield from (f"{recipe.stage.name}: {line}" for line in changed)
    here = recorded.get("python") and differences({"python": recorded["python"]}, {"python": platform.python_version()})
    if here:
        made_with, this = recorded["python"], platform.python_version()
        yield f"{recipe.stage.name}: its data are the files of Python {made_with}, and this is Python {this}"


def _other_surroundings(link: Link) -> Iterator[str]:
    """Versions and machine, where they are others than those of the record."""
    yield from (
        note.replace("made with", "it was made with") for note in libraries.notes(link.manifest, libraries.versions())
    )
    yield from (f"it was {note}" for note in link.notes)
    recorded = link.manifest.get("provenance", {}).get("machine") or {}
    here = provenance.machine()
    yield from (f"{name}: {recorded[name]} → {here.get(name)}" for name in recorded if recorded[name] != here.get(name))
