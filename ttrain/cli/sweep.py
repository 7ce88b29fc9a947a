"""The `ttrain sweep` commands: run a pipeline with several values of some settings and find the best."""

from __future__ import annotations

from dataclasses import asdict, dataclass
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
from ttrain.core.terminal import console, outlast_output, print_escaped, print_json, table
from ttrain.errors import TTrainError
from ttrain.store.layout import home, usable_home

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ttrain.experiments.records import Sweep


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
    from ttrain.experiments import request as requests
    from ttrain.experiments import trials
    from ttrain.flows.full import full
    from ttrain.pipeline.artifact_commands import store_of

    settings_layers = layers(overrides or (), config or (), profile or (), os.environ)
    request = requests.sweep_request(full, settings_layers, **asdict(options))
    request.check_data()
    if dry_run:
        _show_plan(requests.preview(request, store_of(home(), request.settings(request.first))), as_json)
        return
    outlast_output()
    arguments = [*(f"--profile={name}" for name in profile or ()), *(f"--config={path}" for path in config or ())]
    arguments += [word for word in overrides or () if word.partition("=")[0].strip() not in request.space.dimensions]
    store = store_of(usable_home(), request.settings(request.first))
    screen = console(stderr=as_json)  # standard output is for the JSON
    sweep = requests.find_or_begin(request, store)
    with sweep.lock():
        try:
            trials.run(request, sweep, arguments, store, screen)
        finally:
            _show(sweep, as_json)


@command(sweep_app, "Example:  ttrain sweep list --json")
def sweep_list(as_json: AsJson = False) -> None:
    """List the sweeps, the newest first."""
    from ttrain.experiments import records, summary

    sweeps = records.list_sweeps(home())
    if as_json:
        print_json([*map(summary.sweep_json, sweeps)])
        return
    if not sweeps:
        hint = "no sweeps yet; begin with `ttrain sweep full 'pretrain.optim.lr=log(1e-4,3e-3)' --trials 8`"
        print(with_settings_file(hint))
        return
    rows = [
        (
            sweep.name,
            sweep.outcome,
            "  ".join(f"{key}={text}" for key, text in sweep.space.texts.items()),
            str(len(sweep.trials)),
            summary.verdict(sweep.trials, sweep.measure),
        )
        for sweep in sweeps
    ]
    table(("sweep", "outcome", "varies", "trials", "best"), rows)


@command(sweep_app, "Examples:  ttrain sweep show\n\nttrain sweep show sweep-20261121-160222-1a2b --json")
def sweep_show(name: Name = "latest", as_json: AsJson = False) -> None:
    """Show the trials of a sweep, the best first."""
    from ttrain.experiments import records

    _show(records.find_sweep(home(), name), as_json)


@command(sweep_app, "Example:  ttrain sweep best --json")
def sweep_best(name: Name = "latest", as_json: AsJson = False) -> None:
    """Print the best trial's settings, and the command that runs the pipeline with them."""
    from ttrain.experiments import records, summary

    sweep = records.find_sweep(home(), name)
    best = records.best_of(sweep.trials, maximize=sweep.measure.maximize)
    if best is None:
        raise TTrainError(f"no trial of {sweep.name} has completed yet; `ttrain sweep show {sweep.name}` lists them")
    if as_json:
        print_json({"sweep": sweep.name, **asdict(best), "command": summary.command(sweep, best)})
        return
    print_escaped(summary.command(sweep, best))


def _show(sweep: Sweep, as_json: bool) -> None:
    """Print the trials, the best first."""
    from ttrain.experiments import summary
    from ttrain.experiments.records import FAILED, RUNNING, best_of

    if as_json:
        print_json(summary.sweep_json(sweep))
        return
    trials = sweep.trials
    table(*summary.trial_table(trials, sweep.space, sweep.measure))
    print_escaped(f"{sweep.name}: {summary.verdict(trials, sweep.measure)}")
    if any(trial.outcome in (RUNNING, FAILED) for trial in trials):
        print("the same command continues unfinished trials and retries failed ones")
    if best := best_of(trials, maximize=sweep.measure.maximize):
        print_escaped(f"to run the best one in full: {summary.command(sweep, best)}")


def _show_plan(plan: Mapping[str, Any], as_json: bool) -> None:
    """Print the planned trials; of a sampler that learns, only those drawn before it learns."""
    from ttrain.experiments.space import format_value

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
