"""Results of stages, typed: the `result` of a manifest. A missing value has the default."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ttrain.core.files import JsonDict, JsonObject


@dataclass(frozen=True)
class Result:
    """A result, or a part of one."""

    @classmethod
    def of(cls, result: JsonObject) -> Self:
        """The values of a manifest that have a field; parts are typed results, too."""
        return cls(
            **{
                each.name: each.default.of(value) if isinstance(each.default, Result) else value
                for each in fields(cls)
                if (value := result.get(each.name)) is not None
            }
        )


@dataclass(frozen=True)
class PartCounts(Result):
    """Counts of the training or held-out part of shards, or of a file of the stage `source`."""

    rows: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class ShardsResult(Result):
    """Result of the stages `shards-*`."""

    train: PartCounts = PartCounts()
    heldout: PartCounts = PartCounts()
    blocks: int = 0
    encoded_blocks: int = 0
    contamination: JsonDict = field(default_factory=dict)
    files: Sequence[JsonObject] = ()
    rows: Mapping[str, JsonObject] = field(default_factory=dict)  # by role: train, heldout


@dataclass(frozen=True)
class TokenizerResult(Result):
    """Result of the stage `tokenizer`."""

    documents: int | None = None  # that it was trained on; None: it existed
    bytes: int = 0
    bytes_per_token: float | None = None
    unk_rate: float | None = None
    files: Sequence[JsonObject] = ()


@dataclass(frozen=True)
class ReplayResult(Result):
    """Result of the stages `replay` and `replay-sft`."""

    records: int = 0
    tokens: int = 0
    share: float = 0.0
    nights: int = 0


@dataclass(frozen=True)
class HeldoutResult(Result):
    """Result of the stage `heldout`."""

    records: int = 0
    new: int = 0
    unscored: int = 0


@dataclass(frozen=True)
class EvaluationResult(Result):
    """Result of the stages `evaluate` and `evaluate-champion`."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    paired: Mapping[str, JsonObject] = field(default_factory=dict)
    suites: JsonObject = field(
        default_factory=lambda: {"models": (), "tasks": (), "comparisons": ()}
    )
    samples: Mapping[str, Sequence[JsonObject]] = field(default_factory=dict)  # by model


@dataclass(frozen=True)
class TrainingResult(Result):
    """Result of the stages that train."""

    steps: int = 0
    tokens: int | None = None
    epochs: float | None = None
    parameters: int = 0
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_second: float | None = None
    train_seconds: float | None = None
    resumed_from_step: int | None = None
    stop_reason: str = "completed"
    skipped_steps: int = 0
    ranks: int = 0
    precision: str = ""
    device: str = ""
    threads: int = 0
    by_rule: Mapping[str, Any] = field(default_factory=dict)  # the settings that the rows decided
    guard_warnings: Mapping[str, int] = field(default_factory=dict)  # by guard
    optimizer_groups: Sequence[JsonObject] = ()
    rows: JsonObject = field(
        default_factory=dict
    )  # that were packed: rows, epoch, fill, records, ...
