"""What commands that take settings have in common: their options, the settings they load, the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ttrain.config import Servers
    from ttrain.config.loading import Given, Loaded
    from ttrain.pipeline.planned import Planned
    from ttrain.pipeline.selection import Selection
    from ttrain.store.artifacts import Store

SETTINGS_HELP = "settings as key=value, for example sft.optim.lr=2e-4"

Overrides = Annotated[list[str] | None, typer.Argument(help=SETTINGS_HELP, metavar="[KEY=VALUE]...", show_default=False)]
ServerOverrides = Annotated[
    list[str] | None,
    typer.Argument(help="servers.auth=token or servers.auth=off", metavar="[KEY=VALUE]...", show_default=False),
]
Files = Annotated[list[Path] | None, typer.Option("--config", "-c", help="YAML file with settings; several may be given")]
Profiles = Annotated[list[str] | None, typer.Option("--profile", help="named settings that ship with ttrain, such as small")]
RunName = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="RUN", help="the run whose stages are meant; else the newest finished one", show_default=False
    ),
]
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
Note = Annotated[
    str | None, typer.Option("--note", metavar="TEXT", help="what this run is for; shown with it", show_default=False)
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="KEY=VALUE", help="a label of this run, to search by in MLflow; repeatable"),
]
GoOn = Annotated[
    str | None,
    typer.Option(
        "--continue",
        metavar="KEY",
        help="go on with the unfinished work of this key, begun under other code or another learning rate",
        show_default=False,
    ),
]


def load_settings(overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None) -> Loaded:
    """The settings that the options of a command name."""
    from ttrain.config.loading import load

    return load(overrides or (), files=config or (), profiles=profile or ())


def settings_of_run(
    run: Mapping[str, Any], overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None
) -> Loaded:
    """The settings of an earlier run, and on top what the options name; the environment speaks of `runtime` alone, and knows
    the secrets of sources, which no record has."""
    from ttrain.config.loading import load
    from ttrain.pipeline.earlier_settings import settings_of, with_secrets

    here, base = _environment_of("runtime"), settings_of(with_secrets(run))
    return load(overrides or (), files=config or (), profiles=profile or (), environment=here, base=base)


def task_settings(overrides: list[str] | None, config: list[Path] | None) -> list[Given]:
    """What is given of a task's settings, the weakest first; the environment speaks of `runtime` alone."""
    from ttrain.config.loading import layers

    return layers(overrides or (), config or (), environment=_environment_of("runtime"))


def server_settings(overrides: list[str] | None) -> Servers:
    """Settings of the servers that a command starts, which takes no others. Raises UsageError."""
    from ttrain.config import ServersConfig
    from ttrain.config.loading import layers, merge

    return merge(ServersConfig, layers(overrides or (), environment=_environment_of("servers")))[0].servers


def _environment_of(section: str) -> dict[str, str]:
    """What the environment says of the settings of one section."""
    from ttrain.config.loading import ENVIRONMENT_PREFIX

    prefix = f"{ENVIRONMENT_PREFIX}{section.upper()}__"
    return {key: value for key, value in os.environ.items() if key.upper().startswith(prefix)}


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
    from ttrain.pipeline.plan import EVERYTHING, plan
    from ttrain.pipeline.stores import store_of
    from ttrain.store.layout import home

    store = store_of(home(), loaded.settings)
    chosen = selection or EVERYTHING
    return store, plan(recipe(pipeline), loaded.settings, store, force, extend=extend, selection=chosen, go_on=go_on)
