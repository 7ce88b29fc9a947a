"""The lineage of a model: the artifacts behind it, its evaluation, and the public sources of its data.

`lineage_of` resolves any name, from the store's manifests, or from MLflow's if the store is gone. What it finds is one list
of links, which the command prints, `--json` gives as it is, and `reproduce` makes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config.training import MODEL_STAGES
from ttrain.core.files import JsonDict, JsonObject, user_path
from ttrain.core.hashing import digest_of
from ttrain.errors import UsageError
from ttrain.reports.facts import changed_settings
from ttrain.reports.history import inputs_first, seed_of
from ttrain.store import references, runs
from ttrain.store.artifacts import HEX, SHOWN_KEY, ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.registry import CHAMPION, Registry, Version
from ttrain.store.run_views import read_run
from ttrain.tasks import RUNNABLE, STAGES
from ttrain.tracking import datasets
from ttrain.tracking.artifact_source import MlflowArtifacts
from ttrain.tracking.book import Book
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.registered import take_over_champions

STORE, TRACKER, REGISTRY = "store", "mlflow", "registry"  # sources of a link; the registry holds little

SHORTEST_KEY = 6

RUN_ID = 32  # characters of MLflow's ids, which are hexadecimal as keys are

NOT_AN_ARTIFACT = (
    "the output of `ttrain train`, `ttrain gate train` and exports is not an artifact of a pipeline, and its inputs "
    "are not recorded; to make it again, run the same command with another --out and compare"
)


@dataclass(frozen=True)
class LineageTarget:
    """What a name resolves to: `roots` are (stage, key) of its artifacts."""

    text: str
    kind: str  # set, model, run, stage or key
    name: str  # in full: NAME/VERSION, a run's name, STAGE/KEY
    roots: tuple[tuple[str, str], ...]
    run: str | None = None  # name of the pipeline's run
    versions: tuple[Version, ...] = ()  # registered, of these artifacts
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """One artifact behind a target; without its manifest, what is known is that of its registered version."""

    stage: str
    key: str
    known_from: str  # STORE, TRACKER or REGISTRY
    artifact: Artifact | None = None
    version: Version | None = None
    run_id: str | None = None  # MLflow's, of the stage

    @property
    def inputs(self) -> dict[str, tuple[str, str]]:
        """What it was made from: (stage, key) by name."""
        used = self.artifact.manifest["inputs"] if self.artifact else {}
        return {name: (entry["stage"], entry["key"]) for name, entry in used.items()}

    def to_json(self) -> JsonDict:
        """How it was made; null where that is not recorded."""
        artifact, version = self.artifact, self.version
        manifest = artifact.manifest if artifact else {}
        provenance, ingredients = manifest.get("provenance", {}), manifest.get("ingredients", {})
        settings = ingredients.get("settings", {})
        versions = {name: provenance[name] for name in ("ttrain", "python") if provenance.get(name)}
        made_by = artifact or version
        return {
            "stage": self.stage,
            "key": self.key,
            "content": made_by.content if made_by else None,
            "known_from": self.known_from,
            "run": provenance.get("run") or (version.run if version else None),
            "run_id": provenance.get("run_id") or self.run_id,
            "code": digest_of(ingredients.get("code", {})) if artifact else None,
            "commit": provenance.get("commit"),
            "seed": seed_of(self.stage, settings),
            "made_unix": manifest.get("published"),
            "settings": {name: value for name, (value, _) in sorted(changed_settings(settings).items())},
            "inputs": {name: {"stage": stage, "key": key} for name, (stage, key) in self.inputs.items()},
            "data": list(_data_of(artifact)) if artifact else [],
            "libraries": {**versions, **provenance.get("libraries", {})},
            "runtime": provenance.get("runtime"),
            "machine": provenance.get("machine"),
            "result": manifest.get("result", {}),
            "notes": notes_of(manifest) if artifact else ["neither the store nor MLflow has its manifest"],
        }


@dataclass(frozen=True)
class Lineage:
    """Everything behind a target: `links`, inputs first."""

    target: LineageTarget
    links: tuple[Link, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        """What `lineage --json` prints."""
        target = self.target
        links = [link.to_json() for link in self.links]
        named = {"asked": target.text, "kind": target.kind, "name": target.name, "run": target.run}
        return {**named, "stages": links, "notes": list(target.notes)}


def lineage_of(home: Path, text: str) -> Lineage:
    """The lineage of a registered model, a run, a stage's newest artifact or an artifact by its key.

    Raises UsageError if the text names nothing.
    """
    target, store, tracked = find_target(home, text), ArtifactStore(home), MlflowArtifacts(home)
    pushed, begun = Book(home, tracking_uri(home)).runs, set[str]()

    def link_of(stage: str, key: str) -> Link:
        path, known_from = store.path(stage, key), STORE
        artifact = store.at(path)
        if artifact is None:
            recorded, known_from = tracked.recorded(stage, key), TRACKER
            artifact = Artifact(stage, key, path, recorded) if recorded else None
        if artifact is None:
            return Link(stage, key, REGISTRY, version=next((of for of in target.versions if of.key == key), None))
        run_ids = pushed.get(artifact.provenance.get("run") or "", {}).get("stages", {})
        return Link(stage, key, known_from, artifact, run_id=run_ids.get(stage))

    def begin(names: Iterable[tuple[str, str]]) -> Iterator[Link]:
        """The links of these that were not met yet."""
        for stage, key in sorted(names, key=_models_first):
            if key not in begun:
                begun.add(key)
                yield link_of(stage, key)

    links = [link for root in begin(target.roots) for link in inputs_first(root, lambda of: begin(of.inputs.values()))]
    return Lineage(target, tuple(links))


def _models_first(artifact: tuple[str, str]) -> tuple[bool, int]:
    """Sort key of (stage, key): the chain of models first, so that the data of each stand right before it."""
    names, stage = list(STAGES), artifact[0]
    return stage.startswith("shards-"), names.index(stage) if stage in names else -1


def _data_of(artifact: Artifact) -> Iterator[JsonDict]:
    """The user's files with the counts of the rows that were kept of each, or the files of an imported model."""
    counted = {(file.get("role", "train"), file["name"]): file for file in artifact.result.get("files", ())}
    for role in artifact.manifest["ingredients"].get("files", {}):
        for file in datasets.files_of(artifact, role):
            counts = counted.get((role, file["name"]), {})
            yield {
                "part": role,
                "name": file["name"],
                "sha256": file["sha256"],
                "documents": counts.get("kept", counts.get("documents")),
                "tokens": counts.get("tokens"),
                "bytes": counts.get("bytes"),
                "location": file.get("location"),
            }


def notes_of(manifest: JsonObject) -> list[str]:
    """Notes on an artifact that was adopted, continued or extended."""
    notes = []
    for entry in manifest.get("adopted", []):
        notes.append(f"adopted from {entry['key'][:SHOWN_KEY]}, although {'; '.join(entry['differences'])}")
    for entry in manifest.get("continued") or []:
        begun = f"begun as {entry['key'][:SHOWN_KEY]}, continued at step {entry['step']}"
        notes.append(f"{begun} although {'; '.join(entry['differences'])}")
    if manifest.get("extends"):
        notes.append(f"extends a shorter training from its checkpoint {manifest['extends']}")
    return notes


# --- names --------------------------------------------------------------------------------------------------------------


def find_target(home: Path, text: str) -> LineageTarget:
    """Resolve the argument of `ttrain lineage` and `ttrain reproduce`. Raises UsageError that lists what exists."""
    store = ArtifactStore(home)
    if text in STAGES:
        artifact = store.latest(text)
        return LineageTarget(text, "stage", f"{text}/{artifact.key}", ((text, artifact.key),))
    if root := _key(store, text) or _directory(store, text):
        return LineageTarget(text, "key", "/".join(root), (root,))
    if model := references.registered(text):
        return _registered(home, text, model)
    run, stage = references.run_and_stage(text)
    view = read_run(home, run)
    done = (*runs.BUILT, "cached")
    roots = {name: (name, of.key) for name, of in view.stages.items() if of.key and of.status in done}
    if not roots:
        raise UsageError(f"the run {view.name} has finished no stage, so there is nothing behind it")
    if not stage:
        return LineageTarget(text, "run", view.name, tuple(roots.values()), view.name, notes=view.notes)
    references.need_stage(stage, roots, f"the run {view.name}")
    return LineageTarget(text, "run", f"{view.name}:{stage}", (roots[stage],), view.name)


def _key(store: ArtifactStore, text: str) -> tuple[str, str] | None:
    """Find an artifact by a key prefix or STAGE/KEY; None if the text is not a key."""
    stage, slash, prefix = text.rpartition("/")
    if not HEX.issuperset(prefix) or len(prefix) < SHORTEST_KEY or len(prefix) == RUN_ID:
        return None
    if slash and (stage not in STAGES or prefix.isdecimal()):
        return None  # NAME/VERSION
    paths = [path for path in (store.root / "store").glob(f"{stage or '*'}/{prefix}*") if store.at(path) is not None]
    matches = {(path.parent.name, path.name) for path in paths} or set(
        MlflowArtifacts(store.root).find_keys(stage or None, prefix)
    )
    if len(matches) > 1:
        raise references.ambiguous(text, "keys", [f"{name}/{key[:SHOWN_KEY]}" for name, key in sorted(matches)])
    if slash and not matches:
        raise UsageError(f"'{text}' is not the key of an artifact; `ttrain artifacts list` shows them")
    return next(iter(matches), None)


def _directory(store: ArtifactStore, text: str) -> tuple[str, str] | None:
    """Find an artifact by a directory in the store; None if the text is not a directory.

    Raises UsageError for other directories: how they were made is not recorded.
    """
    path, root = user_path(text).resolve(), (store.root / "store").resolve()
    if path.is_dir() and path.is_relative_to(root):
        parts = path.relative_to(root).parts
        if len(parts) >= len(("stage", "key")) and parts[0] in STAGES:
            return parts[0], parts[1]
    if text in RUNNABLE or (path.is_dir() and text.startswith(("/", ".", "~"))):
        raise UsageError(f"{text} is not a directory of the store {root}: {NOT_AN_ARTIFACT}")
    return None


def _registered(home: Path, text: str, model: references.Registered) -> LineageTarget:
    """Find a registered set or model."""
    if model.alias == CHAMPION:
        take_over_champions(home, model.name)
    found = Registry(home).resolve(model)
    if isinstance(found, Version):
        return LineageTarget(text, "model", str(found), ((found.stage, found.key),), versions=(found,))
    roots = tuple((stage, found.keys[stage]) for stage in ("tokenizer", *MODEL_STAGES) if stage in found.keys)
    versions = tuple(found.members.values())
    return LineageTarget(text, "set", f"{found.name}/{found.version}", roots, found.run, versions)
