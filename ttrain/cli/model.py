"""`ttrain export`, `ttrain models size` and `ttrain adapter`: arguments and output."""

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
    Profiles,
    RunName,
    SettingsOptions,
    app,
    argument,
    command,
    command_group,
    option,
    resolved_models,
)
from ttrain.cli.registry import models_app
from ttrain.core.files import JsonDict, need_object, read_object
from ttrain.core.terminal import print_escaped, print_json, table
from ttrain.core.text import format_size
from ttrain.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from ttrain.config import Model, Settings


SHOWN_KINDS = 6  # in a line


@command(
    models_app,
    "Examples:  ttrain models size\n\nttrain models size 124m model.kv_heads=4\n\n"
    "ttrain models size model.kind=gpt2 model.layers=6 --json\n\nttrain models size --kinds",
)
def models_size(
    arguments: Annotated[
        list[str] | None,
        argument("a preset, and settings that override it", metavar="PRESET|KEY=VALUE"),
    ] = None,
    config: Files = None,
    profile: Profiles = None,
    kinds: Annotated[bool, option("list every model.kind instead", "--kinds")] = False,
    as_json: AsJson = False,
) -> None:
    """Print parameters, FLOPs and memory of the presets, or of the model with the given settings."""
    if kinds:
        _show_kinds(as_json)
        return
    if not (arguments or config or profile):
        _show_presets(as_json)
        return
    from ttrain.config import Model, Settings
    from ttrain.config.model import vocab_size_of

    presets = [word for word in arguments or () if "=" not in word]
    if len(presets) > 1:
        raise UsageError(f"{len(presets)} presets are given: {', '.join(presets)}; give one")
    overrides = [*(f"model.preset={name}" for name in presets), *(word for word in arguments or () if "=" in word)]
    loaded = SettingsOptions(overrides, config, profile).load()
    preset_vocabulary = bool(presets) and "tokenizer.vocab_size" not in loaded.sources

    settings, shipped = loaded.settings, None
    if preset_vocabulary and settings.model == Model(preset=presets[0]):
        shipped = of_presets().get(presets[0]) if settings.pretrain.row_length == Settings().pretrain.row_length else None
    cost = shipped or of_settings(settings, vocab_size=vocab_size_of(presets[0]) if preset_vocabulary else None)
    if as_json:
        print_json(cost)
        return
    _print_cost(cost, "of the preset" if preset_vocabulary else "tokenizer.vocab_size")


def _print_cost(cost: ModelCost, vocabulary: str) -> None:
    attention = f"6 a weight that multiplies + 12 layers heads head_dim {cost.row_length}, arXiv:2204.02311, appendix B"
    rows: list[tuple[str, str, str]] = [
        ("architecture", cost.kind, "model.kind"),
        ("vocabulary", f"{cost.vocab_size:,}", vocabulary),
        ("parameters", f"{cost.parameters:,}", ""),
        ("  active for a token", f"{cost.active_parameters:,}", "without the experts that a token is not routed to"),
        ("  embeddings and head", f"{cost.embedding_parameters:,}", ""),
        *(
            [("second head", f"{cost.second_head_parameters:,}", "model.multi_token; beside the model")]
            if cost.second_head_parameters
            else []
        ),
        ("FLOPs of a token", f"{cost.flops_per_token:.4g}", f"forward and backward: {attention}"),
    ]
    for kind, size in cost.memory_bytes.items():
        rows.append((f"memory with {kind}", format_size(size), "weights, gradients and state; activations come on top"))
    rows += [
        (f"checkpoint with {kind}", format_size(size), "weights and state") for kind, size in cost.checkpoint_bytes.items()
    ]
    rows.append(("model on disk", format_size(cost.model_bytes), "fp32; `ttrain export` halves it"))
    table(("property", "value", ""), rows)


def _show_presets(as_json: bool) -> None:
    from ttrain.config.model import COLUMNS, sizes_of

    costs = of_presets()
    if as_json:
        print_json({name: {"settings": sizes_of(name), **asdict(cost)} for name, cost in costs.items()})
        return
    rows = []
    for name, cost in costs.items():
        sizes = sizes_of(name)
        rows.append((
            name, *("" if sizes[column] is None else sizes[column] for column in COLUMNS), f"{cost.vocab_size:,}",
            f"{cost.parameters:,}", f"{cost.flops_per_token:.2g}", *map(format_size, cost.memory_bytes.values()),
        ))  # fmt: skip
    table(("preset", *COLUMNS, "vocabulary", "parameters", "FLOPs/token", "memory adamw", "memory muon"), rows)
    print("take one with model.preset=NAME; other settings override it. Details of one: ttrain models size NAME")


def _show_kinds(as_json: bool) -> None:
    from ttrain.model.architecture import suitable_kinds

    kinds = suitable_kinds()
    if as_json:
        print_json(kinds)
        return
    for start in range(0, len(kinds), SHOWN_KINDS):
        print_escaped("  ".join(f"{name:24}" for name in kinds[start : start + SHOWN_KINDS]).rstrip())


adapter_app = command_group(
    "adapter",
    "Models",
    help="Show adapters. `ttrain export REF --merge` merges one into its base.",
    epilog="Example:  ttrain adapter show lora",
)


@command(adapter_app, "Examples:  ttrain adapter show lora\n\nttrain adapter show out/expert --base sft --json")
def adapter_show(
    reference: Annotated[str, argument(f"{MODEL_HELP}, of an adapter", metavar="REF")],
    base: AdapterBase = None,
    as_json: AsJson = False,
) -> None:
    """Show an adapter: kind, rank or virtual tokens, targets, size, and the base model that it belongs to."""
    from ttrain.pipeline.names import resolve
    from ttrain.store.model_files import parameters_of

    target = resolve(reference, base=base)
    if target.adapter is None:
        raise UsageError(
            f"'{reference}' is a full model, not an adapter; `ttrain adapter show lora` shows the newest adapter"
        )
    description, of_base = _describe_adapter(target.adapter), parameters_of(target.model)
    recorded_base, parameters = description["base_weights_sha256"], description["parameters"]
    fits = recorded_base == target.base_digest if recorded_base else None
    values = {
        "adapter": str(target.adapter),
        **description,
        "share_of_base": parameters / of_base,
        "base": str(target.model),
        "base_fits": fits,
    }
    if as_json:
        print_json(values)
        return
    shown = {
        **values,
        "parameters": f"{parameters:,} ({parameters / of_base:.2%} of the base's {of_base:,})",
        "bytes": f"{description['bytes']:,}",
        "base_weights_sha256": recorded_base or "not recorded: it was not trained here",
        "base_fits": {True: "yes, to the byte", False: "NO: it was trained on other weights", None: "unknown"}[fits],
        "base_held_in": f"{values['base_held_in']} while it was trained" if values["base_held_in"] else None,
    }
    del shown["share_of_base"]
    lists = {name: ", ".join(value) for name, value in shown.items() if isinstance(value, list)}
    table(("", ""), [(name, value) for name, value in {**shown, **lists}.items() if value is not None])


def _describe_adapter(directory: Path) -> JsonDict:
    """An adapter's kind, the settings of its kind, its size and its base. Raises ArtifactError if a file is missing or
    damaged."""
    from ttrain.pipeline.names import ADAPTER_CONFIG, BASE
    from ttrain.store.model_files import ADAPTER, numbers_in

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


def _read(path: Path) -> JsonDict:
    try:
        return need_object(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"cannot read {path}: {error}") from None


BYTES_PER_NUMBER = 4  # bytes of a weight, a gradient and a number of the optimizer's state: master weights are fp32

PRESETS = "presets.json"

STATE_NUMBERS = {"AdamW": 2, "Muon": 1}  # numbers that an optimizer keeps for each weight

IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # their values do not affect sizes


@dataclass(frozen=True)
class ModelCost:
    """Parameters, FLOPs of a token and bytes, of one model."""

    kind: str
    vocab_size: int
    row_length: int
    parameters: int
    active_parameters: int  # for one token: without the experts that it is not routed to
    embedding_parameters: int  # of tables that are looked up, and of the output head
    second_head_parameters: int  # of `model.multi_token`; trained beside the model, not counted in the figures above
    flops_per_token: float  # forward and backward
    memory_bytes: Mapping[str, int]  # weights, gradients and state, by optimizer
    checkpoint_bytes: Mapping[str, int]  # weights and state, by optimizer
    model_bytes: int  # of the weights that a stage writes


def cost(config: Model, *, vocab_size: int, row_length: int) -> ModelCost:
    """Compute a model's cost. Raises UsageError if its architecture does not allow these sizes."""
    import torch

    from ttrain.model import factory
    from ttrain.train.monitor import flops_per_token, visited_shares

    with torch.device("meta"):
        model: Any = factory.construct(config, vocab_size=vocab_size, ids=IDS)
    second = model.get_output_embeddings().weight.numel() if config.multi_token else 0
    total = sum(p.numel() for p in model.parameters())
    shares = visited_shares(model)
    active = sum(round(p.numel() * shares.get(name, 1.0)) for name, p in model.named_parameters())
    state = {kind: _state_numbers(model, kind) + STATE_NUMBERS["AdamW"] * second for kind in ("adamw", "muon")}
    trained = total + second
    return ModelCost(
        kind=model.config.model_type,
        vocab_size=vocab_size,
        row_length=row_length,
        parameters=total,
        active_parameters=active,
        embedding_parameters=_embedding_parameters(model),
        second_head_parameters=second,
        flops_per_token=flops_per_token(model, row_length) + 6 * second,
        memory_bytes={kind: BYTES_PER_NUMBER * (2 * trained + numbers) for kind, numbers in state.items()},
        checkpoint_bytes={kind: BYTES_PER_NUMBER * (trained + numbers) for kind, numbers in state.items()},
        model_bytes=BYTES_PER_NUMBER * total,
    )


def of_settings(settings: Settings, *, vocab_size: int | None = None) -> ModelCost:
    """The cost of the model of these settings; `vocab_size` replaces `tokenizer.vocab_size`.

    Raises UsageError for an existing model, whose sizes are not in the settings.
    """
    if settings.existing_model:
        raise UsageError(
            f"{settings.trainings[0]}.start_from is {settings.existing_model}, but this command shows "
            f"new models, with the sizes in model.*; remove start_from"
        )
    return cost(
        settings.model, vocab_size=vocab_size or settings.tokenizer.vocab_size, row_length=settings.pretrain.row_length
    )


def of_presets() -> dict[str, ModelCost]:
    """The cost of every preset, each with the vocabulary that its name refers to: from a file that ships with ttrain, since
    building them takes 5 s."""
    from ttrain.config.loading import configs_directory

    return {name: ModelCost(**values) for name, values in read_object(configs_directory() / PRESETS).items()}


def _state_numbers(model: nn.Module, kind: Any) -> int:
    """Count the numbers of the optimizer's state."""
    from ttrain.config import Optim
    from ttrain.train import optim

    groups = optim.build(model, Optim(kind=kind)).groups()
    return sum(STATE_NUMBERS[group["optimizer"]] * group["parameters"] for group in groups)


def _embedding_parameters(model: Any) -> int:
    from ttrain.train.monitor import looked_up_weights

    tables = looked_up_weights(model)
    weights = [parameter for name, parameter in model.named_parameters() if name in tables]
    heads = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    by_id = {id(weight): weight.numel() for weight in (*weights, *(head.weight for head in heads))}
    return sum(by_id.values())


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
    from ttrain.pipeline import lineage_names

    quieten()
    if push is not None:
        work.check_repository(push)
    [model] = resolved_models([reference], [base], run, stderr=as_json)
    request = work.Request(
        dtype=dtype, merge=merge, shard_size=shard_size, keep_head=keep_head, licence=licence, gguf=gguf, force=force
    )
    exported = work.export(model, out, request, say=lambda text: print_escaped(text, stderr=True))
    address = work.push(exported, push, public=public) if push is not None else None
    if as_json:
        print_json(
            {
                **lineage_names.to_json(model),
                "directory": str(exported.directory),
                "kind": exported.kind,
                "dtype": exported.dtype,
                "parameters": exported.parameters,
                "bytes": sum(exported.files.values()),
                "files": exported.files,
                "remarks": list(exported.remarks),
                **({"pushed": address} if address else {}),
            }
        )
        return
    table(("file", "bytes"), [(name, f"{size:,}") for name, size in exported.files.items()])
    print_escaped(f"the {exported.kind}, {exported.parameters:,} parameters in {exported.dtype}, is in {exported.directory}")
    for remark in exported.remarks:
        print_escaped(remark)
    if address:
        print_escaped(f"uploaded to {address}")
    if exported.kind == "model":
        trust = ", trust_remote_code=True" if any(name.startswith("modeling_") for name in exported.files) else ""
        print_escaped(f'open it: AutoModelForCausalLM.from_pretrained("{exported.directory}", dtype="auto"{trust})')
        print_escaped(f"try it:  ttrain chat {exported.directory}")
    else:
        print_escaped(f'open it: PeftModel.from_pretrained(base, "{exported.directory}")')
