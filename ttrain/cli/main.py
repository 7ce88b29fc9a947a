"""The command line. Commands import what they need themselves: `--help` stays under 0.3 s."""

import itertools
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

from typer import Exit
from typer._click.exceptions import BadParameter, ClickException, NoArgsIsHelpError, NoSuchOption

from ttrain.cli import (  # noqa: F401  # each registers its commands
    artifacts,
    chat,
    compare,
    data,
    evaluate,
    export,
    gate,
    pipeline,
    registry,
    schedule,
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
    with_settings_file,
)
from ttrain.core.files import JsonDict
from ttrain.core.terminal import console, escaped, guard_streams, outlast_output, show_warnings
from ttrain.core.text import invalid_values
from ttrain.errors import TooFewRows, TTrainError, exit_code_of, with_fix
from ttrain.store import layout

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = (128 + signal.SIGTERM, 128 + signal.SIGHUP)
MESSAGE_CHARACTERS = 10_000  # of an error: it may quote user input
STOP = "stop them with: ttrain down"

stage_app = command_group(
    "stage",
    "Train",
    help="Run one stage alone, or list the stages.",
    epilog="Example:  ttrain stage run sft",
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
        bool,
        option("print the versions and the home", "--version", callback=_version, is_eager=True),
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
        ),
    ],
    settings_options: SettingsOptions,
    restart: RestartOptions,
    extend: Extend = False,
    force: Annotated[
        bool, option("rebuild it even if it is finished, and compare", "--force")
    ] = False,
    as_json: AsJson = False,
) -> Output:
    """Run one stage alone, without Prefect."""

    from ttrain.engine.planner import alone
    from ttrain.flows.engine import RunOptions, run_pipeline

    outlast_output()
    layout.usable_home()
    planned = restart.plan(
        "full",
        settings_options.load().settings,
        only_of=stage,
        force=[stage] if force else [],
        extend=extend,
    )
    execution = run_pipeline(alone(stage, planned), console(stderr=as_json), RunOptions("none"))
    artifact = planned.store.complete(execution.artifacts[stage])
    value = {
        "stage": stage,
        "state": execution.record.snapshot()["stages"][0]["outcome"],
        "key": artifact.key,
        "path": artifact.path,
        "result": artifact.result,
    }
    return Output(value, [f"artifact: {artifact.path}"])


@command(stage_app, "Example:  ttrain stage list")
def stage_list() -> Output:
    """List the stages, each with what it does."""
    from ttrain.tasks import STAGES

    abouts = {stage.name: stage.about for stage in STAGES.values()}
    return Output(abouts, [Table(("stage", "what it does"), list(abouts.items()))])


@command(
    config_app,
    "Examples:  ttrain config show sft.epochs=2 --profile small\n\n"
    "ttrain config show -c my.yaml --changed\n\n"
    "ttrain config show --schema > ttrain.schema.json",
)
def config_show(
    settings_options: SettingsOptions,
    changed: Annotated[bool, option("only what differs from the defaults", "--changed")] = False,
    schema: Annotated[bool, option("instead: their JSON schema, for editors", "--schema")] = False,
) -> Output:
    """Print every setting, its value and where the value comes from."""
    from ttrain.config import Settings, flatten

    if schema:
        document = Settings.model_json_schema()
        return Output(document, json.dumps(document, indent=2).splitlines())
    loaded = settings_options.load()
    usual = dict(flatten(Settings().model_dump(mode="json"))) if changed else {}
    shown = {
        key: {"value": value, "source": loaded.sources.get(key, "default")}
        for key, value in flatten(loaded.settings.model_dump(mode="json"))
        if not changed or usual.get(key) != value
    }
    lines = [
        f"{key}: {json.dumps(each['value'], ensure_ascii=False)}  # {each['source']}"
        for key, each in shown.items()
    ]
    return Output(shown, lines or ["all settings have their defaults"])


@command(
    app,
    "Examples:  ttrain up\n\nttrain up latest --open\n\nttrain up full-20261121-160222 latest\n\n"
    "ttrain up --prefect-port 4300 --json",
    "Servers",
)
def up(
    runs: Annotated[
        list[str] | None, argument("runs to open in MLflow, compared if several", metavar="RUN")
    ] = None,
    prefect_port: Annotated[int, option("of the Prefect server", min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, option("of the MLflow server", min=1, max=65535)] = 5000,
    opens: Annotated[bool, option("open MLflow in the browser", "--open")] = False,
) -> Output:
    """Start the Prefect and MLflow servers on 127.0.0.1 in the background, or print running ones.

    The addresses contain the token that the servers require; a browser keeps it.
    """
    from ttrain.flows import servers
    from ttrain.store import name_syntax, run_views, server_records

    home = layout.usable_home()
    chosen = []
    for text in runs or ():  # before the servers start
        run, stage = name_syntax.run_and_stage(text)
        record = run_views.need_run(home, run)
        chosen.append((str(record.get("equals") or record["run"]), stage or None))
    if len(servers.running(home)) < 2:
        print("starting the servers, which takes about ten seconds", file=sys.stderr, flush=True)
    servers.start(home, {"prefect": prefect_port, "mlflow": mlflow_port})
    addresses = servers.running(home)
    links = tracking.links_of(home, addresses["mlflow"], chosen)
    pages = {
        name: server_records.page_with_token(home, address) for name, address in addresses.items()
    } | links
    if opens and links:
        tracking.open_in_browser(home, links.get("url", links["table"]))
    titles = {"prefect": "Prefect", "mlflow": "MLflow"}
    lines = [
        f"{titles.get(name, name):<8} {page}"
        for name, page in pages.items()
        if name != "experiment"
    ]
    return Output(pages, [*lines, STOP])


@command(app, "Example:  ttrain down", "Servers")
def down() -> Output:
    """Stop the servers that `ttrain up` started."""
    from ttrain.flows import servers

    stopped = servers.down(layout.home())
    return Output(
        {"stopped": stopped},
        [f"stopped {' and '.join(stopped)}" if stopped else "no servers were running"],
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point; turn ttrain's errors into a message and an exit code."""
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
            sys.stdout.flush()  # here a failure is the command's error, not the interpreter's
    except SystemExit as ended:
        if ended.code in TERMINATED:
            print("interrupted", file=sys.stderr)
        raise
    except NoArgsIsHelpError as error:
        error.show()
        sys.exit(error.exit_code)
    except ClickException as error:
        context = getattr(error, "ctx", None)
        words = itertools.takewhile(str.isalpha, arguments)
        path = context.command_path if context else " ".join(["ttrain", *words])
        problem = _option_as_setting(error, arguments) or _problem(error)
        _print_error(f"{problem}; `{path} --help` shows what it takes")
        sys.exit(error.exit_code)
    except (TTrainError, OSError) as error:
        if os.environ.get("TTRAIN_DEBUG"):
            traceback.print_exc()
        elif not getattr(error, "shown", False):
            _print_error(with_settings_file(with_fix(error), arguments))
        if isinstance(error, TooFewRows) and error.fixes:
            command_line = pipeline.with_settings(arguments, *error.fixes)
            print("with that set:", escaped(command_line, kept="\n"), file=sys.stderr)
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def _problem(error: ClickException) -> str:
    refused: list[JsonDict] = getattr(error.__cause__, "errors", list)()
    if (
        isinstance(error, BadParameter)
        and error.param
        and refused
        and refused[0]["type"] != "value_error"
    ):
        return invalid_values(
            {**item, "loc": (max(error.param.opts, key=len),)} for item in refused
        )
    problem = error.format_message().replace("Value error, ", "").strip().rstrip(".?")
    return f"{problem[:1].lower()}{problem[1:]}"


def _option_as_setting(error: ClickException, arguments: Sequence[str]) -> str:
    """The setting that an unknown option means, as key=value; "" for other errors."""
    from ttrain.config import Settings
    from ttrain.config.loading import types_by_name
    from ttrain.config.other_names import similar_settings

    if not isinstance(error, NoSuchOption) or error.ctx is None:
        return ""
    near = similar_settings(error.option_name.lstrip("-"), [*types_by_name(Settings)])
    if not near or not any(
        parameter.metavar == "KEY=VALUE" for parameter in error.ctx.command.params
    ):
        return ""
    typed = re.search(f"{re.escape(error.option_name)}[= ]([^- ][^ ]*)", " ".join(arguments))
    value = typed[1] if typed else "VALUE"
    return (
        f"no such option: {error.option_name}; settings are written without dashes, such as "
        f"{near[0]}={value}"
    )


def _print_error(message: str) -> None:
    print("error:", escaped(message[:MESSAGE_CHARACTERS], kept="\n"), file=sys.stderr)
