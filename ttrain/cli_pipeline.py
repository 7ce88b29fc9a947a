"""`ttrain pipeline`: plan, run, rerun and list whole pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli_settings import AsJson, Extend, Files, Overrides, Profiles, load_settings, plan_of
from ttrain.terminal import console, print_json, table

if TYPE_CHECKING:
    from ttrain.loading import Loaded
    from ttrain.plan import Planned
    from ttrain.store import Store

PIPELINE_HELP = "the pipeline; `full` is the one there is"

pipeline_app = typer.Typer(
    no_args_is_help=True, help="Plan, run, rerun and list whole pipelines.", epilog="Example:  ttrain pipeline run full"
)

Pipeline = Annotated[str, typer.Argument(help=PIPELINE_HELP)]
Engine = Annotated[str, typer.Option("--engine", help="`prefect`, or `none` to run the same recipe without it")]


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
