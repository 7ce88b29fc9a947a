"""The model card of an export, `README.md`, made from the model's manifests.

The Hugging Face Hub reads the block at the top: https://huggingface.co/docs/hub/model-cards
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ttrain.config.training import TRAINING_STAGES, VALIDATION_LOSS
from ttrain.core.files import JsonDict, need_object
from ttrain.core.text import counted, format_value, short_digest
from ttrain.errors import ArtifactError
from ttrain.pipeline.lineage import BASE_MODEL, History
from ttrain.pipeline.names import ADAPTER_CONFIG, BASE
from ttrain.reports import facts
from ttrain.reports import summary as report
from ttrain.reports.sections import Block, Code, Fold, Section, Table, Text, markdown, table_of
from ttrain.store.layout import Artifact, Artifacts
from ttrain.store.model_files import ADAPTER, MODEL, weight_files
from ttrain.store.runs import read_rows

CURVE_ROWS = 8

SHOWN_ARTIFACTS = 40  # the newest; a year of nights has some 2,000 behind its model

SAMPLES = 3

MORE_IN_LOSS = (
    "The loss that was trained on holds more than that of the next tokens (a second head, the balance of experts), which "
    "alone is the validation loss."
)

QUICKSTART = "source"  # the stage that writes the text of the Python documentation

QUICKSTART_LICENCE = "PSF-2.0"  # https://docs.python.org/3/license.html

UNKNOWN_LICENCE = "not recorded: look it up where the files came from, before you pass the model on"

MODEL_LOADED = 'model = AutoModelForCausalLM.from_pretrained("THIS_DIRECTORY", dtype="auto"{trust})'

ADAPTER_LOADED = """base = AutoModelForCausalLM.from_pretrained("BASE"{trust})  # see below

model = PeftModel.from_pretrained(base, "THIS_DIRECTORY")"""

TEXT_PROMPT = 'inputs = tokenizer("The function returns", return_tensors="pt")'

CHAT_PROMPT = """messages = [{"role": "user", "content": "Hello! Who are you?"}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
)"""

EXAMPLE = """from transformers import AutoModelForCausalLM, AutoTokenizer

{load}
tokenizer = AutoTokenizer.from_pretrained("THIS_DIRECTORY"{trust})
{prompt}
said = model.generate(**inputs, max_new_tokens=100, do_sample=False)
print(tokenizer.decode(said[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))"""

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
    recent = replace(history, artifacts=history.artifacts[-SHOWN_ARTIFACTS:])
    sections = {
        "Use": _use(exported, last),
        "Model": _shape(exported),
        "Training": _training(recent),
        "Started from": _starting_model(history),
        "Data": _data(history),
        "Evaluation": _evaluation(history),
        "Lineage": _lineage(history),
        "Settings": _settings(history),
    }
    parts = [_front(exported, history), f"# {exported.name}", summary(exported, last)]
    parts += [markdown(Section(title, blocks)) for title, blocks in sections.items() if blocks]
    return "\n\n".join(parts) + "\n"


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


def _use(exported: Exported, last: Artifact | None) -> list[Block]:
    row = TRAINING_STAGES.get(last.stage) if last else None
    is_adapter = exported.files == "adapter"
    trust = ", trust_remote_code=True" if exported.has_code else ""
    load = (ADAPTER_LOADED if is_adapter else MODEL_LOADED).format(trust=trust)
    prompt = CHAT_PROMPT if is_adapter or row is None or row.role != "base" else TEXT_PROMPT
    example = EXAMPLE.format(load=load, trust=trust, prompt=prompt)
    imports = "from peft import PeftModel\n" if is_adapter else ""
    blocks: list[Block] = [Code(imports + example, "python")]
    if exported.base_digest:
        blocks.append(Text(f"The base is the model whose weights have the sha256 `{exported.base_digest}`."))
    return blocks


def _shape(exported: Exported) -> list[Block]:
    rows = [(label, format_value(exported.config[name])) for name, label in SHAPE if exported.config.get(name) is not None]
    return table_of(("property", "value"), rows)


def _training(history: History) -> list[Block]:
    """A table of the trainings, then the curve of each."""
    rows, curves, has_parts = [], list[Block](), False
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
            names = ("tokens", "loss", VALIDATION_LOSS)
            shown = [
                (format_value(step), *(format_value(values.get(name)) for name in names))
                for step, values in facts.spread(points, CURVE_ROWS)
            ]
            curves += [Text(f"Curve of `{artifact.stage}`:"), Table(("step", "tokens", "loss", "validation loss"), shown)]
    table = table_of(("stage", "steps", "tokens", "loss", "validation loss", "computed in"), rows)
    return [*table, *([Text(MORE_IN_LOSS)] if has_parts else []), *curves]


def _points(file: Path) -> list[tuple[int, JsonDict]]:
    """(step, logged values) of the steps that have a loss; [] if there is no file."""
    steps: dict[int, JsonDict] = {}  # a validation has a line of its own
    with contextlib.suppress(OSError):
        for row in read_rows(file):
            steps.setdefault(row["step"], {}).update(row["metrics"], tokens=row.get("tokens"))
    return [(step, values) for step, values in steps.items() if "loss" in values]


def _starting_model(history: History) -> list[Block]:
    """The files of the model that the first training started from."""
    base_model = next((artifact for artifact in history.artifacts if artifact.stage == BASE_MODEL), None)
    if base_model is None:
        return []
    rows = [(name, f"`{digest}`") for _, name, digest in facts.files_of(base_model.manifest)]
    origin = f"`{history.base}` on the Hugging Face Hub" if history.base else "a local model"
    return [Text(f"From {origin}, under its own licence."), Table(("file", "sha256"), rows)]


def _data(history: History) -> list[Block]:
    rows, licences = [], []
    sources = {source.key: source for source in history.artifacts if source.stage == QUICKSTART}
    for artifact in history.artifacts:
        if not artifact.stage.startswith("shards-"):
            continue
        dataset = artifact.stage.removeprefix("shards-")
        digests = _file_digests(artifact, sources)
        for file in artifact.result.get("files", ()):
            digest = digests.get((file["role"], file["name"]), "")
            counts = [format_value(file[name]) for name in ("kept", "tokens", "bytes")]
            rows.append((dataset, file["role"], file["name"], *counts, f"`{digest}`" if digest else ""))
        if artifact.manifest["inputs"].get("source"):
            licences.append(f"- {dataset}: {QUICKSTART_LICENCE}, text of the Python documentation")
        else:
            locations = ", ".join(f"`{location}`" for location in history.locations.get(dataset, ()))
            licences.append(f"- {dataset}: {UNKNOWN_LICENCE}" + (f" ({locations})" if locations else ""))
    if not rows:
        return []
    header = ("data", "part", "file", "records", "tokens", "bytes of text", "sha256")
    return [Table(header, rows), Text("Licences of the data:"), Text("\n".join(licences))]


def _file_digests(artifact: Artifact, sources: Artifacts) -> dict[tuple[str, str], str]:
    """Short digest of each file that a set of shards was made of, by (role, name)."""
    digests = {(role, name): digest for role, name, digest in facts.files_of(artifact.manifest)}
    if source := sources.get(artifact.manifest["inputs"].get("source", {}).get("key", "")):
        for file in artifact.result.get("files", ()):
            if entry := source.manifest["files"].get(file["name"]):
                digests.setdefault((file["role"], file["name"]), short_digest(entry["sha256"]))
    return digests


def evaluation_rows(history: History) -> list[report.EvaluationRow]:
    """(metric, value, remark) of the model and of those below it; [] if it was not evaluated."""
    if history.evaluation is None:
        return []
    stages = {artifact.stage for artifact in history.artifacts}
    later = [row for name, row in TRAINING_STAGES.items() if row.role != "base" and name not in stages]
    later_models = [row.model for row in later]  # trained on top of it
    suffixes = tuple(f"{mark}{name}" for name in later_models for mark in "_/")
    metrics = report.metrics_of({"evaluate": history.evaluation.result})
    shown = {name: value for name, value in metrics.items() if not name.endswith(suffixes)}
    result = dict(history.evaluation.result)
    if suites := result.get("suites"):
        result["suites"] = {**suites, "models": [name for name in suites["models"] if name not in later_models]}
    return report.rows(shown, {"evaluate": result})


def _evaluation(history: History) -> list[Block]:
    if history.evaluation is None:
        return []
    result, stage = history.evaluation.result, history.artifacts[-1].stage
    row = TRAINING_STAGES.get(stage)
    samples = result.get("samples", {}).get(row.model if row else stage, [])[:SAMPLES]
    header = {"prompt": "prompt", "answer": "answer", "reference": facts.REFERENCE}
    if not any("reference" in sample for sample in samples):
        del header["reference"]
    quoted = [tuple(_cell(sample.get(name, "")) for name in header) for sample in samples]
    said: list[Block] = [
        Text("What it says when it always takes the likeliest token:"),
        Table(tuple(header.values()), quoted),
    ]
    table = Table(("metric", "value", ""), evaluation_rows(history))
    return [Text("On held-out data, computed in fp32."), table, *(said if quoted else [])]


def _lineage(history: History) -> list[Block]:
    if not history.artifacts:
        return []
    rows = [
        (
            artifact.stage,
            f"`{short_digest(artifact.key)}`",
            f"`{short_digest(artifact.content)}`",
            ", ".join(f"{name} `{short_digest(used['key'])}`" for name, used in artifact.manifest["inputs"].items()),
        )
        for artifact in history.artifacts[-SHOWN_ARTIFACTS:]
    ]
    earlier = len(history.artifacts) - len(rows)
    left_out = [Text(f"Left out here and above: {earlier:,} earlier ones; `ttrain lineage` has all.")] if earlier else []
    versions = {"ttrain": ["?"], "python": ["?"], **facts.versions_of([history.artifacts[-1].manifest])}
    version_list = ", ".join(f"{name} {', '.join(values)}" for name, values in versions.items() if name != "platform")
    return [Table(("stage", "key", "content", "made from"), rows), *left_out, Text(f"Made with {version_list}.")]


def _settings(history: History) -> list[Block]:
    """What differs from the defaults, then everything."""
    settings: JsonDict = {}
    for artifact in history.artifacts:
        settings |= artifact.manifest["ingredients"].get("settings", {})
    if not settings:
        return []
    changed = [f"{key}={json.dumps(value)}" for key, (value, _) in sorted(facts.changed_settings(settings).items())]
    everything = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in sorted(settings.items())]
    text = "What differs from ttrain's defaults:" if changed else "ttrain's defaults."
    changes = [Code("\n".join(changed))] if changed else []
    return [Text(text), *changes, Fold("All settings", Code("\n".join(everything), "yaml"))]


def _cell(text: str) -> str:
    """A text in one cell of a table, with nothing in it that would count as markup."""
    return "`" + " ".join(text.replace("`", "'").split()) + "`" if text.strip() else ""


def describe(directory: Path) -> JsonDict:
    """An adapter's kind, the settings of its kind, its size and its base. Raises ArtifactError if a file is missing or
    damaged."""
    config = _read(directory / ADAPTER_CONFIG)
    base = _read(directory / BASE) if (directory / BASE).is_file() else {}
    kind = "dora" if config.get("use_dora") else str(config.get("peft_type", "unknown")).lower()
    settings: JsonDict = {}
    try:
        if kind in ("lora", "dora"):
            settings = {"rank": config["r"], "alpha": config["lora_alpha"], "dropout": config.get("lora_dropout", 0.0)}
            settings["targets"] = sorted([*(config.get("target_modules") or ()), *(config.get("target_parameters") or ())])
        elif kind == "prefix_tuning":
            kind = "prefix"
            settings = {"virtual_tokens": config["num_virtual_tokens"], "layers": config["num_layers"]}
    except KeyError as error:
        raise ArtifactError(f"{directory / ADAPTER_CONFIG} does not say {error}") from None
    return {
        "kind": kind,
        **settings,
        "parameters": numbers_in(directory / ADAPTER),
        "bytes": (directory / ADAPTER).stat().st_size,
        "base_weights_sha256": base.get("base_weights_sha256"),  # None: not recorded
        "base_held_in": base.get("base_held_in"),  # how the base was quantized during training; None: not quantized
    }


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


def _read(path: Path) -> JsonDict:
    try:
        return need_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None
