"""`ttrain model import`: its arguments, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrain.cli.options import AsJson

EPILOG = (
    "Examples:  ttrain model import TinySeek_Pre_final.pkl --to tinyseek\n\n"
    "ttrain model import full_sft_512.pth --to minimind --tokenizer minimind/model"
)


def import_model(
    source: Annotated[Path, typer.Argument(help="a state dict of TinySeek's or MiniMind's code, or a directory with one")],
    to: Annotated[Path, typer.Option(help="directory to make; it must be empty or not there")],
    config: Annotated[Path | None, typer.Option(help="its model_config.json, where it does not lie beside it")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="directory of a Hugging Face tokenizer to bring along; else the one beside it")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a model of TinySeek or MiniMind to a Hugging Face directory with the same logits, in fp32."""
    from ttrain.core.terminal import print_json, table
    from ttrain.model import convert

    done = convert.import_model(source, to, config=config, tokenizer=tokenizer)
    if as_json:
        print_json({
            "layout": done.layout, "kind": done.kind, "parameters": done.parameters, "second_head": done.second_head,
            "tokenizer": done.tokenizer, "assumed": done.assumed, "directory": str(done.directory),
        })  # fmt: skip
        return
    assumed = ", ".join(f"{name} {value}" for name, value in done.assumed.items())
    table(("what", "value"), [
        ("layout", done.layout),
        ("model.kind", done.kind),
        ("parameters", f"{done.parameters:,}"),
        ("second head", "beside the weights" if done.second_head else "none"),
        ("tokenizer", "beside the weights" if done.tokenizer else "none: give one with --tokenizer"),
        ("not told by the source, so assumed", assumed or "nothing"),
    ])  # fmt: skip
    print(f"the model is in {to}; start from it with, for example, sft.start_from={to}")
