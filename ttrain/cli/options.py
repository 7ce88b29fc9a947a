"""Shared options of commands that take settings, and functions that load the settings and the plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ttrain.config import Servers
    from ttrain.config.loading import LoadedSettings, Override
    from ttrain.pipeline.recipe import Planned, Selection
    from ttrain.store.artifacts import ArtifactStore

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
        "--run", metavar="RUN", help="the run whose stages are used; default: the newest finished one", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]
Extend = Annotated[
    bool, typer.Option("--extend", help="for a larger training budget, continue from a shorter run's checkpoint")
]
Force = Annotated[bool, typer.Option("--force", help="rebuild it even if it is finished, and compare")]

# Of whole pipelines.
ForceStages = Annotated[
    list[str] | None,
    typer.Option(
        "--force", metavar="STAGE", help="rerun this stage even if it is finished, and those that depend on it; repeatable"
    ),
]
OnlyStages = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="STAGES", help="only these stages (A,B, or repeated); their inputs must be in the store"),
]
FromStage = Annotated[
    str | None, typer.Option("--from", metavar="STAGE", help="this stage and what depends on it", show_default=False)
]
UntilStage = Annotated[
    str | None, typer.Option("--until", metavar="STAGE", help="this stage and what it depends on", show_default=False)
]
Note = Annotated[
    str | None,
    typer.Option("--note", metavar="TEXT", help="a note on the purpose of this run; shown with it", show_default=False),
]
Tags = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="KEY=VALUE", help="a label of this run to search for in MLflow; repeatable"),
]
ContinueKey = Annotated[
    str | None,
    typer.Option(
        "--continue",
        metavar="KEY",
        help="resume the unfinished work of this key, begun with other code or another learning rate",
        show_default=False,
    ),
]


def load_settings(overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None) -> LoadedSettings:
    """Load the settings from the options of a command."""
    from ttrain.config.loading import load

    return load(overrides or (), files=config or (), profiles=profile or ())


def settings_of_run(
    run: Mapping[str, Any], overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None
) -> LoadedSettings:
    """The settings of an earlier run, overridden by the options. From the environment come only `runtime` settings and the
    secrets of sources, which are not recorded."""
    from ttrain.config.loading import load
    from ttrain.pipeline.names import settings_of, with_secrets

    runtime_variables, base = _environment_of("runtime"), settings_of(with_secrets(run))
    return load(overrides or (), files=config or (), profiles=profile or (), environment=runtime_variables, base=base)


def task_settings(overrides: list[str] | None, config: list[Path] | None) -> list[Override]:
    """The overrides of a task's settings, the weakest first; from the environment only those of `runtime`."""
    from ttrain.config.loading import layers

    return layers(overrides or (), config or (), environment=_environment_of("runtime"))


def server_settings(overrides: list[str] | None) -> Servers:
    """Load the `servers` settings of a command, which accepts no others. Raises UsageError."""
    from ttrain.config import ServersConfig
    from ttrain.config.loading import layers, merge

    return merge(ServersConfig, layers(overrides or (), environment=_environment_of("servers")))[0].servers


def _environment_of(section: str) -> dict[str, str]:
    """The environment variables of one section of the settings."""
    from ttrain.config.loading import ENVIRONMENT_PREFIX

    prefix = f"{ENVIRONMENT_PREFIX}{section.upper()}__"
    return {key: value for key, value in os.environ.items() if key.upper().startswith(prefix)}


def stage_names(options: list[str] | None) -> frozenset[str]:
    """Split a repeated, comma-separated option into stage names. Raises UsageError if there are none: an empty shell
    variable must not mean all stages."""
    from ttrain.errors import UsageError

    names = frozenset(name.strip() for option in options or () for name in option.split(",") if name.strip())
    if options and not names:
        raise UsageError(
            "--only and --force need the name of a stage, and got an empty one; leave the option out for all stages"
        )
    return names


def checked_name(option: str | None) -> str:
    """The stripped value of an option with one name, "" if it is not given. Raises UsageError if it is empty."""
    from ttrain.errors import UsageError

    if option is not None and not option.strip():
        raise UsageError("--from and --until need the name of a stage, --continue a key, and got an empty one; leave it out")
    return (option or "").strip()


def plan_of(
    pipeline: str,
    loaded: LoadedSettings,
    *,
    force: frozenset[str] = frozenset(),
    extend: bool = False,
    selection: Selection | None = None,
    resume_key: str = "",
) -> tuple[ArtifactStore, list[Planned]]:
    """The store, and the planned stages of a pipeline in it."""
    from ttrain.flows import recipe
    from ttrain.pipeline.artifact_commands import store_of
    from ttrain.pipeline.plan import EVERYTHING, plan
    from ttrain.store.layout import home

    store = store_of(home(), loaded.settings)
    chosen = selection or EVERYTHING
    return store, plan(
        recipe(pipeline), loaded.settings, store, force, extend=extend, selection=chosen, resume_key=resume_key
    )
