"""Texts about registered models in the tracker: descriptions and evaluation tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ttrain.config.training import EVALUATED, PRIMARY_METRICS, TRAINING_STAGES, model_order
from ttrain.core.text import short_digest
from ttrain.reports import summary as report
from ttrain.reports.facts import REFERENCE
from ttrain.reports.history import History, seed_of
from ttrain.reports.model_card import Exported, summary
from ttrain.store.layout import Artifact, Artifacts
from ttrain.tracking.datasets import DataInput, data_of

HERE = "<NAME/VERSION>"  # in a text: the version that it describes
LOGGED_TABLES = "mlflow.loggedArtifacts"  # tag by which MLflow's pages show a JSON file as a table

EVALUATION_TABLE, SAMPLES_TABLE = "evaluation_table.json", "samples_table.json"


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
            if reference := sample.get("reference"):
                answers_by_prompt[sample["prompt"]][REFERENCE] = reference
    models = sorted(samples, key=model_order)
    if any(REFERENCE in by_model for by_model in answers_by_prompt.values()):
        models.append(REFERENCE)
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


SHOWN_FILES = 3  # of a data set: MLflow's database holds 5,000 characters of a description

CHAT_STAGES = tuple(name for name, row in TRAINING_STAGES.items() if row.role != "base")  # their models chat
# The title of a registered model; each version has its own description.
TITLES: Mapping[str, str] = {
    "tokenizer": "Tokenizers",
    **{name: row.title for name, row in TRAINING_STAGES.items()},
}

SETS = (  # the description of the registered model that holds the sets of a pipeline
    "Models of the pipeline `{name}`: each version is a tokenizer, a base model, an SFT model and an adapter that one run "
    "made or took. `champion` is the set that was promoted, `challenger` the newest other one. `ttrain models list` shows "
    "them, `ttrain models promote` and `ttrain models promote --previous` move the alias."
)


def of_model(exported: Exported | None, history: History, *, opens: bool, note: str = "") -> str:
    """Describe one version: its metric and the run's note, then data, training, how to open it.

    `exported` is None for a tokenizer; `opens`: whether MLflow can open it. `HERE` stands for
    NAME/VERSION, which only MLflow knows.
    """
    model = history.artifacts[-1]
    result = history.evaluation.result if history.evaluation else {}
    parts = [
        _headline([model.stage], result.get("metrics", {}), result.get("intervals", {}), note),
        summary(exported, model) if exported else _of_tokenizer(model.result),
        _list(_facts(model, history)),
        _open(exported, model.stage, opens=opens),
        _lineage_hint(card=exported is not None),
    ]
    return "\n\n".join(filter(None, parts))


def of_set(
    name: str,
    run: str,
    models: Artifacts,
    metrics: Mapping[str, float],
    *,
    intervals: Mapping[str, Sequence[float]] = MappingProxyType({}),
    note: str = "",
) -> str:
    """Describe a version of a set: its metric and the run's note, then its models.

    `models` by their registered name, `metrics` of the run, `intervals` of its evaluation.
    """
    evaluated = {metric.removeprefix(EVALUATED): value for metric, value in metrics.items()}
    stages = [model.stage for model in models.values()]
    parts = [
        _headline(stages, evaluated, intervals, note),
        f"Models of the run `{run}` of `{name}`; opens as the last one that MLflow can open.",
        _list((f"`{name}`", f"{made.stage}, key `{short_digest(made.key)}`") for name, made in models.items()),
        _through_mlflow(chats=any(stage in CHAT_STAGES for stage in stages)),
        _lineage_hint(card=False),
    ]
    return "\n\n".join(filter(None, parts))


def _headline(
    stages: Iterable[str],
    metrics: Mapping[str, float],
    intervals: Mapping[str, Sequence[float]],
    note: str,
) -> str:
    """The metric that the last model is judged by, with its interval, and the run's note."""
    text = ""
    for stage in stages:
        metric = PRIMARY_METRICS.get(stage)
        if metric and metric.name in metrics:
            text = f"{metric.label} **{metrics[metric.name]:.3f}**"
            if bounds := intervals.get(metric.name):
                text += f" ({bounds[0]:.3f} to {bounds[1]:.3f})"
    return ". ".join(filter(None, (text, " ".join(note.split()))))


def of_all_versions(stage: str, name: str) -> str:
    """Describe the registered model that holds the models of a stage."""
    return (
        f"{TITLES[stage]} of the pipeline `{name}`, a version for each one that was made. "
        f"`champion` and `challenger` are those of the set `{name}`."
    )


def _list(rows: Iterable[tuple[str, str]]) -> str:
    """A list instead of a table: MLflow's pages print a table's columns without a space between them."""
    return "\n".join(f"- {name}: {value}" for name, value in rows)


def _of_tokenizer(result: Mapping[str, Any]) -> str:
    fits = ""
    if "bytes_per_token" in result:
        fits = f", {result['bytes_per_token']:.2f} bytes per token of what it was trained on"
    return f"A tokenizer of {result.get('vocab_size', 0):,} tokens{fits}, with a chat template. Made with ttrain."


def _facts(model: Artifact, history: History) -> Iterator[tuple[str, str]]:
    for artifact in history.artifacts:
        for data in data_of(artifact):
            if data.context == "training" and (artifact is model or artifact.stage != "tokenizer"):
                yield f"data, {data.name}", _data_summary(data)
        if "train_seconds" in artifact.result:
            yield f"training, {artifact.stage}", report.key_figures(artifact.stage, artifact.result)
    origin = {
        "run": model.provenance.get("run"),
        "key": short_digest(model.key),
        "commit": short_digest(model.provenance.get("commit") or ""),
        "seed": seed_of(model.stage, model.manifest["ingredients"].get("settings", {})),
    }
    yield "made", ", ".join(f"{name} `{value}`" for name, value in origin.items() if value not in (None, ""))


def _data_summary(data: DataInput) -> str:
    counts = {"records": data.counts.get("documents"), "tokens": data.tokens, "files": len(data.files)}
    shown = [f"{count:,} {unit}" for unit, count in counts.items() if count is not None]
    names = [f"`{str(file['name']).replace('`', '')}`" for file in data.files[:SHOWN_FILES]]
    return ", ".join([*shown, *names, f"digest `{data.digest}`"])


def _open(exported: Exported | None, stage: str, *, opens: bool) -> str:
    if opens:
        return _through_mlflow(chats=stage in CHAT_STAGES)
    imports, load = "from transformers import AutoTokenizer", "tokenizer = AutoTokenizer.from_pretrained(place)"
    if exported:
        imports = "from peft import PeftModel"
        load = "model = PeftModel.from_pretrained(base, place)  # base: the model below it"
    place = f'place = mlflow.artifacts.download_artifacts("models:/{HERE}")'
    return f"```python\nimport mlflow\n{imports}\n\n{place}\n{load}\n```"


def _through_mlflow(*, chats: bool) -> str:
    example = '[{"role": "user", "content": "Hello! Who are you?"}]' if chats else '"The function returns"'
    return (
        f'```python\nimport mlflow\n\npipe = mlflow.transformers.load_model("models:/{HERE}")\n'
        f"pipe({example}, max_new_tokens=50)\n```"
    )


def _lineage_hint(*, card: bool) -> str:
    card_note = "The model card is `README.md` among its files. " if card else ""
    return f"{card_note}What it was made of: `ttrain lineage {HERE}`; the same again: `ttrain reproduce {HERE}`."
