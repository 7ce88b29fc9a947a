"""Settings of a gate: a router over finished models."""

from __future__ import annotations

from pydantic import Field, model_validator

from ttrain.config.base import Section
from ttrain.config.training import Optim, TaskConfig


class Gate(TaskConfig):
    """What `ttrain gate train` reads, how it scores the experts, and the router that it trains."""

    text_field: str = Field("text", description="a document's key; with the default also content, body, paragraphs")
    limit: int | None = Field(None, ge=2, description="records to use, any of them; empty: all")
    rejected_fraction: float = Field(0.01, ge=0, le=1, description="more bad rows than this share end the training")
    heldout_fraction: float = Field(0.2, gt=0, lt=1, description="share of records held out by content hash")
    row_length: int = Field(256, ge=8, description="tokens that an expert sees at once when it is scored")
    stride: int = Field(128, ge=1, description="each window scores its last `stride` tokens, so that all have context")
    characters: int = Field(1024, ge=16, description="of a text that the router reads, from its beginning")
    ngram_characters: int = Field(4, ge=1, le=8, description="the router sees all runs of 1 to so many characters")
    buckets: int = Field(1 << 14, ge=16, description="embeddings, over which those runs are spread by their hash")
    embedding_size: int = Field(64, ge=1)
    hidden: int = Field(64, ge=1, description="width of the hidden layer")
    epochs: float = Field(20.0, gt=0, description="passes over the records")
    rows_per_step: int = Field(32, ge=1, description="records of one optimizer step")
    validation_rows: int = Field(4096, ge=1, description="held-out records whose loss is measured while training")
    optim: Optim = Optim(lr=3e-3, weight_decay=0.01)

    @model_validator(mode="after")
    def _stride_fits(self) -> Gate:
        if self.stride > self.row_length:
            raise ValueError(
                f"stride is {self.stride} but must not exceed row_length {self.row_length}; try {self.row_length}"
            )
        return self


class Expert(Section):
    """A model that a gate may choose: where its files lie, and the digests of its weights."""

    reference: str  # as the user named it
    model: str  # the directory of the model, or of the base of an adapter
    weights_sha256: str
    adapter: str | None = None
    adapter_sha256: str | None = None


class GateConfig(Section):
    """What `ttrain gate train` hands to its process."""

    gate: Gate
    experts: tuple[Expert, ...]
    data: tuple[str, ...]  # files of documents or chats
    allow: tuple[str, ...] = ()
