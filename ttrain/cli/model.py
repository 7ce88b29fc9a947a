"""`ttrain export` and `ttrain models size`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ttrain.cli.options import (
    MODEL_HELP,
    AdapterBase,
    AsJson,
    Files,
    Output,
    Profiles,
    RunName,
    SettingsOptions,
    Table,
    app,
    argument,
    command,
    option,
    resolved_models,
)
from ttrain.cli.registry import models_app
from ttrain.core.files import read_object
from ttrain.core.terminal import print_escaped
from ttrain.core.text import format_size
from ttrain.errors import UsageError

if TYPE_CHECKING:
    from ttrain.config import Model

BYTES_PER_NUMBER = 4  # bytes of a weight, a gradient and a number of the optimizer's state: master weights are fp32
PRESETS = "presets.json"
STATE_NUMBERS = {"AdamW": 2, "Muon": 1}  # numbers that an optimizer keeps for each weight
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # their values do not affect sizes


@command(
    models_app,
    "Examples:  ttrain models size\n\nttrain models size 124m model.kv_heads=4\n\n"
    "ttrain models size model.kind=gpt2 model.layers=6 --json",
)
def models_size(
    arguments: Annotated[
        list[str] | None,
        argument("a preset, and settings that override it", metavar="PRESET|KEY=VALUE"),
    ] = None,
    config: Files = None,
    profile: Profiles = None,
) -> Output:
    """Print parameters, FLOPs and memory of the presets, or of the model with the given settings."""
    from ttrain.config.loading import Override
    from ttrain.config.model import vocab_size_of

    words = arguments or []
    if not (words or config or profile):
        return _presets()
    presets = [word for word in words if "=" not in word]
    if len(presets) > 1:
        raise UsageError(f"{len(presets)} presets are given: {', '.join(presets)}; give one")
    overrides = [f"model.preset={word}" if word in presets else word for word in words]
    vocabularies = [Override("preset", "tokenizer.vocab_size", vocab_size_of(name)) for name in presets]
    settings = SettingsOptions(overrides, config, profile).load(base=vocabularies).settings
    if settings.existing_model:
        raise UsageError(
            f"{settings.trainings[0]}.start_from is {settings.existing_model}, but this command shows "
            f"new models, with the sizes in model.*; remove start_from"
        )
    size = cost(settings.model, vocab_size=settings.tokenizer.vocab_size, row_length=settings.pretrain.row_length)
    attention = f"6 a weight that multiplies + 12 layers heads head_dim {size.row_length}, arXiv:2204.02311, appendix B"
    rows = [
        ("architecture", size.kind, "model.kind"),
        ("vocabulary", f"{size.vocab_size:,}", "tokenizer.vocab_size"),
        ("parameters", f"{size.parameters:,}", "without the second head of model.multi_token"),
        ("  active for a token", f"{size.active_parameters:,}", "without the experts that a token is not routed to"),
        ("FLOPs of a token", f"{size.flops_per_token:.4g}", f"forward and backward: {attention}"),
    ]
    memory = "weights, gradients and state; activations come on top"
    rows += [(f"memory with {kind}", format_size(number), memory) for kind, number in size.memory_bytes.items()]
    rows.append(("model on disk", format_size(size.model_bytes), "fp32; `ttrain export` halves it"))
    return Output(size, [Table(("property", "value", ""), rows)])


def _presets() -> Output:
    from ttrain.config.model import COLUMNS, sizes_of

    rows, values = [], {}
    for name, size in of_presets().items():
        sizes = sizes_of(name)
        shape = ("" if sizes[column] is None else sizes[column] for column in COLUMNS)
        memory = map(format_size, size.memory_bytes.values())
        rows.append((name, *shape, f"{size.vocab_size:,}", f"{size.parameters:,}", f"{size.flops_per_token:.2g}", *memory))
        values[name] = {"settings": sizes, **asdict(size)}
    header = ("preset", *COLUMNS, "vocabulary", "parameters", "FLOPs/token", "memory adamw", "memory muon")
    advice = "take one with model.preset=NAME; other settings override it. Details of one: ttrain models size NAME"
    return Output(values, [Table(header, rows), advice])


@dataclass(frozen=True)
class ModelCost:
    """Parameters, FLOPs of a token and bytes, of one model."""

    kind: str
    vocab_size: int
    row_length: int
    parameters: int
    active_parameters: int  # for one token: without the experts that it is not routed to
    flops_per_token: float  # forward and backward
    memory_bytes: Mapping[str, int]  # weights, gradients and state, by optimizer
    model_bytes: int  # of the weights that a stage writes


def cost(config: Model, *, vocab_size: int, row_length: int) -> ModelCost:
    """Compute a model's cost. Raises UsageError if its architecture does not allow these sizes."""
    import torch

    from ttrain.config import Optim
    from ttrain.model import factory
    from ttrain.train import optim
    from ttrain.train.monitor import flops_per_token, visited_shares

    with torch.device("meta"):
        model: Any = factory.construct(config, vocab_size=vocab_size, ids=IDS)
    second = model.get_output_embeddings().weight.numel() if config.multi_token else 0  # AdamW trains it beside the model
    total = sum(p.numel() for p in model.parameters())
    shares = visited_shares(model)
    memory = {}
    for kind in ("adamw", "muon"):
        groups = optim.build(model, Optim(kind=kind)).groups()
        state = sum(STATE_NUMBERS[group["optimizer"]] * group["parameters"] for group in groups)
        memory[kind] = BYTES_PER_NUMBER * (2 * (total + second) + state + STATE_NUMBERS["AdamW"] * second)
    return ModelCost(
        kind=model.config.model_type,
        vocab_size=vocab_size,
        row_length=row_length,
        parameters=total,
        active_parameters=sum(round(p.numel() * shares.get(name, 1.0)) for name, p in model.named_parameters()),
        flops_per_token=flops_per_token(model, row_length) + 6 * second,
        memory_bytes=memory,
        model_bytes=BYTES_PER_NUMBER * total,
    )


def of_presets() -> dict[str, ModelCost]:
    """The cost of every preset, each with the vocabulary that its name refers to: from a file that ships with ttrain, since
    building them takes 5 s."""
    from ttrain.config.loading import configs_directory

    return {name: ModelCost(**values) for name, values in read_object(configs_directory() / PRESETS).items()}


def quieten() -> None:
    """Hide FutureWarnings of libraries, and the Hub's progress bars if standard error is not a terminal."""
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@command(
    app,
    "Examples:  ttrain export sft --to out/chat\n\n"
    "ttrain export lora --merge --to out/expert --dtype fp16\n\n"
    "ttrain export sft --to out/chat --push me/my-chat-model\n\n"
    "ttrain export mine-sft@champion --to out/champion --dtype fp32 --shard-size 2GB",
    "Use",
)
def export(
    reference: Annotated[str, argument(MODEL_HELP, metavar="REF")],
    out: Annotated[Path, option("the directory to write", "--to")],
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], option("of the weights; fp32: as they were trained")] = "bf16",
    merge: Annotated[bool, option("an adapter becomes part of its base: one full model", "--merge")] = False,
    run: RunName = None,
    base: AdapterBase = None,
    shard_size: Annotated[str, option("largest weights file, for example 500MB")] = "5GB",
    keep_head: Annotated[bool, option("write the second head beside the model", "--keep-head")] = False,
    licence: Annotated[str | None, option("of the model, for its card, for example apache-2.0", "--license")] = None,
    gguf: Annotated[
        Path | None,
        option("directory of llama.cpp, whose converter also writes a GGUF file", metavar="DIR"),
    ] = None,
    push: Annotated[
        str | None,
        option("also upload it to this repository of the Hugging Face Hub, with HF_TOKEN", metavar="OWNER/NAME"),
    ] = None,
    public: Annotated[bool, option("with --push: a new repository is public", "--public")] = False,
    force: Annotated[bool, option("replace the model in a directory that is not empty", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs: safetensors, tokenizer, chat template, generation config, model card."""
    from ttrain.export import export as work
    from ttrain.lineage import names

    quieten()
    if push is not None:
        work.check_repository(push)
    [model] = resolved_models([reference], [base], run, stderr=as_json)
    request = work.Request(
        dtype=dtype, merge=merge, shard_size=shard_size, keep_head=keep_head, licence=licence, gguf=gguf, force=force
    )
    exported = work.export(model, out, request, say=lambda text: print_escaped(text, stderr=True))
    address = work.push(exported, push, public=public) if push is not None else None
    value = {
        **names.to_json(model),
        "directory": str(exported.directory),
        "kind": exported.kind,
        "dtype": exported.dtype,
        "parameters": exported.parameters,
        "bytes": sum(exported.files.values()),
        "files": exported.files,
        "remarks": list(exported.remarks),
        **({"pushed": address} if address else {}),
    }
    sizes = [(name, f"{size:,}") for name, size in exported.files.items()]
    summary = f"the {exported.kind}, {exported.parameters:,} parameters in {exported.dtype}, is in {exported.directory}"
    lines = [summary, *exported.remarks, *([f"uploaded to {address}"] if address else [])]
    if exported.kind == "model":
        trust = ", trust_remote_code=True" if any(name.startswith("modeling_") for name in exported.files) else ""
        lines.append(f'open it: AutoModelForCausalLM.from_pretrained("{exported.directory}", dtype="auto"{trust})')
        lines.append(f"try it:  ttrain chat {exported.directory}")
    else:
        lines.append(f'open it: PeftModel.from_pretrained(base, "{exported.directory}")')
    Output(value, [Table(("file", "bytes"), sizes), *lines]).print(as_json=as_json)
