"""Settings of the evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ttrain.config.base import Location, Section, as_tuple

Names = Annotated[tuple[Location, ...], BeforeValidator(as_tuple)]


class Suites(Section):
    """Suites of tasks for each model of a pipeline, by the names of those that ship with ttrain or as YAML files.

    They count by the bytes of their files. What is no mapping is meant for all models: `evaluate.suites=mine.yaml`.
    """

    base: Names = ()
    sft: Names = ()
    lora: Names = ()

    @model_validator(mode="before")
    @classmethod
    def _for_all(cls, given: Any) -> Any:
        return given if isinstance(given, Mapping | Suites) else dict.fromkeys(cls.model_fields, given)

    def of(self, model: str) -> tuple[str, ...]:
        """Those of a model: base, sft or lora."""
        named: tuple[str, ...] = getattr(self, model)
        return named


class Evaluate(Section):
    """What the evaluation measures."""

    row_length: int = Field(256, ge=8, description="tokens that the model sees at once")
    stride: int = Field(128, ge=1, description="each window scores its last `stride` tokens, so that all have context")
    max_bytes: int = Field(1_000_000, ge=1000, description="held-out text that is scored, in UTF-8 bytes")
    max_chats: int = Field(500, ge=1)
    new_tokens: int = Field(48, ge=0, description="length of a sample; 0: no samples")
    documents: tuple[str, ...] = ("Return the", "The first argument")
    chats: tuple[str, ...] = ("What does `textwrap.dedent` do?", "Hello! Who are you?")
    seed: int = Field(1, ge=0, lt=2**32)
    suites: Suites = Suites()
    overlapping: Literal["report", "leave_out"] = Field(
        "report", description="suites' items that shards.decontaminate found in training documents: figures apart, or none"
    )
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of the intervals")
    resamples: int = Field(2000, ge=0, description="of the bootstrap; 0: no intervals but those of accuracies")

    def longest_row(self, limit: int) -> int | None:
        """The longest `row_length` within the limit that the other settings allow; None where there is none."""
        return limit if self.accepts(row_length=limit) else None

    @model_validator(mode="after")
    def _stride_fits(self) -> Evaluate:
        if self.stride > self.row_length:
            raise ValueError(f"evaluate.stride is {self.stride} but must not exceed evaluate.row_length {self.row_length}")
        return self
