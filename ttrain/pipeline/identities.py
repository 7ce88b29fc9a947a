"""Which model a name on the command line led to: as a line and as JSON, and whether several models are of one lineage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ttrain.stages import STAGES
from ttrain.store.artifacts import SHOWN_KEY, Store
from ttrain.store.layout import Artifact
from ttrain.store.model_reference import Reference
from ttrain.store.weights import ADAPTER, weights_digest


def lines_of(references: Sequence[Reference], store: Store) -> list[str]:
    """A line for each model, such as `sft = quickstart, full-20261121-160222-1a2b4:sft, 0f3a91c2d4e5`, and one where they
    are not of one lineage."""
    return [*(_line(reference, store) for reference in references), *_lineages(references, store)]


def to_json(reference: Reference) -> dict[str, Any]:
    """The same for scripts: `name` of the pipeline, `run` (RUN:STAGE), `key` of the artifact, `digest` of the weights."""
    weights = (reference.adapter, ADAPTER) if reference.adapter else None
    return {
        "model": reference.text,
        "name": _pipeline_of(reference),
        "run": _run_of(reference),
        "key": reference.artifact.key if reference.artifact else None,
        "digest": weights_digest(weights[0], name=weights[1]) if weights else reference.base_digest,
    }


def _line(reference: Reference, store: Store) -> str:
    artifact = reference.artifact
    if artifact is None:
        return f"{reference.text} = {reference.directory}"
    run = _run_of(reference) or "of no run"
    words = [word for word in (_pipeline_of(reference), run, artifact.key[:SHOWN_KEY]) if word]
    return f"{reference.text} = {', '.join(words)}{_remark(reference, artifact, store)}"


def _remark(reference: Reference, artifact: Artifact, store: Store) -> str:
    """What a bare stage could also have meant."""
    if reference.text not in STAGES:
        return ""
    if reference.run is None:
        return f" (the newest {artifact.stage} here)"
    newest = next(iter(store.artifacts(artifact.stage)), artifact)
    if newest.key == artifact.key:
        return ""
    return f" (there is a newer {artifact.stage}, {newest.key[:SHOWN_KEY]}: {newest.path})"


def _run_of(reference: Reference) -> str | None:
    """RUN:STAGE: the run that was named or found, else the one that made the artifact."""
    if reference.artifact is None:
        return None
    made_by = reference.artifact.manifest.get("provenance", {}).get("run")
    run = reference.run["run"] if reference.run else made_by
    return f"{run}:{reference.artifact.stage}" if run else None


def _pipeline_of(reference: Reference) -> str | None:
    """The setting `name` of the run, or of what made the artifact."""
    if reference.run:
        return str(reference.run["settings"].get("name") or "") or None
    made_with = reference.artifact.manifest.get("provenance", {}).get("settings") if reference.artifact else None
    return str(made_with["name"]) if made_with and made_with.get("name") else None


def _lineages(references: Sequence[Reference], store: Store) -> list[str]:
    """One line that names the stages behind the models which are not the same for all of them."""
    models = [(reference.text, reference.artifact) for reference in references if reference.artifact]
    behind = [(artifact.stage, _behind(artifact, store)) for _, artifact in models]
    differing = []
    for stage in STAGES:
        holders = [(last, contents[stage]) for last, contents in behind if stage in contents]
        is_behind_one = any(last != stage for last, _ in holders)  # else these are the models that are to be told apart
        if is_behind_one and len({content for _, content in holders}) > 1:
            differing.append(stage)
    if not differing:
        return []
    names = ", ".join(dict.fromkeys(text for text, _ in models))
    return [f"not of one lineage: {names} were not made from the same {', '.join(differing)}"]


def _behind(artifact: Artifact, store: Store) -> dict[str, str]:
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
