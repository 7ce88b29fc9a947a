"""An experiment before its first trial: the request, its checks, and the plan of each trial."""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path

from ttrain.config import SHAPE_NO_RESULT, Settings
from ttrain.config.loading import COMMAND_LINE, Override, settings_of
from ttrain.config.training import SEEDS
from ttrain.core.hashing import code_digests, digest_of
from ttrain.engine.graph import Graph, Pipeline, Plan
from ttrain.engine.input_files import file_digests
from ttrain.engine.planner import no_stage, plan
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.evaluate.noise import Noise, noise_of
from ttrain.experiments import measure, space
from ttrain.experiments.changes import BASELINE, Change, read_changes
from ttrain.experiments.measure import Measure
from ttrain.experiments.space import Space
from ttrain.store import sweeps
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import STAGES

# Changes that are spread before TPE learns; Optuna's own 10 would leave nothing to learn of eight.
STARTUP = 4
MANY = 8  # changes that are drawn of a space that cannot be listed


@dataclass(frozen=True)
class Options:
    """Options of an experiment. `trials`: changes that are drawn of ranges; None: all, or MANY."""

    trials: int | None = None
    seeds: int = 5
    rounds: bool = True
    sampler: str = "spread"
    metric: str = ""
    maximize: bool | None = None


@dataclass(frozen=True)
class Request:
    """What an experiment is to do.

    `overrides`: the settings of the baseline; `space`: those that vary; `changes`: the baseline,
    `named` ones, and those of the space, to which a sampler that learns adds `draws`.
    """

    pipeline: Pipeline
    overrides: Sequence[Override]
    space: Space
    changes: Sequence[Change]
    named: int
    draws: int
    measure: Measure
    options: Options

    @cached_property
    def varied(self) -> frozenset[str]:
        """The settings that differ between changes."""
        return frozenset(self.space.dimensions).union(*(change.values for change in self.changes))

    @cached_property
    def baseline(self) -> Settings:
        """The present settings."""
        return self.settings(self.changes[0])

    def settings(self, change: Change, seed: int = 1) -> Settings:
        """The settings of a trial."""
        own = [
            Override(COMMAND_LINE, key, value) for key, value in change.values.items()
        ]  # as its command has them
        seeds = [Override("seed of the trial", key, seed) for key in SEEDS]
        return settings_of([*self.overrides, *own, *seeds]).settings

    def plan(self, change: Change, seed: int, store: ArtifactStore) -> Plan:
        """The plan of a trial."""
        settings = self.settings(change, seed)
        graph = self.graph(settings)
        return Plan("full", settings, store, graph, plan(graph, settings, store))

    def graph(self, settings: Settings | None = None) -> Graph:
        """The stages that the metric of a trial needs. `settings`: else the baseline's."""
        settings = settings or self.baseline
        graph = measure.without_later_models(self.pipeline(settings), self.measure)
        if self.measure.stage not in graph:
            raise no_stage(self.measure.stage, graph, settings)
        needed = graph.needed_by(self.measure.stage)
        return graph.replacing({name: None for name in graph if name not in needed})

    def stages(self) -> tuple[list[str], list[str], list[str]]:
        """The stages that run once, those that run once a seed, and those of each trial."""
        graph = self.graph()
        by_change, by_seed = (
            measure.affected_by(measure.directly_affected(keys, graph), graph)
            for keys in (self.varied, SEEDS)
        )
        own = [name for name in graph if name in by_change]
        of_seed = [name for name in graph if name in by_seed - by_change]
        return [name for name in graph if name not in by_seed | by_change], of_seed, own

    def identity(self, store: ArtifactStore) -> str:
        """Digest of what identifies an experiment that is requested again, perhaps with more seeds.

        Data and code of each stage are in it: where they differ, earlier values cannot be compared.
        """
        tree = with_absolute_paths(self.baseline).model_dump(mode="json")
        changes = (
            self.changes
            if any(key.startswith("data.") for key in self.varied)
            else self.changes[:1]
        )
        of_changes = [self.settings(change) for change in changes]
        data = []
        for name in self.graph():
            data.append([file_digests(STAGES[name], each, store) for each in of_changes])
        return digest_of(
            {
                "settings": {
                    name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT
                },
                "space": repr(self.space) if self.draws else "",
                "changes": [[change.name, dict(change.values)] for change in self.changes],
                "measure": asdict(self.measure),
                "rounds": self.options.rounds,
                "data": data,
                "code": [code_digests(STAGES[name].module, store.cache) for name in self.graph()],
            }
        )

    def noise(self, store: ArtifactStore) -> Noise | None:
        """The noise of the baseline, as earlier runs of the home show it."""
        return noise_of(
            store.root,
            self.measure.metric,
            with_absolute_paths(self.baseline).model_dump(mode="json"),
        )

    def experiment(self, store: ArtifactStore) -> sweeps.Experiment:
        """The requested experiment: one to continue, or a new one."""
        noise = self.noise(store)
        facts = {
            "identity": self.identity(store),
            "measure": asdict(self.measure),
            "changes": [asdict(change) for change in self.changes],
            "rounds": self.options.rounds,
            "seeds": self.options.seeds,
            "noise": noise and asdict(noise),  # as it was: the same trials give the same verdict
        }
        return sweeps.find_or_begin(store.root, facts)


def request_of(
    pipeline: Pipeline, overrides: Sequence[Override], options: Options, files: Sequence[Path] = ()
) -> Request:
    """Check and complete a request; `files` name changes.

    Raises UsageError where a value or the metric is invalid.
    """
    varying = space.parse_space(overrides)
    named = [change for path in files for change in read_changes(path)]
    plain = [
        item
        for item in overrides
        if not (isinstance(item.value, str) and space.varies(item.key, item.value))
    ]
    if (
        not varying.dimensions and not named
    ):  # the model settings on the command line are the change
        change = Change.of(
            {
                item.key: item.value
                for item in plain
                if item.origin == COMMAND_LINE and _shapes(item.key)
            }
        )
        named = [change] if change.values else []
        plain = [
            item for item in plain if item.origin != COMMAND_LINE or item.key not in change.values
        ]
    if not varying.dimensions and (not named or options.sampler == "tpe"):
        raise UsageError(
            "a sweep needs settings to compare; give one several values, as "
            f"{', '.join(space.FORMS.values())}, for example "
            f"sft.optim.lr=1e-3,2e-3, or a file of named changes; --sampler tpe needs ranges"
        )
    size = varying.size
    learns = options.sampler == "tpe"
    count = min(options.trials or size or MANY, size or sys.maxsize)
    drawn = varying.spread(min(STARTUP, count)) if learns else varying.combinations(count)
    listed = [Change(BASELINE), *named, *map(Change.of, drawn if varying.dimensions else ())]
    draws = count - len(drawn) if learns else 0
    request = Request(pipeline, plain, varying, listed, len(named), draws, Measure("", ""), options)
    request = replace(request, changes=_different(request))
    if len(request.changes) < 2:
        raise UsageError(
            "the changes are the present settings, so there is nothing to compare; "
            "give other values"
        )
    runtime = request.baseline.runtime
    if runtime.nodes > 1 or runtime.sharding == "dask":
        raise UsageError(
            f"runtime.nodes is {runtime.nodes} and runtime.sharding is {runtime.sharding}, "
            "but a trial runs on one machine; "
            f"set runtime.nodes=1 runtime.sharding=processes"
        )
    if seeds := sorted(request.varied.intersection(SEEDS)):
        raise UsageError(
            f"{seeds[0]} varies, but all changes get the same seeds; remove it, and set --seeds"
        )
    chosen = measure.choose(
        request.baseline,
        sorted(request.varied),
        pipeline(request.baseline),
        metric=options.metric,
        maximize=options.maximize,
    )
    return replace(request, measure=chosen)


def _shapes(key: str) -> bool:
    """Whether a setting can be a change: one of the models, not of data, machine or seeds."""
    return key.partition(".")[0] not in ("data", "name", *SHAPE_NO_RESULT) and key not in SEEDS


def _different(request: Request) -> list[Change]:
    """The changes whose settings are not those of an earlier one.

    Raises UsageError for a value that is refused, and for a named change that changes nothing.
    """
    distinct = list[tuple[Settings, Change]]()
    for number, change in enumerate(request.changes):
        try:
            settings = request.settings(change)
        except UsageError as error:
            raise UsageError(f"the sweep cannot try {change.name}: {error}") from None
        same = next(
            (
                earlier.name
                for known, earlier in distinct
                if known == settings or earlier.name == change.name
            ),
            "",
        )
        if same and number <= request.named:
            raise UsageError(
                f"the change {change.name} has the settings, or the name, of {same}; "
                "remove one of them"
            )
        if not same:
            distinct.append((settings, change))
    return [change for _, change in distinct]
