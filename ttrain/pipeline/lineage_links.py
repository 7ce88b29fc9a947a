"""One link of a model's lineage: what a stage made, of what, with which code and settings, when, by which run. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ttrain.config import Settings, flatten
from ttrain.core.hashing import digest_of
from ttrain.store.layout import Artifact
from ttrain.tracking import datasets as inputs

STORE, TRACKER, TAGS = "store", "mlflow", "tags"  # where a link is known from; of tags little is known


@dataclass(frozen=True)
class Data:
    """A file, or a data set made by another stage, that a stage read. Counts are what was kept of it."""

    part: str  # train, heldout, existing, or the role of a model's file
    name: str
    sha256: str
    documents: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    location: str | None = None  # where it was; None where that is not on record

    def to_json(self) -> dict[str, Any]:
        """What `lineage --json` prints of it."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Link:
    """One artifact and how it came about. What is not on record is None."""

    stage: str
    key: str
    content: str | None
    known_from: str  # STORE, TRACKER or TAGS
    made: float | None  # seconds since 1970
    run: str | None  # name of the pipeline's run
    run_id: str | None  # MLflow's, of the stage
    code: str | None  # digest of the code that shaped it
    commit: str | None
    seed: int | None
    settings: Mapping[str, Any]  # that differ from the defaults
    inputs: Mapping[str, tuple[str, str]]  # what it was made from: (stage, key) by name
    data: tuple[Data, ...]
    libraries: Mapping[str, str]  # and Python and ttrain
    notes: tuple[str, ...] = ()  # adopted, continued under other code, extended
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def to_json(self) -> dict[str, Any]:
        """What `lineage --json` prints of it."""
        names = ("stage", "key", "content", "known_from", "run", "run_id", "code", "commit", "seed", "notes")
        return {
            **{name: getattr(self, name) for name in names},
            "made_unix": self.made,
            "settings": dict(self.settings),
            "inputs": {name: {"stage": stage, "key": key} for name, (stage, key) in self.inputs.items()},
            "data": [one.to_json() for one in self.data],
            "libraries": dict(self.libraries),
            "runtime": self.manifest.get("provenance", {}).get("runtime"),
            "machine": self.manifest.get("provenance", {}).get("machine"),
        }


def link_of(artifact: Artifact, known_from: str, made_by: Mapping[str, str]) -> Link:
    """From an artifact's manifest. `made_by`: the run of each key, for manifests that do not say it."""
    manifest = artifact.manifest
    ingredients, made = manifest["ingredients"], manifest.get("provenance", {})
    versions = {name: made[name] for name in ("ttrain", "python") if made.get(name)}
    return Link(
        stage=artifact.stage,
        key=artifact.key,
        content=artifact.content,
        known_from=known_from,
        made=manifest.get("published"),
        run=made.get("run") or made_by.get(artifact.key),
        run_id=made.get("run_id"),
        code=digest_of(ingredients["code"]),
        commit=made.get("commit"),
        seed=seed_of(artifact.stage, ingredients.get("settings", {})),
        settings=own_settings(ingredients.get("settings", {})),
        inputs={name: (used["stage"], used["key"]) for name, used in manifest["inputs"].items()},
        data=tuple(_data(artifact)),
        libraries={**versions, **made.get("libraries", {})},
        notes=tuple(_notes(manifest)),
        manifest=manifest,
    )


def link_of_tags(tags: Mapping[str, str], run_id: str | None) -> Link:
    """From the tags of a registered version, where its manifest is nowhere to be had."""
    given = {name.removeprefix("ttrain.input."): key for name, key in tags.items() if name.startswith("ttrain.input.")}
    return Link(
        stage=tags.get("ttrain.stage", ""),
        key=tags.get("ttrain.key", ""),
        content=tags.get("ttrain.content"),
        known_from=TAGS,
        made=None,
        run=tags.get("ttrain.run"),
        run_id=run_id,
        code=tags.get("ttrain.code"),
        commit=None,
        seed=None,
        settings={},
        inputs={name: ("", key) for name, key in given.items()},
        data=(),
        libraries={},
        notes=("neither the store nor MLflow has its manifest: only what the registered version says is known",),
    )


def own_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that differ from ttrain's defaults of today."""
    return {key: value for key, value in sorted(settings.items()) if key not in _defaults() or _defaults()[key] != value}


@cache
def _defaults() -> Mapping[str, Any]:
    return dict(flatten(Settings().model_dump(mode="json")))


def seed_of(stage: str, settings: Mapping[str, Any]) -> int | None:
    """That of the stage's own section, else of how it reads."""
    own = "pretrain" if stage == "new-model" else stage
    found = settings.get(f"{own}.seed", settings.get("reading.seed"))
    return int(found) if found is not None else None


def _data(artifact: Artifact) -> list[Data]:
    """The user's files with what was kept of each, or the model's own where it takes one in."""
    counted = {(file.get("role", "train"), file["name"]): file for file in artifact.result.get("files", ())}
    found = []
    for role in artifact.manifest["ingredients"].get("files", {}):
        for file in inputs.files_of(artifact, role):
            told = counted.get((role, file["name"]), {})
            documents = told.get("kept", told.get("documents"))
            counts = (documents, told.get("tokens"), told.get("bytes"))
            found.append(Data(role, file["name"], file["sha256"], *counts, file.get("location")))
    return found


def _notes(manifest: Mapping[str, Any]) -> list[str]:
    """What makes it more than the outcome of its key."""
    notes = [
        f"adopted from {one['key'][:12]}, although {'; '.join(one['differences'])}" for one in manifest.get("adopted", [])
    ]
    notes += [
        f"begun as {one['key'][:12]}, continued at step {one['step']} although {'; '.join(one['differences'])}"
        for one in manifest.get("continued") or []
    ]
    if manifest.get("extends"):
        notes.append(f"extends a shorter training from its checkpoint {manifest['extends']}")
    return notes
