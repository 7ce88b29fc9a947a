"""The command line. Imports what a command needs inside the command, so that `--help` stays under 0.3 s."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from typer import Exit
from typer._click.exceptions import BadParameter, ClickException, NoArgsIsHelpError, NoSuchOption
from typer._click.exceptions import UsageError as ClickUsageError
from typer.core import TyperGroup
from typer.main import get_command

from ttrain.cli import (  # noqa: F401  # each registers its commands
    artifacts,
    chat,
    compare,
    data,
    evaluate,
    gate,
    init,
    model,
    pipeline,
    registry,
    sweep,
    tracking,
    train,
)
from ttrain.cli.options import (
    AsJson,
    Extend,
    Output,
    RestartOptions,
    SettingsOptions,
    Table,
    app,
    argument,
    command,
    command_group,
    option,
    run_words,
    server_settings,
    stage_words,
    with_settings_file,
)
from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.core.terminal import (
    console,
    escaped,
    escaped_lines,
    guard_streams,
    outlast_output,
    print_escaped,
    print_json,
    show_warnings,
)
from ttrain.core.text import invalid_values
from ttrain.errors import TooFewRows, TTrainError, UsageError, exit_code_of, with_fix
from ttrain.store import layout

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
MESSAGE_CHARACTERS = 10_000  # of an error: it may quote user input

stage_app = command_group(
    "stage", "Train", help="Run one stage alone, or list the stages.", epilog="Example:  ttrain stage run sft"
)
config_app = command_group(
    "config",
    "Train",
    help="Show the settings and where each value comes from.",
    epilog="Example:  ttrain config show --profile small",
)


def _version(show: bool) -> None:
    if show:
        import platform
        from importlib import metadata

        print(f"ttrain {metadata.version('ttrain')}\nPython {platform.python_version()}")
        for library in ("torch", "prefect", "mlflow"):
            print(f"{library} {metadata.version(library)}")
        print(f"home {escaped(str(layout.home()))}")
        raise Exit


@app.callback()
def main_options(
    debug: Annotated[bool, option("show tracebacks", "--debug")] = False,
    version: Annotated[
        bool, option("print the versions and the home", "--version", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options of every command."""
    if debug:
        os.environ["TTRAIN_DEBUG"] = "1"


@command(stage_app, "Example:  ttrain stage run sft sft.epochs=3")
def stage_run(
    stage: Annotated[
        str,
        argument(
            "the stage, see `ttrain stage list`; its inputs are those of the current plan",
            metavar="STAGE",
            autocompletion=stage_words,
        ),
    ],
    settings_options: SettingsOptions,
    restart: RestartOptions,
    extend: Extend = False,
    force: Annotated[bool, option("rebuild it even if it is finished, and compare", "--force")] = False,
    as_json: AsJson = False,
) -> None:
    """Run one stage alone, without Prefect."""
    from ttrain import api
    from ttrain.flows.run import RunOptions, run_pipeline

    outlast_output()
    layout.usable_home()
    settings = settings_options.load().settings
    selection: dict[str, Any] = {"until": stage, "force": [stage] if force else [], "extend": extend}
    planned = api.plan("full", settings, **selection)
    if restart:
        restart.apply(planned.store, [each for each in planned.stages[-1:] if each.state == "run"])
        planned = api.plan("full", settings, **selection)
    *needed, chosen = planned.stages
    if missing := [each.stage.name for each in needed if not each.artifact]:
        commands = ", ".join(f"`ttrain stage run {each}`" for each in missing)
        raise UsageError(
            f"stage {stage} waits for {', '.join(missing)}; run first, with the same settings: {commands}, "
            f"or all at once: `ttrain pipeline run full --until {stage}`"
        )
    chosen = replace(chosen, sources=chosen.inputs)  # the artifacts that are there
    alone = replace(planned, pipeline=f"stage-{stage}", stages=[chosen])
    execution = run_pipeline(alone, console(stderr=as_json), RunOptions("none"))
    artifact = planned.store.complete(execution.artifacts[stage])
    if as_json:
        [state] = [each["outcome"] for each in execution.record.snapshot()["stages"] if each["name"] == stage]
        path, key = str(artifact.path), artifact.key
        print_json({"stage": stage, "state": state, "key": key, "path": path, "result": artifact.result})
    else:
        print_escaped(f"artifact: {artifact.path}")


@command(stage_app, "Example:  ttrain stage list")
def stage_list() -> Output:
    """List the stages, each with what it does."""
    from ttrain.tasks import STAGES

    abouts = {stage.name: stage.about for stage in STAGES.values()}
    return Output(abouts, [Table(("stage", "what it does"), list(abouts.items()))])


@command(
    config_app,
    "Examples:  ttrain config show sft.epochs=2 --profile small\n\nttrain config show -c my.yaml --changed",
)
def config_show(
    settings_options: SettingsOptions,
    changed: Annotated[bool, option("only what differs from the defaults", "--changed")] = False,
) -> Output:
    """Print every setting, its value and where the value comes from."""
    from ttrain.config import Settings, flatten

    loaded = settings_options.load()
    tree = loaded.settings.model_dump(mode="json")
    values = {key: {"value": value, "source": loaded.sources.get(key, "default")} for key, value in flatten(tree)}
    if changed:
        usual = dict(flatten(Settings().model_dump(mode="json")))
        values = {key: entry for key, entry in values.items() if usual.get(key) != entry["value"]}
    lines = [f"{key}: {json.dumps(each['value'], ensure_ascii=False)}  # {each['source']}" for key, each in values.items()]
    return Output(values, lines or ["all settings have their defaults"])


@command(config_app, "Example:  ttrain config schema > ttrain.schema.json")
def config_schema() -> None:
    """Print the JSON schema of the settings, for editors."""
    from ttrain.config import Settings

    print_json(Settings.model_json_schema())


@command(
    app,
    "Examples:  ttrain up\n\nttrain up latest --open\n\nttrain up full-20261121-160222 latest\n\n"
    "ttrain up --prefect-port 4300 --json",
    "Servers",
)
def up(
    arguments: Annotated[
        list[str] | None,
        argument(
            "runs to open in MLflow, compared if several; servers.auth=off",
            metavar="RUN|KEY=VALUE",
            autocompletion=run_words,
        ),
    ] = None,
    prefect_port: Annotated[int, option("of the Prefect server", min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, option("of the MLflow server", min=1, max=65535)] = 5000,
    opens: Annotated[bool, option("open MLflow in the browser", "--open")] = False,
    as_json: AsJson = False,
) -> None:
    """Start the Prefect and MLflow servers on 127.0.0.1 in the background, or print the running ones.

    The addresses contain the token that the servers require; a browser keeps it.
    """
    from ttrain.flows import servers
    from ttrain.store import server_records

    given_arguments = arguments or []
    overrides, runs = ([word for word in given_arguments if ("=" in word) == has_value] for has_value in (True, False))
    home, auth = layout.usable_home(), server_settings(overrides).auth
    missing = [name for name in ("prefect", "mlflow") if not server_records.live_server(home, name)]
    if missing:
        print(f"starting {' and '.join(missing)}, which takes about ten seconds", file=sys.stderr, flush=True)
    addresses = servers.up(home, prefect_port=prefect_port, mlflow_port=mlflow_port, auth=auth)
    pages = {"prefect": addresses.prefect_url, "mlflow": addresses.mlflow_url}
    pages = {name: server_records.page_with_token(home, url) for name, url in pages.items()}
    links: dict[str, str] = {}
    try:
        links = tracking.links_of(home, addresses.mlflow_url, runs)
    except UsageError as error:
        if runs or opens:
            if missing:
                print("the servers are running; stop them with: ttrain down", file=sys.stderr)
            raise
        print_escaped(str(error), stderr=True)
    if as_json:
        print_json({**pages, **links})
    else:
        print(f"Prefect  {pages['prefect']}\nMLflow   {pages['mlflow']}")
        print("".join(f"{name:<8} {link}\n" for name, link in links.items() if name != "experiment"), end="")
        print("stop them with: ttrain down")
    if opens:
        tracking.open_in_browser(home, links.get("url", links["table"]))


@command(app, "Example:  ttrain down", "Servers")
def down() -> None:
    """Stop the servers that `ttrain up` started."""
    from ttrain.flows import servers

    stopped = servers.down(layout.home())
    print(f"stopped {' and '.join(stopped)}" if stopped else "no servers were running")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; turns ttrain's errors into a message and an exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--debug" in arguments:  # at any position
        arguments = ["--debug", *(word for word in arguments if word != "--debug")]
    guard_streams()
    show_warnings()
    try:
        try:
            code = app(arguments, prog_name="ttrain", standalone_mode=False)
            if code == INTERRUPTED:  # what Typer returns after Ctrl-C
                raise KeyboardInterrupt
        finally:
            sys.stdout.flush()  # a failure here is an error of the command, not a message of the interpreter
    except SystemExit as ended:
        if ended.code in TERMINATED:
            print("interrupted", file=sys.stderr)
        raise
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except ClickException as error:
        path = error.ctx.command_path if isinstance(error, ClickUsageError) and error.ctx else _command_path(arguments)
        problem = _option_as_setting(error, arguments) or _problem(error)
        _print_error(f"{problem}; `{path} --help` shows what it takes")
        sys.exit(error.exit_code)
    except (TTrainError, OSError) as error:
        if os.environ.get("TTRAIN_DEBUG"):
            traceback.print_exc()
        elif not getattr(error, "shown", False):
            message = with_fix(layout.closed_home(error) if isinstance(error, OSError) else error)
            _print_error(with_settings_file(message, arguments))
        if isinstance(error, TooFewRows) and error.fixes:
            print(f"with that set: {escaped_lines(_with_settings(arguments, error.fixes))}", file=sys.stderr)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _with_settings(arguments: list[str], settings: Sequence[str]) -> str:
    """The command with these settings, key=value, instead of its own of the same keys."""
    keys = {setting.partition("=")[0] for setting in settings}
    words = [word for word in arguments if word.partition("=")[0] not in keys]
    return shlex.join(["ttrain", *map(redact.text, words), *settings])


def _command_path(arguments: list[str]) -> str:
    """The command that the arguments name, such as "ttrain pipeline run"; of an error that came before it was known."""
    command, path = get_command(app), ["ttrain"]
    for word in arguments:
        child = command.commands.get(word) if isinstance(command, TyperGroup) else None
        if child is not None:
            command = child
            path.append(word)
    return " ".join(path)


def _problem(error: ClickException) -> str:
    """What is wrong with the command; of an option's value that pydantic refuses, the option, the value and the rule."""
    refused: list[JsonDict] = getattr(error.__cause__, "errors", list)()
    if isinstance(error, BadParameter) and error.param and refused and refused[0]["type"] != "value_error":
        return invalid_values({**item, "loc": (max(error.param.opts, key=len),)} for item in refused)
    problem = error.format_message().replace("Value error, ", "").strip().rstrip(".?")
    return f"{problem[:1].lower()}{problem[1:]}"


def _option_as_setting(error: ClickException, arguments: Sequence[str]) -> str:
    """How a setting is written that was given as an option; "" where the error is about something else."""
    from ttrain.config.loading import written_setting

    if not isinstance(error, NoSuchOption) or error.ctx is None:
        return ""
    if all(parameter.metavar != "KEY=VALUE" for parameter in error.ctx.command.params):
        return ""
    place = next((n for n, word in enumerate(arguments) if word.startswith(error.option_name)), None)
    if place is None:
        return ""
    _, equals, value = arguments[place].partition("=")
    if not equals:
        value = next(iter(arguments[place + 1 : place + 2]), "-")
        value = "VALUE" if value.startswith("-") else value
    setting = written_setting(error.option_name.lstrip("-"), value)
    problem = f"no such option: {error.option_name}; settings are written without dashes"
    return f"{problem}, such as {setting}" if setting else ""


def _print_error(message: str) -> None:
    if len(message) > MESSAGE_CHARACTERS:
        message = f"{message[:MESSAGE_CHARACTERS]}... ({len(message):,} characters)"
    print(f"error: {escaped_lines(message)}", file=sys.stderr)
