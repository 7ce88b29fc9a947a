"""Settings of the evaluation."""

from __future__ import annotations

from pydantic import Field, model_validator

from ttrain.config.base import Section


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

    @model_validator(mode="after")
    def _stride_fits(self) -> Evaluate:
        if self.stride > self.row_length:
            raise ValueError(f"evaluate.stride is {self.stride} but must not exceed evaluate.row_length {self.row_length}")
        return self
