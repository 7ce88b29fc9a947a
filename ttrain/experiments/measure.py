"""The metric by which the trials of a sweep are compared, and the stages that it needs."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ttrain.config import Settings
from ttrain.config.training import BITS_PER_BYTE, PRIMARY_METRICS, TRAINING_STAGES, VALIDATION_LOSS
from ttrain.core.text import is_number
from ttrain.engine.graph import Graph
from ttrain.engine.planner import no_stage
from ttrain.errors import UsageError
from ttrain.reports import facts, summary
from ttrain.tasks import EVALUATE, SHARDS, SOURCE, STAGES, TOKENIZER, Stage

PREFIXES = {
    "eval": EVALUATE.name,
    "tok": TOKENIZER.name,
}  # of metrics that do not begin with their stage's name
# the training stage, by the metric of its model
MODEL_OF = {row.metric.of_run: name for name, row in TRAINING_STAGES.items()}


@dataclass(frozen=True)
class Measure:
    """The metric `metric` of stage `stage`: lower is better, unless `maximize`."""

    metric: str
    stage: str
    maximize: bool = False

    @property
    def direction(self) -> str:
        """Whether it is maximized or minimized."""
        return "maximize" if self.maximize else "minimize"

    def of(self, results: Mapping[str, Mapping[str, Any]]) -> float | None:
        """The metric of a trial, from the results of its stages; None where it has none."""
        value = results.get(self.stage, {}).get(self.metric.partition("/")[2])
        if is_number(value):
            return float(value)
        return summary.metrics_of(results).get(self.metric)


def choose(
    settings: Settings,
    keys: Collection[str],
    graph: Graph,
    *,
    metric: str = "",
    maximize: bool | None = None,
) -> Measure:
    """Choose the metric of a sweep over the settings `keys`.

    The requested one, else the primary metric of the last training that they affect, or bits per
    byte where they change the tokenizer. `maximize`: None by the metric's name. Raises UsageError
    where the settings cannot change the metric, or where it does not exist.
    """
    direct = {key: directly_affected([key], graph) for key in keys}
    for key, stages in direct.items():
        if not stages:
            raise UsageError(
                f"{key} changes no result of this pipeline, so that all trials would be equal; "
                f"vary settings of {', '.join(settings.trainings)}, model, tokenizer, reading, "
                "shards or data"
            )
    shaped = affected_by(frozenset().union(*direct.values()), graph)
    metric_name = metric or _default_metric(settings, direct, shaped)
    if maximize is None:
        maximize = facts.better(metric_name) > 0
    prefix, slash, _ = metric_name.partition("/")
    stage = PREFIXES.get(prefix, prefix)
    if not slash:
        raise UsageError(
            f"--metric is {metric_name}, but a metric is STAGE/NAME; "
            f"try {settings.trainings[0]}/{VALIDATION_LOSS}, or {BITS_PER_BYTE.of_run}"
        )
    if stage not in graph:
        raise no_stage(stage, graph, settings)
    if stage not in shaped:
        raise UsageError(
            f"--metric {metric_name} is of stage {stage}, which {', '.join(keys)} cannot change; "
            f"it can change {', '.join(name for name in graph if name in shaped)}"
        )
    return Measure(metric_name, stage, maximize)


def without_later_models(graph: Graph, measured: Measure) -> Graph:
    """The graph without the trainings, and their shards, that the metric's model does not need.

    The complete graph where the metric is not the primary one of a model.
    """
    model = MODEL_OF.get(measured.metric, "")
    if model not in graph:
        return graph
    needed = graph.needed_by(model)
    stages = (
        name for row in TRAINING_STAGES.values() for name in (row.name, SHARDS[row.name].name)
    )
    return graph.replacing({name: None for name in stages if name in graph and name not in needed})


def affected_by(stages: Collection[str], graph: Graph) -> frozenset[str]:
    """These stages and all that depend on them: those that each trial makes anew."""
    return frozenset(name for name in graph if not graph.needed_by(name).isdisjoint(stages))


def directly_affected(keys: Collection[str], graph: Graph) -> frozenset[str]:
    """The stages that read one of the settings themselves."""
    return frozenset(name for name in graph for key in keys if _is_affected(STAGES[name], key))


def changes_heldout(keys: Collection[str], graph: Graph) -> list[str]:
    """The settings that change which records are held out, so that losses are of other text."""
    splits = {SOURCE.name, *(name for name in graph if name.startswith("shards-"))}
    return [key for key in keys if not splits.isdisjoint(directly_affected([key], graph))]


def _is_affected(stage: Stage, key: str) -> bool:
    """Whether the setting may change what the stage makes."""
    section, _, subkey = key.partition(".")
    if section == "data":
        dataset = subkey.partition(".")[0]
        return stage.dataset == dataset or (stage == TOKENIZER and dataset == "pretrain")
    return any(
        f"{key}.".startswith(f"{prefix}.") or prefix.startswith(f"{key}.") for prefix in stage.sees
    )


def _default_metric(settings: Settings, keys: Collection[str], shaped: frozenset[str]) -> str:
    """The metric where none is requested. `keys`: what varies; `shaped`: the stages it affects."""
    if TOKENIZER.name in shaped:  # nats per token cannot be compared across tokenizers
        if "pretrain" in shaped:
            return BITS_PER_BYTE.of_run
        raise UsageError(
            f"{', '.join(keys)} changes the tokenizer, so that losses per token cannot be "
            "compared; name another --metric"
        )
    affected = [name for name in settings.trainings if name in shaped]
    if not affected:
        raise UsageError(f"{', '.join(keys)} shapes no training; name a metric: --metric eval/NAME")
    sections = {key.partition(".")[0] for key in keys}
    varied = [name for name in settings.trainings if name in sections]
    return PRIMARY_METRICS[(varied or affected[:1])[-1]].of_run
