"""Stages `shards-*`: documents, chats or pairs to Arrow shards, training and held-out apart."""

import functools
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import orjson

from ttrain.config import Reading, Settings
from ttrain.core.files import JsonDict
from ttrain.core.hashing import DigestCache, code_digests, digest_of
from ttrain.data import blocks, contamination, records, sharding, shards
from ttrain.data.blocks import BlockRecipe, DataFile, Table, table_of
from ttrain.data.json_rows import TEXT
from ttrain.data.pool import Pool, Processes
from ttrain.data.sharding import ShardSetResult, Work
from ttrain.errors import DataError, NothingNew
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import EARLIER_HELDOUT, LEARNT_BEFORE
from ttrain.tasks.common.job import Figures, StageContext

AGAINST = "against"  # the role of files with items of evaluations


def run(settings: Settings, job: StageContext) -> Figures:
    """Write `train/` and `heldout/` (with the records as text beside, for the evaluation); returns
    the counts.
    """
    with Processes(job.runtime.workers or os.cpu_count() or 1) as pool:
        built = build(settings, job, pool)
    check(built, settings.reading, f"data.{job.arguments['dataset']}", job.arguments["kind"])
    return built.to_json()


def make_blocks(settings: Settings, job: StageContext, pool: Pool) -> None:
    """Make the blocks only; another process assembles them."""
    sharding.make_blocks(_work(settings, job, pool))


def build(settings: Settings, job: StageContext, pool: Pool) -> ShardSetResult:
    """Make the shards, or finish those that an earlier run began."""
    # The items of the evaluations that `shards.decontaminate` names; a task has the name of its
    # file.
    left_out = Counter[str]()
    items = [
        item
        for file in job.files.get(AGAINST, ())
        for item in contamination.read_items(file, left_out)
    ]
    against = contamination.OverlapCheck(items, settings.shards.overlapping == "remove", left_out)
    return sharding.build(
        _work(settings, job, pool),
        weights=job.weights,
        against=against if items else None,
        earlier=[job.inputs[name] for name in sorted(job.inputs) if name.startswith(LEARNT_BEFORE)],
        earlier_heldout=heldout_hashes(job.inputs[EARLIER_HELDOUT])
        if EARLIER_HELDOUT in job.inputs
        else None,
    )


def _work(settings: Settings, job: StageContext, pool: Pool) -> Work:
    files = files_of(job)
    kind = job.arguments["kind"]
    reading = settings.reading
    if not job.files.keys() - {AGAINST}:
        reading = reading.model_copy(update={"text_field": TEXT})  # the quickstart's
    if "heldout" in files:  # held-out files that are named leave nothing to choose
        reading = reading.model_copy(update={"heldout_fraction": 0.0})
    else:
        reading = records.with_heldout_share(
            reading,
            [file.location for file in files["train"]],
            records.parser_of(kind, reading.text_field),
        )
    recipe = replace(
        recipe_of(reading, job.inputs["tokenizer"], kind, job.home),
        learn_reasoning=kind == "documents" or settings.sft.learn_reasoning,
        reuse=job.reuse,
    )
    return Work(
        job.output,
        files,
        recipe,
        settings.reading,
        settings.shards.block_bytes,
        pool,
        progress=lambda rows, blocks: job.progress.update(rows, 0, "records", blocks=blocks),
    )


def files_of(job: StageContext) -> dict[str, list[DataFile]]:
    """The files by role; the quickstart's source brings both parts."""
    if not job.files.keys() - {AGAINST}:
        path = job.inputs["source"] / job.arguments["dataset"]
        return {
            "train": [DataFile(f"{path}.jsonl")],
            "heldout": [DataFile(f"{path}_heldout.jsonl")],
        }
    return {
        role: list(map(DataFile, locations, job.groups[role]))
        for role, locations in job.files.items()
        if role != AGAINST
    }


def recipe_of(
    reading: Reading, tokenizer: Path, kind: str, home: Path | None = None
) -> BlockRecipe:
    """The recipe of blocks, with the digest of its code, which `home` remembers."""
    encoder = blocks.encoder_of(str(tokenizer))
    return BlockRecipe(
        kind=kind,
        text_field=reading.text_field,
        heldout_fraction=float(reading.heldout_fraction),
        max_line_bytes=reading.max_line_bytes,
        tokenizer=str(tokenizer),
        tokenizer_digest=encoder.digest,
        template=digest_of(encoder.jinja),
        code=_code(home),
        vocab_size=len(encoder),
        seed=reading.seed,
    )


@functools.cache
def _code(home: Path | None) -> str:
    # 0.2 s where nothing is remembered
    cache = ArtifactStore(home).cache if home else DigestCache(Path(os.devnull))
    return digest_of(code_digests(__name__, cache))


def check(built: ShardSetResult, reading: Reading, name: str, kind: str) -> None:
    """Raise DataError if too many rows are bad or none is left; NothingNew if all are known."""
    expected_fields = records.expected_fields(kind, reading.text_field)
    train = built.tallies["train"]
    train.check(name, reading.rejected_fraction, expected_fields, may_be_empty=True)
    near = built.near_duplicates or {}
    is_empty = not built.parts["train"]["rows"]
    if is_empty and (near.get("of_earlier_sets") or built.of_earlier_heldout):
        raise NothingNew(
            f"{name}: of {train.rows} rows {near.get('dropped', 0)} are near-duplicates, most "
            f"of documents that were "
            f"learnt before (reading.near_duplicates={near.get('threshold')}), "
            f"{built.of_earlier_heldout or 0} are held "
            f"out by earlier nights, and none is left to learn"
        )
    for role, tally in built.tallies.items():
        if role == "train" or tally.rows:
            tally.check(
                name if role == "train" else f"{name}_heldout",
                reading.rejected_fraction,
                expected_fields,
            )
    if is_empty:
        or_overlap = " or hold items of an evaluation" if built.contamination else ""
        raise DataError(
            f"{name}: all {train.kept} rows went to the held-out part{or_overlap}; bring more rows"
        )


def heldout_records(directory: Path) -> Iterator[JsonDict]:
    """The held-out records of a set of shards as text, one at a time."""
    heldout = directory / "heldout"
    for shard in shards.ShardSet(heldout).index["shards"]:
        with (heldout / shard["records"]).open("rb") as lines:
            yield from (orjson.loads(line) for line in lines if line != b"\n")


def heldout_documents(directory: Path) -> Iterator[records.TextDocument]:
    """The held-out documents of shards or of the stage `heldout`, one at a time."""
    return (records.TextDocument(record["text"]) for record in heldout_records(directory))


def heldout_hashes(directory: Path) -> Table:
    """Content hashes of the held-out documents; each row has the two halves of one hash."""
    return table_of(b"".join(map(records.content_hash, heldout_documents(directory))), 2)


def scored_documents(documents: Iterable[JsonDict], max_bytes: int) -> list[JsonDict]:
    """The first held-out documents with this many bytes of text together.

    A longer one is skipped while less than half is taken; if none fits, the shortest is taken.
    """
    scored: list[JsonDict] = []
    total = 0
    sized = [(len(document["text"].encode("utf-8")), document) for document in documents]
    for size, document in sized:
        if total + size <= max_bytes:
            scored.append(document)
            total += size
        elif total >= max_bytes // 2:
            break
    return scored or [document for _, document in sorted(sized, key=lambda one: one[0])[:1]]
