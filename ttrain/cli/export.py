"""`ttrain export`: its arguments, and what it prints."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from ttrain.cli.options import AsJson, RunName
from ttrain.core.terminal import escaped, print_json, table
from ttrain.store import layout

REFERENCE_HELP = "a run, a stage, a registered model (NAME@ALIAS, NAME/VERSION) or a directory"
EPILOG = (
    "Examples:  ttrain export sft --to out/chat\n\n"
    "ttrain export lora --merge --to out/expert --dtype fp16\n\n"
    "ttrain export mine-sft@champion --to out/champion --dtype fp32 --shard-size 2GB"
)


def quieten() -> None:
    """Warnings of libraries are for those who call them, and bars for those who watch."""
    import warnings

    warnings.filterwarnings("ignore", category=FutureWarning)
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def export(
    reference: Annotated[str, typer.Argument(metavar="REF", help=REFERENCE_HELP)],
    to: Annotated[Path, typer.Option("--to", help="the directory to write")],
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="of the weights; fp32: as they were trained")
    ] = "bf16",
    merge: Annotated[bool, typer.Option("--merge", help="an adapter becomes part of its base: one full model")] = False,
    run: RunName = None,
    base: Annotated[
        str | None, typer.Option("--base", metavar="REF", help="the full model of an adapter from elsewhere")
    ] = None,
    shard_size: Annotated[str, typer.Option("--shard-size", help="largest weights file, for example 500MB")] = "5GB",
    keep_head: Annotated[bool, typer.Option("--keep-head", help="write the second head beside the model")] = False,
    licence: Annotated[
        str | None, typer.Option("--license", help="of the model, for its card, for example apache-2.0")
    ] = None,
    gguf: Annotated[
        Path | None, typer.Option("--gguf", metavar="DIR", help="llama.cpp, whose converter writes a GGUF file besides")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="replace the model in a directory that is not empty")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a model for other programs: safetensors, tokenizer, chat template, generation config, model card."""
    from ttrain.export import export as work
    from ttrain.pipeline import identities
    from ttrain.pipeline.names import resolve_all
    from ttrain.store import artifacts

    quieten()
    [found] = resolve_all([reference], base=base, run=run)
    for line in identities.lines_of([found], artifacts.Store(layout.home())):
        print(escaped(line), file=sys.stderr if as_json else sys.stdout, flush=True)
    request = work.Request(
        dtype=dtype, merge=merge, shard_size=shard_size, keep_head=keep_head, licence=licence, gguf=gguf, force=force
    )
    done = work.export(found, to, request, say=lambda text: print(escaped(text), file=sys.stderr))
    if as_json:
        print_json(
            {
                **identities.to_json(found),
                "directory": str(done.directory),
                "kind": done.kind,
                "dtype": done.dtype,
                "parameters": done.parameters,
                "bytes": sum(done.files.values()),
                "files": done.files,
                "remarks": list(done.remarks),
            }
        )
        return
    table(("file", "bytes"), [(name, f"{size:,}") for name, size in done.files.items()])
    print(escaped(f"the {done.kind}, {done.parameters:,} parameters in {done.dtype}, is in {done.directory}"))
    for remark in done.remarks:
        print(escaped(remark))
    if done.kind == "model":
        trust = ", trust_remote_code=True" if any(name.startswith("modeling_") for name in done.files) else ""
        print(escaped(f'open it: AutoModelForCausalLM.from_pretrained("{done.directory}", dtype="auto"{trust})'))
        print(escaped(f"try it:  ttrain chat {done.directory}"))
    else:
        print(escaped(f'open it: PeftModel.from_pretrained(base, "{done.directory}")'))
