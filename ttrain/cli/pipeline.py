"""The `ttrain pipeline` commands: plan, run, rerun and list whole pipelines."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from time import sleep
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit, confirm

from ttrain.cli.options import (
    AsJson,
    Extend,
    Output,
    PipelineOptions,
    RestartOptions,
    SelectionOptions,
    SettingsOptions,
    Table,
    argument,
    command,
    command_group,
    commands_named,
    option,
)
from ttrain.core import redact
from ttrain.core.files import JsonObject, temporary_directory
from ttrain.core.terminal import (
    console,
    escape_control_characters,
    outlast_output,
    print_escaped,
)
from ttrain.core.text import first_line, format_duration, format_time
from ttrain.engine.progress import progress_of
from ttrain.errors import UsageError
from ttrain.reports import summary
from ttrain.store import name_syntax, runs
from ttrain.store.layout import Artifact, home, usable_home

if TYPE_CHECKING:
    from ttrain.api import Plan, Run
    from ttrain.config import Settings, Training
    from ttrain.config.loading import LoadedSettings
    from ttrain.engine.estimate import Estimate
    from ttrain.train.measured_steps import Measured

LISTED_RUNS = 10
MEASURED_FROM_SECONDS = 3600.0  # of a run: then 20 s of measuring are little
WATCH_SECONDS = 2.0
STAGE_COLUMNS = ("stage", "state", "key", "why")  # of a plan
OWN_DATA = "data.pretrain=docs.jsonl data.sft=chats.jsonl data.lora=domain.jsonl"
# The quickstart's SFT model is better after three passes over the chats than after one (README has
# the verdict), and not at another learning rate: 2e-4 made it 20 % worse, 4e-3 made no difference
# that 220 chats show.
BETTER_EPOCHS = 3
MOST_EPOCHS = 10
FULL = "full"
PIPELINE_HELP = "the pipeline: full, or nightly (one night: new data, a challenger, the decision)"

pipeline_app = command_group(
    "pipeline",
    "Train",
    help="Plan, run, rerun and schedule whole pipelines, and see their status.",
    epilog="Example:  ttrain pipeline run full",
)

Pipeline = Annotated[str, argument(PIPELINE_HELP, metavar="PIPELINE")]


@command(
    pipeline_app,
    "Examples:  ttrain pipeline run full\n\n"
    "ttrain pipeline run full data.pretrain=docs.jsonl data.sft=chats.jsonl "
    "data.lora=domain.jsonl\n\n"
    "ttrain pipeline run full sft.epochs=3\n\n"
    "ttrain pipeline run full --until pretrain\n\n"
    "ttrain pipeline run full sft.epochs=3 --note 'three passes' --tag purpose=baseline\n\n"
    "ttrain pipeline run nightly data.pretrain=inbox/",
    short="Train",
)
def pipeline_run(
    *,
    pipeline: Pipeline = FULL,
    settings_options: SettingsOptions,
    stages: SelectionOptions,
    restart: RestartOptions,
    options: PipelineOptions,
) -> None:
    """Run a pipeline; stages with unchanged inputs, settings and code come from the store."""
    outlast_output()
    chooses_stages = stages != SelectionOptions() or bool(restart)
    pipeline, loaded = _pipeline_and_settings(
        pipeline, settings_options, chooses_stages=chooses_stages
    )
    labels = options.labels()
    if pipeline == runs.NIGHTLY:
        from ttrain.engine.provenance import with_absolute_paths
        from ttrain.flows.engine import RunOptions
        from ttrain.flows.nightly import run_night
        from ttrain.tracking.artifact_source import store_of

        settings = with_absolute_paths(loaded.settings)
        store = store_of(usable_home(), settings)
        result = run_night(settings, store, console(), RunOptions(options.engine, labels=labels))
        print_escaped(f"{result.night or 'no night'}: {result.outcome}")
        if result.night:
            print("next:\n  all champions and challengers: ttrain models list")
        return
    plan_and_run(
        pipeline, loaded, options=options, labels=labels, restart=restart, **asdict(stages)
    )


@command(
    pipeline_app,
    "Examples:  ttrain pipeline rerun sft\n\n"
    "ttrain pipeline rerun sft --run full-20261121-160222-1a2b sft.epochs=3\n\n"
    "ttrain pipeline rerun pretrain --from-step 600",
)
def pipeline_rerun(
    stage: Annotated[
        str, argument("the stage to run again; what depends on it follows", metavar="STAGE")
    ],
    settings_options: SettingsOptions,
    options: PipelineOptions,
    restart: RestartOptions,
    run: Annotated[
        str,
        option("use the settings of this run (its name, or a part of it)", metavar="RUN"),
    ] = "",
    extend: Extend = False,
) -> None:
    """Rerun a stage and the stages that depend on it; compare finished ones with stored results.

    The settings are those of the newest run that has the stage, or of --run, overridden by those
    given here. Config files and profiles without --run replace them, as in `run`.
    """
    from ttrain.lineage import lookup
    from ttrain.store.run_views import need_run

    outlast_output()
    if (settings_options.config or settings_options.profile) and not run:
        loaded = settings_options.load()
    else:
        earlier_run = need_run(home(), run) if run else lookup.newest_with(home(), stage)
        loaded = settings_options.over_run(earlier_run)
        changed = " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}"
            for _, key, value in lookup.settings_of(earlier_run)
        )
        print_escaped(
            f"settings of {earlier_run['run']}, apart from the defaults: {changed or 'none'}"
        )
    plan_and_run(
        "full",
        loaded,
        options=options,
        labels=options.labels(),
        restart=restart,
        extend=extend,
        force=frozenset({stage}),
    )


@command(
    pipeline_app,
    "Examples:  ttrain pipeline plan full sft.epochs=3 --json\n\n"
    "ttrain pipeline plan full --from sft\n\n"
    "ttrain pipeline plan full model.preset=5m --rules\n\n"
    "ttrain pipeline plan full model.preset=5m --time",
    short="Train",
)
def pipeline_plan(
    *,
    pipeline: Pipeline = FULL,
    settings_options: SettingsOptions,
    options: SelectionOptions,
    show_rules: Annotated[
        bool, option("also what follows from other settings, by which rule", "--rules")
    ] = False,
    time: Annotated[
        bool, option("measure steps of the trainings, at most 20 s, the first time", "--time")
    ] = False,
) -> Output:
    """Print whether each stage is cached or will run, its key, why, and its time. Runs nothing.

    The reasons compare with the newest finished run of the same `name`.
    """
    from ttrain import api
    from ttrain.config import flatten, rules
    from ttrain.engine.estimate import estimate
    from ttrain.engine.planner import trained_on
    from ttrain.engine.row_counts import rules_of_rows

    pipeline, loaded = _pipeline_and_settings(
        pipeline, settings_options, chooses_stages=options != SelectionOptions()
    )
    if pipeline == runs.NIGHTLY:
        return _plan_night(loaded)
    planned = api.plan(pipeline, loaded.settings, **asdict(options))
    automatic = rules_of_rows(planned.settings, planned.stages, packs=show_rules)
    if "pretrain" in loaded.settings.trainings:
        automatic = rules.followed(dict(flatten(loaded.settings.model_dump()))) | automatic
    estimated = measured_estimate(planned) if time else estimate(planned)
    value = {
        **planned.to_json(),
        "estimate": estimated.to_json(),
        "trained_on": trained_on(planned.settings, planned.stages),
        "auto": {key: asdict(rule) for key, rule in automatic.items()},
    }
    shown = automatic.items() if show_rules else ()
    lines = [f"{key} is {json.dumps(rule.value)} by rule: {rule.reason}" for key, rule in shown]
    waiting = sum(stage.state == "run" for stage in planned)
    lines.append(
        f"{waiting} of {len(planned)} stages will run" if waiting else "everything is cached"
    )
    return Output(value, [*_plan_parts(planned, estimated), *lines])


def measured_estimate(planned: Plan) -> Estimate:
    """The estimate by steps of the trainings, measured here unless they have been before."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from ttrain.cli.train import prepare_to_train
    from ttrain.engine.estimate import estimate
    from ttrain.train.measured_steps import can_be_measured

    prepare_to_train(planned.settings)
    # In another process, or a pipeline of hours would keep torch and its memory.
    spawned = ProcessPoolExecutor(1, get_context("spawn"))
    with temporary_directory("time") as directory, spawned:

        def measure(stage: str, config: Training) -> Measured | None:
            if not can_be_measured(stage, planned.settings, planned.paths):
                return None
            print(f"measuring steps of {stage} ...", file=sys.stderr)
            arguments = (stage, config, planned.settings, planned.paths, directory)
            try:
                return spawned.submit(_measure_stage, *arguments).result()
            except Exception as error:  # the run itself may fit, or fail with a better message
                print_escaped(f"{stage} cannot be measured: {first_line(error)}", stderr=True)
                return None

        return estimate(planned, measure)


def _measure_stage(*arguments: Any) -> Measured:
    from ttrain.doctor.timing import measure_stage

    return measure_stage(*arguments)


@command(
    pipeline_app,
    "Examples:  ttrain pipeline status --json\n\nttrain pipeline status --limit 1 --watch",
    short="Look",
)
def pipeline_status(
    run: Annotated[str, argument("only this run: its name, or a part of it", metavar="RUN")] = "",
    limit: Annotated[
        int | None, option("how many runs, newest first; 10, with --json all", min=1)
    ] = None,
    watch: Annotated[
        bool, option("again every two seconds until no run is in progress", "--watch", "-w")
    ] = False,
    as_json: AsJson = False,
) -> Output:
    """List runs and their stages: outcome, time or progress, key metrics, logs."""
    from ttrain import api
    from ttrain.store.run_views import need_run

    name = need_run(home(), run)["run"] if run else ""
    while True:
        listed = [
            _with_progress(one)
            for one in api.runs(limit=None if run else limit)
            if name in ("", one.name)
        ]
        if not watch or all(one.outcome != "running" for one in listed):
            break
        if not as_json:
            console().clear()  # nothing where it is no terminal
            Output(None, _status_parts(listed[: limit or LISTED_RUNS])).print()
        sleep(WATCH_SECONDS)
    if not listed and not as_json:
        raise UsageError(
            f"there are no runs yet in {home().absolute()}; {name_syntax.BEGIN}, "
            f"or set TTRAIN_HOME to the home that has some"
        )
    return Output([one.to_json() for one in listed], _status_parts(listed[: limit or LISTED_RUNS]))


def _with_progress(run: Run) -> Run:
    """The run with the progress of its running stages, also in place of their figures."""
    stages = [dict(stage) for stage in run.record["stages"]]
    for stage in stages:
        if run.outcome == "running" and (progress := progress_of(stage)):
            stage |= {"progress": progress.to_json(), "metric": str(progress)}
    return replace(run, record={**run.record, "stages": stages})


def _status_parts(runs: Sequence[Run]) -> Iterator[str | Table]:

    for one in runs:
        run = one.record
        same = f", the same as {run['equals']}" if run.get("equals") else ""
        night = f"  {run['night']}" if run.get("night") else ""
        times = f"{format_duration(run['seconds'])}  {format_time(run['started_unix'])}"
        yield f"{run['run']}{night}  {run['outcome']}{same}  {times}"
        yield from (f"  {line}" for line in summary.labels(run))
        if rows := [summary.status_row(stage) for stage in summary.shown_stages(run)]:
            yield Table(("stage", "outcome", "time", "figures", "log"), rows)


@command(
    pipeline_app,
    "Examples:  ttrain pipeline logs\n\nttrain pipeline logs latest pretrain --follow\n\n"
    "ttrain pipeline logs full-20261121-160222 evaluate",
    short="Look",
)
def pipeline_logs(
    run: Annotated[str, argument("the run, or a part of its name", metavar="RUN")] = "latest",
    stage: Annotated[str, argument("of this stage alone", metavar="STAGE")] = "",
    follow: Annotated[bool, option("go on until the run ends", "--follow", "-f")] = False,
) -> None:
    """Print the log of a run, or of one of its stages."""
    from ttrain.store.run_views import need_run

    record = need_run(home(), run)
    name = str(record["run"])
    if stage:
        name_syntax.need_stage(
            stage, [entry["name"] for entry in record["stages"]], f"the run {name}"
        )
    if not (home() / "runs" / f"{name}.log").is_file() and record["outcome"] != "running":
        raise UsageError(f"the run {name} has no log")
    for line in runs.log_lines(home(), name, follow=follow):
        if not stage or line.split(" ", 3)[2:3] == [f"{stage}:"]:
            print(escape_control_characters(line), flush=follow)


def _plan_night(loaded: LoadedSettings) -> Output:
    """What a night would do now."""
    from ttrain.config import TRAININGS
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows.night_plan import plan_night
    from ttrain.tracking.artifact_source import store_of

    settings = with_absolute_paths(loaded.settings)
    planned = plan_night(settings, store_of(home(), settings))
    frozen = planned.frozen
    frozen_files = frozen.files.items() if frozen else ()
    files = {
        name: [redact.url(file["location"]) for file in entries] for name, entries in frozen_files
    }
    value = {
        "pipeline": runs.NIGHTLY,
        "reason": planned.reason,
        "champion": frozen.champion.version if frozen and frozen.champion else None,
        "files": files,
        "near_duplicates": {
            "similarity": planned.near_duplicates,
            "earlier_sets": planned.earlier_sets,
        },
        "stages": [stage.to_json() for stage in planned.stages],
    }
    lines = [
        f"  data.{dataset}: {location}"
        for dataset in TRAININGS
        for location in files.get(dataset, ())
    ]
    stages = [Table(STAGE_COLUMNS, [stage.row for stage in planned.stages])] if frozen else []
    return Output(value, [planned.reason, *lines, *stages])


def _pipeline_and_settings(
    word: str, settings_options: SettingsOptions, *, chooses_stages: bool
) -> tuple[str, LoadedSettings]:
    """The pipeline and the settings; `full` where the first word is a setting already.

    Raises UsageError for an option that selects stages of a night: it chooses them itself.
    """
    from ttrain.config.loading import known_keys
    from ttrain.flows import NAMES

    if "=" in word or word in known_keys():
        overrides = [word, *(settings_options.overrides or ())]
        named = [name for name in overrides if name in NAMES][:1] or [FULL]
        settings = [override for override in overrides if override not in named]
        word = named[0]
        settings_options = replace(settings_options, overrides=settings)
    elif word not in NAMES and (meant := commands_named(word)):
        raise UsageError(f"there is no pipeline '{word}'; did you mean {meant}?")
    loaded = settings_options.load()
    if word == runs.NIGHTLY and chooses_stages:
        raise UsageError(
            "an option chooses stages or begins them again, but a night chooses its stages by "
            "itself; "
            "leave it out, or use `ttrain pipeline run full`"
        )
    return word, loaded


def plan_and_run(
    pipeline: str,
    loaded: LoadedSettings,
    *,
    options: PipelineOptions,
    labels: JsonObject,
    restart: RestartOptions,
    **to_plan: Any,
) -> None:
    """Plan the pipeline, print the plan, run it unless all is cached; print what to do next.

    `to_plan`: as for `api.plan`.
    """
    from ttrain.engine.artifact_commands import remarks_on_code
    from ttrain.engine.estimate import estimate
    from ttrain.engine.planner import record_cached

    planned = restart.plan(pipeline, loaded.settings, **to_plan)
    if record := record_cached(planned, labels):
        Output(None, _cached_parts(planned, record)).print()
        return
    estimated = estimate(planned)
    usable_home()
    if (estimated.seconds or 0) > MEASURED_FROM_SECONDS:
        estimated = measured_estimate(planned)
    Output(None, _plan_parts(planned, estimated)).print()
    on_code = remarks_on_code(planned)
    for line in on_code:
        print_escaped(line)
    is_on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    asks = (on_code or estimated.remarks()) and not options.yes and is_on_terminal
    if asks and not confirm("run it?", default=False):
        print("nothing was run; --yes runs it without asking")
        raise Exit(1)
    from ttrain.flows.engine import RunOptions, run_pipeline
    from ttrain.store.results import TrainingResult

    execution = run_pipeline(planned, console(), RunOptions(options.engine, labels=labels))
    trained = {
        name: TrainingResult.of(artifact.result) for name, artifact in execution.artifacts.items()
    }
    passes = {
        name: one.by_rule["epochs"] for name, one in trained.items() if "epochs" in one.by_rule
    }
    overfit = [name for name, one in trained.items() if "overfit" in one.guard_warnings]
    Output(
        None,
        next_steps(execution.record.run, planned.settings, execution.artifacts, passes, overfit),
    ).print()


def _plan_parts(planned: Plan, estimated: Estimate) -> list[str | Table]:
    """The table of a plan, its training data, the run that it is compared with, its time."""
    from ttrain.engine.planner import trained_on, without_data
    from ttrain.tasks import TAUGHT_BY, TEACHER

    lines = [
        f"training data of {name}: {sources}"
        for name, sources in trained_on(planned.settings, planned.stages).items()
    ]
    lines.append(without_data(planned.settings))
    if TEACHER.name in planned.graph:
        teachers = [
            f"{source.provenance.get('run', source.key[:12])}:{source.stage}"
            for name, source in planned.graph[TEACHER.name].sources.items()
            if isinstance(source, Artifact) and name.startswith(TAUGHT_BY)
        ]
        lines.append(f"teachers of pretrain: {', '.join(teachers)}")
    if planned.left_out:
        lines.append(f"left out by {planned.selection}: {', '.join(planned.left_out)}")
    if planned.compared_with and not planned.is_cached:
        lines.append(f"compared with the run {planned.compared_with}")
    lines += [*estimated.lines(), *estimated.remarks()]
    return [Table(STAGE_COLUMNS, planned.rows()), *filter(None, lines)]


def _cached_parts(planned: Plan, record: Mapping[str, Any]) -> list[str | Table]:
    """The metrics of a run that found everything cached."""
    parts: list[str | Table] = []
    if rows := summary.rows(record["metrics"], planned.results):
        parts.append(Table(("metric", "value", ""), rows))
    same = f" in the run {record['equals']}" if record["equals"] else ""
    subject = (
        f"all {len(planned)} stages of {planned.pipeline} are"
        if len(planned) > 1
        else f"{planned[0].name} is"
    )
    parts.append(f"everything is cached: {subject} unchanged{same}; nothing was run")
    return parts


def with_settings(words: Sequence[str], *settings: str) -> str:
    """The command of these words, with settings, key=value, instead of its own of the same keys."""
    keys = {setting.partition("=")[0] for setting in settings}
    kept = [redact.text(word) for word in words if word.partition("=")[0].strip() not in keys]
    return shlex.join(["ttrain", *kept, *settings])


def next_steps(
    run: str,
    settings: Settings,
    made: Collection[str],
    passes: Mapping[str, float] = MappingProxyType({}),
    overfit: Collection[str] = (),
) -> list[str]:
    """The lines after a run that made, or took from the store, the artifacts of these stages.

    `passes`: over the rows, by a rule, of each stage; `overfit`: stages whose guard warned of them.
    """
    from ttrain.config import TRAINING_STAGES

    page = (
        "  curves, models and their metrics, in MLflow: ttrain up latest --open"
        if settings.tracking.enabled
        else "  curves, samples and metrics, as a page: ttrain report latest"
    )
    lines = ["next:", page]
    for row in [
        row for row in TRAINING_STAGES.values() if row.role != "adapter" and row.name in made
    ][-1:]:
        changed = _one_thing(settings, row.name, passes.get(row.name), row.name in overfit)
        lines[1:1] = [
            f"  talk to the {row.label} model: ttrain chat {row.name}",
            f"  its files, for transformers: ttrain export {row.name} --to out/{row.name}",
        ]
        lines.append(
            "  change one thing, rerun what it touches: "
            f"ttrain pipeline rerun {row.name} --run {run} {changed}"
        )
    if "source" in made:  # the text that ttrain brings
        lines.append(f"  your own text: ttrain pipeline run full {OWN_DATA}")
    return lines


def _one_thing(settings: Settings, stage: str, passes: float | None, is_overfit: bool) -> str:
    """A setting of a stage with a value worth trying: fewer passes where there were too many."""
    from ttrain.config import rules

    section = getattr(settings, stage)
    epochs = (passes or section.by_rows.epochs) if section.epochs == rules.AUTO else section.epochs
    if is_overfit and epochs and stage != "pretrain":
        return f"{stage}.epochs={epochs / 2:g}"
    if stage != "pretrain" and (epochs or MOST_EPOCHS) < MOST_EPOCHS:
        return f"{stage}.epochs={max(BETTER_EPOCHS, 2 * epochs):g}"
    return f"{stage}.seed={section.seed + 1}"
