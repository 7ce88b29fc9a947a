"""`ttrain adapter`: its arguments, and what it prints."""

from __future__ import annotations

from typing import Annotated

import typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import print_json, table

REFERENCE_HELP = "a run, a stage, a registered model (NAME@ALIAS, NAME/VERSION) or a directory, of an adapter"

adapter_app = typer.Typer(
    no_args_is_help=True,
    help="Look at adapters. `ttrain export REF --merge` makes one part of its base.",
    epilog="Example:  ttrain adapter show lora",
)


@adapter_app.command(
    "show", epilog="Examples:  ttrain adapter show lora\n\nttrain adapter show out/expert --base sft --json"
)
def show(
    reference: Annotated[str, typer.Argument(metavar="REF", help=REFERENCE_HELP)],
    base: Annotated[
        str | None, typer.Option("--base", metavar="REF", help="the full model of an adapter from elsewhere")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What an adapter is: kind, rank or virtual tokens, targets, size, and the base that it belongs to."""
    from ttrain.errors import UsageError
    from ttrain.pipeline.adapter_files import describe, parameters_of
    from ttrain.pipeline.names import resolve

    found = resolve(reference, base=base)
    if found.adapter is None:
        raise UsageError(f"'{reference}' is a full model, no adapter; `ttrain adapter show lora` shows the newest adapter")
    told, of_base = describe(found.adapter), parameters_of(found.model)
    fits = told.base_digest == found.base_digest if told.base_digest else None
    values = {
        "adapter": str(found.adapter),
        "kind": told.kind,
        **told.settings,
        "parameters": told.parameters,
        "share_of_base": told.parameters / of_base,
        "bytes": told.bytes,
        "base": str(found.model),
        "base_weights_sha256": told.base_digest,
        "base_fits": fits,
        "base_held_in": told.base_held_in,
    }
    if as_json:
        print_json(values)
        return
    shown = {
        **values,
        "parameters": f"{told.parameters:,} ({told.parameters / of_base:.2%} of the base's {of_base:,})",
        "bytes": f"{told.bytes:,}",
        "base_weights_sha256": told.base_digest or "not recorded: it was not trained here",
        "base_fits": {True: "yes, to the byte", False: "NO: it was trained on other weights", None: "not known"}[fits],
        "base_held_in": f"{told.base_held_in} while it was trained" if told.base_held_in else None,
    }
    del shown["share_of_base"]
    lists = {name: ", ".join(value) for name, value in shown.items() if isinstance(value, list)}
    table(("", ""), [(name, value) for name, value in {**shown, **lists}.items() if value is not None])
