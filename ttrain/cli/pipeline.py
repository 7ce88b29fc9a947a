"""`ttrain pipeline`: plan, run, rerun and list whole pipelines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ttrain.cli import nightly
from ttrain.cli.options import (
    AsJson,
    Extend,
    Files,
    ForceStages,
    GoOn,
    Note,
    Only,
    Overrides,
    Profiles,
    Since,
    Tags,
    Until,
    load_settings,
    name_in,
    names_in,
    plan_of,
    settings_of_run,
)
from ttrain.core.terminal import console, escaped, print_json, table
from ttrain.store import layout

if TYPE_CHECKING:
    from ttrain.config.loading import Loaded
    from ttrain.pipeline.labels import Labels
    from ttrain.pipeline.planned import Planned
    from ttrain.pipeline.selection import Selection
    from ttrain.store.artifacts import Store

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
    "ttrain pipeline run full sft.optim.lr=2e-4 --note 'a smaller rate' --tag purpose=baseline\n\n"
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
    note: Note = None,
    tag: Tags = None,
) -> None:
    """Run a pipeline; stages whose inputs, settings and code did not change come from the store."""
    from ttrain.core.standard_streams import outlast_output
    from ttrain.pipeline.labels import labels_of
    from ttrain.pipeline.selection import Selection

    outlast_output()
    _check_engine(engine)
    labels = labels_of(note, tag)
    loaded = load_settings(overrides, config, profile)
    if pipeline == nightly.NIGHTLY:
        nightly.refuse(
            extend=extend, force=force, only=only, until=until, record=record, **{"from": since, "continue": go_on}
        )
        nightly.run(loaded, engine=engine, labels=labels)
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
        labels=labels,
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
    note: Note = None,
    tag: Tags = None,
) -> None:
    """Run a stage again, finished or not, and what depends on it; a finished one is compared with what was stored.

    The settings are those of the newest run that has the stage, or of --run, and what is given here on top of them. Files
    and profiles without --run say them anew, as in `run`.
    """
    from ttrain.core.standard_streams import outlast_output
    from ttrain.pipeline.labels import labels_of

    outlast_output()
    _check_engine(engine)
    labels = labels_of(note, tag)
    _run(
        "full",
        _of_earlier_run(stage, run, overrides, config, profile),
        engine=engine,
        extend=extend,
        force=frozenset({stage}),
        labels=labels,
    )


@pipeline_app.command(
    "plan",
    epilog="Examples:  ttrain pipeline plan full sft.optim.lr=2e-4 --json\n\nttrain pipeline plan full --from sft\n\n"
    "ttrain pipeline plan full --profile small --memory",
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
    memory: Annotated[bool, typer.Option("--memory", help="also what a new model takes while it is pretrained")] = False,
    as_json: AsJson = False,
) -> None:
    """Print for every stage whether it is cached or will run, its key, and why. Runs nothing."""
    from ttrain.pipeline import plan_table
    from ttrain.pipeline.selection import Selection

    selection = Selection(names_in(only), name_in(since), name_in(until))
    loaded = load_settings(overrides, config, profile)
    if pipeline == nightly.NIGHTLY:
        nightly.refuse(extend=extend, force=force, only=only, until=until, **{"from": since, "continue": go_on})
        nightly.plan(loaded, as_json=as_json)
        return
    _, stages = plan_of(pipeline, loaded, force=names_in(force), extend=extend, selection=selection, go_on=name_in(go_on))
    needs = _memory_of(loaded) if memory else {}
    if as_json:
        print_json({**plan_table.plan_json(pipeline, stages), **needs})
        return
    screen = console()
    table(("stage", "state", "key", "why"), plan_table.plan_rows(stages))
    for name, size in needs.get("memory_bytes", {}).items():
        screen.print(f"{name}: {size / 1e9:.3g} GB, and activations on top", highlight=False)
    _say_left_out(pipeline, loaded, stages, selection)
    waiting = sum(planned.state == "run" for planned in stages)
    screen.print(f"{waiting} of {len(stages)} stages will run" if waiting else "everything is cached", highlight=False)


@pipeline_app.command("status", epilog="Example:  ttrain pipeline status --json")
def pipeline_status(
    limit: Annotated[int | None, typer.Option(min=1, help="how many runs, newest first; 10, with --json all")] = None,
    as_json: AsJson = False,
) -> None:
    """List runs and their stages: outcome, time, key figures, logs."""
    from ttrain.reports import summary
    from ttrain.store import runs

    found = runs.history(layout.home())
    if as_json:
        print_json([summary.run_json(run) for run in found[:limit]])
        return
    screen = console()
    if not found:
        screen.print("no runs yet; begin with `ttrain pipeline run full`")
    for run in found[: limit or LISTED_RUNS]:
        same = f", the same as {run['equals']}" if run.get("equals") else ""
        took = summary.seconds(run["seconds"])
        screen.print(f"[bold]{run['run']}[/]  {run['outcome']}{same}  {took}  {run['started']}", highlight=False)
        for line in summary.labels(run):
            screen.print(escaped(f"  {line}"), highlight=False, markup=False)
        rows = [summary.status_row(stage) for stage in run["stages"] if run["outcome"] != "cached"]
        if rows:
            table(("stage", "outcome", "time", "figures", "log"), rows)


def _memory_of(loaded: Loaded) -> dict[str, Any]:
    """What pretraining holds in memory whatever a micro-batch is. Loads torch. Raises UsageError where no model is made."""
    from ttrain.cli import model_costs

    kind = loaded.settings.pretrain.optim.kind
    sizes = model_costs.of_settings(loaded.settings).memory_bytes
    size = sizes["muon" if kind == "muon" else "adamw"]
    return {"memory_bytes": {f"weights, gradients and state of {kind}": size}}


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
    labels: Labels,
) -> None:
    from ttrain.pipeline import plan_table
    from ttrain.pipeline.plan import is_all_cached
    from ttrain.store import runs
    from ttrain.store.layout import usable_home

    store, stages = plan_of(pipeline, loaded, force=force, extend=extend, selection=selection, go_on=go_on)
    keys = {planned.stage.name: planned.key for planned in stages}
    if is_all_cached(stages) and not record and runs.cut_short(store.root, keys) is None:
        _say_cached(pipeline, loaded, store, stages, labels)
        return
    table(("stage", "state", "key", "why"), plan_table.plan_rows(stages))
    _say_left_out(pipeline, loaded, stages, selection)
    usable_home()
    from flows.engine import run_pipeline

    settings = loaded.settings
    options: dict[str, Any] = {"engine": engine, "force": force, "extend": extend, "go_on": go_on, "labels": labels}
    run_pipeline(pipeline, settings, store, stages, console(), **options)


def _of_earlier_run(
    stage: str, run: str, overrides: list[str] | None, config: list[Path] | None, profile: list[str] | None
) -> Loaded:
    """The settings for a stage to be run again; says of which run they are, and what in them is not a default."""
    from ttrain.core.terminal import escaped
    from ttrain.pipeline import earlier_settings
    from ttrain.store.layout import home

    if (config or profile) and not run:
        return load_settings(overrides, config, profile)
    found = earlier_settings.run_named(home(), run) if run else earlier_settings.newest_with(home(), stage)
    loaded = settings_of_run(found, overrides, config, profile)
    told = " ".join(
        f"{key}={json.dumps(value, ensure_ascii=False)}" for _, key, value in earlier_settings.settings_of(found)
    )
    print(escaped(f"settings of {found['run']}, apart from the defaults: {told or 'none'}"))
    return loaded


def _say_left_out(pipeline: str, loaded: Loaded, stages: list[Planned], selection: Selection | None) -> None:
    if selection:
        from flows import recipe
        from ttrain.pipeline.selection import graph_of

        planned = {stage.stage.name for stage in stages}
        left_out = [name for name in graph_of(recipe(pipeline), loaded.settings) if name not in planned]
        if left_out:
            print(f"left out by {selection}: {', '.join(left_out)}")


def _say_cached(pipeline: str, loaded: Loaded, store: Store, stages: list[Planned], labels: Labels) -> None:
    from ttrain.pipeline import champion_baseline
    from ttrain.pipeline.absolute_paths import absolute
    from ttrain.reports import evaluation_table, summary
    from ttrain.store import runs

    found = {planned.stage.name: planned.artifact for planned in stages if planned.artifact}
    results = {name: artifact.result for name, artifact in found.items()}
    if "evaluate" in found and champion_baseline.STAGE not in found:
        results |= champion_baseline.of(found["evaluate"], loaded.settings.name, store)
    metrics = summary.metrics_of(results)
    equals = runs.equal_run(store.root, {planned.stage.name: planned.key for planned in stages})
    settings = absolute(loaded.settings).model_dump(mode="json")
    runs.record_cached(store.root, pipeline, stages, settings, metrics, equals, labels.to_json())
    table(("what", "value", ""), evaluation_table.rows(metrics, results))
    same = f" in the run {equals}" if equals else ""
    print(f"everything is cached: all {len(stages)} stages of {pipeline} are as they were{same}; nothing was run")
    fetchable = [planned.stage.name for planned in stages if planned.artifact and not planned.artifact.path.exists()]
    if fetchable:
        print(f"in MLflow, not here: {', '.join(fetchable)}; `ttrain stage run {fetchable[-1]}` fetches that one")
