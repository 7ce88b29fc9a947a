"""Settings of the evaluation."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ttrain.config.base import Count, Listed, Location, Section, Seed, as_tuple, need, setting
from ttrain.config.training import TRAINING_STAGES

Names = Annotated[tuple[Location, ...], BeforeValidator(as_tuple)]
HELDOUT = "heldout"  # instead of a file: the held-out documents of the model's own run
# By kind of task: what stands for a file, and which held-out part it is.
HELDOUT_PARTS: dict[str, dict[str, str]] = {
    "text": {HELDOUT: "documents"},
    "chats": {row.part: row.part for row in TRAINING_STAGES.values() if row.rows == "chats"},
    "pairs": {row.part: row.part for row in TRAINING_STAGES.values() if row.rows == "pairs"},
}


class Suites(Section):
    """Suites of tasks for each model of a pipeline, by shipped names or as YAML files.

    They count by their bytes. A value for all models: `evaluate.suites=mine.yaml`.
    """

    base: Names = setting((), "suites of the base model")
    sft: Names = setting((), "suites of the sft model")
    dpo: Names = setting((), "suites of the dpo model")
    lora: Names = setting((), "suites of the lora model")

    @model_validator(mode="before")
    @classmethod
    def _for_all(cls, suites: Any) -> Any:
        return (
            suites
            if isinstance(suites, Mapping | Suites)
            else dict.fromkeys(cls.model_fields, suites)
        )

    def of(self, model: str) -> tuple[str, ...]:
        return tuple(getattr(self, model))


class Windows(Section):
    """Text that is scored in windows."""

    prefix: ClassVar[str] = ""  # of these settings' names, in messages
    row_length: int = setting(
        256, "tokens that the model sees at once; less where it accepts fewer", ge=8
    )
    stride: int = setting(
        128, "each window scores its last `stride` tokens, so that all have context", ge=1
    )

    def check_values(self) -> None:
        need(
            self.stride <= self.row_length,
            f"{self.prefix}stride is {self.stride} but must not exceed {self.prefix}row_length "
            f"{self.row_length}; "
            f"try {self.row_length}",
        )


class Evaluate(Windows):
    """What the evaluation measures."""

    prefix: ClassVar[str] = "evaluate."
    max_bytes: int = setting(
        1_000_000,
        "held-out text that is scored, in UTF-8 bytes; of each night's a tenth of it",
        ge=1000,
    )
    max_chats: int = setting(500, "held-out chats that are scored", ge=1)
    new_tokens: int = setting(48, "length of a sample; 0: no samples", ge=0)
    documents: Annotated[tuple[str, ...] | None, Listed] = setting(
        None, "beginnings that samples continue; empty: those of two held-out documents"
    )
    chats: Annotated[tuple[str, ...] | None, Listed] = setting(
        None, "questions that samples answer; empty: two of held-out chats"
    )
    seed: Seed = setting(1, "of the resampling behind the intervals")
    suites: Suites = Suites()
    confidence: float = setting(0.95, "of the intervals", gt=0.5, lt=1)
    resamples: int = setting(
        2000, "of the bootstrap; 0: no intervals but those of accuracies", ge=0
    )


class Gate(Windows):
    """What `ttrain gate train` reads, how it scores the experts, and the router that it trains."""

    text_field: str = setting(
        "text", "a document's key; with the default also content, body, paragraphs"
    )
    limit: Count | None = setting(None, "records to use, any of them; empty: all", ge=2)
    rejected_fraction: float = setting(
        0.01, "more bad rows than this share end the training", ge=0, le=1
    )
    heldout_fraction: float = setting(0.2, "share of records held out by content hash", gt=0, lt=1)
    characters: int = setting(1024, "of a text that the router reads, from its beginning", ge=16)
    ngram_characters: int = setting(
        4, "the router sees all runs of 1 to so many characters", ge=1, le=8
    )
    buckets: int = setting(
        1 << 14, "embeddings, over which those runs are spread by their hash", ge=16
    )
    embedding_size: int = Field(64, ge=1)
    hidden: int = setting(64, "width of the hidden layer", ge=1)
    epochs: float = setting(20.0, "passes over the records", gt=0)
    rows_per_step: int = setting(32, "records of one optimizer step", ge=1)
    lr: float = setting(3e-3, "peak learning rate of AdamW; it falls to 0 by a cosine", gt=0)
    weight_decay: float = setting(0.01, "of AdamW", ge=0)
    seed: Seed = setting(1, "of weights and the order of records")


class Expert(Section):
    """A model that a gate may choose: its directory, and digests of its weights."""

    reference: str  # as the user named it
    model: str  # the directory of the model, or of the base of an adapter
    weights_sha256: str
    adapter: str | None = None
    adapter_sha256: str | None = None


class GateJob(Section):
    """What `ttrain gate train` hands to its process."""

    gate: Gate
    experts: tuple[Expert, ...]
    data: tuple[str, ...]  # files of documents or chats


class TaskBase(Section):
    """What every task has."""

    limit: int | None = setting(None, "items that are scored, drawn by the seed; empty: all", ge=1)
    seed: Seed = setting(1, "of the items that `limit` draws")
    by: Annotated[tuple[str, ...], Listed] = setting(
        (), "keys of the rows, such as source: figures of each of their values too"
    )


class Shots(TaskBase):
    """A task whose items may stand after worked examples."""

    shots: int = setting(0, "worked examples before each item", ge=0, le=64)
    shots_file: str | None = setting(
        None, "where they come from; empty: the head of the task's own file"
    )
    shots_separator: str = setting("\n\n", "between examples")

    def check_values(self) -> None:
        need(
            self.shots_file is None or self.shots > 0,
            f"shots_file is {self.shots_file}, but shots is 0; say how many examples, such "
            "as shots: 4",
        )


class WindowsTask(TaskBase, Windows):
    """A task on the tokens of records, which are scored in windows."""


class TextTask(WindowsTask):
    """Bits per byte and perplexity of documents, {"text"}."""

    kind: Literal["text"] = "text"
    file: str = setting(
        HELDOUT, "JSON Lines with `text`; heldout: the documents held out from pretraining"
    )
    text_field: str = Field("text", min_length=1)
    max_bytes: int | None = setting(None, "text that is scored, in UTF-8 bytes; empty: all", ge=1)
    by: Annotated[tuple[str, ...], Listed] = setting(
        ("source", "lang"), "keys of the rows: figures of each of their values too"
    )


class ChatsTask(WindowsTask):
    """Loss on the assistant's tokens of chats, and what its own answers look like."""

    kind: Literal["chats"] = "chats"
    file: str = setting(
        "chats", "JSON Lines with chats; chats, domain: those held out from sft, from lora"
    )
    new_tokens: int = setting(
        64, "length of an answer that is judged; 0: the loss alone", ge=0, le=4096
    )
    answers: int = setting(
        2, "of each chat that are judged, the last ones; 0: the loss alone", ge=0, le=64
    )


class PairsTask(WindowsTask):
    """Which of two answers is more probable, {"prompt", "chosen", "rejected"}."""

    kind: Literal["pairs"] = "pairs"
    file: str = setting("pairs", "JSON Lines with pairs of answers; pairs: those held out from dpo")


class ChoicesTask(Shots):
    """Multiple choice by log-likelihood, {"question", "choices", "answer"}."""

    kind: Literal["choices"] = "choices"
    file: str
    normalise: Literal["none", "characters", "bytes", "tokens"] = setting(
        "none",
        "what the log-likelihood of a choice is divided by in the figure that stands for the task",
    )
    template: str = setting("{question}", "what stands before a choice", pattern=r"\{question\}")
    delimiter: str | None = setting(
        None,
        "between question and choice; empty: a space, where neither brings one and the "
        "script has them",
    )


class LastWordTask(Shots):
    """The last word of a passage, {"context", "target"}."""

    kind: Literal["last_word"] = "last_word"
    file: str


class GenerationTask(Shots):
    """A generated answer compared with the right one: {"question", "answer", "final"?}."""

    kind: Literal["generation"] = "generation"
    file: str
    match: Literal["auto", "exact", "numeric"] = setting(
        "auto",
        "what is compared; auto: numbers, where every right answer of the file is one, "
        "else the text",
    )
    new_tokens: int = Field(256, ge=1, le=32768)
    chat: bool = setting(False, "ask through the chat template")
    template: str = setting("Question: {question}\nAnswer:", "what is asked where chat is false")
    stop: Annotated[tuple[str, ...], Listed] = setting(
        ("\n\n", "Question:"), "texts that end an answer where chat is false"
    )


class HarnessTask(TaskBase):
    """A task of lm-evaluation-harness, by its name there."""

    kind: Literal["harness"] = "harness"
    task: str = Field(min_length=1, description="a task or group that the harness knows")
    shots: int | None = setting(None, "worked examples; empty: as the task says", ge=0, le=64)


# The tokens of records are scored, of a file or of a held-out part.
RecordsTask = TextTask | ChatsTask | PairsTask
Task = RecordsTask | ChoicesTask | LastWordTask | GenerationTask | HarnessTask

KINDS = [task.model_fields["kind"].default for task in get_args(Task)]


class Suite(Section):
    """Tasks by name, in the order in which a table shows them."""

    # By names that can be a part of a metric's.
    tasks: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")],
        Annotated[Task, Field(discriminator="kind")],
    ] = Field(min_length=1)
