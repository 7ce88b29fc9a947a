"""What commands that take settings have in common: their options, the settings they load, the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ttrain.loading import Given, Loaded
    from ttrain.plan import Planned
    from ttrain.selection import Selection
    from ttrain.store import Store

SETTINGS_HELP = "settings as key=value, for example sft.optim.lr=2e-4"

Overrides = Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP, metavar="[KEY=VALUE]...", show_default=False)]
Files = Annotated[list[Path] | None, typer.Option("--config", "-c", help="YAML file with settings; several may be given")]
Profiles = Annotated[list[str] | None, typer.Option("--profile", help="named settings that ship with ttrain, such as small")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]
Extend = Annotated[bool, typer.Option("--extend", help="a larger training budget starts from a shorter run's checkpoint")]
Force = Annotated[bool, typer.Option("--force", help="build it although it is finished, and compare")]

# Of whole pipelines.
ForceStages = Annotated[
    list[str] | None,
    typer.Option(
        "--force", metavar="STAGE", help="run it again although it is finished, and what depends on it; repeatable"
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="STAGES", help="these stages alone (A,B, or repeated); what they read is in the store"),
]
Since = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help="this stage and what depends on it", show_default=False)
]
Until = Annotated[
    str | None, typer.Option("--until", metavar="STAGE", help="this stage and what it depends on", show_default=False)
]
GoOn = Annotated[
    str | None,
    typer.Option(
        "--continue",
        metavar="KEY",
        help="go on with the unfinished work of this key, begun under other code; `plan` names it",
        show_default=False,
    ),
]


def load_settings(overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None) -> Loaded:
    """The settings that the options of a command name."""
    from ttrain.loading import load

    return load(overrides or (), files=config or (), profiles=profile or ())


def settings_of_run(
    run: Mapping[str, Any], overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None
) -> Loaded:
    """The settings of an earlier run, and on top what the options name; the environment speaks of `runtime` alone."""
    from ttrain.earlier import settings_of
    from ttrain.loading import load

    here = _runtime_environment()
    return load(overrides or (), files=config or (), profiles=profile or (), environment=here, base=settings_of(run))


def task_settings(overrides: list[str] | None, config: list[Path] | None) -> list[Given]:
    """What is given of a task's settings, the weakest first; the environment speaks of `runtime` alone."""
    from ttrain.loading import layers

    return layers(overrides or (), config or (), environment=_runtime_environment())


def _runtime_environment() -> dict[str, str]:
    """What the environment says of how fast and where it runs."""
    from ttrain.loading import ENVIRONMENT_PREFIX

    return {key: value for key, value in os.environ.items() if key.upper().startswith(f"{ENVIRONMENT_PREFIX}RUNTIME__")}


def names_in(options: list[str] | None) -> frozenset[str]:
    """The names that a repeated option gives, each with commas between several. Raises UsageError where it gives none: an
    empty variable of a shell does not mean all stages."""
    from ttrain.errors import UsageError

    names = frozenset(name.strip() for option in options or () for name in option.split(",") if name.strip())
    if options and not names:
        raise UsageError(
            "--only and --force need the name of a stage, and got an empty one; leave the option out for all stages"
        )
    return names


def name_in(option: str | None) -> str:
    """The same for an option that gives one name: "" where it is not given."""
    from ttrain.errors import UsageError

    if option is not None and not option.strip():
        raise UsageError("--from and --until need the name of a stage, --continue a key, and got an empty one; leave it out")
    return (option or "").strip()


def plan_of(
    pipeline: str,
    loaded: Loaded,
    *,
    force: frozenset[str] = frozenset(),
    extend: bool = False,
    selection: Selection | None = None,
    go_on: str = "",
) -> tuple[Store, list[Planned]]:
    """The store, and what a pipeline would do in it."""
    from flows import recipe
    from ttrain.fetching import store_of
    from ttrain.plan import EVERYTHING, plan
    from ttrain.store import home

    store = store_of(home(), loaded.settings)
    chosen = selection or EVERYTHING
    return store, plan(recipe(pipeline), loaded.settings, store, force, extend=extend, selection=chosen, go_on=go_on)
