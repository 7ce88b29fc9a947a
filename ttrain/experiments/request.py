"""A sweep before its first trial: the request, its checks, and the plan of each trial."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.config import SHAPE_NO_RESULT, Runtime, Settings
from ttrain.config.loading import Override, settings_of
from ttrain.core.files import JsonDict
from ttrain.core.hashing import code_digests, digest_of
from ttrain.engine.graph import Graph, Pipeline, Plan
from ttrain.engine.input_files import check_first_rows, file_digests
from ttrain.engine.planner import no_stage, plan
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.experiments import measure, records, space
from ttrain.experiments.measure import Measure
from ttrain.experiments.space import Space
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import STAGES

TRIALS = 8


@dataclass(frozen=True)
class SweepRequest:
    """What a sweep is to do. `pipeline`: makes the graph of `full`; `overrides`: all settings that are given, with
    their ranges."""

    pipeline: Pipeline
    overrides: Sequence[Override]
    space: Space
    measure: Measure
    sampler: str
    seed: int
    trials: int
    parallel: int
    gpus: Sequence[int]

    def settings(self, values: Mapping[str, Any], slot: int = 0) -> Settings:
        """The settings of a trial with these values, in one of the slots of parallel trials."""
        overrides = space.with_values(self.overrides, self.space, values)
        settings = settings_of(overrides).settings
        share = trial_device(settings.runtime, self.gpus, slot, self.parallel)
        overrides += [Override("place of the trial", key, value) for key, value in share.items()]
        return settings_of(overrides).settings if share else settings

    @property
    def first(self) -> JsonDict:
        """The first value of each setting."""
        return next(self.space.probes())

    def plan(self, values: Mapping[str, Any], store: ArtifactStore, slot: int = 0) -> Plan:
        """The plan of a trial with these values."""
        settings = self.settings(values, slot)
        graph = self.graph(settings)
        return Plan("full", settings, store, graph, plan(graph, settings, store))

    def check_data(self) -> None:
        """Raise UsageError for data that the trials cannot read, before the first of them."""
        check_first_rows(self.settings(self.first))

    def graph(self, settings: Settings | None = None) -> Graph:
        """The stages that the measure of a trial needs. `settings`: of the trial, else those of the first values."""
        graph = self.pipeline(settings or self.settings(self.first))
        if self.measure.base_only:  # the evaluation gets no model that is trained on top of the base model
            graph = graph.replacing(dict.fromkeys(measure.AFTER_BASE))
        if self.measure.stage not in graph:
            raise no_stage(self.measure.stage, graph, settings or self.settings(self.first))
        needed = graph.needed_by(self.measure.stage)
        return graph.replacing({name: None for name in graph if name not in needed})

    def stages(self) -> tuple[list[str], list[str]]:
        """(stages that all trials share, stages that each trial makes for itself), in their order."""
        graph = self.graph()
        per_trial = measure.affected_by(measure.directly_affected(self.space.dimensions, graph), graph)
        return [name for name in graph if name not in per_trial], [name for name in graph if name in per_trial]

    def identity(self, store: ArtifactStore) -> JsonDict:
        """What identifies the sweep when it is requested again; the number of trials may grow."""
        tree = with_absolute_paths(self.settings(self.first)).model_dump(mode="json")
        return {
            "settings": {name: value for name, value in tree.items() if name not in SHAPE_NO_RESULT},
            "space": dict(self.space.texts),
            "measure": dataclasses.asdict(self.measure),
            "sampler": self.sampler,
            "seed": self.seed,
            "ingredients": self._ingredients(store),
        }

    def _ingredients(self, store: ArtifactStore) -> dict[str, dict[str, str]]:
        """Digests of the data and the code of each stage: where they differ, earlier values cannot be compared."""
        probes = list(self.space.probes())
        if not any(key.startswith("data.") for key in self.space.dimensions):
            probes = probes[:1]
        digests = {}
        for name in self.graph():
            files = [file_digests(STAGES[name], self.settings(values), store) for values in probes]
            digests[name] = {"data": digest_of(files), "code": digest_of(code_digests(STAGES[name].module, store.cache))}
        return digests


def sweep_request(
    pipeline: Pipeline,
    overrides: Sequence[Override],
    *,
    trials: int | None = None,
    sampler: str = "tpe",
    metric: str = "",
    maximize: bool | None = None,
    seed: int = 1,
    parallel: int | None = None,
) -> SweepRequest:
    """Check and complete a request. Raises UsageError where a value or the metric is invalid."""
    search_space = space.parse_space(overrides)
    if sampler == "grid" and search_space.size is None:
        endless = next(key for key, dimension in search_space.dimensions.items() if dimension.values is None)
        raise UsageError(
            f"--sampler is grid, but {endless} is {search_space.texts[endless]}, which has no finite grid; add a count: "
            f"{search_space.texts[endless][:-1]},5)"
        )
    settings = _check_values(overrides, search_space)
    if settings.runtime.nodes > 1:
        raise UsageError(f"runtime.nodes is {settings.runtime.nodes}, but a sweep runs on one machine; set runtime.nodes=1")
    if settings.runtime.sharding == "dask":
        raise UsageError(
            "runtime.sharding is dask, which goes through Prefect, as the trials of a sweep do not; set it to processes, or "
            "run the pipeline once before: what trials share is then in the store"
        )
    chosen = measure.choose(settings, list(search_space.dimensions), pipeline(settings), metric=metric, maximize=maximize)
    gpus = assigned_gpus(settings.runtime, chosen=os.environ.get("CUDA_VISIBLE_DEVICES"))
    trial_count = trials or (sampler == "grid" and search_space.size) or TRIALS
    return SweepRequest(
        pipeline=pipeline,
        overrides=overrides,
        space=search_space,
        measure=chosen,
        sampler=sampler,
        seed=seed,
        trials=min(trial_count, search_space.size or trial_count),
        parallel=parallel or parallel_trials(settings.runtime, gpus),
        gpus=gpus,
    )


def find_or_begin(request: SweepRequest, store: ArtifactStore) -> records.Sweep:
    """The requested sweep: one to continue, or a new one."""
    identity = request.identity(store)
    return records.find_same(store.root, identity) or records.begin(store.root, identity)


def preview(request: SweepRequest, store: ArtifactStore) -> JsonDict:
    """The plan of a sweep, from what it has done so far and from its seed, as `--dry-run --json` prints it."""
    from ttrain.experiments.sampler import TrialSampler

    sweep = records.find_same(store.root, request.identity(store))
    earlier = sweep.trials if sweep else []
    sampler = TrialSampler(request.space, request.sampler, request.seed, request.measure.maximize)
    planned_trials = [*earlier, *sampler.upcoming(earlier, request.trials - len(earlier))]
    trials = [
        {
            "trial": trial.number,
            "values": dict(trial.values),
            "run": [stage.name for stage in request.plan(trial.values, store) if stage.state == "run"],
        }
        for trial in planned_trials
    ]
    once, each = request.stages()
    return {
        "space": dict(request.space.texts),
        "metric": request.measure.metric,
        "direction": request.measure.direction,
        "sampler": request.sampler,
        "once": once,
        "each": each,
        "trials": trials,
        "chosen_later": max(0, request.trials - len(planned_trials)),
    }


def _check_values(overrides: Sequence[Override], search_space: Space) -> Settings:
    """Check all values; returns the settings of the first ones. Raises UsageError for a value that is refused."""
    settings = []
    for values in search_space.probes():
        try:
            settings.append(settings_of(space.with_values(overrides, search_space, values)).settings)
        except UsageError as error:
            tried = " ".join(space.assignment(key, value) for key, value in values.items())
            raise UsageError(f"the sweep cannot try {tried}: {error}") from None
    return settings[0]


def assigned_gpus(runtime: Runtime, *, devices: Path = Path("/dev"), chosen: str | None = None) -> list[int]:
    """Numbers of the NVIDIA GPUs that trials may use; none where they compute on something else.

    `chosen`: as CUDA_VISIBLE_DEVICES; with UUIDs there, trials take turns unless `runtime.gpus` names numbers. The driver
    makes one file for each GPU, so that no library has to be loaded.
    """
    if runtime.device not in ("auto", "cuda"):
        return []
    if runtime.gpus:
        return list(runtime.gpus)
    numbers = [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]
    # A batch system may name them by UUID: their numbers are not known, and other GPUs may belong to other jobs
    visible = numbers if chosen is None else [word.strip() for word in chosen.split(",")]
    return [int(number) for number in numbers if number in visible]


def parallel_trials(runtime: Runtime, gpu_numbers: Sequence[int]) -> int:
    """The default number of parallel trials: one for each group of GPUs that a trial needs, else one."""
    return max(1, len(gpu_numbers) // runtime.devices)


def trial_device(runtime: Runtime, gpu_numbers: Sequence[int], slot: int, slots: int) -> JsonDict:
    """Settings of `runtime` for the trial in one of `slots` slots: its GPUs, or its part of the cores.

    Where there are more slots than groups of GPUs, trials share them.
    """
    if gpu_numbers and len(gpu_numbers) >= runtime.devices:
        group = slot % parallel_trials(runtime, gpu_numbers)
        return {"runtime.gpus": [*gpu_numbers[group * runtime.devices : (group + 1) * runtime.devices]]}
    if slots == 1 or runtime.threads:
        return {}
    return {"runtime.threads": max(1, (os.cpu_count() or 1) // (slots * runtime.devices))}
