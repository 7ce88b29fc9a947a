"""`ttrain export`."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from ttrain.cli.chat import before_torch
from ttrain.cli.options import (
    MODEL_HELP,
    AdapterBase,
    AsJson,
    Output,
    RunName,
    Table,
    app,
    argument,
    command,
    option,
    resolved_models,
)
from ttrain.core.terminal import print_escaped


@command(
    app,
    "Examples:  ttrain export sft --to out/chat\n\n"
    "ttrain export lora --merge --to out/expert --dtype fp16\n\n"
    "ttrain export sft --to out/chat --gguf f16,q8_0,q4_0\n\n"
    "ttrain export sft --to out/chat --push me/my-chat-model\n\n"
    "ttrain export mine-sft@champion --to out/champion --dtype fp32 --shard-size 2GB",
    "Use",
)
def export(
    reference: Annotated[str, argument(MODEL_HELP, metavar="REF")],
    out: Annotated[Path, option("the directory to write", "--to")],
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], option("of the weights; fp32: as they were trained")
    ] = "bf16",
    merge: Annotated[
        bool, option("an adapter becomes part of its base: one full model", "--merge")
    ] = False,
    run: RunName = None,
    base: AdapterBase = None,
    shard_size: Annotated[str, option("largest weights file, for example 500MB")] = "5GB",
    keep_head: Annotated[
        bool, option("write the second head beside the model", "--keep-head")
    ] = False,
    licence: Annotated[
        str | None, option("of the model, for its card, for example apache-2.0", "--license")
    ] = None,
    gguf: Annotated[
        str | None,
        option(
            "also write GGUF files, for llama.cpp and Ollama, each scored: f16, q8_0, q4_0, ...",
            metavar="TYPES",
        ),
    ] = None,
    push: Annotated[
        str | None,
        option(
            "also upload it to this repository of the Hugging Face Hub, with HF_TOKEN",
            metavar="OWNER/NAME",
        ),
    ] = None,
    public: Annotated[bool, option("with --push: a new repository is public", "--public")] = False,
    force: Annotated[
        bool, option("replace the model in a directory that is not empty", "--force")
    ] = False,
    as_json: AsJson = False,
) -> Output:
    """Write a model for other programs: safetensors, tokenizer, template, configs, model card."""
    from ttrain.export import export as work
    from ttrain.export import hub
    from ttrain.lineage import lookup

    before_torch()
    if push is not None:
        hub.check_repository(push)
    [model] = resolved_models([reference], base=base, run=run, stderr=as_json)
    request = work.Request(
        dtype=dtype,
        merge=merge,
        shard_size=shard_size,
        keep_head=keep_head,
        licence=licence,
        gguf=gguf,
        force=force,
    )
    exported = work.export(model, out, request, say=lambda text: print_escaped(text, stderr=True))
    value = {**lookup.to_json(model), **asdict(exported), "bytes": sum(exported.files.values())}
    lines = [
        f"the {exported.kind}, {exported.parameters:,} parameters in {exported.dtype}, is in "
        f"{exported.directory}"
    ]
    lines += exported.remarks
    if push is not None:
        value["pushed"] = hub.push(exported, push, public=public)
        lines.append(f"uploaded to {value['pushed']}")
    files = [(name, f"{size:,}") for name, size in exported.files.items()]
    tables = [Table(("file", "bytes"), files)]
    if exported.scores:
        tables.append(
            Table(
                ("file", "bits per byte", "the model's", "change"),
                [each.row() for each in exported.scores],
            )
        )
    if exported.kind == "model":
        trust = (
            ", trust_remote_code=True"
            if any(name.startswith("modeling_") for name in exported.files)
            else ""
        )
        lines.append(
            f'open it: AutoModelForCausalLM.from_pretrained("{exported.directory}", '
            f'dtype="auto"{trust})'
        )
        lines.append(f"try it:  ttrain chat {exported.directory}")
        if exported.scores:
            lines.append(f"llama.cpp: llama-cli -m {exported.directory / exported.scores[0].file}")
            modelfile = exported.directory / "Modelfile"
            lines.append(f"Ollama: ollama create {exported.directory.name} -f {modelfile}")
    else:
        lines.append(f'open it: PeftModel.from_pretrained(base, "{exported.directory}")')
    return Output(value, [*tables, *lines])
