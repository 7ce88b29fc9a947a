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
from ttrain.core.text import counted, format_duration
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home, usable_home
from ttrain.store.sweeps import Experiment, find_experiment

if TYPE_CHECKING:
    from ttrain.config import Settings
    from ttrain.engine.graph import Graph
    from ttrain.experiments.request import Request


class _WithoutPipeline(CommandGroup):
    """`ttrain sweep KEY=VALUES` means the pipeline `full`, the only one that sweeps."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_command = not args or args[0] in (*self.commands, "--help", "-h")
        return super().parse_args(ctx, args if is_command else ["full", *args])


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
DIFFERENCES = (0.1, 0.03, 0.01)  # of which the plan says how many seeds they need
Name = Annotated[
    str, argument("its name, or a part of it", metavar="SWEEP", show_default="the latest")
]


@dataclass(frozen=True)
class SweepOptions:
    """What is compared, how, and by which metric."""

    trials: Annotated[
        int | None,
        option(
            "settings that are drawn of ranges",
            "--trials",
            "-n",
            min=1,
            show_default="all that are listed, else 8",
        ),
    ] = None
    seeds: Annotated[int, option("seeds of each setting, the same for all", min=1)] = 5
    rounds: Annotated[
        bool,
        option(
            "stop what is clearly worse, and decide the best on fresh seeds", "--rounds/--no-rounds"
        ),
    ] = True
    sampler: Annotated[
        Literal["spread", "tpe"], option("of ranges; tpe learns from the settings so far")
    ] = "spread"
    metric: Annotated[
        str, option("the metric to compare by", show_default="that of the last model they train")
    ] = ""
    maximize: Annotated[
        bool | None,
        option(
            "whether more is better", "--maximize/--minimize", show_default="by the metric's name"
        ),
    ] = None


@command(sweep_app, EPILOG)
def sweep_full(
    overrides: Annotated[
        list[str] | None,
        argument(
            "settings as key=value; those that vary as key=a,b, log(low,high), uniform(low,high) "
            "or choice(a,b); FILE.yaml names changes, {name: {key: value}}",
            metavar="KEY=VALUE",
        ),
    ] = None,
    config: Files = None,
    profile: Profiles = None,
    *,
    options: SweepOptions,
    plan: Annotated[
        bool, option("show what would run, and what the noise allows; run nothing", "--plan")
    ] = False,
    as_json: AsJson = False,
) -> Output:
    """Compare the present settings, the baseline, with others over common seeds.

    `full`, the pipeline, may be left out. The same command continues after a kill, with more
    --seeds, and beside itself on another machine with the same home.
    """
    import os

    from ttrain.config.loading import COMMAND_LINE, layers
    from ttrain.engine.execution import screen
    from ttrain.engine.input_files import check_first_rows
    from ttrain.experiments import request, trials
    from ttrain.flows.full import full
    from ttrain.flows.teacher import with_teachers
    from ttrain.tracking.artifact_source import store_of

    files = [
        Path(word)
        for word in overrides or ()
        if word.endswith((".yaml", ".yml")) and "=" not in word
    ]
    settings = [word for word in overrides or () if Path(word) not in files]

    def pipeline(settings: Settings) -> Graph:
        return with_teachers(full(settings), settings, store_of(home(), settings))

    wanted = request.request_of(
        pipeline,
        layers(settings, config or (), profile or (), os.environ),
        request.Options(**asdict(options)),
        files,
    )
    check_first_rows(wanted.baseline)
    if plan:
        return _plan(wanted, store_of(home(), wanted.baseline))
    outlast_output()
    store = store_of(usable_home(), wanted.baseline)
    experiment = wanted.experiment(store)
    arguments = [
        *(f"--profile={name}" for name in profile or ()),
        *(f"--config={path}" for path in config or ()),
    ]
    plain = {item.key for item in wanted.overrides if item.origin == COMMAND_LINE}
    arguments += [word for word in settings if word.partition("=")[0].strip() in plain]
    experiment.extend(options.seeds)
    experiment.note(arguments=arguments)
    try:
        # standard output is for the JSON
        with screen(console(stderr=as_json), wanted.baseline.runtime.log_level) as display:
            display("", "message", {"text": _opening(wanted, experiment.name)})
            trials.run(wanted, experiment, store, display)
    except BaseException:
        _shown(experiment).print(as_json=as_json)
        raise
    return _shown(experiment)


def _opening(wanted: Request, name: str) -> str:
    """The lines that announce a sweep."""
    from ttrain.experiments.measure import changes_heldout

    settings = counted(wanted.draws or len(wanted.changes) - 1, "setting")
    lines = [
        f"{name}: {settings} against the baseline, {counted(wanted.options.seeds, 'seed')}, "
        f"to {wanted.measure.direction} {wanted.measure.metric}",
        _stages(wanted),
    ]
    if heldout := changes_heldout(sorted(wanted.varied), wanted.graph()):
        lines.append(
            f"warning: {', '.join(heldout)} may change which records are held out: losses are then "
            "of other text"
        )
    return "\n  ".join(lines)


def _stages(wanted: Request) -> str:
    once, by_seed, own = (", ".join(names) or "nothing" for names in wanted.stages())
    return f"once: {once}; for each seed: {by_seed}; in each trial: {own}"


def _plan(wanted: Request, store: ArtifactStore) -> Output:
    """What would run, and how many seeds a difference needs."""
    from ttrain.engine.estimate import estimate

    noise = wanted.noise(store)
    seconds = estimate(
        wanted.plan(wanted.changes[-1], 0, store)
    ).seconds  # no trial has seed 0, so nothing is cached
    needs = {size: noise.seeds_for(size) for size in DIFFERENCES} if noise else {}
    value = {
        "metric": wanted.measure.metric,
        "direction": wanted.measure.direction,
        "settings": [asdict(change) for change in wanted.changes],
        "drawn_later": wanted.draws,
        "seeds": wanted.options.seeds,
        **dict(zip(("once", "for_each_seed", "in_each_trial"), wanted.stages(), strict=True)),
        "seconds_of_a_trial": seconds,
        "noise": noise and asdict(noise),
        "seeds_for_difference": needs,
    }
    lines = [_stages(wanted), f"compared by: {wanted.measure.metric} ({wanted.measure.direction})"]
    if seconds:
        lines.append(f"a trial takes about {format_duration(seconds)} here")
    known = (
        f"differ by ± {noise.spread:.3g} (one standard deviation)"
        if noise
        else "were not compared yet"
    )
    lines.append(f"seeds of the baseline {known} in this home")
    for size, seeds in needs.items():
        time = f", about {format_duration(2 * seeds * seconds)}" if seeds and seconds else ""
        lines.append(f"  a difference of {size} takes {seeds or 'more than 1,000'} seeds{time}")
    return Output(
        value, [Table(("setting",), [(change.name,) for change in wanted.changes]), *lines]
    )


@command(
    sweep_app,
    "Examples:  ttrain sweep show\n\nttrain sweep show sweep-20261121-160222-1a2b --json",
)
def sweep_show(name: Name = "latest") -> Output:
    """Show the verdict on each setting of a sweep, and the command that runs the better one."""
    return _shown(find_experiment(home(), name))


def _shown(experiment: Experiment) -> Output:
    """The verdicts, and what to do next."""
    from ttrain.experiments.space import assignment
    from ttrain.experiments.verdict import HEADER, Judgement

    judgement = Judgement(experiment, ArtifactStore(home()))
    lines = [f"{experiment.name}: {judgement.sentence}"]
    if judgement.standing.wanted:
        lines.append("the same command continues unfinished trials and retries failed ones")
    run = None
    if best := judgement.best:
        values = judgement.changes[judgement.verdicts.index(best)].values
        words = [
            *(experiment["arguments"] or []),
            *(assignment(key, value) for key, value in values.items()),
        ]
        run = shlex.join(["ttrain", "pipeline", "run", "full", *words])
        lines.append(f"to run it in full: {run}")
    return Output(
        {**judgement.to_json(), "command": run},
        [Table(HEADER, [row.row for row in judgement.verdicts]), *lines],
    )
