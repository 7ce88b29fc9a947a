"""The command line. Imports what a command needs inside the command, so that `--help` stays under 0.3 s."""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import Annotated

import typer

from ttrain.cli.artifacts import artifacts_app
from ttrain.cli.chat import chat, generate, serve
from ttrain.cli.compare import add_pages
from ttrain.cli.contamination import add_contamination
from ttrain.cli.data import data_app, tokenizer_app
from ttrain.cli.doctor import doctor
from ttrain.cli.evaluate import EPILOG as EVAL_EPILOG
from ttrain.cli.evaluate import evaluate
from ttrain.cli.export import EPILOG as EXPORT_EPILOG
from ttrain.cli.export import export
from ttrain.cli.gate import gate_app
from ttrain.cli.lineage import add_lineage
from ttrain.cli.model import adapter_app, model_app
from ttrain.cli.nightly import EPILOG as SERVE_EPILOG
from ttrain.cli.nightly import schedule_app
from ttrain.cli.nightly import serve as serve_schedules
from ttrain.cli.options import (
    AsJson,
    ServerOverrides,
    SettingsOptions,
    StageOptions,
    server_settings,
    with_option_groups,
)
from ttrain.cli.pipeline import pipeline_app
from ttrain.cli.registry import models_app
from ttrain.cli.sweep import sweep_app
from ttrain.cli.tracking import EPILOG as UI_EPILOG
from ttrain.cli.tracking import track_app, ui
from ttrain.cli.train import run_stage, train_app
from ttrain.core.terminal import escaped, guard_streams, print_json, show_warnings
from ttrain.store import layout

MESSAGE_CHARACTERS = 10_000  # of an error: it may quote user input

app = typer.Typer(
    name="ttrain",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Raw JSONL to a tokenizer, shards, a pretrained model, an SFT model, a LoRA adapter and an evaluation.",
    epilog="Begin with:  ttrain pipeline run full\n\nThen:  ttrain pipeline plan full sft.optim.lr=2e-4",
)
stage_app = typer.Typer(no_args_is_help=True, help="Run one stage alone.", epilog="Example:  ttrain stage run sft")
config_app = typer.Typer(
    no_args_is_help=True,
    help="Show the settings and where each value comes from.",
    epilog="Example:  ttrain config show --profile small",
)
pipeline_app.add_typer(schedule_app, name="schedule")
pipeline_app.command("serve", epilog=SERVE_EPILOG)(serve_schedules)
app.add_typer(pipeline_app, name="pipeline")
app.add_typer(stage_app, name="stage")
app.add_typer(sweep_app, name="sweep")
app.add_typer(artifacts_app, name="artifacts")
app.add_typer(config_app, name="config")
app.add_typer(adapter_app, name="adapter")
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(train_app, name="train")
app.add_typer(gate_app, name="gate")
app.add_typer(model_app, name="model")
app.add_typer(models_app, name="models")
app.add_typer(track_app, name="track")


def _version(show: bool) -> None:
    if show:
        from ttrain import __version__

        print(f"ttrain {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    debug: Annotated[bool, typer.Option("--debug", help="show tracebacks")] = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")] = False,
) -> None:
    """Options of every command."""
    if debug:
        os.environ["TTRAIN_DEBUG"] = "1"


@stage_app.command("run", epilog="Example:  ttrain stage run sft sft.optim.lr=2e-4")
@with_option_groups
def stage_run(
    stage: Annotated[str, typer.Argument(help="the stage; its inputs are those of the current plan")],
    given: SettingsOptions,
    options: StageOptions,
) -> None:
    """Run one stage alone, without Prefect."""
    run_stage(stage, given, options)


@config_app.command("show", epilog="Example:  ttrain config show sft.epochs=2 --profile small")
@with_option_groups
def config_show(given: SettingsOptions, as_json: AsJson = False) -> None:
    """Print every setting, its value and where the value comes from."""
    from ttrain.config import flatten

    loaded = given.load()
    tree = loaded.settings.model_dump(mode="json")
    if as_json:
        values = {key: {"value": value, "source": loaded.sources.get(key, "default")} for key, value in flatten(tree)}
        print_json(values)
        return
    for key, value in flatten(tree):
        print(f"{key}: {json.dumps(value, ensure_ascii=False)}  # {loaded.sources.get(key, 'default')}")


@config_app.command("schema", epilog="Example:  ttrain config schema > ttrain.schema.json")
def config_schema() -> None:
    """Print the JSON schema of the settings, for editors."""
    from ttrain.config import Settings

    print_json(Settings.model_json_schema())


app.command(
    "chat",
    epilog="Examples:  ttrain chat\n\nttrain chat sft --temperature 0\n\nttrain chat pretrain --versus sft\n\n"
    "ttrain chat lora --adapter ./other-adapter\n\n"
    "echo 'What is a list?' | ttrain chat sft --json",
)(chat)
app.command(
    "generate",
    epilog="Examples:  ttrain generate questions.txt --model sft --out answers.jsonl\n\n"
    "ttrain generate beginnings.txt --model pretrain --raw --temperature 0.8",
)(generate)
app.command(
    "serve",
    context_settings={"allow_extra_args": True},
    epilog="Examples:  ttrain serve sft\n\nttrain serve sft --port 0 --json -- --continuous-batching",
)(serve)
app.command("doctor", epilog="Examples:  ttrain doctor\n\nttrain doctor --stage sft sft.optim.lr=2e-4 --json")(doctor)


app.command("eval", epilog=EVAL_EPILOG)(evaluate)
app.command("export", epilog=EXPORT_EPILOG)(export)
app.command("ui", epilog=UI_EPILOG)(ui)
add_lineage(app)
add_contamination(data_app)
add_pages(app)


@app.command("up", epilog="Examples:  ttrain up\n\nttrain up --prefect-port 4300 --json")
def up(
    overrides: ServerOverrides = None,
    prefect_port: Annotated[int, typer.Option(help="of the Prefect server")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="of the MLflow server")] = 5000,
    as_json: AsJson = False,
) -> None:
    """Start the Prefect and MLflow servers on 127.0.0.1 in the background, or print the running ones.

    The addresses contain the token that the servers require; a browser keeps it.
    """
    from ttrain.flows import servers
    from ttrain.store import server_records

    home, auth = layout.usable_home(), server_settings(overrides).auth
    addresses = servers.up(home, prefect_port=prefect_port, mlflow_port=mlflow_port, auth=auth)
    pages = {"prefect": addresses.prefect_url, "mlflow": addresses.mlflow_url}
    pages = {name: server_records.page_with_token(home, url) for name, url in pages.items()}
    if as_json:
        print_json(pages)
        return
    print(f"Prefect  {pages['prefect']}\nMLflow   {pages['mlflow']}")
    print("open MLflow on the runs with: ttrain ui\nstop them with: ttrain down")


@app.command("down", epilog="Example:  ttrain down")
def down() -> None:
    """Stop the servers that `ttrain up` started."""
    from ttrain.flows import servers

    stopped = servers.down(layout.home())
    print(f"stopped {' and '.join(stopped)}" if stopped else "no servers were running")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; turns ttrain's errors into a message and an exit code."""
    from ttrain.errors import TTrainError, exit_code_of

    arguments = sys.argv[1:] if arguments is None else arguments
    if "--debug" in arguments:  # at any position
        arguments = ["--debug", *(word for word in arguments if word != "--debug")]
    guard_streams()
    show_warnings()
    try:
        try:
            app(arguments)
        finally:
            sys.stdout.flush()  # a failure here is an error of the command, not a message of the interpreter
    except (TTrainError, OSError) as error:
        if os.environ.get("TTRAIN_DEBUG"):
            traceback.print_exc()
        elif not getattr(error, "shown", False):
            message = str(error)
            if len(message) > MESSAGE_CHARACTERS:
                message = f"{message[:MESSAGE_CHARACTERS]}... ({len(message):,} characters)"
            print("error: " + "\n".join(map(escaped, message.split("\n"))), file=sys.stderr)
        sys.exit(exit_code_of(error))
