"""Settings of data sources, reading, tokenizer and shards."""

from typing import Annotated, Literal

from pydantic import BeforeValidator

from ttrain.config.base import (
    Count,
    Location,
    Paths,
    Section,
    Seed,
    Share,
    Weighted,
    as_tuple,
    need,
    setting,
)
from ttrain.config.rules import AUTO
from ttrain.config.training import TRAININGS

PYTHON_DOCS = "python-docs"
LEAST_SIMILAR = (
    0.5  # of near-duplicates: below it, most pairs that share a band are not similar enough
)
NEAR_DUPLICATES_OF_NIGHTS = 0.8  # where reading.near_duplicates is empty
# Those that the training stages read are named as their stages.
DATASETS = (
    *(name for dataset in TRAININGS for name in (dataset, f"{dataset}_heldout")),
    "tokenizer",
)
HELDOUT_ROWS = "held-out rows; empty: taken by content hash"


def dataset_read(name: str, tokenizer: object) -> str:
    """The data set whose files are read: a tokenizer without files reads `pretrain`."""
    return "pretrain" if name == "tokenizer" and not tokenizer else name


class Data(Section):
    """Where the data comes from: paths, globs, folders, URLs, `hf://owner/name`, or `python-docs`.

    Where one of pretrain, sft, dpo and lora names files, those not set are none. Files count by
    their bytes. Sources can be weighted: [{path: a.jsonl, weight: 3}, b.jsonl].
    """

    pretrain: Paths = setting(
        (PYTHON_DOCS,), "documents, JSONL with a text field; none: no stage `pretrain`"
    )
    pretrain_heldout: Paths = setting(
        (), "held-out documents; empty: taken from `pretrain` by content hash"
    )
    sft: Paths = setting(
        (PYTHON_DOCS,), "chats, JSONL with `messages` or `conversations`; none: no stage `sft`"
    )
    sft_heldout: Paths = setting((), HELDOUT_ROWS)
    dpo: Paths = setting(
        (), "pairs of answers, JSONL with `chosen` and `rejected`; none: no stage `dpo`"
    )
    dpo_heldout: Paths = setting((), HELDOUT_ROWS)
    lora: Paths = setting(
        (PYTHON_DOCS,), "chats of the domain that the adapter learns; none: no stage `lora`"
    )
    lora_heldout: Paths = setting((), HELDOUT_ROWS)
    tokenizer: Paths = setting(
        (), "documents the tokenizer learns from; empty: the training part of `pretrain`"
    )

    def paths(self, name: str) -> tuple[str, ...]:
        return tuple(
            entry.path if isinstance(entry, Weighted) else entry for entry in getattr(self, name)
        )

    def weights(self, name: str) -> tuple[float, ...]:
        """The weight of each source of a data set; empty if none is set."""
        entries = getattr(self, name)
        if not any(isinstance(entry, Weighted) for entry in entries):
            return ()
        return tuple(entry.weight if isinstance(entry, Weighted) else 1.0 for entry in entries)

    def check_values(self) -> None:
        for name in (*TRAININGS, "tokenizer"):
            paths = self.paths(name)
            ours = PYTHON_DOCS in paths
            need(
                not ours or len(paths) == 1,
                f"data.{name} mixes {PYTHON_DOCS} with files; choose one of them",
            )
            need(
                not ours or not getattr(self, f"{name}_heldout", ()),
                f"data.{name}_heldout is set, but {PYTHON_DOCS} brings its own held-out part",
            )

    def uses_python_docs(self, name: str) -> bool:
        """Whether the data set is the Python documentation that ships with ttrain."""
        return self.paths(dataset_read(name, self.tokenizer)) == (PYTHON_DOCS,)


class PythonDocs(Section):
    """The quickstart's text: Python's docstrings and language reference, shipped with ttrain."""

    document_bytes: int = setting(
        3_000_000, "documents to take, in UTF-8 bytes, of 2.3 MB", ge=300_000
    )
    chat_rows: int = setting(4000, "chats to take, of about 9000", ge=100)


class Reading(Section):
    """How records are read from files."""

    text_field: str = setting(
        "text", "a document's key; with the default also content, body, paragraphs"
    )
    heldout_fraction: Literal["auto"] | Share = setting(
        AUTO,
        "share of rows held out by content hash; auto: max(2 %, min(50 rows, 20 %)) of a data "
        "set's distinct rows",
    )
    rejected_fraction: float = setting(
        0.01, "more bad rows than this share end the stage", ge=0, le=1
    )
    max_line_bytes: int = setting(
        32 << 20, "a longer line is rejected unread", ge=1024, le=256 << 20
    )
    deduplicate: bool = setting(True, "of rows that say exactly the same, keep the first")
    near_duplicates: float | None = setting(
        None,
        "of documents that are as similar (Jaccard of their shingles), keep the first; 0: all; "
        "empty: 0.8 in "
        "nights, else all",
        ge=0,
        le=1,
    )
    limit: Count | None = setting(None, "rows to use, for a try; empty: all", ge=1)
    sample: Literal["reservoir", "head"] = setting(
        "reservoir", "which rows `limit` takes: any, or the first"
    )
    seed: Seed = setting(1, "of the reservoir")

    def check_values(self) -> None:
        need(
            not self.near_duplicates or self.near_duplicates >= LEAST_SIMILAR,
            f"reading.near_duplicates is {self.near_duplicates}, but texts less similar than "
            f"{LEAST_SIMILAR} are not "
            f"found; set {LEAST_SIMILAR} to 1, or 0 to keep all",
        )


class Tokenizer(Section):
    """A byte-level BPE with the full byte alphabet, or a tokenizer that exists."""

    vocab_size: Count = setting(
        2048, "entries, the 256 bytes and the special tokens among them", ge=300, le=2**24
    )
    template: Literal["ttrain", "tinyseek", "own", "auto"] = setting(
        "ttrain",
        "chat template; own: the existing one's; auto: that, or ttrain's where it has none",
    )
    existing: Location | None = setting(
        None, "a folder with tokenizer.json, or owner/name[@revision] on the Hub"
    )
    sample: Literal["reservoir", "head"] = setting(
        "reservoir", "which documents: any, or the first"
    )
    seed: Seed = setting(1, "of the reservoir")
    max_documents: int | None = setting(None, "documents to learn from; empty: all", ge=1)
    max_bytes: int = setting(50_000_000, "text to learn from, in UTF-8 bytes", ge=10_000)

    def check_values(self) -> None:
        need(
            self.template not in ("own", "auto") or self.existing is not None,
            f"tokenizer.template is '{self.template}' but tokenizer.existing names no "
            "tokenizer; set one of them",
        )


class Shards(Section):
    """Arrow files of token ids."""

    block_bytes: int = setting(
        16 << 20, "text of one shard, which one worker makes at a time", ge=1024
    )
    decontaminate: Annotated[tuple[Location, ...], BeforeValidator(as_tuple)] = setting(
        (),
        "suites, or files with items of evaluations, that training documents are checked against",
    )
    overlapping: Literal["remove", "report"] = setting(
        "remove", "what becomes of documents that hold an item"
    )
