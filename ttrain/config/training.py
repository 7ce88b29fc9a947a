"""Settings of the training stages, and the table of them."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, field_validator

from ttrain.config import rules
from ttrain.config.base import Count, Location, Section, as_tuple, need, setting
from ttrain.config.loop import Loop, Optim, Precision

Passes = Annotated[float, Field(gt=0)]
Tokens = Annotated[Count, Field(ge=1)]
Auto = Literal["auto"]
Marker = Annotated[int | str, Field(union_mode="left_to_right")]  # a token, by its id or its text
NONE = "none"
EVALUATED = "eval/"  # before the name of a metric of the evaluation, among the metrics of a run
VALIDATION_LOSS = "validation_loss"  # of a training, where nothing is evaluated


class Training(Loop):
    """What one training stage does to the weights."""

    by_rows: ClassVar[rules.FineTuning] = rules.FineTuning()  # what `auto` makes of the rows

    tokens: Tokens | Auto | None = setting(
        None, "budget in tokens, such as 1_000_000 or 1M; one of `tokens` and `epochs`"
    )
    epochs: Passes | Auto | None = setting(None, "budget in passes over the rows")
    tokens_per_step: Tokens | Auto = setting(4096, "tokens of one optimizer step, over all ranks")
    row_length: int = setting(256, "tokens of one packed row", ge=8)
    packing: Literal["best-fit", "stream", "none"] = setting(
        "best-fit",
        "records share rows; stream: documents one after the other, cut at each row's end; "
        "none: one a row, "
        "batches only as wide as their longest",
    )
    stride: int | None = setting(
        None, "places between the rows of documents; empty: row_length, no overlap", ge=1
    )
    order: Literal["shuffled", "length-grouped"] = setting(
        "shuffled", "length-grouped: rows of about the same length come in the same step"
    )
    mask_intervals: tuple[tuple[Marker, Marker], ...] = setting(
        (),
        "[from, to] token pairs, as ids or words: both, and all between them in a record, are "
        "never learnt",
    )
    dropped_fraction: float = setting(
        0.01, "a larger share of chats without a token to learn ends the stage", ge=0, le=1
    )

    def resolved(self, rows: int) -> Self:
        """The settings with numbers for `auto`, for a training with this many rows."""
        settings = (
            self.replaced({"tokens_per_step": self.by_rows.batch(rows, self.row_length)})
            if self.tokens_per_step == rules.AUTO
            else self
        )
        by_rule = {
            "tokens": rules.budget(rows * self.row_length),
            "epochs": self.by_rows.passes(rows, settings.rows_per_step),
        }
        return settings.replaced(
            {name: value for name, value in by_rule.items() if getattr(self, name) == rules.AUTO}
        )

    @property
    def automatic(self) -> tuple[str, ...]:
        """The settings that the rows decide."""
        return tuple(
            name
            for name in ("tokens", "tokens_per_step", "epochs")
            if getattr(self, name) == rules.AUTO
        )

    def check_values(self) -> None:
        super().check_values()
        need(
            self.tokens is not None or self.epochs is not None,
            "tokens and epochs are both empty, but one of them must be the budget; set one, "
            "such as epochs=1",
        )
        need(
            self.tokens is None or self.epochs is None,
            f"tokens is {self.tokens} and epochs is {self.epochs}, but only one of them can be "
            "the budget; "
            f"set the other to null",
        )
        if self.tokens_per_step != rules.AUTO:
            need(
                self.step_tokens % self.row_length == 0,
                f"tokens_per_step is {self.tokens_per_step} but must be a multiple of "
                f"row_length {self.row_length}; "
                f"try {max(1, round(self.step_tokens / self.row_length)) * self.row_length}",
            )
        need(
            self.stride is None or self.stride <= self.row_length,
            f"stride is {self.stride} but must not exceed row_length {self.row_length}, or "
            "tokens between two rows "
            f"would never be learnt; try {self.row_length}",
        )
        need(
            self.order == "shuffled" or self.packing == "none",
            f"order is {self.order} but packing is {self.packing}, which makes all rows equally "
            "long; set packing=none",
        )
        for opens, closes in self.mask_intervals:
            need(
                opens != closes,
                f"mask_intervals has [{opens}, {closes}], but a region must not open and "
                "close alike",
            )

    @field_validator("start_from", check_fields=False)
    @classmethod
    def _starts_from_an_earlier_stage(cls, value: str) -> str:
        starts = TRAINING_STAGES[cls.__name__.lower()].starts
        need(
            value not in TRAININGS or value in starts,
            f"start_from is {value}, a stage that does not come before this one; it takes "
            f"{', '.join([*starts, NONE])}, "
            f"a directory (./{value} for one of that name), or owner/name[@revision] on the Hub",
        )
        return value

    @property
    def section(self) -> str:
        return type(self).__name__.lower()

    @property
    def prefix(self) -> str:
        return f"{self.section}."

    @property
    def rows_per_step(self) -> int:
        """Packed rows of one optimizer step, over all ranks."""
        return self.step_tokens // self.row_length

    @property
    def step_tokens(self) -> int:
        """Tokens of one optimizer step, over all ranks."""
        return int(self.tokens_per_step)

    @property
    def token_budget(self) -> int | None:
        """The budget in tokens; None if it is in passes."""
        return None if self.tokens is None else int(self.tokens)

    @property
    def passes(self) -> float | None:
        """The budget in passes over the rows; None if it is in tokens."""
        return None if self.epochs is None else float(self.epochs)


class TaskConfig(Loop):
    """Settings of `ttrain train`; a task derives its own settings and defaults from it."""

    epochs: float = setting(10.0, "passes over the rows", gt=0)
    rows_per_step: int = setting(64, "rows of one optimizer step, over all ranks", ge=1)
    precision: Precision = setting(
        "fp32", "as of PyTorch itself; auto: bf16 or fp16 where the chip is faster so"
    )

    @property
    def step_tokens(self) -> int:
        """Rows count as tokens, in the loop and in curves."""
        return self.rows_per_step


class TaskJob(Section):
    """What `ttrain train` passes to its process, which knows the task's settings."""

    task: str
    # (origin, key, value) of the settings, the weakest first.
    given: tuple[tuple[str, str, Any], ...]
    allow: tuple[str, ...]


MOST_TEACHERS = 8
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple)]


class Pretrain(Training):
    """Pretraining. `auto` batch and rates follow from the size of a new model (docs/recipe.md)."""

    start_from: Location = setting(
        NONE, "none, a Hugging Face directory, or owner/name[@revision] on the Hub", min_length=1
    )
    tokens: Tokens | Auto | None = setting(
        rules.AUTO,
        f"budget in tokens; auto: {rules.TOKENS:_}, or {rules.USEFUL_PASSES} passes if that is "
        "less; one of `tokens` and `epochs`",
    )
    epochs: Passes | None = setting(None, "budget in passes over the rows")
    tokens_per_step: Tokens | Auto = setting(
        rules.BATCH, "tokens of one optimizer step, over all ranks; auto: by the size of the model"
    )
    teacher: Names = setting(
        (),
        "earlier models whose likeliest next tokens are learnt too, of three passes and more "
        "(docs/recipe.md): previous, champion, or runs, stages and keys of the home, by their mean",
        max_length=MOST_TEACHERS,
    )
    teacher_weight: float = setting(
        0.5, "share of each target that the teacher decides", gt=0, le=1
    )
    optim: Optim = Optim(kind="muon", betas=rules.BETAS, **rules.RATES)


class FineTune(Training):
    """A training whose batch and budget follow from its rows."""

    epochs: Passes | Auto | None = setting(
        rules.AUTO, "budget in passes over the rows; auto: more than usual where there are few"
    )
    tokens_per_step: Tokens | Auto = setting(
        rules.AUTO, "tokens of one optimizer step, over all ranks; auto: by the number of rows"
    )


class Sft(FineTune):
    """Fine-tuning on chats; the loss counts the assistant's tokens."""

    start_from: Location = setting(
        "pretrain",
        "pretrain, none, a Hugging Face directory, or owner/name[@revision]",
        min_length=1,
    )
    learn_reasoning: bool = setting(
        True, "whether the `reasoning_content` of answers is trained on, in pairs too"
    )
    optim: Optim = Optim(lr=1e-3, weight_decay=0.0)


class Adapted(FineTune):
    """A training of all weights or of an adapter, through PEFT."""

    rank: int = setting(16, "of the adapter", ge=1)
    alpha: float = setting(32.0, "of the adapter; its output is scaled by alpha / rank", gt=0)
    dropout: float = setting(
        0.0, "of the adapter; its masks also depend on runtime.rows_per_device", ge=0, lt=1
    )
    targets: Names = setting(
        ("all-linear",),
        "of the adapter: last parts of layers' names, `attention`, or `all-linear` (all but the "
        "output head)",
        min_length=1,
    )
    start_from: Location = setting(
        "sft",
        "sft, pretrain, none, a Hugging Face directory, or owner/name[@revision]",
        min_length=1,
    )


class Dpo(Adapted):
    """Preference tuning: prefer the chosen answer to the rejected one (docs/preferences.md).

    dpo: arXiv:2305.18290. ipo: arXiv:2310.12036. cdpo: arXiv:2305.18290, with label smoothing.
    simpo: arXiv:2405.14734. orpo: arXiv:2403.07691. kto: arXiv:2402.01306.
    """

    loss: Literal["dpo", "ipo", "cdpo", "simpo", "orpo", "kto"] = setting(
        "dpo", "simpo and orpo need no reference model; kto reads single rated answers, too"
    )
    beta: float = setting(
        0.1, "how far the model may leave the reference: the smaller, the farther", gt=0
    )
    label_smoothing: float = setting(
        0.1, "of cdpo: share of pairs that are labelled the wrong way", ge=0, lt=0.5
    )
    margin: float = setting(
        0.5, "of simpo: the reward by which the chosen answer should lead (gamma)", ge=0
    )
    length_normalized: bool = setting(
        False, "divide log-probabilities by the answer's tokens; ipo, simpo and orpo always do"
    )
    desirable_weight: float = setting(1.0, "of kto: weight of the good answers", ge=0)
    undesirable_weight: float = setting(1.0, "of kto: weight of the bad answers", ge=0)
    sft_weight: float = setting(
        0.0, "weight of the chosen answers' own loss a token; orpo has it always", ge=0
    )
    optim: Optim = Optim(lr=2e-4, weight_decay=0.0)
    adapter: Literal["none", "lora", "dora"] = setting(
        "none",
        "none: train all weights; else an adapter, which is merged into the model at the end",
    )

    @property
    def has_reference(self) -> bool:
        """Whether the loss needs the model that training starts from (stage `reference`)."""
        return self.loss not in ("simpo", "orpo")

    def check_values(self) -> None:
        super().check_values()
        need(
            self.loss != "orpo" or not self.sft_weight,
            f"dpo.sft_weight is {self.sft_weight} but dpo.loss is orpo, which has that term; "
            "set it to 0",
        )


class Lora(Adapted):
    """An adapter on a frozen model, through PEFT.

    lora: arXiv:2106.09685. dora: arXiv:2402.09353. prefix: arXiv:2101.00190.
    """

    kind: Literal["lora", "dora", "prefix"] = setting(
        "lora", "what is trained: see docs/adapters.md"
    )
    by_rows: ClassVar[rules.FineTuning] = rules.FineTuning(tokens_per_step=2048, epochs=2.0)
    optim: Optim = Optim(lr=5e-3, weight_decay=0.0)
    virtual_tokens: int = setting(
        8, "of prefix: positions that the adapter puts before every record", ge=1
    )
    quantize: Literal["none", "nf4", "int8"] = setting(
        "none", "how the frozen base is held (QLoRA, arXiv:2305.14314); needs bitsandbytes"
    )

    def check_values(self) -> None:
        super().check_values()
        need(
            self.quantize != "int8" or self.kind != "dora",
            "lora.quantize is int8, on which PEFT's dora does not train; set lora.quantize=nf4",
        )


def adapter_of(stage: str, settings: Any) -> Lora | None:
    """The adapter of a training stage as settings of `lora`; None if it trains all weights."""
    section = getattr(settings, stage, None)
    if isinstance(section, Dpo) and section.adapter != "none":
        shared = {
            name: getattr(section, name)
            for name in ("rank", "alpha", "dropout", "targets", "seed", "start_from")
        }
        return Lora().replaced({"kind": section.adapter, **shared})
    return section if isinstance(section, Lora) else None


@dataclass(frozen=True)
class PrimaryMetric:
    """The metric that decides about a stage's model, over held-out `records`."""

    name: str
    model: str
    label: str
    records: str
    higher_is_better: bool = False
    separator: str = "_"  # before the model

    @property
    def family(self) -> str:
        return self.name.removesuffix(f"{self.separator}{self.model}")

    @property
    def of_run(self) -> str:
        return f"{EVALUATED}{self.name}"

    def of(self, model: str) -> str:
        return self.name if model == self.model else f"{self.family}{self.separator}{model}"


BITS_PER_BYTE = PrimaryMetric("bits_per_byte", "base", "bits per byte", "documents")
CHAT_LOSS = PrimaryMetric("chat_loss_sft", "sft", "chats loss", "chats")
PREFERENCE_ACCURACY = PrimaryMetric(
    "preference_accuracy/dpo",
    "dpo",
    "preference accuracy",
    "pairs",
    higher_is_better=True,
    separator="/",
)
DOMAIN_LOSS = PrimaryMetric("domain_loss_lora", "lora", "domain loss", "domain")


@dataclass(frozen=True)
class TrainingStage:
    """A training stage, for all parts of ttrain that list such stages.

    It is named after its settings, as is its data set.
    """

    settings: type[Training]
    label: str  # on pages and charts
    # A base model, one that chats, or an adapter on a model.
    role: Literal["base", "chat", "adapter"]
    rows: Literal["documents", "chats", "pairs"]  # what it learns from
    metric: PrimaryMetric  # by which its model is judged
    about: str  # what it does

    @property
    def name(self) -> str:
        return self.settings.__name__.lower()

    @property
    def model(self) -> str:
        """Name of its model in the evaluation, and suffix of its registered model."""
        return self.metric.model

    @property
    def part(self) -> str:
        """Name of its held-out rows in the evaluation."""
        return self.metric.records

    @property
    def loss(self) -> str:
        """Prefix of losses on held-out chats; documents have bits per byte, pairs a share."""
        return self.metric.family if self.rows == "chats" else ""

    @property
    def starts(self) -> list[str]:
        """The stages that it may start from, the nearest first."""
        return [
            name
            for name in reversed(TRAININGS[: TRAININGS.index(self.name)])
            if TRAINING_STAGES[name].role != "adapter"
        ]


# In the order in which one goes on from another.
ROWS = (
    TrainingStage(
        Pretrain,
        "pretraining",
        "base",
        "documents",
        BITS_PER_BYTE,
        "Train a new model, or that of pretrain.start_from, on documents",
    ),
    TrainingStage(
        Sft,
        "SFT",
        "chat",
        "chats",
        CHAT_LOSS,
        "Fine-tune the pretrained model, or that of sft.start_from, on chats",
    ),
    TrainingStage(
        Dpo,
        "DPO",
        "chat",
        "pairs",
        PREFERENCE_ACCURACY,
        "Tune the fine-tuned model, or that of dpo.start_from, on pairs of answers",
    ),
    TrainingStage(
        Lora,
        "LoRA",
        "adapter",
        "chats",
        DOMAIN_LOSS,
        "Train an adapter for the fine-tuned model, or for that of lora.start_from, on chats "
        "of a domain",
    ),
)
TRAINING_STAGES = {row.name: row for row in ROWS}
TRAININGS = tuple(TRAINING_STAGES)
# Where runs share a model, the metric of the next one tells which run is better.
PRIMARY_METRICS = {name: row.metric for name, row in TRAINING_STAGES.items()}
# Of weights, dropout, the order of rows, and replayed samples.
SEEDS = tuple(f"{name}.seed" for name in TRAINING_STAGES)
MODELS = tuple(row.model for row in TRAINING_STAGES.values())  # as the evaluation names them


def model_order(model: str) -> int:
    """Sort key for names of models: in the order of training, then all others."""
    return MODELS.index(model) if model in MODELS else len(MODELS)
