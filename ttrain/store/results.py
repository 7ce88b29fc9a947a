"""What stages return, as whoever reads an artifact gets it: the `result` of its manifest, typed.

A result that lacks a value, such as that of a training without tokens, has the default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from ttrain.core.files import JsonObject


@dataclass(frozen=True)
class Result:
    """A result, or a part of one."""

    @classmethod
    def of(cls, result: JsonObject) -> Self:
        """The values of a manifest that have a field."""
        names = {each.name for each in fields(cls)}
        return cls(**{name: value for name, value in result.items() if name in names and value is not None})


@dataclass(frozen=True)
class PartCounts(Result):
    """The training or the held-out part of shards."""

    rows: int = 0
    tokens: int = 0
    bytes: int = 0


@dataclass(frozen=True)
class RowCounts(Result):
    """What became of the rows that were read; by reasons."""

    skipped: Mapping[str, int] = field(default_factory=dict)
    rejected: Mapping[str, int] = field(default_factory=dict)

    @property
    def left_out(self) -> int:
        """Rows that were skipped or rejected."""
        return sum(self.skipped.values()) + sum(self.rejected.values())


@dataclass(frozen=True)
class ShardsResult(Result):
    """Of the stages `shards-*`."""

    train: PartCounts = PartCounts()
    heldout: PartCounts = PartCounts()
    rows: Mapping[str, RowCounts] = field(default_factory=dict)  # by role: train, heldout

    @classmethod
    def of(cls, result: JsonObject) -> Self:
        tallies = result.get("rows", {})
        return cls(
            PartCounts.of(result.get("train", {})),
            PartCounts.of(result.get("heldout", {})),
            {role: RowCounts.of(tally) for role, tally in tallies.items() if isinstance(tally, Mapping)},
        )


@dataclass(frozen=True)
class TokenizerResult(Result):
    """Of the stage `tokenizer`."""

    bytes: int = 0
    bytes_per_token: float = 0.0


@dataclass(frozen=True)
class ReplayResult(Result):
    """Of the stages `replay` and `replay-sft`."""

    records: int = 0
    share: float = 0.0


@dataclass(frozen=True)
class TrainingResult(Result):
    """Of the stages that train."""

    steps: int = 0
    tokens: int = 0
    epochs: float | None = None
    parameters: int = 0
    tokens_per_second: float = 0.0
    train_seconds: float = 0.0
    resumed_from_step: int | None = None
    by_rule: Mapping[str, Any] = field(default_factory=dict)  # the settings that the rows decided
    guard_warnings: Mapping[str, int] = field(default_factory=dict)  # by guard
    optimizer_groups: Sequence[JsonObject] = ()
    rows: JsonObject = field(default_factory=dict)  # that were packed: rows, epoch, fill, records, ...


@dataclass(frozen=True)
class EvaluationResult(Result):
    """Of the stages `evaluate` and `evaluate-champion`, by the names of metrics."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)
    intervals: Mapping[str, Sequence[float]] = field(default_factory=dict)
    paired: Mapping[str, JsonObject] = field(default_factory=dict)  # with the model before, on the same records
    suites: JsonObject = field(default_factory=lambda: {"models": (), "tasks": (), "comparisons": ()})
    samples: Mapping[str, Sequence[JsonObject]] = field(default_factory=dict)  # by model
