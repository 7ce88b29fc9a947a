"""The command line. Imports what a command needs inside the command, so that `--help` stays under 0.3 s."""

from __future__ import annotations

import io
import json
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli_adapter import adapter_app
from ttrain.cli_data import data_app, tokenizer_app
from ttrain.cli_doctor import doctor
from ttrain.cli_export import EPILOG as EXPORT_EPILOG
from ttrain.cli_export import export
from ttrain.cli_gate import gate_app
from ttrain.cli_model import model_app
from ttrain.cli_settings import AsJson, Extend, Files, Force, Overrides, Profiles, load_settings, plan_of
from ttrain.cli_talk import chat, generate, serve
from ttrain.cli_train import run_stage, train_app
from ttrain.terminal import console, escaped, print_json, table

if TYPE_CHECKING:
    from ttrain.loading import Loaded
    from ttrain.plan import Planned
    from ttrain.store import Store

PIPELINE_HELP = "the pipeline; `full` is the one there is"

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
pipeline_app = typer.Typer(
    no_args_is_help=True, help="Plan, run, rerun and list whole pipelines.", epilog="Example:  ttrain pipeline run full"
)
stage_app = typer.Typer(no_args_is_help=True, help="Run one stage alone.", epilog="Example:  ttrain stage run sft")
artifacts_app = typer.Typer(
    no_args_is_help=True, help="Find what the stages left behind.", epilog="Example:  ttrain artifacts path sft"
)
config_app = typer.Typer(
    no_args_is_help=True,
    help="Show the settings and where each value comes from.",
    epilog="Example:  ttrain config show --profile small",
)
app.add_typer(pipeline_app, name="pipeline")
app.add_typer(stage_app, name="stage")
app.add_typer(artifacts_app, name="artifacts")
app.add_typer(config_app, name="config")
app.add_typer(adapter_app, name="adapter")
app.add_typer(data_app, name="data")
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(train_app, name="train")
app.add_typer(gate_app, name="gate")
app.add_typer(model_app, name="model")

Pipeline = Annotated[str, typer.Argument(help=PIPELINE_HELP)]
Engine = Annotated[str, typer.Option("--engine", help="`prefect`, or `none` to run the same recipe without it")]


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


@pipeline_app.command(
    "run",
    epilog="Examples:  ttrain pipeline run full\n\n"
    "ttrain pipeline run full data.pretrain=docs.jsonl data.sft=chats.jsonl data.lora=domain.jsonl\n\n"
    "ttrain pipeline run full sft.optim.lr=2e-4",
)
def pipeline_run(
    pipeline: Pipeline,
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    extend: Extend = False,
    engine: Engine = "prefect",
    record: Annotated[bool, typer.Option("--record", help="make a tracked run although all is cached")] = False,
) -> None:
    """Run a pipeline; stages whose inputs, settings and code did not change come from the store."""
    _run(pipeline, overrides, config, profile, extend=extend, engine=engine, record=record)


@pipeline_app.command("rerun", epilog="Example:  ttrain pipeline rerun sft")
def pipeline_rerun(
    stage: Annotated[str, typer.Argument(help="the stage to run again; what depends on it follows")],
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    extend: Extend = False,
    engine: Engine = "prefect",
) -> None:
    """Run a stage again, finished or not, and what depends on it; a finished one is compared with what was stored."""
    _run("full", overrides, config, profile, extend=extend, engine=engine, force=frozenset({stage}))


@pipeline_app.command("plan", epilog="Example:  ttrain pipeline plan full sft.optim.lr=2e-4 --json")
def pipeline_plan(
    pipeline: Pipeline,
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    extend: Extend = False,
    as_json: AsJson = False,
) -> None:
    """Print for every stage whether it is cached or will run, its key, and why. Runs nothing."""
    from ttrain import report

    _, stages = plan_of(pipeline, load_settings(overrides, config, profile), extend=extend)
    if as_json:
        print_json(report.plan_json(pipeline, stages))
        return
    screen = console()
    table(("stage", "state", "key", "why"), report.plan_rows(stages))
    waiting = sum(planned.state == "run" for planned in stages)
    screen.print(f"{waiting} of {len(stages)} stages will run" if waiting else "everything is cached", highlight=False)


@pipeline_app.command("status", epilog="Example:  ttrain pipeline status --json")
def pipeline_status(
    limit: Annotated[int, typer.Option(min=1, help="how many runs, newest first")] = 10, as_json: AsJson = False
) -> None:
    """List runs and their stages: outcome, time, key figures, logs."""
    from ttrain import report, runs, store

    found = runs.history(store.home())
    if as_json:
        print_json([report.run_json(run) for run in found])
        return
    screen = console()
    if not found:
        screen.print("no runs yet; begin with `ttrain pipeline run full`")
    for run in found[:limit]:
        same = f", the same as {run['equals']}" if run.get("equals") else ""
        took = report.seconds(run["seconds"])
        screen.print(f"[bold]{run['run']}[/]  {run['outcome']}{same}  {took}  {run['started']}", highlight=False)
        rows = [report.status_row(stage) for stage in run["stages"] if run["outcome"] != "cached"]
        if rows:
            table(("stage", "outcome", "time", "figures", "log"), rows)


@stage_app.command("run", epilog="Example:  ttrain stage run sft sft.optim.lr=2e-4")
def stage_run(
    stage: Annotated[str, typer.Argument(help="the stage; its inputs are those that the present plan names")],
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    extend: Extend = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Run one stage alone, without Prefect."""
    run_stage(stage, overrides, config, profile, extend=extend, force=force, as_json=as_json)


@artifacts_app.command("path", epilog="Example:  ls $(ttrain artifacts path sft)/model")
def artifacts_path(stage: Annotated[str, typer.Argument(help="the stage; its latest artifact is meant")]) -> None:
    """Print where the latest artifact of a stage lies."""
    from ttrain.errors import UsageError
    from ttrain.stages import STAGES
    from ttrain.store import Store, home

    if stage not in STAGES:
        raise UsageError(f"there is no stage '{stage}'; the stages are {', '.join(STAGES)}")
    print(Store(home()).latest(stage).path)


@config_app.command("show", epilog="Example:  ttrain config show sft.epochs=2 --profile small")
def config_show(
    overrides: Overrides = None, config: Files = None, profile: Profiles = None, as_json: AsJson = False
) -> None:
    """Print every setting, its value and where the value comes from."""
    from ttrain.config import flatten

    loaded = load_settings(overrides, config, profile)
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


app.command("export", epilog=EXPORT_EPILOG)(export)


@app.command("up", epilog="Example:  ttrain up")
def up(
    prefect_port: Annotated[int, typer.Option(help="of the Prefect server")] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="of the MLflow server")] = 5000,
) -> None:
    """Start the Prefect and MLflow servers on 127.0.0.1 in the background, or name the running ones."""
    from flows import servers
    from ttrain import store

    found = servers.up(store.usable_home(), prefect_port=prefect_port, mlflow_port=mlflow_port)
    print(f"Prefect  {found.prefect_url}\nMLflow   {found.mlflow_url}\nstop them with: ttrain down")


@app.command("down", epilog="Example:  ttrain down")
def down() -> None:
    """Stop the servers that `ttrain up` started."""
    from flows import servers
    from ttrain import store

    stopped = servers.down(store.home())
    print(f"stopped {' and '.join(stopped)}" if stopped else "no servers were running")


def main(arguments: list[str] | None = None) -> None:
    """Entry point; turns ttrain's errors into a message and an exit code."""
    from ttrain.errors import TTrainError

    arguments = sys.argv[1:] if arguments is None else arguments
    if "--debug" in arguments:  # wherever it stands
        arguments = ["--debug", *(word for word in arguments if word != "--debug")]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character gets a question mark, not the run's end
            stream.reconfigure(errors="replace")
    try:
        app(arguments)
    except (TTrainError, OSError) as error:
        if os.environ.get("TTRAIN_DEBUG"):
            traceback.print_exc()
        elif not getattr(error, "shown", False):
            print("error: " + "\n".join(map(escaped, str(error).split("\n"))), file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))


def _run(
    pipeline: str,
    overrides: list[str] | None,
    config: list[Path] | None,
    profile: list[str] | None,
    *,
    extend: bool,
    engine: str,
    record: bool = False,
    force: frozenset[str] = frozenset(),
) -> None:
    from ttrain import report
    from ttrain.errors import UsageError
    from ttrain.plan import is_all_cached
    from ttrain.store import usable_home

    if engine not in ("prefect", "none"):
        raise UsageError(f"--engine is '{engine}' but must be prefect or none")
    loaded = load_settings(overrides, config, profile)
    store, stages = plan_of(pipeline, loaded, force=force, extend=extend)
    if is_all_cached(stages) and not record:
        _say_cached(pipeline, loaded, store, stages)
        return
    table(("stage", "state", "key", "why"), report.plan_rows(stages))
    usable_home()
    from flows.engine import run_pipeline

    run_pipeline(pipeline, loaded.settings, store, stages, console(), engine=engine, force=force, extend=extend)


def _say_cached(pipeline: str, loaded: Loaded, store: Store, stages: list[Planned]) -> None:
    from ttrain import report, runs

    results = {planned.stage.name: planned.artifact.result for planned in stages if planned.artifact}
    metrics = report.metrics_of(results)
    equals = runs.equal_run(store.root, {planned.stage.name: planned.key for planned in stages})
    runs.record_cached(store.root, pipeline, stages, loaded.settings.model_dump(mode="json"), metrics, equals)
    table(("what", "value", ""), report.evaluation_table(metrics))
    same = f" in the run {equals}" if equals else ""
    print(f"everything is cached: all {len(stages)} stages of {pipeline} are as they were{same}; nothing was run")
