"""What the tracker gets beside a model's own files: a card, what opens it elsewhere, tags, tables of the evaluation."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ttrain.core.files import read_object
from ttrain.core.hashing import digest_of
from ttrain.pipeline import model_description
from ttrain.pipeline.adapter_files import numbers_in, parameters_of
from ttrain.pipeline.lineage import History
from ttrain.pipeline.lineage_links import seed_of
from ttrain.pipeline.model_card import Exported, card
from ttrain.pipeline.names import base_digest_of
from ttrain.store.artifacts import Store
from ttrain.store.layout import Artifact
from ttrain.store.weights import ADAPTER as ADAPTER_WEIGHTS
from ttrain.tracking import loading_snippets
from ttrain.tracking.calls import first_line, outcome
from ttrain.tracking.loading_snippets import ADAPTER, MODEL, Loadable
from ttrain.tracking.null_tracker import NullRun
from ttrain.tracking.runs import Run

log = logging.getLogger("ttrain")

LOGGED_TABLES: Final = "mlflow.loggedArtifacts"  # tag by which MLflow's pages show a JSON file as a table
MODELS: Final = ("base", "sft", "lora")  # in the order of their columns
EVALUATION_TABLE, SAMPLES_TABLE = "evaluation_table.json", "samples_table.json"


def beside(
    artifact: Artifact, directory: str, name: str, store: Store, run: Run | NullRun, examples: Sequence[str]
) -> Loadable:
    """What goes into the directory of a registered model; nothing for a tokenizer, or where its files are not here.

    An adapter gets its base along where the run's files are on the same disk, so that this takes no room. A model whose
    files cannot be described is registered without: the run does not depend on it.
    """
    if directory not in (MODEL, ADAPTER) or artifact.absent or isinstance(run, NullRun):
        return Loadable()
    found, error = outcome(lambda: _beside(artifact, directory, name, store, run, examples))
    if error is not None:
        log.warning("%s is registered without a description of its files: %s", name, first_line(error))
    return found or Loadable()


def _beside(artifact: Artifact, directory: str, name: str, store: Store, run: Run, examples: Sequence[str]) -> Loadable:
    below = artifact.manifest["inputs"].get("base") if directory == ADAPTER else None
    base = store.path(below["stage"], below["key"]) / MODEL if below else None
    if base is not None and not ((base / "config.json").is_file() and loading_snippets.shares_disk(run, base)):
        base = None
    text = card_of(artifact, directory, name, store)
    return loading_snippets.describe(artifact, directory, base=base, card=text, examples=examples)


def card_of(artifact: Artifact, directory: str, name: str, store: Store) -> str:
    """The model card of a registered model, with its evaluation where it has one; "" where its files cannot be read."""
    text, error = outcome(lambda: _card(artifact, directory, name, store))
    if error is not None:
        log.warning("%s is registered without a card: %s", name, first_line(error))
    return text or ""


def words_of(artifact: Artifact, directory: str, name: str, pipeline: str, store: Store, *, opens: bool) -> dict[str, str]:
    """What MLflow's pages say of a version and of its registered model; {} where its files cannot be read.

    `opens`: whether MLflow can open it.
    """

    def words() -> dict[str, str]:
        exported = _exported(artifact, directory, name) if directory else None
        text = model_description.of_model(exported, History.of(artifact, store), opens=opens)
        return {"description": text, "about": model_description.of_all_versions(artifact.stage, pipeline)}

    found, error = (None, None) if artifact.absent else outcome(words)
    if error is not None:
        log.warning("%s is registered without a description: %s", name, first_line(error))
    return found or {}


def _card(artifact: Artifact, directory: str, name: str, store: Store) -> str:
    return card(_exported(artifact, directory, name), History.of(artifact, store))


def _exported(artifact: Artifact, directory: str, name: str) -> Exported:
    place = artifact.path / directory
    is_adapter = directory == ADAPTER
    parameters = numbers_in(place / ADAPTER_WEIGHTS) if is_adapter else parameters_of(place)
    config = read_object(place / "config.json")
    return Exported(
        name=name,
        files="adapter" if is_adapter else "model",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        parameters=parameters,
        config=config,
        base_digest=base_digest_of(place) if is_adapter else None,
        has_code=bool(config.get("auto_map")),
    )


def tags_of(artifact: Artifact) -> dict[str, str]:
    """What a registered version says of the artifact that it is, and of how it was made."""
    manifest = artifact.manifest
    made, seed = manifest.get("provenance", {}), seed_of(artifact.stage, manifest["ingredients"].get("settings", {}))
    more = {"ttrain.seed": seed, "ttrain.commit": made.get("commit"), "ttrain.run": made.get("run")}
    return {
        "ttrain.stage": artifact.stage,
        "ttrain.key": artifact.key,
        "ttrain.content": artifact.content,
        **{f"ttrain.input.{name}": entry["key"] for name, entry in manifest["inputs"].items()},
        "ttrain.code": digest_of(manifest["ingredients"]["code"]),
        **{name: str(value) for name, value in more.items() if value is not None},
    }


def tables(evaluated: Iterable[Sequence[str]], samples: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, str]:
    """The evaluation as files that MLflow's pages show as tables, and `mlflow.load_table` reads.

    `evaluated`: rows of `evaluation_table.rows`.
    """
    figures = [list(row) for row in evaluated]
    said: dict[str, dict[str, str]] = {}  # what each model answers, by prompt
    for model, listed in samples.items():
        for one in listed:
            said.setdefault(one["prompt"], {})[model] = one["answer"]
    models = sorted(samples, key=lambda model: MODELS.index(model) if model in MODELS else len(MODELS))
    answers = [[prompt, *(by_model.get(model, "") for model in models)] for prompt, by_model in said.items()]
    found = {EVALUATION_TABLE: (("what", "value", "remark"), figures), SAMPLES_TABLE: (("prompt", *models), answers)}
    return {
        name: json.dumps({"columns": list(columns), "data": rows}, ensure_ascii=False)
        for name, (columns, rows) in found.items()
        if rows
    }


def tag_of_tables(names: Iterable[str]) -> dict[str, str]:
    """The tag that tells MLflow's pages which files are tables."""
    return {LOGGED_TABLES: json.dumps([{"path": name, "type": "table"} for name in names])}
