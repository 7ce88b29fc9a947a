"""`ttrain pipeline`: plan, run, rerun and list whole pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain import cli_night
from ttrain.cli_settings import (
    AsJson,
    Extend,
    Files,
    ForceStages,
    GoOn,
    Only,
    Overrides,
    Profiles,
    Since,
    Until,
    load_settings,
    name_in,
    names_in,
    plan_of,
    settings_of_run,
)
from ttrain.terminal import console, print_json, table

if TYPE_CHECKING:
    from ttrain.loading import Loaded
    from ttrain.plan import Planned
    from ttrain.selection import Selection
    from ttrain.store import Store

LISTED_RUNS = 10
PIPELINE_HELP = "the pipeline: full, or nightly (one night: new data, a challenger, the decision)"

pipeline_app = typer.Typer(
    no_args_is_help=True, help="Plan, run, rerun and list whole pipelines.", epilog="Example:  ttrain pipeline run full"
)

Pipeline = Annotated[str, typer.Argument(help=PIPELINE_HELP)]
Engine = Annotated[str, typer.Option("--engine", help="`prefect`, or `none` to run the same recipe without it")]


@pipeline_app.command(
    "run",
    epilog="Examples:  ttrain pipeline run full\n\n"
    "ttrain pipeline run full data.pretrain=docs.jsonl data.sft=chats.jsonl data.lora=domain.jsonl\n\n"
    "ttrain pipeline run full sft.optim.lr=2e-4\n\n"
    "ttrain pipeline run full --until pretrain\n\n"
    "ttrain pipeline run nightly data.pretrain=inbox/",
)
def pipeline_run(
    pipeline: Pipeline,
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    extend: Extend = False,
    force: ForceStages = None,
    only: Only = None,
    since: Since = None,
    until: Until = None,
    go_on: GoOn = None,
    engine: Engine = "prefect",
    record: Annotated[bool, typer.Option("--record", help="make a tracked run although all is cached")] = False,
) -> None:
    """Run a pipeline; stages whose inputs, settings and code did not change come from the store."""
    from ttrain.selection import Selection

    _check_engine(engine)
    loaded = load_settings(overrides, config, profile)
    if pipeline == cli_night.NIGHTLY:
        cli_night.refuse(
            extend=extend, force=force, only=only, until=until, record=record, **{"from": since, "continue": go_on}
        )
        cli_night.run(loaded, engine=engine)
        return
    _run(
        pipeline,
        loaded,
        engine=engine,
        record=record,
        extend=extend,
        force=names_in(force),
        selection=Selection(names_in(only), name_in(since), name_in(until)),
        go_on=name_in(go_on),
    )


@pipeline_app.command(
    "rerun",
    epilog="Examples:  ttrain pipeline rerun sft\n\n"
    "ttrain pipeline rerun sft --run full-20261121-160222-1a2b sft.optim.lr=2e-4",
)
def pipeline_rerun(
    stage: Annotated[str, typer.Argument(help="the stage to run again; what depends on it follows")],
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    run: Annotated[
        str,
        typer.Option("--run", metavar="RUN", help="take the settings of this run (its name, or a part)", show_default=False),
    ] = "",
    extend: Extend = False,
    engine: Engine = "prefect",
) -> None:
    """Run a stage again, finished or not, and what depends on it; a finished one is compared with what was stored.

    The settings are those of the newest run that has the stage, or of --run, and what is given here on top of them. Files
    and profiles without --run say them anew, as in `run`.
    """
    _check_engine(engine)
    _run(
        "full",
        _of_earlier_run(stage, run, overrides, config, profile),
        engine=engine,
        extend=extend,
        force=frozenset({stage}),
    )


@pipeline_app.command(
    "plan",
    epilog="Examples:  ttrain pipeline plan full sft.optim.lr=2e-4 --json\n\nttrain pipeline plan full --from sft",
)
def pipeline_plan(
    pipeline: Pipeline,
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    extend: Extend = False,
    force: ForceStages = None,
    only: Only = None,
    since: Since = None,
    until: Until = None,
    go_on: GoOn = None,
    as_json: AsJson = False,
) -> None:
    """Print for every stage whether it is cached or will run, its key, and why. Runs nothing."""
    from ttrain import report
    from ttrain.selection import Selection

    selection = Selection(names_in(only), name_in(since), name_in(until))
    loaded = load_settings(overrides, config, profile)
    if pipeline == cli_night.NIGHTLY:
        cli_night.refuse(extend=extend, force=force, only=only, until=until, **{"from": since, "continue": go_on})
        cli_night.plan(loaded, as_json=as_json)
        return
    _, stages = plan_of(pipeline, loaded, force=names_in(force), extend=extend, selection=selection, go_on=name_in(go_on))
    if as_json:
        print_json(report.plan_json(pipeline, stages))
        return
    screen = console()
    table(("stage", "state", "key", "why"), report.plan_rows(stages))
    _say_left_out(pipeline, loaded, stages, selection)
    waiting = sum(planned.state == "run" for planned in stages)
    screen.print(f"{waiting} of {len(stages)} stages will run" if waiting else "everything is cached", highlight=False)


@pipeline_app.command("status", epilog="Example:  ttrain pipeline status --json")
def pipeline_status(
    limit: Annotated[int | None, typer.Option(min=1, help="how many runs, newest first; 10, with --json all")] = None,
    as_json: AsJson = False,
) -> None:
    """List runs and their stages: outcome, time, key figures, logs."""
    from ttrain import report, runs, store

    found = runs.history(store.home())
    if as_json:
        print_json([report.run_json(run) for run in found[:limit]])
        return
    screen = console()
    if not found:
        screen.print("no runs yet; begin with `ttrain pipeline run full`")
    for run in found[: limit or LISTED_RUNS]:
        same = f", the same as {run['equals']}" if run.get("equals") else ""
        took = report.seconds(run["seconds"])
        screen.print(f"[bold]{run['run']}[/]  {run['outcome']}{same}  {took}  {run['started']}", highlight=False)
        rows = [report.status_row(stage) for stage in run["stages"] if run["outcome"] != "cached"]
        if rows:
            table(("stage", "outcome", "time", "figures", "log"), rows)


def _check_engine(engine: str) -> None:
    from ttrain.errors import UsageError

    if engine not in ("prefect", "none"):
        raise UsageError(f"--engine is '{engine}' but must be prefect or none")


def _run(
    pipeline: str,
    loaded: Loaded,
    *,
    engine: str,
    extend: bool,
    force: frozenset[str],
    selection: Selection | None = None,
    go_on: str = "",
    record: bool = False,
) -> None:
    from ttrain import report, runs
    from ttrain.plan import is_all_cached
    from ttrain.store import usable_home

    store, stages = plan_of(pipeline, loaded, force=force, extend=extend, selection=selection, go_on=go_on)
    keys = {planned.stage.name: planned.key for planned in stages}
    if is_all_cached(stages) and not record and runs.cut_short(store.root, keys) is None:
        _say_cached(pipeline, loaded, store, stages)
        return
    table(("stage", "state", "key", "why"), report.plan_rows(stages))
    _say_left_out(pipeline, loaded, stages, selection)
    usable_home()
    from flows.engine import run_pipeline

    settings = loaded.settings
    run_pipeline(pipeline, settings, store, stages, console(), engine=engine, force=force, extend=extend, go_on=go_on)


def _of_earlier_run(
    stage: str, run: str, overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None
) -> Loaded:
    """The settings for a stage to be run again; says of which run they are, and what in them is not a default."""
    from ttrain import earlier
    from ttrain.store import home
    from ttrain.terminal import escaped

    if (config or profile) and not run:
        return load_settings(overrides, config, profile)
    found = earlier.run_named(home(), run) if run else earlier.newest_with(home(), stage)
    loaded = settings_of_run(found, overrides, config, profile)
    told = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for _, key, value in earlier.settings_of(found))
    print(escaped(f"settings of {found['run']}, apart from the defaults: {told or 'none'}"))
    return loaded


def _say_left_out(pipeline: str, loaded: Loaded, stages: list[Planned], selection: Selection | None) -> None:
    if selection:
        from flows import recipe
        from ttrain.selection import graph_of

        planned = {stage.stage.name for stage in stages}
        left_out = [name for name in graph_of(recipe(pipeline), loaded.settings) if name not in planned]
        if left_out:
            print(f"left out by {selection}: {', '.join(left_out)}")


def _say_cached(pipeline: str, loaded: Loaded, store: Store, stages: list[Planned]) -> None:
    from ttrain import champion_baseline, evaluation_table, report, runs
    from ttrain.absolute import absolute

    found = {planned.stage.name: planned.artifact for planned in stages if planned.artifact}
    results = {name: artifact.result for name, artifact in found.items()}
    if "evaluate" in found and champion_baseline.STAGE not in found:
        results |= champion_baseline.of(found["evaluate"], loaded.settings.name, store)
    metrics = report.metrics_of(results)
    equals = runs.equal_run(store.root, {planned.stage.name: planned.key for planned in stages})
    runs.record_cached(store.root, pipeline, stages, absolute(loaded.settings).model_dump(mode="json"), metrics, equals)
    table(("what", "value", ""), evaluation_table.rows(metrics, results))
    same = f" in the run {equals}" if equals else ""
    print(f"everything is cached: all {len(stages)} stages of {pipeline} are as they were{same}; nothing was run")
    fetchable = [planned.stage.name for planned in stages if planned.artifact and not planned.artifact.path.exists()]
    if fetchable:
        print(f"in MLflow, not here: {', '.join(fetchable)}; `ttrain stage run {fetchable[-1]}` fetches that one")
