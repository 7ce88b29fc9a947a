"""Every setting, typed and frozen.

What changes the weights sits in a stage's sections and enters its key; what changes only how fast or where it runs sits in
`runtime`, `tracking` and `data` (whose files count by their bytes, never by their path) and does not.
Defaults are the quickstart: a model of 1 M parameters that learns in about a minute on two cores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

PYTHON_DOCS = "python-docs"
CLOCK = r"^([01]\d|2[0-3]):[0-5]\d$"
DATASETS = ("pretrain", "pretrain_heldout", "sft", "sft_heldout", "lora", "lora_heldout", "tokenizer")


class Section(BaseModel):
    """A frozen group of settings; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def _as_tuple(value: object) -> object:
    """One path or a comma-separated list of them is as good as a list; a file whose name has a comma is one path."""
    if value is None:
        return ()
    if isinstance(value, str) and Path(value).expanduser().exists():
        return (value,)
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


class Weighted(Section):
    """A source and how often its rows are drawn, against the other sources' weights."""

    path: str
    weight: float = Field(1.0, gt=0)


def _as_sources(value: object) -> object:
    return (value,) if isinstance(value, Mapping) else _as_tuple(value)


Paths = Annotated[tuple[str | Weighted, ...], BeforeValidator(_as_sources)]


class Data(Section):
    """Where the data comes from: paths, globs, folders, URLs, `hf://owner/name`, or `python-docs`.

    Files count by their bytes, not by their names. A list may weigh its sources: [{path: a.jsonl, weight: 3}, b.jsonl].
    """

    pretrain: Paths = Field((PYTHON_DOCS,), min_length=1, description="documents, JSONL with a text field")
    pretrain_heldout: Paths = Field((), description="held-out documents; empty: taken from `pretrain` by content hash")
    sft: Paths = Field((PYTHON_DOCS,), min_length=1, description="chats, JSONL with `messages` or `conversations`")
    sft_heldout: Paths = Field((), description="held-out chats; empty: taken from `sft` by content hash")
    lora: Paths = Field((PYTHON_DOCS,), min_length=1, description="chats of the domain that the adapter learns")
    lora_heldout: Paths = Field((), description="held-out chats of that domain; empty: taken from `lora`")
    tokenizer: Paths = Field((), description="documents the tokenizer learns from; empty: the training part of `pretrain`")

    def paths(self, name: str) -> tuple[str, ...]:
        """The sources of a data set, without their weights."""
        return tuple(entry.path if isinstance(entry, Weighted) else entry for entry in getattr(self, name))

    def weights(self, name: str) -> tuple[float, ...]:
        """The weight of each source of a data set; empty where none is given."""
        entries = getattr(self, name)
        if not any(isinstance(entry, Weighted) for entry in entries):
            return ()
        return tuple(entry.weight if isinstance(entry, Weighted) else 1.0 for entry in entries)

    @model_validator(mode="after")
    def _one_kind_of_source(self) -> Data:
        for name in ("pretrain", "sft", "lora", "tokenizer"):
            paths = self.paths(name)
            if PYTHON_DOCS in paths and len(paths) > 1:
                raise ValueError(f"data.{name} mixes {PYTHON_DOCS} with files; choose one of them")
            if name != "tokenizer" and PYTHON_DOCS in paths and getattr(self, f"{name}_heldout"):
                raise ValueError(f"data.{name}_heldout is set, but {PYTHON_DOCS} brings its own held-out part")
        return self

    def uses_python_docs(self, name: str) -> bool:
        """Whether the data set `name` is read from the Python that runs ttrain."""
        return (self.paths(name) or self.paths("pretrain")) == (PYTHON_DOCS,)


class PythonDocs(Section):
    """The quickstart's text: docstrings, language reference and source of the Python that runs ttrain."""

    document_bytes: int = Field(3_000_000, ge=300_000, description="documents to make, in UTF-8 bytes")
    source_code_fraction: float = Field(0.0, ge=0, le=1, description="share of the documents that is source code")
    chat_rows: int = Field(4000, ge=100)
    domain_rows: int = Field(800, ge=50)
    heldout_fraction: float = Field(0.055, gt=0, lt=0.5, description="share of modules held out (at least 100 kB)")


class Reading(Section):
    """How records are read from files."""

    text_field: str = Field("text", description="a document's key; with the default also content, body, paragraphs")
    heldout_fraction: float = Field(0.02, ge=0, lt=1, description="share of rows held out by content hash")
    rejected_fraction: float = Field(0.01, ge=0, le=1, description="more bad rows than this share end the stage")
    max_line_bytes: int = Field(32 << 20, ge=1024, le=256 << 20, description="a longer line is rejected unread")
    deduplicate: bool = Field(True, description="of rows that say exactly the same, keep the first")
    limit: int | None = Field(None, ge=1, description="rows to use, for a try; empty: all")
    rounds: int = Field(1, ge=1, description="how many times `limit` distinct rows to use")
    sample: Literal["reservoir", "head"] = Field("reservoir", description="which rows `limit` takes: any, or the first")
    seed: int = Field(1, ge=0, lt=2**32, description="of the reservoir")

    @model_validator(mode="after")
    def _rounds_of_a_limit(self) -> Reading:
        if self.rounds > 1 and self.limit is None:
            raise ValueError(f"reading.rounds is {self.rounds} but reading.limit is not set; set it, or rounds=1")
        return self


class Tokenizer(Section):
    """A byte-level BPE with the full byte alphabet, or a tokenizer that exists."""

    vocab_size: int = Field(2048, ge=300, description="entries, the 256 bytes and the special tokens among them")
    template: Literal["ttrain", "tinyseek", "own"] = Field("ttrain", description="chat template; own: the existing one's")
    existing: str | None = Field(None, description="a folder with tokenizer.json, or owner/name[@revision] on the Hub")
    sample: Literal["reservoir", "head"] = Field("reservoir", description="which documents: any, or the first")
    seed: int = Field(1, ge=0, lt=2**32, description="of the reservoir")
    max_documents: int | None = Field(None, ge=1, description="documents to learn from; empty: all")
    max_bytes: int = Field(50_000_000, ge=10_000, description="text to learn from, in UTF-8 bytes")

    @model_validator(mode="after")
    def _own_template_exists(self) -> Tokenizer:
        if self.template == "own" and self.existing is None:
            raise ValueError("tokenizer.template is 'own' but tokenizer.existing names no tokenizer; set one of them")
        return self


class Shards(Section):
    """Arrow files of token ids."""

    block_bytes: int = Field(16 << 20, ge=1024, description="text of one shard, which one worker makes at a time")


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


Share = Annotated[float, Field(ge=0, lt=1)]


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
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = Field(
        "original", description="how the rate follows a matrix's sizes; match_rms_adamw: so that a rate found for AdamW fits"
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
        "stop", description="a loss or gradient that is no number: save and end, leave the step out, or end at once"
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
        """What stands before the names of these settings in the whole tree, for messages."""
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


class Pretrain(Training):
    """Pretraining; Muon reached 2.02 bits per byte where AdamW alone ended at 2.5 to 2.7 in the same time."""

    tokens: int | None = Field(1_000_000, ge=1)
    optim: Optim = Optim(kind="muon")


class Sft(Training):
    """Fine-tuning on chats; the loss counts the assistant's tokens."""

    epochs: float | None = Field(1.0, gt=0)
    optim: Optim = Optim(lr=1e-3, weight_decay=0.0)


class Lora(Training):
    """A low-rank adapter on the SFT model (LoRA, arXiv:2106.09685), through PEFT."""

    epochs: float | None = Field(2.0, gt=0)
    tokens_per_step: int = Field(2048, ge=1)
    optim: Optim = Optim(lr=5e-3, weight_decay=0.0)
    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0)
    dropout: float = Field(0.0, ge=0, lt=1, description="its masks also depend on runtime.rows_per_device")
    targets: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )


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


class Night(Section):
    """Hours in which training takes less of the machine. The same weights come of it, up to the order of summation."""

    start: str = Field("22:00", pattern=CLOCK, description="hour:minute; included")
    end: str = Field("08:00", pattern=CLOCK, description="hour:minute; not included. The same as start: all day")
    timezone: str | None = Field(None, description="such as Europe/Berlin; empty: the machine's own")
    rows_fraction: float = Field(0.5, gt=0, le=1, description="of runtime.rows_per_device")
    threads_fraction: float = Field(0.5, gt=0, le=1, description="of the threads of a rank")
    memory_limit_gb: float | None = Field(None, gt=0, description="of a rank, as runtime.memory_limit_gb")

    @field_validator("timezone")
    @classmethod
    def _timezone_exists(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                ZoneInfo(value)
            except (ZoneInfoNotFoundError, ValueError):
                raise ValueError(f"timezone is {value!r}, which no time zone has as its name; try Europe/Berlin") from None
        return value


class Runtime(Section):
    """How fast and where it runs. Nothing here changes a key."""

    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    devices: int = Field(1, ge=1, description="ranks of a training stage on this machine")
    nodes: int = Field(1, ge=1, description="machines that train together, through torchrun; all need the same TTRAIN_HOME")
    node_rank: int = Field(0, ge=0, description="which of them this one is; 0 publishes")
    rendezvous: str | None = Field(None, pattern=r"^\S+:\d{1,5}$", description="host:port of node 0, where nodes meet")
    rank_timeout_seconds: float = Field(
        20.0, gt=0, description="ranks that do not answer, or all wait, for so long (or five of their steps) are ended"
    )
    fork_server: bool = Field(True, description="stages that train start from a process that has their libraries loaded")
    threads: int | None = Field(None, ge=1, description="threads of a rank; empty: the cores divided by the ranks")
    rows_per_device: int = Field(16, ge=1, description="rows of one micro-batch on one rank")
    memory_limit_gb: float | None = Field(
        None, gt=0, description="of a rank, in 1e9 bytes: of the GPU, or of the process on a CPU; more ends the stage"
    )
    night: Night | None = Field(None, description="hours in which less of the machine is taken; empty: none")
    prefetch_steps: int = Field(1, ge=0, description="steps whose rows are made ahead, each in a thread; 0: none")
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="ranks hold whole models, or shards of one (FSDP2)")
    reduction: Literal["fast", "tree"] = Field(
        "fast", description="tree: gradients are summed in an order that no number of ranks changes, equal to the last bit"
    )
    deterministic: bool = Field(True, description="the same run gives the same bits; false: the fastest kernels")
    compile: bool = Field(False, description="torch.compile; pays for long runs only")
    loss_chunk_tokens: int | None = Field(
        None, ge=0, description="tokens whose logits are in memory at once; empty: chosen, 0: all of a micro-batch"
    )
    gradient_checkpointing: bool = Field(
        False, description="keep only what goes into each layer, and compute it again for the gradient: a third slower"
    )
    log_every_steps: int = Field(10, ge=1)
    sample_every_steps: int = Field(0, ge=0, description="steps between texts that the model writes for you; 0: none")
    sample_prompts: tuple[str, ...] = Field(
        ("Return the", "Hello! Who are you?"), min_length=1, description="beginnings of documents, or what a user asks"
    )
    checkpoint_every_steps: int = Field(100, ge=1)
    keep_checkpoints: int = Field(2, ge=1, description="the newest so many, beside the best one")
    keep_every_steps: int = Field(0, ge=0, description="checkpoints of these steps stay for good; 0: none")
    guards: Literal["warn", "off"] = Field("warn", description="look out for spikes of the loss, overfitting, a dead loader")
    tensorboard: bool = Field(False, description="event files beside the curves; needs the extra tb")
    workers: int | None = Field(None, ge=1, description="processes that make shards; empty: the cores")
    sharding: Literal["processes", "dask"] = Field("processes", description="where shards are made; dask: on its cluster")
    dask_address: str | None = Field(None, description="scheduler of the Dask cluster; empty: a local one of `workers`")
    retries: int = Field(0, ge=0, description="how often Prefect runs a failed stage again")
    retry_delay_seconds: float = Field(10.0, ge=0)
    timeout_seconds: float | None = Field(None, gt=0, description="of one stage; empty: none")

    @model_validator(mode="after")
    def _nodes_can_meet(self) -> Runtime:
        if self.node_rank >= self.nodes:
            raise ValueError(
                f"runtime.node_rank is {self.node_rank} but must be below runtime.nodes, which is {self.nodes}; "
                f"nodes count from 0"
            )
        if self.nodes > 1 and not self.rendezvous:
            raise ValueError(
                f"runtime.nodes is {self.nodes} but runtime.rendezvous is empty; set it to host:port of node 0, on all nodes"
            )
        return self


class Tracking(Section):
    """MLflow."""

    enabled: bool = True
    experiment: str = Field("ttrain", min_length=1)


class Settings(Section):
    """The whole tree."""

    name: str = Field("quickstart", pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="prefix of registered models")
    data: Data = Data()
    python_docs: PythonDocs = PythonDocs()
    reading: Reading = Reading()
    tokenizer: Tokenizer = Tokenizer()
    shards: Shards = Shards()
    model: Model = Model()
    pretrain: Pretrain = Pretrain()
    sft: Sft = Sft()
    lora: Lora = Lora()
    evaluate: Evaluate = Evaluate()
    runtime: Runtime = Runtime()
    tracking: Tracking = Tracking()

    @model_validator(mode="after")
    def _rows_fit_the_model(self) -> Settings:
        for name in ("pretrain", "sft", "lora", "evaluate"):
            length = getattr(self, name).row_length
            if length > self.model.max_length:
                raise ValueError(
                    f"{name}.row_length is {length} but model.max_length is {self.model.max_length}; "
                    f"set model.max_length={length}"
                )
        return self


# Sections that each stage is allowed to see: what is not here cannot shape its result.
class SourceConfig(Section):
    python_docs: PythonDocs


class TokenizerConfig(Section):
    reading: Reading
    tokenizer: Tokenizer


class ShardsConfig(Section):
    reading: Reading
    shards: Shards


class PretrainConfig(Section):
    model: Model
    pretrain: Pretrain


class SftConfig(Section):
    sft: Sft


class LoraConfig(Section):
    lora: Lora


class EvaluateConfig(Section):
    evaluate: Evaluate


class UserTaskConfig(Section):
    """What `ttrain train --task` hands to its process, which alone knows the task's own settings."""

    task: str
    given: tuple[tuple[str, str, Any], ...]  # (origin, key, value) of the settings, the weakest first
    allow: tuple[str, ...]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of a nested mapping with their dotted names: ("sft.optim.lr", 0.001)."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{name}.")
        else:
            yield name, value
