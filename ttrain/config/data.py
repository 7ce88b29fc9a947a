"""Settings of the data: where it comes from, how it is read, tokenizer, shards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ttrain.config.base import Count, Location, Paths, Section, Weighted, as_tuple, with_fields
from ttrain.config.training import TRAINING_STAGES

PYTHON_DOCS = "python-docs"
LEAST_SIMILAR = 0.5  # of near-duplicates: below it, most pairs that share a band are not similar enough
NEAR_DUPLICATES_OF_NIGHTS = 0.8  # where reading.near_duplicates is empty
LEARNT = tuple(dict.fromkeys(row.dataset for row in TRAINING_STAGES.values()))  # data sets that the training stages read
DATASETS = (*(name for dataset in LEARNT for name in (dataset, f"{dataset}_heldout")), "tokenizer")


def dataset_read(name: str, tokenizer: object) -> str:
    """The data set whose files are read: a tokenizer without files of its own reads documents."""
    return "pretrain" if name == "tokenizer" and not tokenizer else name


@with_fields({name: (Paths, Field((), description="of a stage that another package brings")) for name in DATASETS})
class Data(Section):
    """Where the data comes from: paths, globs, folders, URLs, `hf://owner/name`, or `python-docs`.

    Files count by their bytes, not by their names. A list may weigh its sources: [{path: a.jsonl, weight: 3}, b.jsonl].
    """

    pretrain: Paths = Field((PYTHON_DOCS,), min_length=1, description="documents, JSONL with a text field")
    pretrain_heldout: Paths = Field((), description="held-out documents; empty: taken from `pretrain` by content hash")
    sft: Paths = Field((PYTHON_DOCS,), min_length=1, description="chats, JSONL with `messages` or `conversations`")
    sft_heldout: Paths = Field((), description="held-out chats; empty: taken from `sft` by content hash")
    dpo: Paths = Field((), description="pairs of answers, JSONL with `chosen` and `rejected`; empty: no stage `dpo`")
    dpo_heldout: Paths = Field((), description="held-out pairs; empty: taken from `dpo` by content hash of the prompt")
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
        for name in (*LEARNT, "tokenizer"):
            paths = self.paths(name)
            if PYTHON_DOCS in paths and len(paths) > 1:
                raise ValueError(f"data.{name} mixes {PYTHON_DOCS} with files; choose one of them")
            if name != "tokenizer" and PYTHON_DOCS in paths and getattr(self, f"{name}_heldout"):
                raise ValueError(f"data.{name}_heldout is set, but {PYTHON_DOCS} brings its own held-out part")
        return self

    def uses_python_docs(self, name: str) -> bool:
        """Whether the data set `name` is made from the Python documentation that ships with ttrain."""
        return self.paths(dataset_read(name, self.tokenizer)) == (PYTHON_DOCS,)


class PythonDocs(Section):
    """The quickstart's text: docstrings, language reference and source of Python, from a file that ships with ttrain."""

    document_bytes: int = Field(3_000_000, ge=300_000, description="documents to take, in UTF-8 bytes, of 2.3 MB")
    source_code_fraction: float = Field(0.0, ge=0, le=1, description="share of the documents that is source code, of 1.2 MB")
    chat_rows: int = Field(4000, ge=100, description="chats to take, of about 9000")
    domain_rows: int = Field(800, ge=50, description="letters to take, of about 1500")
    heldout_fraction: float = Field(0.055, gt=0, lt=0.5, description="share of modules held out (at least 100 kB)")


class Reading(Section):
    """How records are read from files."""

    text_field: str = Field("text", description="a document's key; with the default also content, body, paragraphs")
    heldout_fraction: float = Field(0.02, ge=0, lt=1, description="share of rows held out by content hash")
    rejected_fraction: float = Field(0.01, ge=0, le=1, description="more bad rows than this share end the stage")
    max_line_bytes: int = Field(32 << 20, ge=1024, le=256 << 20, description="a longer line is rejected unread")
    deduplicate: bool = Field(True, description="of rows that say exactly the same, keep the first")
    near_duplicates: float | None = Field(
        None,
        ge=0,
        le=1,
        description="of documents that are as similar (Jaccard of their shingles), keep the first; 0: all; empty: 0.8 in "
        "nights, else all",
    )
    limit: Count | None = Field(None, ge=1, description="rows to use, for a try; empty: all")
    rounds: int = Field(1, ge=1, description="how many times `limit` distinct rows to use")
    sample: Literal["reservoir", "head"] = Field("reservoir", description="which rows `limit` takes: any, or the first")
    seed: int = Field(1, ge=0, lt=2**32, description="of the reservoir")

    @model_validator(mode="after")
    def _rounds_of_a_limit(self) -> Reading:
        if self.rounds > 1 and self.limit is None:
            raise ValueError(f"reading.rounds is {self.rounds} but reading.limit is not set; set it, or rounds=1")
        return self

    @model_validator(mode="after")
    def _similarity_that_can_be_found(self) -> Reading:
        if self.near_duplicates and self.near_duplicates < LEAST_SIMILAR:
            raise ValueError(
                f"reading.near_duplicates is {self.near_duplicates}, but texts less similar than {LEAST_SIMILAR} are not "
                f"found; set {LEAST_SIMILAR} to 1, or 0 to keep all"
            )
        return self


class Tokenizer(Section):
    """A byte-level BPE with the full byte alphabet, or a tokenizer that exists."""

    vocab_size: Count = Field(2048, ge=300, description="entries, the 256 bytes and the special tokens among them")
    template: Literal["ttrain", "tinyseek", "own", "auto"] = Field(
        "ttrain", description="chat template; own: the existing one's; auto: that, or ttrain's where it has none"
    )
    existing: Location | None = Field(None, description="a folder with tokenizer.json, or owner/name[@revision] on the Hub")
    sample: Literal["reservoir", "head"] = Field("reservoir", description="which documents: any, or the first")
    seed: int = Field(1, ge=0, lt=2**32, description="of the reservoir")
    max_documents: int | None = Field(None, ge=1, description="documents to learn from; empty: all")
    max_bytes: int = Field(50_000_000, ge=10_000, description="text to learn from, in UTF-8 bytes")

    @model_validator(mode="after")
    def _own_template_exists(self) -> Tokenizer:
        if self.template in ("own", "auto") and self.existing is None:
            raise ValueError(
                f"tokenizer.template is '{self.template}' but tokenizer.existing names no tokenizer; set one of them"
            )
        return self


class Shards(Section):
    """Arrow files of token ids."""

    block_bytes: int = Field(16 << 20, ge=1024, description="text of one shard, which one worker makes at a time")
    decontaminate: Annotated[tuple[Location, ...], BeforeValidator(as_tuple)] = Field(
        (), description="suites, or files with items of evaluations, that training documents are checked against"
    )
    overlapping: Literal["remove", "report"] = Field("remove", description="what becomes of documents that hold an item")
    overlap_bytes: int = Field(32, ge=24, description="letters in UTF-8 from which on a part in common counts")
    overlap_share: float = Field(0.5, gt=0, le=1, description="share of an item in such parts that makes a document hold it")
