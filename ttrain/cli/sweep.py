"""The `ttrain sweep` commands: run a pipeline with several values of some settings and find the best."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ttrain.cli.options import (
    AsJson,
    CommandGroup,
    Files,
    Output,
    Profiles,
    Table,
    argument,
    command,
    command_group,
    option,
)
from ttrain.core.terminal import console, outlast_output
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
Name = Annotated[str, argument("its name, or a part of it", metavar="SWEEP", show_default="the latest")]


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
) -> Output:
    """Run the pipeline `full` with several values of the settings that are given as ranges; its name may be left out.

    Stages that the trials share are built once. The same command continues after a kill, and with more --trials.
    """
    import os

    from ttrain.config.loading import layers
    from ttrain.experiments import request as requests
    from ttrain.experiments import trials
    from ttrain.flows.full import full
    from ttrain.tracking.artifact_source import store_of

    settings_layers = layers(overrides or (), config or (), profile or (), os.environ)
    request = requests.sweep_request(full, settings_layers, **asdict(options))
    request.check_data()
    if dry_run:
        return _plan(requests.preview(request, store_of(home(), request.settings(request.first))))
    outlast_output()
    arguments = [*(f"--profile={name}" for name in profile or ()), *(f"--config={path}" for path in config or ())]
    arguments += [word for word in overrides or () if word.partition("=")[0].strip() not in request.space.dimensions]
    store = store_of(usable_home(), request.settings(request.first))
    screen = console(stderr=as_json)  # standard output is for the JSON
    sweep = requests.find_or_begin(request, store)
    with sweep.lock():
        try:
            trials.run(request, sweep, arguments, store, screen)
        except BaseException:
            _shown(sweep).print(as_json=as_json)
            raise
        return _shown(sweep)


@command(
    sweep_app,
    "Examples:  ttrain sweep show\n\nttrain sweep show sweep-20261121-160222-1a2b --json",
)
def sweep_show(name: Name = "latest") -> Output:
    """Show the trials of a sweep, the best first, and the command that runs the pipeline with the best settings."""
    from ttrain.experiments import records

    return _shown(records.find_sweep(home(), name))


def _shown(sweep: Sweep) -> Output:
    """The trials, the best first."""
    from ttrain.experiments.records import FAILED, RUNNING

    lines = [f"{sweep.name}: {sweep.verdict()}"]
    if any(trial.outcome in (RUNNING, FAILED) for trial in sweep.trials):
        lines.append("the same command continues unfinished trials and retries failed ones")
    if best := sweep.best:
        lines.append(f"to run the best one in full: {sweep.command(best)}")
    return Output(sweep.to_json(), [Table(*sweep.table()), *lines])


def _plan(plan: Mapping[str, Any]) -> Output:
    """The planned trials; of a sampler that learns, only those drawn before it learns."""
    from ttrain.experiments.space import format_value

    rows = [
        (trial["trial"], *map(format_value, trial["values"].values()), ", ".join(trial["run"]) or "nothing: cached")
        for trial in plan["trials"]
    ]
    later = f"and {plan['chosen_later']} more, which {plan['sampler']} chooses by the results of these"
    lines = [
        *([later] if plan["chosen_later"] else []),
        f"once: {', '.join(plan['once']) or 'nothing'}; in each trial: {', '.join(plan['each'])}",
        f"compared by: {plan['metric']} ({plan['direction']})",
    ]
    return Output(plan, [Table(("trial", *plan["space"], "will run"), rows), *lines])
