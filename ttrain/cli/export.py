"""The `ttrain export` command: arguments and output."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from ttrain.cli.options import AdapterBase, AsJson, RunName, resolved_models
from ttrain.core.terminal import print_escaped, print_json, table

REFERENCE_HELP = "a run, a stage, a registered model (NAME@ALIAS, NAME/VERSION) or a directory"
EPILOG = (
    "Examples:  ttrain export sft --to out/chat\n\n"
    "ttrain export lora --merge --to out/expert --dtype fp16\n\n"
    "ttrain export sft --to out/chat --push me/my-chat-model\n\n"
    "ttrain export mine-sft@champion --to out/champion --dtype fp32 --shard-size 2GB"
)


def quieten() -> None:
    """Hide FutureWarnings of libraries, and the Hub's progress bars if standard error is not a terminal."""
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def export(
    reference: Annotated[str, Argument(metavar="REF", help=REFERENCE_HELP)],
    to: Annotated[Path, Option(help="the directory to write")],
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], Option(help="of the weights; fp32: as they were trained")] = "bf16",
    merge: Annotated[bool, Option("--merge", help="an adapter becomes part of its base: one full model")] = False,
    run: RunName = None,
    base: AdapterBase = None,
    shard_size: Annotated[str, Option(help="largest weights file, for example 500MB")] = "5GB",
    keep_head: Annotated[bool, Option("--keep-head", help="write the second head beside the model")] = False,
    licence: Annotated[str | None, Option("--license", help="of the model, for its card, for example apache-2.0")] = None,
    gguf: Annotated[
        Path | None,
        Option(metavar="DIR", help="directory of llama.cpp, whose converter also writes a GGUF file"),
    ] = None,
    push: Annotated[
        str | None,
        Option(metavar="OWNER/NAME", help="also upload it to this repository of the Hugging Face Hub, with HF_TOKEN"),
    ] = None,
    public: Annotated[bool, Option("--public", help="with --push: a new repository is public")] = False,
    force: Annotated[bool, Option("--force", help="replace the model in a directory that is not empty")] = False,
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
    exported = work.export(model, to, request, say=lambda text: print_escaped(text, stderr=True))
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
