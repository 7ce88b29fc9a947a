"""Settings of the training loop: optimizer, schedule, precision, validation and early stopping."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from ttrain.config.base import Section, Share


class Optim(Section):
    """AdamW, Adam, AdamW whose state takes 8 bits a number, or Muon for the hidden matrices and AdamW for the rest."""

    kind: Literal["muon", "adamw", "adam", "adamw8bit"] = Field("adamw", description="adamw8bit needs torchao")
    lr: float = Field(4e-3, gt=0, description="peak learning rate; where kind=muon, of what AdamW trains")
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon, where kind=muon")
    embedding_lr: float | None = Field(None, gt=0, description="peak learning rate of the embedding; empty: lr")
    head_lr: float | None = Field(
        None, gt=0, description="peak learning rate of the output head, also of one that is the embedding; empty: lr"
    )
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="of AdamW and Adam: decay of the two means, a step")
    eps: float = Field(1e-8, gt=0, description="of AdamW, added to the denominator")
    weight_decay: float = Field(
        0.1, ge=0, description="on matrices only, never on norms, biases and embeddings; kind=adam adds it to the gradient"
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm, over all parameters; empty: any")


class Schedule(Section):
    """Learning rate over the optimizer steps: a warm-up, a hold at the peak, a decay to the floor.

    linear: decays straight in the last `decay_fraction` of the steps. wsd: there too, as 1 - sqrt. infinite: as wsd, and the
    state before the decay is kept, with which the next night continues. cosine: decays from the
    hold to the end. minimind: the cosine with a floor of 0.1 and, unless asked for, no warm-up. exponential: times
    `decay_rate` every `decay_steps` steps, however long the run. constant: no decay. An `average` can stand for the decay.
    """

    kind: Literal["linear", "cosine", "constant", "minimind", "exponential", "wsd", "infinite"] = Field(
        "linear",
        description="how the learning rate decays after the warm-up; wsd: constant, then a short decay; infinite: as wsd, "
        "and nights continue the constant part",
    )
    warmup_steps: int | None = Field(None, ge=0, description="empty: 10, but none where kind=minimind")
    hold_steps: int = Field(0, ge=0, description="steps at the peak after the warm-up, before any decay")
    decay_fraction: float = Field(
        0.5, ge=0, le=1, description="share of the steps, at the end, in which `linear`, `wsd` and `infinite` decay"
    )
    decay_rate: float = Field(0.5, gt=0, le=1, description="of `exponential`: what remains after `decay_steps`")
    decay_steps: int = Field(1000, ge=1, description="of `exponential`")
    floor: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak; of `minimind` it is 0.1")
    average: float | None = Field(
        None,
        ge=0.25,
        description="half-life of a moving average of the weights (EMA), which is the model, as a share of the steps, at "
        "most 8 % of all steps so far, those of earlier nights too; empty: no average",
    )
    full_rate_steps: int | None = Field(
        None,
        ge=1,
        description="a training of more steps has its rates times the square root of this / its steps; empty: no number of "
        "steps changes them",
    )

    @model_validator(mode="after")
    def _one_floor(self) -> Schedule:
        if self.kind == "minimind" and self.floor not in (0.0, 0.1):
            raise ValueError(
                f"schedule.floor is {self.floor} but schedule.kind is minimind, whose floor is 0.1; "
                f"for another floor set schedule.kind=cosine"
            )
        return self


class EarlyStopping(Section):
    """Ends a training whose validation loss no longer falls. The best weights are kept, also of one that reaches its end."""

    patience: int = Field(3, ge=1, description="validations without a better loss, one after the other, that end it")
    min_delta: float = Field(0.0, ge=0, description="a loss is better if it is lower by more than this")


Precision = Literal["auto", "bf16", "fp16", "fp32", "tf32"]


class Loop(Section):
    """What the training loop does to the weights, whatever it trains."""

    validate_every_steps: int = Field(0, ge=0, description="0: at the end only")
    validation_rows: int = Field(256, ge=1, description="rows of the held-out part used while training")
    early_stopping: EarlyStopping | None = Field(None, description="empty: train to the end; needs validate_every_steps")
    nonfinite: Literal["stop", "skip", "raise"] = Field(
        "stop", description="a loss or gradient that is not finite: save and end, leave the step out, or end at once"
    )
    precision: Precision = Field(
        "auto", description="auto: bf16 where the chip has it, else fp16 on CUDA, else fp32; tf32: CUDA's short fp32 matmuls"
    )
    seed: int = Field(1, ge=0, lt=2**32, description="of weights, dropout and the order of rows")
    optim: Optim = Optim()
    schedule: Schedule = Schedule()

    @model_validator(mode="after")
    def _early_stopping_is_asked(self) -> Self:
        if self.early_stopping and not self.validate_every_steps:
            raise ValueError("early_stopping is set but validate_every_steps is 0; set it, for example to 50")
        return self

    @property
    def prefix(self) -> str:
        """The prefix of these settings' names in the whole tree, for messages."""
        return ""
