"""The lineage of a model: the artifacts behind it, its evaluation, and the public sources of its data.

`lineage_of` resolves any name, from the store's manifests, or from MLflow's if the store is gone.
`History` is what a model card says of an artifact in the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.core.hashing import digest_of
from ttrain.lineage import lineage_names
from ttrain.lineage.lineage_names import LineageTarget
from ttrain.reports.facts import changed_settings
from ttrain.reports.history import inputs_first, seed_of
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact, Manifest
from ttrain.store.registry import Version
from ttrain.tasks import STAGES
from ttrain.tracking import datasets as inputs
from ttrain.tracking.artifact_source import MlflowArtifacts


@dataclass(frozen=True)
class Lineage:
    """Everything behind a target: `links`, inputs first."""

    target: LineageTarget
    links: tuple[Link, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What `lineage --json` prints."""
        return {
            "asked": self.target.text,
            "kind": self.target.kind,
            "name": self.target.name,
            "run": self.target.run,
            "stages": [link.to_json() for link in self.links],
            "notes": list(self.notes),
        }


def lineage_of(home: Path, text: str) -> Lineage:
    """The lineage of a registered model, a run, a stage's newest artifact or an artifact by its key.

    Raises UsageError if the text names nothing.
    """
    target = lineage_names.find_target(home, text)
    begin = _Walk(home, target).begin
    links = [link for root in begin(target.roots) for link in inputs_first(root, lambda of: begin(of.inputs.values()))]
    return Lineage(target, tuple(links), target.notes)


class _Walk:
    """Walk from the roots to their inputs: makes a link of each artifact once."""

    def __init__(self, home: Path, target: LineageTarget) -> None:
        self._store, self._target = ArtifactStore(home), target
        self._tracked, self._begun = MlflowArtifacts(home), set[str]()

    def begin(self, names: Iterable[tuple[str, str]]) -> Iterator[Link]:
        """The links of these that were not met yet."""
        for stage, key in sorted(names, key=_models_first):
            if key not in self._begun:
                self._begun.add(key)
                yield self._link(stage, key)

    def _link(self, stage: str, key: str) -> Link:
        path = self._store.path(stage, key)
        if stored := self._store.at(path):
            return link_of(stored, STORE)
        if recorded := self._tracked.manifest(stage, key):
            return link_of(Artifact(stage, key, path, recorded), TRACKER)
        return link_of_version(stage, key, next((of for of in self._target.versions if of.key == key), None))


def _models_first(artifact: tuple[str, str]) -> tuple[bool, int]:
    """Sort key of (stage, key): the chain of models first, so that the data of each stand right before it."""
    names, stage = list(STAGES), artifact[0]
    return stage.startswith("shards-"), names.index(stage) if stage in names else -1


STORE, TRACKER, REGISTRY = "store", "mlflow", "registry"  # sources of a link; the registry holds little


@dataclass(frozen=True)
class LineageData:
    """A file, or another stage's data set, that a stage read. Counts are of the rows that were kept."""

    part: str  # train, heldout, existing, or the role of a model's file
    name: str
    sha256: str
    documents: int | None = None
    tokens: int | None = None
    bytes: int | None = None
    location: str | None = None  # None: not recorded


@dataclass(frozen=True)
class Link:
    """One artifact and how it was made. What is not recorded is None."""

    stage: str
    key: str
    content: str | None
    known_from: str  # STORE, TRACKER or REGISTRY
    made_unix: float | None  # seconds since 1970
    run: str | None  # name of the pipeline's run
    run_id: str | None  # MLflow's, of the stage
    code: str | None  # digest of the code that shaped it
    commit: str | None
    seed: int | None
    settings: Mapping[str, Any]  # that differ from the defaults
    inputs: Mapping[str, tuple[str, str]]  # what it was made from: (stage, key) by name
    data: tuple[LineageData, ...]
    libraries: Mapping[str, str]  # and Python and ttrain
    notes: tuple[str, ...] = ()  # adopted, continued under other code, extended
    manifest: Manifest = field(default_factory=dict, repr=False)

    @property
    def provenance(self) -> Mapping[str, Any]:
        """What its manifest records of its making; empty if that cannot be found."""
        return dict(self.manifest.get("provenance", {}))

    def to_json(self) -> dict[str, Any]:
        """The form that `lineage --json` prints."""
        names = ("stage", "key", "content", "known_from", "run", "run_id", "code", "commit", "seed", "notes")
        return {
            **{name: getattr(self, name) for name in names},
            "made_unix": self.made_unix,
            "settings": dict(self.settings),
            "inputs": {name: {"stage": stage, "key": key} for name, (stage, key) in self.inputs.items()},
            "data": list(self.data),
            "libraries": dict(self.libraries),
            "runtime": self.provenance.get("runtime"),
            "machine": self.provenance.get("machine"),
        }


def link_of(artifact: Artifact, known_from: str) -> Link:
    """Build a link from an artifact's manifest."""
    manifest = artifact.manifest
    ingredients, provenance = manifest["ingredients"], artifact.provenance
    versions = {name: provenance[name] for name in ("ttrain", "python") if provenance.get(name)}
    return Link(
        stage=artifact.stage,
        key=artifact.key,
        content=artifact.content,
        known_from=known_from,
        made_unix=manifest.get("published"),
        run=provenance.get("run"),
        run_id=provenance.get("run_id"),
        code=digest_of(ingredients.get("code", {})),
        commit=provenance.get("commit"),
        seed=seed_of(artifact.stage, ingredients.get("settings", {})),
        settings={name: value for name, (value, _) in sorted(changed_settings(ingredients.get("settings", {})).items())},
        inputs={name: (used["stage"], used["key"]) for name, used in manifest["inputs"].items()},
        data=tuple(_data_entries(artifact)),
        libraries={**versions, **provenance.get("libraries", {})},
        notes=tuple(_notes(manifest)),
        manifest=manifest,
    )


def link_of_version(stage: str, key: str, version: Version | None) -> Link:
    """Build a link of an artifact whose manifest cannot be found, from its registered version if it has one."""
    return Link(
        stage=stage,
        key=key,
        content=version.content if version else None,
        known_from=REGISTRY,
        made_unix=None,
        run=version.run if version else None,
        run_id=None,
        code=None,
        commit=None,
        seed=None,
        settings={},
        inputs={},
        data=(),
        libraries={},
        notes=("neither the store nor MLflow has its manifest: only what the registered version says is known",),
    )


def _data_entries(artifact: Artifact) -> list[LineageData]:
    """The user's files with the counts of each, or the files of an imported model."""
    counted = {(file.get("role", "train"), file["name"]): file for file in artifact.result.get("files", ())}
    entries = []
    for role in artifact.manifest["ingredients"].get("files", {}):
        for file in inputs.files_of(artifact, role):
            counts_of_file = counted.get((role, file["name"]), {})
            documents = counts_of_file.get("kept", counts_of_file.get("documents"))
            counts = (documents, counts_of_file.get("tokens"), counts_of_file.get("bytes"))
            entries.append(LineageData(role, file["name"], file["sha256"], *counts, file.get("location")))
    return entries


def _notes(manifest: Manifest) -> list[str]:
    """Notes on an artifact that was adopted, continued or extended."""
    notes = [
        f"adopted from {entry['key'][:12]}, although {'; '.join(entry['differences'])}"
        for entry in manifest.get("adopted", [])
    ]
    notes += [
        f"begun as {entry['key'][:12]}, continued at step {entry['step']} although {'; '.join(entry['differences'])}"
        for entry in manifest.get("continued") or []
    ]
    if manifest.get("extends"):
        notes.append(f"extends a shorter training from its checkpoint {manifest['extends']}")
    return notes
