"""A sweep before its first trial: what was asked for, whether it can be, and what each trial will run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows import recipe
from ttrain.config import SHAPE_NO_RESULT, Settings
from ttrain.config.loading import Given, settings_of
from ttrain.core.hashing import code_digests, digest_of
from ttrain.errors import UsageError
from ttrain.pipeline.absolute_paths import absolute
from ttrain.pipeline.input_files import file_digests
from ttrain.pipeline.plan import plan
from ttrain.pipeline.planned import Planned, Recipe
from ttrain.pipeline.selection import Selection, graph_of
from ttrain.reports import figures
from ttrain.stages import STAGES, Stage
from ttrain.store.artifacts import Store
from ttrain.sweep import devices, measure, records, space
from ttrain.sweep.measure import Measure
from ttrain.sweep.space import Space

SAMPLERS = ("tpe", "random", "grid")
MOST_TRIALS_OF_A_GRID = 1000
TRIALS = 8


@dataclass(frozen=True)
class Asked:
    """What a sweep is to do. `given`: all settings that are given, with their ranges."""

    pipeline: str
    given: Sequence[Given]
    space: Space
    measure: Measure
    sampler: str
    seed: int
    trials: int
    parallel: int
    gpus: Sequence[int]
    prune: bool

    def settings(self, values: Mapping[str, Any], slot: int = 0) -> Settings:
        """The settings of a trial with these values, in one of the places where trials run side by side."""
        loaded = settings_of(space.placed(self.given, self.space, values)).settings
        share = devices.share(loaded.runtime, self.gpus, slot, self.parallel)
        return settings_of([*space.placed(self.given, self.space, values), *_shared(share)]).settings if share else loaded

    @property
    def first(self) -> dict[str, Any]:
        """Some values: the first of each setting."""
        return next(self.space.probes())

    def recipe(self) -> Recipe:
        """The pipeline's, without what the measure does not need."""
        whole = recipe(self.pipeline)
        return _of_base(whole) if self.measure.base_only else whole

    def plan(self, values: Mapping[str, Any], store: Store, slot: int = 0) -> list[Planned]:
        """What a trial would do."""
        return plan(self.recipe(), self.settings(values, slot), store, selection=Selection(until=self.measure.until))

    def graph(self) -> dict[str, frozenset[str]]:
        """The stages of a trial, each with those that it reads."""
        graph = graph_of(self.recipe(), self.settings(self.first))
        needed = measure.before(self.measure.until, graph)
        return {name: before for name, before in graph.items() if name in needed}

    def stages(self) -> tuple[list[str], list[str]]:
        """(stages that all trials share, stages that each trial makes for itself), in their order."""
        graph = self.graph()
        own = measure.shaped_by(measure.directly(self.space.dimensions, graph), graph)
        return [name for name in graph if name not in own], [name for name in graph if name in own]

    def to_json(self) -> dict[str, Any]:
        """What makes it the same sweep when it is asked for again; the number of trials may grow."""
        tree = absolute(self.settings(self.first)).model_dump(mode="json")
        return {
            "pipeline": self.pipeline,
            "settings": {name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT},
            "space": dict(self.space.texts),
            "measure": dataclasses.asdict(self.measure),
            "sampler": self.sampler,
            "seed": self.seed,
            "prune": self.prune,
        }

    def ingredients(self, store: Store) -> dict[str, dict[str, str]]:
        """Digests of the data and the code of each stage: where they differ, values of before say nothing."""
        probes = list(self.space.probes())
        if not any(key.startswith("data.") for key in self.space.dimensions):
            probes = probes[:1]
        found = {}
        for name in self.graph():
            files = [file_digests(STAGES[name], self.settings(values), store) for values in probes]
            found[name] = {"data": digest_of(files), "code": digest_of(code_digests(STAGES[name].module, store.cache))}
        return found


def ask(
    pipeline: str,
    given: Sequence[Given],
    *,
    trials: int | None = None,
    sampler: str = "tpe",
    metric: str = "",
    until: str = "",
    maximize: bool | None = None,
    seed: int = 1,
    parallel: int | None = None,
    prune: bool = False,
) -> Asked:
    """What was asked for, made whole. Raises UsageError where a value, the metric or the sampler cannot be."""
    found = space.ranges(given)
    if sampler not in SAMPLERS:
        raise UsageError(f"--sampler is {sampler} but must be one of {', '.join(SAMPLERS)}")
    if sampler == "grid" and found.size is None:
        endless = next(key for key, dimension in found.dimensions.items() if dimension.values is None)
        raise UsageError(
            f"--sampler is grid, but {endless} is {found.texts[endless]}, which has no end of values; say how many: "
            f"{found.texts[endless][:-1]},5)"
        )
    if sampler == "grid" and trials is None and (found.size or 0) > MOST_TRIALS_OF_A_GRID:
        raise UsageError(f"--sampler is grid, and the grid has {found.size} combinations; say how many with --trials")
    settings = _probed(given, found)
    _check_runtime(settings)
    graph = graph_of(recipe(pipeline), settings)
    chosen = measure.choose(settings, list(found.dimensions), graph, metric=metric, until=until, maximize=bool(maximize))
    if maximize is None:
        chosen = dataclasses.replace(chosen, maximize=figures.better(chosen.metric) > 0)
    if prune:
        _check_pruning(settings, chosen, list(found.dimensions))
    gpus = devices.gpus(settings.runtime, chosen=os.environ.get("CUDA_VISIBLE_DEVICES"))
    wanted = trials or (found.size if sampler == "grid" and found.size else TRIALS)
    return Asked(
        pipeline=pipeline,
        given=given,
        space=found,
        measure=chosen,
        sampler=sampler,
        seed=seed,
        trials=min(wanted, found.size or wanted),
        parallel=parallel or devices.side_by_side(settings.runtime, gpus),
        gpus=gpus,
        prune=prune,
    )


def continued(asked: Asked, store: Store) -> tuple[records.Sweep | None, list[str]]:
    """(the sweep that was asked the same and can go on, or None; what has changed since the newest that cannot)."""
    found = records.same(store.root, asked.to_json())
    if found is None:
        return None, []
    changed = records.changes(found["ingredients"], asked.ingredients(store))
    return (None, [f"{found.name} was of other {', '.join(changed)}"]) if changed else (found, [])


def preview(asked: Asked, store: Store) -> dict[str, Any]:
    """What a sweep is about to do, from what it has done so far and from its seed, as `--dry-run --json` prints it."""
    from ttrain.sweep.study import Study, upcoming

    sweep, _ = continued(asked, store)
    options: dict[str, Any] = {"sampler": asked.sampler, "seed": asked.seed, "maximize": asked.measure.maximize}
    earlier = Study.of(sweep).trials() if sweep else []
    known = [*earlier, *upcoming(asked.space, earlier, asked.trials - len(earlier), **options)]
    trials = [
        {
            "trial": trial.number,
            "values": dict(trial.values),
            "run": [planned.stage.name for planned in asked.plan(trial.values, store) if planned.state == "run"],
        }
        for trial in known
    ]
    once, each = asked.stages()
    return {
        "space": dict(asked.space.texts),
        "metric": asked.measure.metric,
        "direction": "maximize" if asked.measure.maximize else "minimize",
        "sampler": asked.sampler,
        "once": once,
        "each": each,
        "trials": trials,
        "chosen_later": max(0, asked.trials - len(known)),
    }


def _probed(given: Sequence[Given], found: Space) -> Settings:
    """The settings of the first values, once all others were looked at. Raises UsageError for a value that is refused."""
    settings = []
    for values in found.probes():
        try:
            settings.append(settings_of(space.placed(given, found, values)).settings)
        except UsageError as error:
            tried = " ".join(space.written(key, value) for key, value in values.items())
            raise UsageError(f"the sweep cannot try {tried}: {error}") from None
    return settings[0]


def _check_runtime(settings: Settings) -> None:
    """Raises UsageError for what trials cannot do."""
    if settings.runtime.nodes > 1:
        raise UsageError(f"runtime.nodes is {settings.runtime.nodes}, but a sweep runs on one machine; set runtime.nodes=1")
    if settings.runtime.sharding == "dask":
        raise UsageError(
            "runtime.sharding is dask, which goes through Prefect, as the trials of a sweep do not; set it to processes, or "
            "run the pipeline once before: what trials share is then in the store"
        )


def _check_pruning(settings: Settings, chosen: Measure, keys: Sequence[str]) -> None:
    """Raises UsageError where there is nothing to see of a trial before its end."""
    if chosen.curve is None:
        raise UsageError(
            f"--prune ends trials by their curves, but {chosen.metric} is known at the end only; leave --prune out"
        )
    training = getattr(settings, chosen.stage)
    setting = f"{chosen.stage}.validate_every_steps"
    if chosen.curve == measure.LOSS and not training.validate_every_steps and setting not in keys:
        raise UsageError(f"--prune needs validations while training, but {setting} is 0; set it, for example to 50")


def _shared(share: Mapping[str, Any]) -> list[Given]:
    return [Given("place of the trial", key, value) for key, value in share.items()]


def _of_base(whole: Recipe) -> Recipe:
    """The recipe without the models that are trained on top of the base model: the evaluation gets that one alone."""

    def of_base(stage: Callable[..., Any], settings: Settings) -> None:
        def chosen(of: Stage, **inputs: Any) -> Any:
            return None if of.name in measure.AFTER_BASE else stage(of, **inputs)

        whole(chosen, settings)

    return of_base
