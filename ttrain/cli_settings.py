"""What commands that take settings have in common: their options, the settings they load, the plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ttrain.loading import Given, Loaded
    from ttrain.plan import Planned
    from ttrain.store import Store

SETTINGS_HELP = "settings as key=value, for example sft.optim.lr=2e-4"

Overrides = Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP, metavar="[KEY=VALUE]...", show_default=False)]
Files = Annotated[list[Path] | None, typer.Option("--config", "-c", help="YAML file with settings; several may be given")]
Profiles = Annotated[list[str] | None, typer.Option("--profile", help="named settings that ship with ttrain, such as small")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]
Extend = Annotated[bool, typer.Option("--extend", help="a larger training budget starts from a shorter run's checkpoint")]
Force = Annotated[bool, typer.Option("--force", help="build it although it is finished, and compare")]


def load_settings(overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None) -> Loaded:
    """The settings that the options of a command name."""
    from ttrain.loading import load

    return load(overrides or (), files=config or (), profiles=profile or ())


def task_settings(overrides: list[str] | None, config: list[Path] | None) -> list[Given]:
    """What is given of a task's settings, the weakest first; the environment speaks of `runtime` alone."""
    from ttrain.loading import ENVIRONMENT_PREFIX, layers

    runtime = {key: value for key, value in os.environ.items() if key.upper().startswith(f"{ENVIRONMENT_PREFIX}RUNTIME__")}
    return layers(overrides or (), config or (), environment=runtime)


def plan_of(
    pipeline: str, loaded: Loaded, *, force: frozenset[str] = frozenset(), extend: bool = False
) -> tuple[Store, list[Planned]]:
    """The store, and what a pipeline would do in it."""
    from flows import recipe
    from ttrain.plan import plan
    from ttrain.store import Store, home

    store = Store(home())
    return store, plan(recipe(pipeline), loaded.settings, store, force, extend=extend)
