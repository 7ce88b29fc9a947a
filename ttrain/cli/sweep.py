"""The `ttrain sweep` commands: run a pipeline with several values of some settings and find the best."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ttrain.cli.options import (
    AsJson,
    CommandGroup,
    Files,
    Profiles,
    argument,
    command,
    command_group,
    option,
    sweep_words,
    with_settings_file,
)
from ttrain.core.files import write_output
from ttrain.core.terminal import console, outlast_output, print_escaped, print_json, table
from ttrain.errors import TTrainError
from ttrain.store.layout import home, usable_home

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ttrain.sweep.records import Sweep


class _WithoutPipeline(CommandGroup):
    """`ttrain sweep KEY=RANGE` means the pipeline `full`, the only one that sweeps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, ["full", *args] if args and "=" in args[0] else args)


sweep_app = command_group(
    "sweep",
    "Train",
    cls=_WithoutPipeline,
    help="Try a pipeline with several values of some settings, and see which are best.",
    epilog="Example:  ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)' --trials 8",
)

EPILOG = (
    "Examples:  ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)' --trials 8\n\n"
    "ttrain sweep full 'sft.optim.lr=log(1e-4,1e-2,5)' 'sft.epochs=choice(1,2)' --sampler grid\n\n"
    "ttrain sweep full 'pretrain.optim.lr=log(1e-3,1e-1)' pretrain.validate_every_steps=20 --prune\n\n"
    "ttrain sweep full 'tokenizer.vocab_size=choice(1024,2048,4096)' --dry-run"
)
Name = Annotated[
    str, argument("its name, or a part of it", metavar="SWEEP", show_default="the latest", autocompletion=sweep_words)
]


@dataclass(frozen=True)
class SweepOptions:
    """What is tried, how, and by what the trials are compared."""

    trials: Annotated[
        int | None,
        option("number of trials, including earlier ones", "--trials", "-n", min=1, show_default="8; of a grid: all"),
    ] = None
    sampler: Annotated[Literal["tpe", "random", "grid"], option("tpe: learns from the trials so far")] = "tpe"
    metric: Annotated[
        str, option("the metric to compare by", show_default="the validation loss of what the settings train")
    ] = ""
    maximize: Annotated[
        bool | None,
        option("whether more is better", "--maximize/--minimize", show_default="by the metric's name"),
    ] = None
    until: Annotated[str, option("the last stage to run", metavar="STAGE", show_default="that of the metric")] = ""
    prune: Annotated[bool, option("end a trial that is behind the median of the others", "--prune")] = False
    parallel: Annotated[int | None, option("trials side by side", min=1, show_default="one a GPU, else 1")] = None
    seed: Annotated[int, option("of the sampler", min=0)] = 1


@command(sweep_app, EPILOG)
def sweep_full(
    overrides: Annotated[
        list[str] | None,
        argument(
            "settings as key=value; those that vary as key=log(low,high), uniform(low,high), int(low,high) or choice(a,b)",
            metavar="KEY=VALUE",
        ),
    ] = None,
    config: Files = None,
    profile: Profiles = None,
    *,
    options: SweepOptions,
    dry_run: Annotated[bool, option("show what would be tried and run; run nothing", "--dry-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline `full` with several values of the settings that are given as ranges; its name may be left out.

    Stages that the trials share are built once. The same command continues after a kill, and with more --trials.
    """
    import os

    from ttrain.config.loading import layers
    from ttrain.flows import sweep as sweeps
    from ttrain.flows import trials as run
    from ttrain.pipeline.artifact_commands import store_of

    settings_layers = layers(overrides or (), config or (), profile or (), os.environ)
    request = sweeps.sweep_request("full", settings_layers, **asdict(options))
    request.check_data()
    if dry_run:
        _show_plan(sweeps.preview(request, store_of(home(), request.settings(request.first))), as_json)
        return
    outlast_output()
    arguments = [*(f"--profile={name}" for name in profile or ()), *(f"--config={path}" for path in config or ())]
    arguments += [word for word in overrides or () if word.partition("=")[0].strip() not in request.space.dimensions]
    store = store_of(usable_home(), request.settings(request.first))
    screen = console(stderr=as_json)  # standard output is for the JSON
    sweep = run.begin(request, store, screen)
    with sweep.lock():
        try:
            run.run(request, sweep, arguments, store, screen)
        finally:
            _show(sweep, sweep.page, as_json)


@command(sweep_app, "Example:  ttrain sweep list --json")
def sweep_list(as_json: AsJson = False) -> None:
    """List the sweeps, the newest first."""
    from ttrain.sweep import records, summary
    from ttrain.sweep.study import Study

    studies = [(sweep, Study.of(sweep).trials()) for sweep in records.list_sweeps(home())]
    if as_json:
        print_json([summary.sweep_json(sweep, trials) for sweep, trials in studies])
        return
    if not studies:
        hint = "no sweeps yet; begin with `ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)' --trials 8`"
        print(with_settings_file(hint))
        return
    rows = [
        (
            sweep.name,
            sweep.outcome,
            "  ".join(f"{key}={text}" for key, text in sweep.space.texts.items()),
            summary.counts(trials),
            summary.verdict(trials, sweep.measure),
        )
        for sweep, trials in studies
    ]
    table(("sweep", "outcome", "varies", "trials", "best"), rows)


@command(sweep_app, "Examples:  ttrain sweep show\n\nttrain sweep show sweep-20261121-160222-1a2b --json")
def sweep_show(
    name: Name = "latest",
    out: Annotated[Path | None, option("write the page with its plots here")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the trials of a sweep, the best first, and where its page with the plots is."""
    from ttrain.sweep import records

    sweep = records.find_sweep(home(), name)
    _show(sweep, out or sweep.page, as_json)


@command(sweep_app, "Example:  ttrain sweep best --json")
def sweep_best(name: Name = "latest", as_json: AsJson = False) -> None:
    """Print the best trial's settings, and the command that runs the pipeline with them."""
    from ttrain.sweep import records, summary
    from ttrain.sweep.study import Study

    sweep = records.find_sweep(home(), name)
    best = Study.of(sweep).best()
    if best is None:
        raise TTrainError(f"no trial of {sweep.name} has completed yet; `ttrain sweep show {sweep.name}` lists them")
    if as_json:
        print_json({"sweep": sweep.name, **best.to_json(), "command": summary.command(sweep, best)})
        return
    print_escaped(summary.command(sweep, best))


def _show(sweep: Sweep, page: Path, as_json: bool) -> None:
    """Print the trials, the best first, and write the page with the plots, which takes half of the time, if it is older."""
    is_current = page == sweep.page and sweep.has_current_page
    if not is_current:
        from ttrain.reports import drawing_process

        drawing_process.start()
    from ttrain.sweep import summary
    from ttrain.sweep.study import FAILED, RUNNING, Study, best_of

    trials = Study.of(sweep).trials()
    if not is_current:
        from ttrain.sweep.report_page import render

        page.parent.mkdir(parents=True, exist_ok=True)
        write_output(page, render(sweep, trials))
    if as_json:
        print_json({**summary.sweep_json(sweep, trials), "page": str(page)})
        return
    table(*summary.trial_table(trials, sweep.space, sweep.measure))
    print_escaped(f"{sweep.name}: {summary.counts(trials)}; {summary.verdict(trials, sweep.measure)}")
    if any(trial.outcome in (RUNNING, FAILED) for trial in trials):
        print("the same command continues unfinished trials and retries failed ones")
    print_escaped(f"plots: {page}")
    best = best_of(trials, maximize=sweep.measure.maximize)
    if best:
        print_escaped(f"to run the best one in full: {summary.command(sweep, best)}")


def _show_plan(plan: Mapping[str, Any], as_json: bool) -> None:
    """Print the planned trials; of a sampler that learns, only those drawn before it learns."""
    from ttrain.sweep.space import format_value

    if as_json:
        print_json(plan)
        return
    rows = [
        (trial["trial"], *map(format_value, trial["values"].values()), ", ".join(trial["run"]) or "nothing: cached")
        for trial in plan["trials"]
    ]
    table(("trial", *plan["space"], "will run"), rows)
    if plan["chosen_later"]:
        print(f"and {plan['chosen_later']} more, which {plan['sampler']} chooses by the results of these")
    print(f"once: {', '.join(plan['once']) or 'nothing'}; in each trial: {', '.join(plan['each'])}")
    print(f"compared by: {plan['metric']} ({plan['direction']})")
