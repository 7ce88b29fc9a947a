"""`ttrain artifacts`: what the stages left behind."""

from __future__ import annotations

from typing import Annotated

import typer

artifacts_app = typer.Typer(
    no_args_is_help=True, help="Find what the stages left behind.", epilog="Example:  ttrain artifacts path sft"
)


@artifacts_app.command("path", epilog="Example:  ls $(ttrain artifacts path sft)/model")
def artifacts_path(stage: Annotated[str, typer.Argument(help="the stage; its latest artifact is meant")]) -> None:
    """Print where the latest artifact of a stage lies."""
    from ttrain.errors import UsageError
    from ttrain.stages import STAGES
    from ttrain.store import Store, home

    if stage not in STAGES:
        raise UsageError(f"there is no stage '{stage}'; the stages are {', '.join(STAGES)}")
    print(Store(home()).latest(stage).path)
