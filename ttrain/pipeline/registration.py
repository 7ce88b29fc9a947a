"""Extra data of a registered model in the tracker: card, loading files, tags, evaluation tables."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ttrain.config.training import BASES, CHOSEN_BASE, TRAINING_STAGES, model_order
from ttrain.core.files import read_object
from ttrain.core.hashing import digest_of
from ttrain.pipeline.lineage import History, seed_of
from ttrain.pipeline.model_card import Exported, card, evaluation_rows, numbers_in, parameters_of, summary
from ttrain.pipeline.names import base_digest_of
from ttrain.reports import summary as report
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER as ADAPTER_WEIGHTS
from ttrain.tracking import data_of, model_description
from ttrain.tracking.calls import attempt, first_line
from ttrain.tracking.model_description import ADAPTER, HERE, MODEL, LoadableModel
from ttrain.tracking.null_tracker import NullRun
from ttrain.tracking.runs import AnyRun, TrackedRun

log = logging.getLogger("ttrain")

LOGGED_TABLES: Final = "mlflow.loggedArtifacts"  # tag by which MLflow's pages show a JSON file as a table

EVALUATION_TABLE, SAMPLES_TABLE = "evaluation_table.json", "samples_table.json"


def extra_files(
    artifact: Artifact, directory: str, name: str, store: ArtifactStore, run: AnyRun, examples: Sequence[str]
) -> LoadableModel:
    """Extra files for the directory of a registered model; none for a tokenizer, or if its files are not on this disk.

    An adapter includes its base if the run's files are on the same disk, where that takes no space. A model whose files
    cannot be described is registered without them: the run does not depend on it.
    """
    if directory not in (MODEL, ADAPTER) or artifact.absent or isinstance(run, NullRun):
        return LoadableModel()
    extra_files, error = attempt(lambda: _described_files(artifact, directory, name, store, run, examples))
    if error is not None:
        log.warning("%s is registered without a description of its files: %s", name, first_line(error))
    return extra_files or LoadableModel()


def _described_files(
    artifact: Artifact, directory: str, name: str, store: ArtifactStore, run: TrackedRun, examples: Sequence[str]
) -> LoadableModel:
    below = artifact.manifest["inputs"].get("base") if directory == ADAPTER else None
    base = store.path(below["stage"], below["key"]) / MODEL if below else None
    if base is not None and not ((base / "config.json").is_file() and model_description.shares_disk(run, base)):
        base = None
    text = card_of(artifact, directory, name, store)
    return model_description.loadable(artifact, directory, base=base, card=text, examples=examples)


def card_of(artifact: Artifact, directory: str, name: str, store: ArtifactStore) -> str:
    """The model card of a registered model, with any evaluation; "" if its files cannot be read."""
    text, error = attempt(lambda: card(_exported(artifact, directory, name), History.of(artifact, store)))
    if error is not None:
        log.warning("%s is registered without a card: %s", name, first_line(error))
    return text or ""


def descriptions_of(
    artifact: Artifact, directory: str, name: str, pipeline: str, store: ArtifactStore, *, opens: bool
) -> dict[str, str]:
    """Descriptions of a version and of its registered model; {} if its files cannot be read.

    `opens`: whether MLflow can open it.
    """

    def words() -> dict[str, str]:
        exported = _exported(artifact, directory, name) if directory else None
        text = of_model(exported, History.of(artifact, store), opens=opens)
        return {"description": text, "about": of_all_versions(artifact.stage, pipeline)}

    descriptions, error = (None, None) if artifact.absent else attempt(words)
    if error is not None:
        log.warning("%s is registered without a description: %s", name, first_line(error))
    return descriptions or {}


def _exported(artifact: Artifact, directory: str, name: str) -> Exported:
    model_directory = artifact.path / directory
    is_adapter = directory == ADAPTER
    parameters = numbers_in(model_directory / ADAPTER_WEIGHTS) if is_adapter else parameters_of(model_directory)
    config = read_object(model_directory / "config.json")
    return Exported(
        name=name,
        files="adapter" if is_adapter else "model",
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        parameters=parameters,
        config=config,
        base_digest=base_digest_of(model_directory) if is_adapter else None,
        has_code=bool(config.get("auto_map")),
    )


def tags_of(artifact: Artifact) -> dict[str, str]:
    """Tags of a registered version: its artifact and provenance."""
    manifest = artifact.manifest
    provenance, seed = artifact.provenance, seed_of(artifact.stage, manifest["ingredients"].get("settings", {}))
    optional_tags = {"ttrain.seed": seed, "ttrain.commit": provenance.get("commit"), "ttrain.run": provenance.get("run")}
    return {
        "ttrain.stage": artifact.stage,
        "ttrain.key": artifact.key,
        "ttrain.content": artifact.content,
        **{f"ttrain.input.{name}": entry["key"] for name, entry in manifest["inputs"].items()},
        "ttrain.code": digest_of(manifest["ingredients"]["code"]),
        **{name: str(value) for name, value in optional_tags.items() if value is not None},
    }


def evaluation_tables(
    evaluated: Iterable[Sequence[str]], samples: Mapping[str, Iterable[Mapping[str, Any]]]
) -> dict[str, str]:
    """The evaluation as JSON tables for MLflow's pages and `mlflow.load_table`.

    `evaluated`: rows of `report.rows`.
    """
    figures = [list(row) for row in evaluated]
    answers_by_prompt: dict[str, dict[str, str]] = {}  # {prompt: {model: answer}}
    for model, listed in samples.items():
        for sample in listed:
            answers_by_prompt.setdefault(sample["prompt"], {})[model] = sample["answer"]
    models = sorted(samples, key=model_order)
    answers = [[prompt, *(by_model.get(model, "") for model in models)] for prompt, by_model in answers_by_prompt.items()]
    contents = {EVALUATION_TABLE: (("what", "value", "remark"), figures), SAMPLES_TABLE: (("prompt", *models), answers)}
    return {
        name: json.dumps({"columns": list(columns), "data": rows}, ensure_ascii=False)
        for name, (columns, rows) in contents.items()
        if rows
    }


def tag_of_tables(names: Iterable[str]) -> dict[str, str]:
    """The tag that marks files as tables for MLflow's pages."""
    return {LOGGED_TABLES: json.dumps([{"path": name, "type": "table"} for name in names])}


SHORT: Final = 12  # letters of a digest that are shown

FILES: Final = 3  # of a data set that are named

NAME: Final = 40  # characters of a file's name: MLflow takes 5,000 for everything

CHAT_STAGES: Final = tuple(name for name, row in TRAINING_STAGES.items() if row.role != "base")  # their models chat
# The title of a registered model; each version has its own description.
TITLES: Final[Mapping[str, str]] = {
    "tokenizer": "Tokenizers",
    **{name: row.title for name, row in TRAINING_STAGES.items()},
    CHOSEN_BASE: TRAINING_STAGES[BASES[0]].title,
}

SETS: Final = (  # the description of the registered model that holds the sets of a pipeline
    "Models of the pipeline `{name}`: each version is a tokenizer, a base model, an SFT model and an adapter that one run "
    "made or took. `champion` is the set that was promoted, `challenger` the newest other one. `ttrain models list` shows "
    "them, `ttrain models promote` and `ttrain models rollback` move the alias."
)


def of_model(exported: Exported | None, history: History, *, opens: bool) -> str:
    """Describe one version. `exported` is None for a tokenizer; `opens`: whether MLflow can open it.

    `HERE` stands for NAME/VERSION, which only MLflow knows.
    """
    model = history.artifacts[-1]
    summary_text = summary(exported, model) if exported else _of_tokenizer(model)
    parts = [summary_text, _list(_facts(model, history)), *_metrics_section(evaluation_rows(history) if exported else [])]
    return "\n\n".join([*parts, _open(exported, model.stage, opens=opens), _lineage_hint(card=exported is not None)])


def of_set(name: str, run: str, models: Mapping[str, Artifact], metrics: Mapping[str, float]) -> str:
    """Describe a version of a set: `models` by their registered name, `metrics` of the run."""
    chats = any(model.stage in CHAT_STAGES for model in models.values())
    members = ((f"`{member}`", f"{model.stage}, key `{model.key[:SHORT]}`") for member, model in models.items())
    parts = [
        f"The models of the run `{run}` of the pipeline `{name}`. As a whole it opens as the last one that MLflow can open.",
        _list(members),
        *_metrics_section(report.rows(metrics)),
    ]
    return "\n\n".join([*parts, _through_mlflow(chats=chats), _lineage_hint(card=False)])


def of_all_versions(stage: str, name: str) -> str:
    """Describe the registered model that holds the models of a stage."""
    return (
        f"{TITLES[stage]} of the pipeline `{name}`, a version for each one that was made; each says what it is. `champion` "
        f"and `challenger` are those of the set `{name}`."
    )


def _list(rows: Iterable[tuple[str, str]]) -> str:
    """A list instead of a table: MLflow's pages print a table's columns without a space between them."""
    return "\n".join(f"- {name}: {value}" for name, value in rows)


def _metrics_section(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    listing = _list((metric, f"**{value}**" + (f" ({remark})" if remark else "")) for metric, value, remark in rows)
    return [f"On held-out data:\n\n{listing}"] if listing else []


def _of_tokenizer(artifact: Artifact) -> str:
    result = artifact.result
    fits = (
        f", {result['bytes_per_token']:.2f} bytes per token of what it was trained on" if "bytes_per_token" in result else ""
    )
    return f"A tokenizer of {result.get('vocab_size', 0):,} tokens{fits}, with a chat template. Made with ttrain."


def _facts(model: Artifact, history: History) -> Iterator[tuple[str, str]]:
    for artifact in history.artifacts:
        for data in data_of(artifact):
            if data.context == "training" and (artifact is model or artifact.stage != "tokenizer"):
                yield f"data, {data.name}", _data_summary(data.counts.get("documents"), data.tokens, data.files, data.digest)
    for artifact in history.artifacts:
        if "train_seconds" in (result := artifact.result):
            hardware = f"{result.get('precision')} on {result.get('device')}, ranks {result.get('ranks')}"
            took = f"{result.get('steps', 0):,} steps, {result.get('tokens', 0):,} tokens, {hardware}"
            loss = result.get("validation_loss")
            yield f"training, {artifact.stage}", took + (f", validation loss {loss:.4f}" if loss is not None else "")
    if model.stage == CHOSEN_BASE:
        yield "base model of a night", report.key_figures(model.stage, model.result)
    provenance, settings = model.provenance, model.manifest["ingredients"].get("settings", {})
    origin = {"run": provenance.get("run"), "key": model.key[:SHORT], "commit": (provenance.get("commit") or "")[:SHORT]}
    origin["seed"] = seed_of(model.stage, settings)
    yield "made", ", ".join(f"{name} `{value}`" for name, value in origin.items() if value not in (None, ""))


def _data_summary(documents: int | None, tokens: int | None, files: tuple[Mapping[str, object], ...], digest: str) -> str:
    counts = [f"{count:,} {unit}" for count, unit in ((documents, "records"), (tokens, "tokens")) if count is not None]
    names = [f"`{str(file['name'])[:NAME].replace('`', '')}`" for file in files[:FILES]]
    remainder = [f"{len(files) - FILES} more"] if len(files) > FILES else []
    return ", ".join([*counts, *names, *remainder, f"digest `{digest}`"])


def _open(exported: Exported | None, stage: str, *, opens: bool) -> str:
    if opens:
        return _through_mlflow(chats=stage in CHAT_STAGES)
    lines = ["import mlflow"]
    lines += ["from transformers import AutoTokenizer"] if exported is None else ["from peft import PeftModel"]
    lines += ["", f'place = mlflow.artifacts.download_artifacts("models:/{HERE}")']
    lines += ["tokenizer = AutoTokenizer.from_pretrained(place)"] if exported is None else []
    lines += ["model = PeftModel.from_pretrained(base, place)  # base: the model below it"] if exported else []
    return "```python\n" + "\n".join(lines) + "\n```"


def _through_mlflow(*, chats: bool) -> str:
    example = '[{"role": "user", "content": "Hello! Who are you?"}]' if chats else '"The function returns"'
    return (
        f'```python\nimport mlflow\n\npipe = mlflow.transformers.load_model("models:/{HERE}")\n'
        f"pipe({example}, max_new_tokens=50)\n```"
    )


def _lineage_hint(*, card: bool) -> str:
    card_note = "The model card is `README.md` among its files. " if card else ""
    return f"{card_note}What it was made of: `ttrain lineage {HERE}`; the same again: `ttrain reproduce {HERE}`."


def log_evaluation(run: AnyRun, evaluation: Artifact, rows: Sequence[tuple[str, str, str]]) -> None:
    """Log the evaluation's table and samples to the pipeline's tracked run."""
    run.log_text(report.markdown(rows, ("metric", "value", "")), "evaluation.md")
    tables = evaluation_tables(rows, evaluation.result.get("samples", {}))
    for name, text in tables.items():
        run.log_text(text, name)
    run.set_tags(tag_of_tables(tables))
    if "samples.json" not in evaluation.absent:  # otherwise the run that made it has logged it to MLflow
        run.log_file(evaluation.path / "samples.json")
