"""Resolve the argument of `ttrain lineage` and `ttrain reproduce`: a registered model, a run, a stage, a key."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.config.training import MODEL_STAGES
from ttrain.core.files import user_path
from ttrain.errors import UsageError
from ttrain.store import references, runs
from ttrain.store.artifacts import HEX, SHOWN_KEY, ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER, Reference, weights_digest
from ttrain.store.registry import CHAMPION, Registry, Version
from ttrain.store.run_views import read_run
from ttrain.tasks import RUNNABLE, STAGES
from ttrain.tracking.registered import take_over_champions

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
    versions: tuple[Version, ...] = field(default=(), repr=False)  # registered, of these artifacts
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
    if not (HEX.issuperset(prefix) and len(prefix) >= SHORTEST_KEY and len(prefix) != RUN_ID):
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
    """Find an artifact by a directory in the store; None if the text is not a directory.

    Raises UsageError for other directories: how they were made is not recorded.
    """
    if text in RUNNABLE:  # but not in a pipeline
        raise UsageError(f"'{text}': {NOT_AN_ARTIFACT}")
    path, root = user_path(text).resolve(), (store.root / "store").resolve()
    if not path.is_dir():
        return None
    parts = path.relative_to(root).parts if path.is_relative_to(root) else ()
    if len(parts) >= len(("stage", "key")) and parts[0] in STAGES:
        return LineageTarget(text, "key", "/".join(parts[:2]), ((parts[0], parts[1]),))
    if not text.startswith(("/", ".", "~")):
        return None  # it may be the name of a model or a run
    raise UsageError(f"{text} is not a directory of the store {root}: {NOT_AN_ARTIFACT}")


def _registered(home: Path, text: str, model: references.Registered) -> LineageTarget:
    """Find a registered set or model."""
    if model.alias == CHAMPION:
        take_over_champions(home)
    found = Registry(home).resolve(model)
    if isinstance(found, Version):
        return LineageTarget(text, "model", str(found), ((found.stage, found.key),), versions=(found,))
    stages = [stage for stage in ("tokenizer", *MODEL_STAGES) if stage in found.keys]
    roots = tuple((stage, found.keys[stage]) for stage in stages)
    versions = tuple(found.members.values())
    return LineageTarget(text, "set", f"{found.name}/{found.version}", roots, found.run, versions)


def _is_done(outcome: str) -> bool:
    return outcome in (*runs.BUILT, "cached")


def lines_of(references: Sequence[Reference], store: ArtifactStore) -> list[str]:
    """One line per model, such as `sft = quickstart, full-20261121-160222-1a2b4:sft, 0f3a91c2d4e5`, and one more if they are
    not of one lineage."""
    return [*(_line(reference, store) for reference in references), *_lineages(references, store)]


def to_json(reference: Reference) -> dict[str, Any]:
    """As JSON: `name` of the pipeline, `run` (RUN:STAGE), `key` of the artifact, `digest` of the weights."""
    weights = (reference.adapter, ADAPTER) if reference.adapter else None
    return {
        "model": reference.text,
        "name": _pipeline_of(reference),
        "run": _run_of(reference),
        "key": reference.artifact.key if reference.artifact else None,
        "digest": weights_digest(weights[0], name=weights[1]) if weights else reference.base_digest,
    }


def _line(reference: Reference, store: ArtifactStore) -> str:
    artifact = reference.artifact
    if artifact is None:
        return f"{reference.text} = {reference.directory}"
    run = _run_of(reference) or "of no run"
    labels = [word for word in (_pipeline_of(reference), run, artifact.key[:SHOWN_KEY]) if word]
    return f"{reference.text} = {', '.join(labels)}{_remark(reference, artifact, store)}"


def _remark(reference: Reference, artifact: Artifact, store: ArtifactStore) -> str:
    """A note on what a bare stage name also could have meant."""
    if reference.text not in STAGES:
        return ""
    if reference.run is None:
        return f" (the newest {artifact.stage} here)"
    newest = next(iter(store.artifacts(artifact.stage)), artifact)
    if newest.key == artifact.key:
        return ""
    return f" (there is a newer {artifact.stage}, {newest.key[:SHOWN_KEY]}: {newest.path})"


def _run_of(reference: Reference) -> str | None:
    """RUN:STAGE of the run that was named or found, else of the one that made the artifact."""
    if reference.artifact is None:
        return None
    made_by = reference.artifact.provenance.get("run")
    run = reference.run["run"] if reference.run else made_by
    return f"{run}:{reference.artifact.stage}" if run else None


def _pipeline_of(reference: Reference) -> str | None:
    """The setting `name` of the run, or of the run that made the artifact."""
    if reference.run:
        return str(reference.run["settings"].get("name") or "") or None
    made_with = reference.artifact.provenance.get("settings") if reference.artifact else None
    return str(made_with["name"]) if made_with and made_with.get("name") else None


def _lineages(references: Sequence[Reference], store: ArtifactStore) -> list[str]:
    """One line that names the upstream stages in which the models differ."""
    models = [(reference.text, reference.artifact) for reference in references if reference.artifact]
    behind = [(artifact.stage, _content_by_stage(artifact, store)) for _, artifact in models]
    differing = []
    for stage in STAGES:
        holders = [(last, contents[stage]) for last, contents in behind if stage in contents]
        is_behind_one = any(last != stage for last, _ in holders)  # otherwise these are the compared models themselves
        if is_behind_one and len({content for _, content in holders}) > 1:
            differing.append(stage)
    if not differing:
        return []
    names = ", ".join(dict.fromkeys(text for text, _ in models))
    return [f"not of one lineage: {names} were not made from the same {', '.join(differing)}"]


def _content_by_stage(artifact: Artifact, store: ArtifactStore) -> dict[str, str]:
    """{stage: content} of a model and of all that it was made from."""
    contents = {artifact.stage: artifact.content}
    waiting = [artifact]
    while waiting:
        for used in waiting.pop().manifest["inputs"].values():
            if used["stage"] in contents:
                continue
            source = store.find(used["stage"], used["key"])
            if content := used.get("content") or (source and source.content):
                contents[used["stage"]] = content
            if source:
                waiting.append(source)
    return contents
