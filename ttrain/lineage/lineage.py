"""The lineage of a model: the artifacts behind it, its evaluation, and the public sources of its data.

`lineage_of` resolves any name, from the store's manifests, or a shared MLflow's where it lacks one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config.training import MODEL_STAGES
from ttrain.core.files import user_path
from ttrain.core.hashing import digest_of
from ttrain.errors import ArtifactError, UsageError
from ttrain.reports.facts import changed_settings
from ttrain.reports.history import inputs_first, seed_of
from ttrain.store import references, runs
from ttrain.store.artifacts import HEX, SHOWN_KEY, ArtifactStore
from ttrain.store.layout import Artifact, Manifest
from ttrain.store.registry import CHAMPION, Registry, Version
from ttrain.store.results import ShardsResult
from ttrain.store.run_views import read_run
from ttrain.tasks import STAGES
from ttrain.tracking import datasets as inputs
from ttrain.tracking.artifact_source import MlflowArtifacts
from ttrain.tracking.registered import take_over_champions

SHORTEST_KEY = 6


@dataclass(frozen=True)
class LineageTarget:
    """What a name resolves to: `roots` are (stage, key) of its artifacts."""

    text: str
    kind: str  # set, model, run, stage or key
    name: str  # in full: NAME/VERSION, a run's name, STAGE/KEY
    roots: tuple[tuple[str, str], ...]
    run: str | None = None  # name of the pipeline's run
    notes: tuple[str, ...] = ()


def find_target(home: Path, text: str) -> LineageTarget:
    """Resolve the text. Raises UsageError that lists what exists."""
    store = ArtifactStore(home)
    if text in STAGES:
        artifact = store.latest(text)
        return LineageTarget(text, "stage", f"{text}/{artifact.key}", ((text, artifact.key),))
    if (target := _key(store, text) or _directory(store, text)) is not None:
        return target
    if model := references.registered(text):
        return _registered(home, text, model)
    run, stage = references.run_and_stage(text)
    view = read_run(home, run)
    roots = tuple((name, of.key) for name, of in view.stages.items() if of.key and _is_done(of.status))
    if not roots:
        raise UsageError(f"the run {view.name} has finished no stage, so there is nothing behind it")
    if not stage:
        return LineageTarget(text, "run", view.name, roots, view.name, notes=view.notes)
    references.need_stage(stage, (root[0] for root in roots), f"the run {view.name}")
    roots = tuple(root for root in roots if root[0] == stage)
    return LineageTarget(text, "run", f"{view.name}:{stage}", roots, view.name)


def _key(store: ArtifactStore, text: str) -> LineageTarget | None:
    """Find an artifact by a key prefix or STAGE/KEY; None if the text is not a key."""
    stage, slash, prefix = text.rpartition("/")
    if not (HEX.issuperset(prefix) and len(prefix) >= SHORTEST_KEY):
        return None
    if slash and (stage not in STAGES or prefix.isdecimal()):
        return None  # NAME/VERSION
    matches = {
        (path.parent.name, path.name)
        for path in (store.root / "store").glob(f"{stage or '*'}/{prefix}*")
        if store.at(path) is not None
    }
    if not matches and not slash:
        return None  # it may be the name of a run
    if len(matches) > 1:
        raise references.ambiguous(text, "keys", [f"{name}/{key[:SHOWN_KEY]}" for name, key in sorted(matches)])
    if not matches:
        raise UsageError(f"'{text}' is not the key of an artifact; `ttrain artifacts list` shows them")
    [root] = matches
    return LineageTarget(text, "key", "/".join(root), (root,))


def _directory(store: ArtifactStore, text: str) -> LineageTarget | None:
    """Find an artifact by its directory in the store; None if the text is no such directory."""
    path, root = user_path(text).resolve(), (store.root / "store").resolve()
    parts = path.relative_to(root).parts if path.is_dir() and path.is_relative_to(root) else ()
    if len(parts) < len(("stage", "key")):
        return None
    return LineageTarget(text, "key", "/".join(parts[:2]), ((parts[0], parts[1]),))


def _registered(home: Path, text: str, model: references.Registered) -> LineageTarget:
    """Find a registered set or model."""
    if model.alias == CHAMPION:
        take_over_champions(home)
    found = Registry(home).resolve(model)
    if isinstance(found, Version):
        return LineageTarget(text, "model", str(found), ((found.stage, found.key),))
    stages = [stage for stage in ("tokenizer", *MODEL_STAGES) if stage in found.keys]
    roots = tuple((stage, found.keys[stage]) for stage in stages)
    return LineageTarget(text, "set", f"{found.name}/{found.version}", roots, found.run)


def _is_done(outcome: str) -> bool:
    return outcome in (*runs.BUILT, "cached")


@dataclass(frozen=True)
class Lineage:
    """Everything behind a target: `links`, inputs first."""

    target: LineageTarget
    links: tuple[Link, ...]
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What `lineage --json` prints."""
        return {
            "requested": self.target.text,
            "kind": self.target.kind,
            "name": self.target.name,
            "run": self.target.run,
            "stages": [link.to_json() for link in self.links],
            "notes": list(self.notes),
        }


def lineage_of(home: Path, text: str) -> Lineage:
    """The lineage of a registered model, a run, a stage's newest artifact or an artifact by its key.

    Raises UsageError if the text names nothing, ArtifactError if a manifest is neither in the store nor in MLflow.
    """
    target = find_target(home, text)
    store, tracked, begun = ArtifactStore(home), MlflowArtifacts(home), set[str]()

    def begin(names: Iterable[tuple[str, str]]) -> Iterator[Link]:
        """The links of these that were not met yet."""
        for stage, key in sorted(names, key=_models_first):
            if key in begun:
                continue
            begun.add(key)
            path = store.path(stage, key)
            artifact, known_from = store.at(path), STORE
            if artifact is None and (recorded := tracked.manifest(stage, key)):
                artifact, known_from = Artifact(stage, key, path, recorded), TRACKER
            if artifact is None:
                raise ArtifactError(
                    f"the manifest of {stage} {key[:SHOWN_KEY]} is neither in the store {home / 'store'} nor in MLflow"
                )
            yield link_of(artifact, known_from)

    links = [link for root in begin(target.roots) for link in inputs_first(root, lambda of: begin(of.inputs.values()))]
    return Lineage(target, tuple(links), target.notes)


def _models_first(artifact: tuple[str, str]) -> tuple[bool, int]:
    """Sort key of (stage, key): the chain of models first, so that the data of each stand right before it."""
    names, stage = list(STAGES), artifact[0]
    return stage.startswith("shards-"), names.index(stage) if stage in names else -1


STORE, TRACKER = "store", "mlflow"  # where a manifest was found


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
    known_from: str  # STORE or TRACKER
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


def _data_entries(artifact: Artifact) -> list[LineageData]:
    """The user's files with the counts of each, or the files of an imported model."""
    counted = {(file.get("role", "train"), file["name"]): file for file in ShardsResult.of(artifact.result).files}
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
