"""The `ttrain sweep` commands: compare settings over several seeds."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
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
    from ttrain.experiments.records import Experiment
    from ttrain.experiments.request import Request
    from ttrain.store.artifacts import ArtifactStore


class _WithoutPipeline(CommandGroup):
    """`ttrain sweep KEY=VALUES` means the pipeline `full`, the only one that sweeps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_full = bool(args) and ("=" in args[0] or args[0].endswith((".yaml", ".yml")))
        return super().parse_args(ctx, ["full", *args] if is_full else args)


sweep_app = command_group(
    "sweep",
    "Train",
    cls=_WithoutPipeline,
    help="Compare settings over several seeds, and say which is better.",
    epilog="Example:  ttrain sweep sft.optim.lr=1e-3,2e-3,4e-3 --seeds 5",
)

EPILOG = (
    "Examples:  ttrain sweep sft.optim.lr=1e-3,2e-3,4e-3 --seeds 5\n\n"
    "ttrain sweep 'pretrain.optim.lr=log(1e-4,3e-3)' -n 8 --plan\n\n"
    "ttrain sweep changes.yaml -c my.yaml"
)
Name = Annotated[str, argument("its name, or a part of it", metavar="SWEEP", show_default="the latest")]


@dataclass(frozen=True)
class SweepOptions:
    """What is compared, how, and by which metric."""

    trials: Annotated[
        int | None,
        option("settings that are drawn of ranges", "--trials", "-n", min=1, show_default="all that are listed, else 8"),
    ] = None
    seeds: Annotated[int, option("seeds of each setting, the same for all", min=1)] = 5
    rounds: Annotated[
        bool, option("stop what is clearly worse, and decide the best on fresh seeds", "--rounds/--no-rounds")
    ] = True
    sampler: Annotated[Literal["spread", "tpe"], option("of ranges; tpe learns from the settings so far")] = "spread"
    metric: Annotated[str, option("the metric to compare by", show_default="that of the model which the settings train")] = (
        ""
    )
    maximize: Annotated[
        bool | None,
        option("whether more is better", "--maximize/--minimize", show_default="by the metric's name"),
    ] = None
    parallel: Annotated[int | None, option("trials side by side", min=1, show_default="one a GPU, else 1")] = None


@command(sweep_app, EPILOG)
def sweep_full(
    overrides: Annotated[
        list[str] | None,
        argument(
            "settings as key=value; those that vary as key=a,b, log(low,high), uniform(low,high), int(low,high) or "
            "choice(a,b); FILE.yaml names changes, {name: {key: value}}",
            metavar="KEY=VALUE",
        ),
    ] = None,
    config: Files = None,
    profile: Profiles = None,
    *,
    options: SweepOptions,
    plan: Annotated[bool, option("show what would run, and what the noise allows; run nothing", "--plan")] = False,
    as_json: AsJson = False,
) -> Output:
    """Compare the present settings, the baseline, with others over common seeds; its pipeline, `full`, may be left out.

    The same command continues after a kill, with more --seeds, and beside itself on another machine with the same home.
    """
    import os

    from ttrain.config.loading import layers
    from ttrain.experiments import preview, request
    from ttrain.flows.full import full
    from ttrain.tracking.artifact_source import store_of

    words = overrides or []
    files = [Path(word) for word in words if "=" not in word]
    settings = [word for word in words if "=" in word]
    wanted = request.request_of(
        full, layers(settings, config or (), profile or (), os.environ), request.Options(**asdict(options)), files
    )
    request.check_data(wanted)
    if plan:
        planned = preview.plan(wanted, store_of(home(), wanted.baseline))
        rows = [(change["name"],) for change in planned["settings"]]
        return Output(planned, [Table(("setting",), rows), *preview.lines_of(planned)])
    outlast_output()
    varied = wanted.space.dimensions
    arguments = [*(f"--profile={name}" for name in profile or ()), *(f"--config={path}" for path in config or ())]
    arguments += [word for word in settings if word.partition("=")[0].strip() not in varied]
    return _run(wanted, store_of(usable_home(), wanted.baseline), arguments, as_json=as_json)


def _run(request: Request, store: ArtifactStore, arguments: list[str], *, as_json: bool) -> Output:
    """Run the trials that are left, and show what they say."""
    import contextlib

    from ttrain.engine.display import Display
    from ttrain.experiments import preview
    from ttrain.experiments.trials import Runner

    experiment = preview.find_or_begin(request, store)
    experiment.note(arguments=arguments, seeds=request.options.seeds)
    with contextlib.closing(Display(console(stderr=as_json))) as display:  # standard output is for the JSON
        for line in preview.opening(request, experiment):
            display.say(line)
        try:
            Runner(request, experiment, store, display).run()
        except BaseException:
            display.close()
            _shown(experiment).print(as_json=as_json)
            raise
    return _shown(experiment)


@command(
    sweep_app,
    "Examples:  ttrain sweep show\n\nttrain sweep show sweep-20261121-160222-1a2b --json",
)
def sweep_show(name: Name = "latest") -> Output:
    """Show the settings of a sweep, what is known of each, and the command that runs the better one."""
    from ttrain.experiments.records import find_experiment

    return _shown(find_experiment(home(), name))


def _shown(experiment: Experiment) -> Output:
    """The verdicts, and what to do next."""
    from ttrain.experiments.space import assignment
    from ttrain.experiments.verdict import HEADER, Judgement
    from ttrain.store.artifacts import ArtifactStore

    judgement = Judgement(experiment, ArtifactStore(home()))
    lines = [f"{experiment.name}: {judgement.sentence}"]
    if judgement.standing.wanted:
        lines.append("the same command continues unfinished trials and retries failed ones")
    run = None
    if best := judgement.best:
        values = next(change.values for change in experiment.changes if change.name == best.setting)
        words = [*(experiment["arguments"] or []), *(assignment(key, value) for key, value in values.items())]
        run = shlex.join(["ttrain", "pipeline", "run", "full", *words])
        lines.append(f"to run it in full: {run}")
    rows = [row.row for row in judgement.verdicts]
    return Output({**judgement.to_json(), "command": run}, [Table(HEADER, rows), *lines])
