"""Sampling settings of text generation, without torch."""

from __future__ import annotations

from typing import Any

from pydantic import Field, ValidationError

from ttrain.config.base import Section
from ttrain.core.text import invalid_values
from ttrain.errors import UsageError


class Sampling(Section):
    """Settings of one answer. At temperature 0 decoding is greedy, and the seed has no effect."""

    temperature: float = Field(
        0.0, ge=0, le=10, description="0: always the most likely token; higher: more various"
    )
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="keep the likeliest tokens that together have this share; 1: all",
    )
    top_k: int = Field(0, ge=0, description="keep that many of the likeliest tokens; 0: all")
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        le=10,
        description="above 1, what the answer holds already gets less likely (arXiv:1909.05858)",
    )
    max_tokens: int = Field(256, ge=1, description="longest answer, in tokens")
    seed: int = Field(1, ge=0, lt=2**32, description="the same seed, the same answer")

    def __str__(self) -> str:
        return "  ".join(f"{name}={value}" for name, value in self.model_dump().items())


def sampling(**values: Any) -> Sampling:
    """Validate sampling settings. Raises UsageError, which names setting, value and rule."""
    try:
        return Sampling.model_validate(values)
    except ValidationError as error:
        raise UsageError(invalid_values(error.errors())) from None
