"""By what the trials of a sweep are compared, and which stages have to run for that."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ttrain.config import Settings
from ttrain.errors import UsageError
from ttrain.pipeline.plan import no_stage
from ttrain.reports import summary
from ttrain.stages import EVALUATE, LORA, SFT, SHARDS_LORA, SHARDS_SFT, SOURCE, STAGES, TOKENIZER, Stage

LOSS = "validation_loss"
BITS = "eval/bits_per_byte"
CURVES = {LOSS: LOSS, "best_validation_loss": LOSS, "loss": "loss"}  # figure of a stage: its name in the stage's curve
PREFIXES = {"eval": EVALUATE.name, "tok": TOKENIZER.name}  # of metrics that do not begin with their stage's name
AFTER_BASE = frozenset(stage.name for stage in (SFT, LORA, SHARDS_SFT, SHARDS_LORA))  # what bits per byte do not need

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Measure:
    """The metric `metric` of stage `stage`: lower is better, unless `maximize`. Stages up to `until` run; with `base_only`
    no model is trained on top of the base model, which alone the metric is of."""

    metric: str
    stage: str
    until: str
    maximize: bool = False
    base_only: bool = False

    @property
    def figure(self) -> str:
        """The metric's name within its stage."""
        return self.metric.partition("/")[2]

    @property
    def curve(self) -> str | None:
        """Its name in the curve that the stage writes while it trains; None where there is none."""
        return CURVES.get(self.figure) if STAGES[self.stage].uses_ranks else None

    def of(self, results: Mapping[str, Mapping[str, Any]]) -> float | None:
        """The metric of a trial, from the results of its stages; None where it has none."""
        value = results.get(self.stage, {}).get(self.figure)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return summary.metrics_of(results).get(self.metric)


def choose(
    settings: Settings, keys: Collection[str], graph: Graph, *, metric: str = "", until: str = "", maximize: bool = False
) -> Measure:
    """What to compare by, where the settings `keys` vary: what was asked for, else the validation loss of the last training
    that they shape, or bits per byte where the tokenizer is another.

    Raises UsageError where the settings cannot change it, or where it is not there.
    """
    direct = {key: frozenset(name for name in graph if _sees(STAGES[name], key)) for key in keys}
    for key, stages in direct.items():
        if not stages:
            raise UsageError(
                f"{key} changes no result of this pipeline, so that all trials would be one; vary settings of "
                f"{', '.join(settings.trainings)}, model, tokenizer, reading, shards or data"
            )
    named = metric or _usual(settings, direct, graph)
    prefix, slash, _ = named.partition("/")
    stage = PREFIXES.get(prefix, prefix)
    if not slash:
        raise UsageError(f"--metric is {named}, but a metric is STAGE/FIGURE; try {settings.trainings[0]}/{LOSS}, or {BITS}")
    for name in filter(None, (stage, until)):
        if name not in graph:
            raise no_stage(name, graph, settings)
    shaped = shaped_by(frozenset().union(*direct.values()), graph)
    if stage not in shaped:
        raise UsageError(
            f"--metric {named} is of stage {stage}, which {', '.join(keys)} cannot change; it can change "
            f"{', '.join(name for name in graph if name in shaped)}"
        )
    if until and stage not in before(until, graph):
        raise UsageError(f"--until {until} leaves out stage {stage}, which --metric {named} is of; leave out the one")
    return Measure(named, stage, until or stage, maximize, base_only=named == BITS and not until)


def shaped_by(stages: Collection[str], graph: Graph) -> frozenset[str]:
    """These stages and all that depend on them: what is made anew for each trial."""
    return frozenset(name for name in graph if not before(name, graph).isdisjoint(stages))


def directly(keys: Collection[str], graph: Graph) -> frozenset[str]:
    """The stages that see one of the settings themselves."""
    return frozenset(name for name in graph if any(_sees(STAGES[name], key) for key in keys))


def changes_heldout(keys: Collection[str], graph: Graph) -> list[str]:
    """Of the settings those with which other records are held out, so that losses are of other text."""
    splits = {SOURCE.name, *(name for name in graph if name.startswith("shards-"))}
    return [key for key in keys if not splits.isdisjoint(directly([key], graph))]


def before(name: str, graph: Graph) -> frozenset[str]:
    """The stage and all that it depends on."""
    return frozenset({name}).union(*(before(earlier, graph) for earlier in graph[name]))


def _sees(stage: Stage, key: str) -> bool:
    """Whether the setting may shape what the stage makes."""
    section, _, part = key.partition(".")
    if section == "data":
        dataset = part.partition(".")[0]
        return stage.dataset == dataset or (stage == TOKENIZER and dataset == "pretrain")
    return section in stage.config.model_fields


def _usual(settings: Settings, direct: Mapping[str, frozenset[str]], graph: Graph) -> str:
    """The metric that is taken where none is named."""
    stages = frozenset().union(*direct.values())
    shaped = shaped_by(stages, graph)
    if TOKENIZER.name in shaped:  # nats per token say nothing where tokens are others
        if "pretrain" in graph:
            return BITS
        raise UsageError(
            f"{', '.join(direct)} changes the tokenizer, so that losses per token cannot be compared; name another --metric"
        )
    own = [name for name in settings.trainings if any(key.startswith(f"{name}.") for key in direct)]
    affected = [name for name in settings.trainings if name in shaped]
    if not affected:
        raise UsageError(f"{', '.join(direct)} shapes no training; name a metric: --metric eval/NAME")
    return f"{(own or affected[:1])[-1]}/{LOSS}"
