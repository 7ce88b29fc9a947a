"""The model card of an export, `README.md`, made from the model's manifests.

The Hugging Face Hub reads the block at the top: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ttrain.config.training import TRAINING_STAGES, VALIDATION_LOSS
from ttrain.core.files import parse_json
from ttrain.core.text import counted, format_value
from ttrain.errors import ArtifactError
from ttrain.pipeline.lineage import BASE_MODEL, History
from ttrain.pipeline.names import ADAPTER_CONFIG, BASE
from ttrain.reports import facts
from ttrain.reports import summary as report
from ttrain.reports.facts import SHOWN_DIGEST
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER, MODEL, weight_files
from ttrain.store.runs import parse_row

CURVE_ROWS = 8

SAMPLES = 3

MORE_IN_LOSS = (
    "The loss that was trained on holds more than that of the next tokens (a second head, the balance of experts), which "
    "alone is the validation loss."
)

QUICKSTART = "source"  # the stage that writes the text of the Python documentation

QUICKSTART_LICENCE = "PSF-2.0"  # https://docs.python.org/3/license.html

UNKNOWN_LICENCE = "not recorded: look it up where the files came from, before you pass the model on"

SHAPE = (
    ("model_type", "architecture"),
    ("num_hidden_layers", "layers"),
    ("hidden_size", "hidden size"),
    ("num_attention_heads", "attention heads"),
    ("num_key_value_heads", "key and value heads"),
    ("vocab_size", "vocabulary"),
    ("max_position_embeddings", "positions"),
    ("num_local_experts", "experts"),
    ("num_experts", "experts"),
    ("n_routed_experts", "experts"),
    ("n_shared_experts", "shared experts"),
    ("num_experts_per_tok", "experts that a token visits"),
)


@dataclass(frozen=True)
class Exported:
    """An exported model: `files` is "model" or "adapter"."""

    name: str
    files: str
    dtype: str
    parameters: int
    config: Mapping[str, Any]  # of the model, or of the model that the adapter goes onto
    merged: bool = False
    base_digest: str | None = None  # of an adapter
    licence: str | None = None
    has_code: bool = False  # the directory brings Python files of its own


def card(exported: Exported, history: History) -> str:
    """The model card in Markdown."""
    last = history.artifacts[-1] if history.artifacts else None
    row = TRAINING_STAGES.get(last.stage) if last else None
    chats = exported.files == "adapter" or row is None or row.role != "base"
    sections = [
        _front(exported, history),
        f"# {exported.name}\n\n{summary(exported, last)}",
        _use(exported, chats=chats),
        _shape(exported),
        _training(history),
        _starting_model(history),
        _data(history),
        _evaluation(history),
        _lineage(history),
        _settings(history),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _front(exported: Exported, history: History) -> str:
    lines = [f"library_name: {'peft' if exported.files == 'adapter' else 'transformers'}", "pipeline_tag: text-generation"]
    lines += [f"license: {exported.licence}"] if exported.licence else []
    lines += [f"base_model: {history.base}"] if history.base else []
    lines += ["tags:", "- ttrain", *(["- adapter"] if exported.files == "adapter" else [])]
    return "---\n" + "\n".join(lines) + "\n---"


def summary(exported: Exported, last: Artifact | None) -> str:
    """Describe the model in a sentence or two."""
    row = TRAINING_STAGES.get(last.stage) if last else None
    if exported.files == "adapter":
        text = f"An adapter with {exported.parameters:,} parameters (PEFT), trained on top of a model that it is bound to"
    elif exported.merged:
        text = f"A language model with {exported.parameters:,} parameters, with the weights of an adapter merged into it"
    else:
        text = f"{(row and row.summary) or 'A causal language model'}, with {exported.parameters:,} parameters"
    return f"{text}. Its numbers are {exported.dtype}. Made with ttrain."


def _use(exported: Exported, *, chats: bool) -> str:
    trust = ", trust_remote_code=True" if exported.has_code else ""
    lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    if exported.files == "adapter":
        lines = ["from peft import PeftModel", *lines]
        lines += [f'base = AutoModelForCausalLM.from_pretrained("BASE"{trust})  # see below', '']  # fmt: skip
        lines += ['model = PeftModel.from_pretrained(base, "THIS_DIRECTORY")']
    else:
        lines += [f'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY", dtype="auto"{trust})']
    lines += [f'tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY"{trust})']
    if chats:
        lines += [
            'messages = [{"role": "user", "content": "Hello! Who are you?"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
        ]
    else:
        lines += ['inputs = tokenizer("The function returns", return_tensors="pt")']
    lines += [
        "said = model.generate(**inputs, max_new_tokens=100, do_sample=False)",
        'print(tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))',
    ]
    text = "## Use\n\n```python\n" + "\n".join(lines) + "\n```"
    if exported.base_digest:
        text += f"\n\nThe base is the model whose weights have the sha256 `{exported.base_digest}`."
    return text


def _shape(exported: Exported) -> str:
    rows = [(label, format_value(exported.config[name])) for name, label in SHAPE if exported.config.get(name) is not None]
    return "## Model\n\n" + report.markdown(rows, ("property", "value")) if rows else ""


def _training(history: History) -> str:
    """The section "Training": a table of the trainings, then the curve of each."""
    rows, curves, has_parts = [], [], False
    for artifact in history.artifacts:
        result = artifact.result
        if "train_seconds" not in result:
            continue
        figures = [format_value(result.get(name)) for name in ("steps", "tokens", "loss", VALIDATION_LOSS)]
        ranks = counted(result.get("ranks", 1), "rank")
        rows.append((artifact.stage, *figures, f"{result.get('precision')} on {result.get('device')}, {ranks}"))
        points = _points(artifact.path / "run" / "metrics.jsonl")
        has_parts = has_parts or any("loss_ce1" in values for _, values in points)
        if points:
            table = report.markdown(_curve(points), ("step", "tokens", "loss", "validation loss"))
            curves.append(f"Curve of `{artifact.stage}`:\n\n{table}")
    if not rows:
        return ""
    header = ("stage", "steps", "tokens", "loss", "validation loss", "computed in")
    table = report.markdown(rows, header)
    return "\n\n".join(["## Training", table, *([MORE_IN_LOSS] if has_parts else []), *curves])


def _points(file: Path) -> list[tuple[int, dict[str, Any]]]:
    """(step, logged values) of the steps that have a loss; [] if there is no file."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    steps: dict[int, dict[str, Any]] = {}  # a validation has a line of its own
    for line in lines:
        if row := parse_row(line.encode("utf-8")):
            steps.setdefault(row["step"], {}).update(row["metrics"], tokens=row.get("tokens"))
    return [(step, values) for step, values in steps.items() if "loss" in values]


def _curve(points: list[tuple[int, dict[str, Any]]]) -> list[tuple[str, ...]]:
    """Evenly spread rows of a curve, including the last."""
    chosen = sorted({round(i * (len(points) - 1) / (CURVE_ROWS - 1)) for i in range(CURVE_ROWS)})
    names = ("tokens", "loss", VALIDATION_LOSS)
    return [
        (format_value(step), *(format_value(values.get(name)) for name in names))
        for step, values in map(points.__getitem__, chosen)
    ]


def _starting_model(history: History) -> str:
    """The section "Started from": the files of the model that the first training started from."""
    base_model = next((artifact for artifact in history.artifacts if artifact.stage == BASE_MODEL), None)
    if base_model is None:
        return ""
    rows = [(name, f"`{digest}`") for _, name, digest in facts.files_of(base_model.manifest)]
    origin = f"`{history.base}` on the Hugging Face Hub" if history.base else "a local model"
    return f"## Started from\n\nFrom {origin}, under its own licence.\n\n{report.markdown(rows, ('file', 'sha256'))}"


def _data(history: History) -> str:
    rows, licences = [], []
    sources = {source.key: source for source in history.artifacts if source.stage == QUICKSTART}
    for artifact in history.artifacts:
        if not artifact.stage.startswith("shards-"):
            continue
        dataset = artifact.stage.removeprefix("shards-")
        digests = _file_digests(artifact, sources)
        for file in artifact.result.get("files", ()):
            digest = digests.get((file["role"], file["name"]), "")
            counts = (format_value(file["kept"]), format_value(file["tokens"]), format_value(file["bytes"]))
            rows.append((dataset, file["role"], file["name"], *counts, f"`{digest}`" if digest else ""))
        locations = ", ".join(f"`{location}`" for location in history.locations.get(dataset, ()))
        if artifact.manifest["inputs"].get("source"):
            licences.append(f"- {dataset}: {QUICKSTART_LICENCE}, text of the Python documentation")
        else:
            licences.append(f"- {dataset}: {UNKNOWN_LICENCE}" + (f" ({locations})" if locations else ""))
    if not rows:
        return ""
    table = report.markdown(rows, ("data", "part", "file", "records", "tokens", "bytes of text", "sha256"))
    return "\n\n".join(["## Data", table, "Licences of the data:\n\n" + "\n".join(licences)])


def _file_digests(artifact: Artifact, sources: Mapping[str, Artifact]) -> dict[tuple[str, str], str]:
    """Short digest of each file that a set of shards was made of, by (role, name)."""
    digests = {(role, name): digest for role, name, digest in facts.files_of(artifact.manifest)}
    source = sources.get(artifact.manifest["inputs"].get("source", {}).get("key", ""))
    if source:
        for file in artifact.result.get("files", ()):
            entry = source.manifest["files"].get(file["name"])
            if entry:
                digests.setdefault((file["role"], file["name"]), entry["sha256"][:SHOWN_DIGEST])
    return digests


def evaluation_rows(history: History) -> list[tuple[str, str, str]]:
    """(metric, value, remark) of the model and of those below it; [] if it was not evaluated."""
    if history.evaluation is None:
        return []
    stages = {artifact.stage for artifact in history.artifacts}
    later = [row for name, row in TRAINING_STAGES.items() if row.role != "base" and name not in stages]
    later_models = [row.model for row in later]  # trained on top of it
    suffixes = tuple(f"{mark}{name}" for name in later_models for mark in "_/")
    metrics = report.metrics_of({"evaluate": history.evaluation.result})
    shown = {name: value for name, value in metrics.items() if not name.endswith(suffixes)}
    return report.rows(shown, {"evaluate": _without_models(history.evaluation.result, later_models)})


def _evaluation(history: History) -> str:
    if history.evaluation is None:
        return ""
    result, stage = history.evaluation.result, history.artifacts[-1].stage
    rows, row = evaluation_rows(history), TRAINING_STAGES.get(stage)
    samples = result.get("samples", {}).get(row.model if row else stage, [])[:SAMPLES]
    parts = ["## Evaluation", "On held-out data, computed in fp32.", report.markdown(rows, ("metric", "value", ""))]
    if samples:
        quoted = [(_cell(sample["prompt"]), _cell(sample["answer"])) for sample in samples]
        parts += ["What it says when it always takes the likeliest token:", report.markdown(quoted, ("prompt", "answer"))]
    return "\n\n".join(parts)


def _without_models(result: Mapping[str, Any], models: Sequence[str]) -> dict[str, Any]:
    """The evaluation without the suite results of these models."""
    suites = result.get("suites")
    if suites is None:
        return dict(result)
    return {**result, "suites": {**suites, "models": [name for name in suites["models"] if name not in models]}}


def _lineage(history: History) -> str:
    if not history.artifacts:
        return ""
    rows = [
        (
            artifact.stage,
            f"`{artifact.key[:SHOWN_DIGEST]}`",
            f"`{artifact.content[:SHOWN_DIGEST]}`",
            ", ".join(f"{name} `{used['key'][:SHOWN_DIGEST]}`" for name, used in artifact.manifest["inputs"].items()),
        )
        for artifact in history.artifacts
    ]
    versions = {"ttrain": ["?"], "python": ["?"], **facts.versions_of([history.artifacts[-1].manifest])}
    version_list = ", ".join(f"{name} {', '.join(values)}" for name, values in versions.items() if name != "platform")
    table = report.markdown(rows, ("stage", "key", "content", "made from"))
    return f"## Lineage\n\n{table}\n\nMade with {version_list}."


def _settings(history: History) -> str:
    """The section "Settings": what differs from the defaults, then everything."""
    settings: dict[str, Any] = {}
    for artifact in history.artifacts:
        settings.update(artifact.manifest["ingredients"].get("settings", {}))
    if not settings:
        return ""
    changed = [f"{key}={json.dumps(value)}" for key, (value, _) in sorted(facts.changed_settings(settings).items())]
    everything = "\n".join(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(settings.items()))
    changes = (
        "What differs from ttrain's defaults:\n\n```\n" + "\n".join(changed) + "\n```" if changed else "ttrain's defaults."
    )
    return (
        f"## Settings\n\n{changes}\n\n<details><summary>All settings</summary>\n\n```yaml\n{everything}\n```\n\n</details>"
    )


def _cell(text: str) -> str:
    """A text in one cell of a table, with nothing in it that would count as markup."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`" if text.strip() else ""


@dataclass(frozen=True)
class AdapterDescription:
    """An adapter's kind, settings, size and base. `settings` are those of its kind; `bytes` is the size of its weights."""

    kind: str
    settings: dict[str, Any]
    parameters: int
    bytes: int
    base_name: str
    base_digest: str | None  # None: not recorded
    base_held_in: str | None  # how the base was quantized during training; None: not quantized


def describe(directory: Path) -> AdapterDescription:
    """Read an adapter's directory. Raises ArtifactError if a file is missing or damaged."""
    config = _read(directory / ADAPTER_CONFIG)
    base = _read(directory / BASE) if (directory / BASE).is_file() else {}
    kind = "dora" if config.get("use_dora") else str(config.get("peft_type", "unknown")).lower()
    settings: dict[str, Any] = {}
    try:
        if kind in ("lora", "dora"):
            settings = {"rank": config["r"], "alpha": config["lora_alpha"], "dropout": config.get("lora_dropout", 0.0)}
            settings["targets"] = sorted([*(config.get("target_modules") or ()), *(config.get("target_parameters") or ())])
        elif kind == "prefix_tuning":
            kind = "prefix"
            settings = {"virtual_tokens": config["num_virtual_tokens"], "layers": config["num_layers"]}
    except KeyError as error:
        raise ArtifactError(f"{directory / ADAPTER_CONFIG} does not say {error}") from None
    return AdapterDescription(
        kind=kind,
        settings=settings,
        parameters=numbers_in(directory / ADAPTER),
        bytes=(directory / ADAPTER).stat().st_size,
        base_name=str(config.get("base_model_name_or_path") or ""),
        base_digest=base.get("base_weights_sha256"),
        base_held_in=base.get("base_held_in"),
    )


def parameters_of(model: Path) -> int:
    """Count the parameters in a model's weights files; a tied tensor counts once."""
    return sum(numbers_in(file) for file in weight_files(model, MODEL))


def numbers_in(path: Path) -> int:
    """Count the parameters in a safetensors file from its header alone."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118  # it is not a mapping
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None
    if not isinstance(content, dict):
        raise ArtifactError(f"{path} must hold a JSON object")
    return content
