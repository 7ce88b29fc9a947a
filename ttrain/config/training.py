"""Settings of a training: optimizer, schedule, precision, and what each stage adds."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ttrain.config.base import Location, Section, Share, as_tuple


class Optim(Section):
    """AdamW, Adam, AdamW whose state takes 8 bits a number, or Muon for the hidden matrices and AdamW for the rest."""

    kind: Literal["muon", "adamw", "adam", "adamw8bit"] = Field("adamw", description="adamw8bit needs torchao")
    lr: float = Field(4e-3, gt=0, description="peak learning rate; where kind=muon, of what AdamW trains")
    muon_lr: float = Field(0.02, gt=0, description="peak learning rate of Muon, where kind=muon")
    betas: tuple[Share, Share] = Field((0.9, 0.95), description="of AdamW and Adam: decay of the two means, a step")
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(
        0.1, ge=0, description="on matrices only, never on norms, biases and embeddings; kind=adam adds it to the gradient"
    )
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm, over all parameters; empty: any")


class Schedule(Section):
    """Learning rate over the optimizer steps: a warm-up, a hold at the peak, a decay to the floor.

    linear: decays straight in the last `decay_fraction` of the steps. wsd: there too, as 1 - sqrt. cosine: decays from the
    hold to the end. minimind: the cosine with a floor of 0.1 and, unless asked for, no warm-up. exponential: times
    `decay_rate` every `decay_steps` steps, however long the run. constant: no decay.
    """

    kind: Literal["linear", "cosine", "constant", "minimind", "exponential", "wsd"] = "linear"
    warmup_steps: int | None = Field(None, ge=0, description="empty: 10, but none where kind=minimind")
    hold_steps: int = Field(0, ge=0, description="steps at the peak after the warm-up, before any decay")
    decay_fraction: float = Field(
        0.5, ge=0, le=1, description="share of the steps, at the end, in which `linear` and `wsd` decay"
    )
    decay_rate: float = Field(0.5, gt=0, le=1, description="of `exponential`: what remains after `decay_steps`")
    decay_steps: int = Field(1000, ge=1, description="of `exponential`")
    floor: float = Field(0.0, ge=0, le=1, description="final learning rate as a share of the peak; of `minimind` it is 0.1")

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
    seed: int = Field(1, ge=0, lt=2**32)
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


class Training(Loop):
    """What one training stage does to the weights."""

    tokens: int | None = Field(None, ge=1, description="budget in tokens; one of `tokens` and `epochs`")
    epochs: float | None = Field(None, gt=0, description="budget in passes over the rows")
    tokens_per_step: int = Field(4096, ge=1, description="tokens of one optimizer step, over all ranks")
    row_length: int = Field(256, ge=8, description="tokens of one packed row")
    packing: Literal["best-fit", "none"] = Field(
        "best-fit",
        description="chats share rows, documents are one stream; none: one a row, batches only as wide as their longest",
    )
    stride: int | None = Field(None, ge=1, description="places between the rows of documents; empty: row_length, no overlap")
    order: Literal["shuffled", "length-grouped"] = Field(
        "shuffled", description="length-grouped: rows of about the same length come in the same step"
    )
    mask_intervals: tuple[tuple[int | str, int | str], ...] = Field(
        (), description="[from, to] token pairs, as ids or words: both, and all between them in a record, are never learnt"
    )
    dropped_fraction: float = Field(
        0.01, ge=0, le=1, description="a larger share of chats without a token to learn ends the stage"
    )

    def longest_row(self, limit: int) -> int | None:
        """The longest `row_length` within the limit that the other settings allow; None where there is none."""
        lengths = (length for length in range(limit, 0, -1) if self.tokens_per_step % length == 0)
        return next((length for length in lengths if self.accepts(row_length=length)), None)

    @model_validator(mode="after")
    def _rules(self) -> Training:
        if (self.tokens is None) == (self.epochs is None):
            raise ValueError(f"set one of tokens ({self.tokens}) and epochs ({self.epochs}), and the other to null")
        if self.tokens_per_step % self.row_length:
            good = max(1, round(self.tokens_per_step / self.row_length)) * self.row_length
            raise ValueError(
                f"tokens_per_step is {self.tokens_per_step} but must be a multiple of row_length {self.row_length}; "
                f"try {good}"
            )
        if self.stride is not None and self.stride > self.row_length:
            raise ValueError(
                f"stride is {self.stride} but must not exceed row_length {self.row_length}, or tokens between two rows "
                f"would never be learnt; try {self.row_length}"
            )
        if self.order == "length-grouped" and self.packing != "none":
            raise ValueError(
                f"order is length-grouped but packing is {self.packing}, which makes all rows equally long; set packing=none"
            )
        for opens, closes in self.mask_intervals:
            if opens == closes:
                raise ValueError(f"mask_intervals has [{opens}, {closes}], but a region must not open and close alike")
        return self

    @property
    def section(self) -> str:
        """Name of the section in the settings, for messages."""
        return type(self).__name__.lower()

    @property
    def prefix(self) -> str:
        return f"{self.section}."

    @property
    def rows_per_step(self) -> int:
        """Packed rows of one optimizer step, over all ranks."""
        return self.tokens_per_step // self.row_length


class TaskConfig(Loop):
    """What `ttrain train --task` does to the weights; a task derives its own settings from it, with its own defaults."""

    epochs: float = Field(10.0, gt=0, description="passes over the rows")
    rows_per_step: int = Field(64, ge=1, description="rows of one optimizer step, over all ranks")
    precision: Precision = Field("fp32", description="as of PyTorch itself; auto: bf16 or fp16 where the chip is faster so")

    @property
    def tokens_per_step(self) -> int:
        """A row counts as one token, in the loop and in the curves."""
        return self.rows_per_step


NONE = "none"
TRAININGS = ("pretrain", "sft", "lora")  # in the order in which one goes on from another


def _starts(*allowed_starts: str) -> AfterValidator:
    """Refuse the name of a stage that does not come before this one."""

    def check(value: str) -> str:
        if value in TRAININGS and value not in allowed_starts:
            raise ValueError(
                f"start_from is {value}, a stage that does not come before this one; it takes {', '.join(allowed_starts)}, "
                f"a directory (./{value} for one of that name), or owner/name[@revision] on the Hub"
            )
        return value

    return AfterValidator(check)


class Pretrain(Training):
    """Pretraining; Muon reached 2.02 bits per byte where AdamW alone ended at 2.5 to 2.7 in the same time."""

    start_from: Annotated[Location, _starts(NONE)] = Field(
        NONE, min_length=1, description="none, a Hugging Face directory, or owner/name[@revision] on the Hub"
    )
    tokens: int | None = Field(1_000_000, ge=1)
    optim: Optim = Optim(kind="muon")


class Sft(Training):
    """Fine-tuning on chats; the loss counts the assistant's tokens."""

    start_from: Annotated[Location, _starts("pretrain", NONE)] = Field(
        "pretrain", min_length=1, description="pretrain, none, a Hugging Face directory, or owner/name[@revision]"
    )
    epochs: float | None = Field(1.0, gt=0)
    optim: Optim = Optim(lr=1e-3, weight_decay=0.0)


class Lora(Training):
    """An adapter on a frozen model, through PEFT.

    lora: arXiv:2106.09685. dora: arXiv:2402.09353. prefix: arXiv:2101.00190.
    """

    start_from: Annotated[Location, _starts("sft", "pretrain", NONE)] = Field(
        "sft", min_length=1, description="sft, pretrain, none, a Hugging Face directory, or owner/name[@revision]"
    )
    kind: Literal["lora", "dora", "prefix"] = Field("lora", description="what is trained: see docs/adapters.md")
    epochs: float | None = Field(2.0, gt=0)
    tokens_per_step: int = Field(2048, ge=1)
    optim: Optim = Optim(lr=5e-3, weight_decay=0.0)
    rank: int = Field(16, ge=1, description="of lora and dora")
    alpha: float = Field(32.0, gt=0, description="of lora and dora; the adapter's output is scaled by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="of lora and dora; its masks also depend on runtime.rows_per_device")
    targets: Annotated[tuple[str, ...], BeforeValidator(as_tuple)] = Field(
        ("all-linear",),
        min_length=1,
        description="of lora and dora: last parts of layers' names, `attention`, or `all-linear` (all but the output head)",
    )
    virtual_tokens: int = Field(8, ge=1, description="of prefix: positions that the adapter puts before every record")
    quantize: Literal["none", "nf4", "int8"] = Field(
        "none", description="how the frozen base is held (QLoRA, arXiv:2305.14314); needs bitsandbytes"
    )

    @model_validator(mode="after")
    def _int8_goes_with_it(self) -> Lora:
        if self.quantize == "int8" and self.kind == "dora":
            raise ValueError("lora.quantize is int8, on which PEFT's dora does not train; set lora.quantize=nf4")
        return self
