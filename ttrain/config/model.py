"""Settings of the model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from ttrain.config.base import Section


class Model(Section):
    """A Hugging Face architecture, by its sizes."""

    kind: Literal["llama", "qwen3"] = "llama"
    hidden_size: int = Field(128, ge=8)
    layers: int = Field(4, ge=1)
    heads: int = Field(2, ge=1)
    kv_heads: int | None = Field(None, ge=1, description="grouped-query attention; empty: as many as `heads`")
    intermediate_size: int | None = Field(None, ge=8, description="empty: 8/3 of hidden_size, rounded up to 32")
    max_length: int = Field(1024, ge=16, description="positions the model accepts, in tokens")
    tie_embeddings: bool = True
    rope_theta: float = Field(10_000.0, gt=0)
    init_std: float = Field(0.02, gt=0)
    dropout: float = Field(
        0.0, ge=0, lt=1, description="on attention weights; its masks also depend on runtime.rows_per_device"
    )

    @model_validator(mode="after")
    def _heads_divide(self) -> Model:
        if self.hidden_size % self.heads:
            raise ValueError(
                f"model.hidden_size is {self.hidden_size} but must be a multiple of model.heads {self.heads}; "
                f"try {-(-self.hidden_size // self.heads) * self.heads}"
            )
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"model.kv_heads is {self.kv_heads} but must divide model.heads {self.heads}; try 1")
        return self
