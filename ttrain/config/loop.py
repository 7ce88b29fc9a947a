"""Settings of the training loop: optimizer, schedule, precision, validation, early stopping."""

from typing import Literal

from pydantic import field_validator

from ttrain.config.base import Section, Seed, Share, need, setting


class Optim(Section):
    """AdamW, Adam, or Muon for the hidden matrices and AdamW for the rest."""

    kind: Literal["muon", "adamw", "adam"] = setting(
        "adamw", "muon: of the hidden matrices; AdamW of the rest"
    )
    lr: float = setting(4e-3, "peak learning rate; where kind=muon, of what AdamW trains", gt=0)
    muon_lr: float = setting(0.02, "peak learning rate of Muon, where kind=muon", gt=0)
    embedding_lr: float | None = setting(
        None, "peak learning rate of the embedding; empty: lr", gt=0
    )
    head_lr: float | None = setting(
        None,
        "peak learning rate of the output head, also of one that is the embedding; empty: lr",
        gt=0,
    )
    betas: tuple[Share, Share] = setting(
        (0.9, 0.95), "of AdamW and Adam: decay of the two means, a step"
    )
    eps: float = setting(1e-8, "of AdamW, added to the denominator", gt=0)
    weight_decay: float = setting(
        0.1,
        "on matrices only, never on norms, biases and embeddings; kind=adam adds it to "
        "the gradient",
        ge=0,
    )
    clip: float | None = setting(
        1.0, "largest gradient norm, over all parameters; empty: any", gt=0
    )

    # With a higher rate a step of AdamW or Muon moves every weight by more than 1.
    @field_validator("lr", "muon_lr", "embedding_lr", "head_lr")
    @classmethod
    def _is_usual_rate(cls, value: float | None) -> float | None:
        need(value is None or value <= 1, "must be at most 1; usual are 1e-5 to 5e-2, such as 2e-4")
        return value


class Schedule(Section):
    """Learning rate over the steps: a warm-up, a hold at the peak, a decay to the floor.

    linear: straight in the last `decay_fraction` of the steps. wsd: there too, as 1 - sqrt.
    infinite: wsd; the next night continues from before the decay. cosine: from the hold to the end.
    minimind: cosine, floor 0.1, no warm-up by default. exponential: times `decay_rate` every
    `decay_steps` steps. constant: none. An `average` can replace the decay.
    """

    kind: Literal["linear", "cosine", "constant", "minimind", "exponential", "wsd", "infinite"] = (
        setting(
            "linear",
            "how the learning rate decays after the warm-up; wsd: constant, then a short decay; "
            "infinite: as wsd, "
            "and nights continue the constant part",
        )
    )
    warmup_steps: int | None = setting(None, "empty: 10, but none where kind=minimind", ge=0)
    hold_steps: int = setting(0, "steps at the peak after the warm-up, before any decay", ge=0)
    decay_fraction: float = setting(
        0.5,
        "share of the steps, at the end, in which `linear`, `wsd` and `infinite` decay",
        ge=0,
        le=1,
    )
    decay_rate: float = setting(
        0.5, "of `exponential`: what remains after `decay_steps`", gt=0, le=1
    )
    decay_steps: int = setting(1000, "of `exponential`", ge=1)
    floor: float = setting(
        0.0, "final learning rate as a share of the peak; of `minimind` it is 0.1", ge=0, le=1
    )
    average: float | None = setting(
        None,
        "half-life of a moving average of the weights (EMA), which is the model, as a share of "
        "the steps, at "
        "most 8 % of all steps so far, those of earlier nights too; empty: no average",
        ge=0.25,
    )
    full_rate_steps: int | None = setting(
        None,
        "a training of more steps has its rates times the square root of this / its steps; "
        "empty: no number of "
        "steps changes them",
        ge=1,
    )

    def check_values(self) -> None:
        need(
            self.kind != "minimind" or self.floor in (0.0, 0.1),
            f"schedule.floor is {self.floor} but schedule.kind is minimind, whose floor is 0.1; "
            f"for another floor set schedule.kind=cosine",
        )


class EarlyStopping(Section):
    """Ends a training whose validation loss stops falling; the best weights are kept."""

    patience: int = setting(
        3, "validations without a better loss, one after the other, that end it", ge=1
    )
    min_delta: float = setting(0.0, "a loss is better if it is lower by more than this", ge=0)


Precision = Literal["auto", "bf16", "fp16", "fp32", "tf32"]


class Loop(Section):
    """What the training loop does to the weights, whatever it trains."""

    validate_every_steps: int = setting(0, "0: at the end only", ge=0)
    validate_every_epochs: int | None = setting(
        None, "also with the step that ends every so many passes over the rows; empty: none", ge=1
    )
    validation_rows: int = setting(256, "rows of the held-out part used while training", ge=1)
    early_stopping: EarlyStopping | None = setting(
        None, "empty: train to the end; needs validate_every_steps or validate_every_epochs"
    )
    nonfinite: Literal["stop", "skip", "raise"] = setting(
        "stop",
        "a loss or gradient that is not finite: save and end, leave the step out, or end at once",
    )
    precision: Precision = setting(
        "auto",
        "auto: bf16 where the chip has it, else fp16 on CUDA, else fp32; tf32: CUDA's short "
        "fp32 matmuls",
    )
    seed: Seed = setting(1, "of weights, dropout and the order of rows")
    optim: Optim = Optim()
    schedule: Schedule = Schedule()

    def check_values(self) -> None:
        need(
            self.early_stopping is None or self.validates_while_training,
            "early_stopping is set but validate_every_steps is 0; set it, for example to 50, or "
            "validate_every_epochs",
        )

    @property
    def validates_while_training(self) -> bool:
        """Whether there are validations before the last step."""
        return bool(self.validate_every_steps or self.validate_every_epochs)

    @property
    def prefix(self) -> str:
        """The prefix of these settings' names in the whole tree, for messages."""
        return ""
