"""What MLflow's pages say of a registered model: what it is, from what data, how good, how to open it. Short, in Markdown.

The facts are those of the model card, which lies among the version's files and has the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from ttrain.pipeline.lineage import History
from ttrain.pipeline.lineage_links import seed_of
from ttrain.pipeline.model_card import Exported, evaluation_rows, summary
from ttrain.reports import evaluation_table
from ttrain.store.layout import Artifact
from ttrain.tracking import data_of
from ttrain.tracking.model_description import HERE

SHORT: Final = 12  # letters of a digest that are shown
FILES: Final = 3  # of a data set that are named
NAME: Final = 40  # characters of a file's name: MLflow takes 5,000 for everything
CHATS: Final = ("sft", "lora")  # stages whose models answer
# What a registered model is as a whole; each version says the rest of itself.
WHOLES: Final[Mapping[str, str]] = {
    "tokenizer": "Tokenizers",
    "pretrain": "Base models",
    "sft": "Models fine-tuned on chats",
    "lora": "Adapters",
}
SETS: Final = (
    "Models of the pipeline `{name}`: each version is a tokenizer, a base model, an SFT model and an adapter that one run "
    "made or took. `champion` is the set that was promoted, `challenger` the newest other one. `ttrain models list` shows "
    "them, `ttrain models promote` and `ttrain models rollback` move the alias."
)


def of_model(exported: Exported | None, history: History, *, opens: bool) -> str:
    """Of one version. `exported` is None for a tokenizer; `opens`: whether MLflow can open it.

    `HERE` stands for NAME/VERSION, which only MLflow knows.
    """
    model = history.artifacts[-1]
    what = summary(exported, model) if exported else _of_tokenizer(model)
    parts = [what, _list(_facts(model, history)), *_measured(evaluation_rows(history) if exported else [])]
    return "\n\n".join([*parts, _open(exported, model.stage, opens=opens), _more(card=exported is not None)])


def of_set(name: str, run: str, models: Mapping[str, Artifact], metrics: Mapping[str, float]) -> str:
    """Of a version that is a set: `models` by the name that they are registered under, `metrics` of the run."""
    chats = any(one.stage in CHATS for one in models.values())
    members = ((f"`{member}`", f"{one.stage}, key `{one.key[:SHORT]}`") for member, one in models.items())
    parts = [
        f"The models of the run `{run}` of the pipeline `{name}`. As a whole it opens as the last one that MLflow can open.",
        _list(members),
        *_measured(evaluation_table.rows(metrics)),
    ]
    return "\n\n".join([*parts, _through_mlflow(chats=chats), _more(card=False)])


def of_all_versions(stage: str, name: str) -> str:
    """Of the registered model that holds the models of a stage."""
    return (
        f"{WHOLES[stage]} of the pipeline `{name}`, a version for each one that was made; each says what it is. `champion` "
        f"and `challenger` are those of the set `{name}`."
    )


def of_all_sets(name: str) -> str:
    """Of the registered model that holds the sets of a pipeline."""
    return SETS.format(name=name)


def _list(rows: Iterable[tuple[str, str]]) -> str:
    """MLflow's pages set the columns of a table side by side without a space, so these are none."""
    return "\n".join(f"- {name}: {value}" for name, value in rows)


def _measured(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    told = _list((what, f"**{value}**" + (f" ({remark})" if remark else "")) for what, value, remark in rows)
    return [f"On held-out data:\n\n{told}"] if told else []


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
                yield f"data, {data.name}", _counted(data.counts.get("documents"), data.tokens, data.files, data.digest)
    for artifact in history.artifacts:
        if "train_seconds" in (result := artifact.result):
            where = f"{result.get('precision')} on {result.get('device')}, ranks {result.get('ranks')}"
            took = f"{result.get('steps', 0):,} steps, {result.get('tokens', 0):,} tokens, {where}"
            loss = result.get("validation_loss")
            yield f"training, {artifact.stage}", took + (f", validation loss {loss:.4f}" if loss is not None else "")
    made, settings = model.manifest.get("provenance", {}), model.manifest["ingredients"].get("settings", {})
    known = {"run": made.get("run"), "key": model.key[:SHORT], "commit": (made.get("commit") or "")[:SHORT]}
    known["seed"] = seed_of(model.stage, settings)
    yield "made", ", ".join(f"{name} `{value}`" for name, value in known.items() if value not in (None, ""))


def _counted(documents: int | None, tokens: int | None, files: tuple[Mapping[str, object], ...], digest: str) -> str:
    counts = [f"{count:,} {what}" for count, what in ((documents, "records"), (tokens, "tokens")) if count is not None]
    names = [f"`{str(file['name'])[:NAME].replace('`', '')}`" for file in files[:FILES]]
    more = [f"{len(files) - FILES} more"] if len(files) > FILES else []
    return ", ".join([*counts, *names, *more, f"digest `{digest}`"])


def _open(exported: Exported | None, stage: str, *, opens: bool) -> str:
    if opens:
        return _through_mlflow(chats=stage in CHATS)
    lines = ["import mlflow"]
    lines += ["from transformers import AutoTokenizer"] if exported is None else ["from peft import PeftModel"]
    lines += ["", f'place = mlflow.artifacts.download_artifacts("models:/{HERE}")']
    lines += ["tokenizer = AutoTokenizer.from_pretrained(place)"] if exported is None else []
    lines += ["model = PeftModel.from_pretrained(base, place)  # base: the model below it"] if exported else []
    return "```python\n" + "\n".join(lines) + "\n```"


def _through_mlflow(*, chats: bool) -> str:
    given = '[{"role": "user", "content": "Hello! Who are you?"}]' if chats else '"The function returns"'
    return (
        f'```python\nimport mlflow\n\npipe = mlflow.transformers.load_model("models:/{HERE}")\n'
        f"pipe({given}, max_new_tokens=50)\n```"
    )


def _more(*, card: bool) -> str:
    there = "The model card is `README.md` among its files. " if card else ""
    return f"{there}What it was made of: `ttrain lineage {HERE}`; the same again: `ttrain reproduce {HERE}`."
