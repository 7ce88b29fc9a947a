"""Stages `replay` and `replay-sft`: a sample of earlier data for a night to read again.

A share of 5 % keeps most of what training on new documents alone forgets (arXiv:2403.08763).
"""

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np

from ttrain.config import Pretrain, Settings, Sft, rules
from ttrain.config.rules import AUTO
from ttrain.core.hashing import digest_of
from ttrain.data.blocks import encode_records, encoder_of
from ttrain.data.order import permute
from ttrain.data.packing import Array, counted_up
from ttrain.data.record_rows import document_windows
from ttrain.data.records import hash_of
from ttrain.data.shards import Column, ShardSet, concatenate, offsets_of, write_index, write_shard
from ttrain.tasks import EARLIER_HELDOUT, LEARNT_BEFORE, SHARE
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.shards import heldout_documents

GOLDEN = (
    5**0.5 - 1
) / 2  # multiples of it modulo 1 are spread evenly: nights one after the other replay other parts
TEMPLATE = "template"  # in the index of chats: the digest of the template that they were made with


def run(settings: Settings, job: StageContext) -> Figures:
    """Write `train/`, a sample of all nights in proportion to their tokens, and by weighted source.

    The sample consists of chats or windows of documents (of complete documents where regions are
    masked). Held-out records of any of these nights are left out, and those of the earlier held-out
    set: a champion promoted by hand may have been trained on them.
    """
    new = ShardSet(job.inputs["documents"] / "train")
    of_documents = new.index["kind"] == "documents"
    training: Pretrain | Sft = settings.pretrain if of_documents else settings.sft
    # A masked region may begin in one window and end in another.
    row_length = training.row_length if of_documents and not training.mask_intervals else None
    tokenizer = new.index["tokenizer"]
    share = settings.nightly.replay
    names = sorted(name for name in job.inputs if name.startswith(LEARNT_BEFORE))
    learnt = {
        name: list(_sources(ShardSet(job.inputs[name] / "train", tokenizer))) for name in names
    }
    passes = (
        Sft.by_rows.epochs if training.epochs == AUTO else training.epochs
    )  # more passes read the same sample again
    tokens_per_pass = new.tokens / (1 - share)
    budget = rules.budget(tokens_per_pass) if training.tokens == AUTO else training.tokens
    read = budget or math.ceil((passes or 0) * tokens_per_pass)
    total = sum(source.tokens for sources in learnt.values() for source in sources)
    sampled_share = min(1.0, share * read / max(1, total))
    held_out = {
        _digest(column, record)
        for name in ("documents", *names)
        for column in ShardSet(job.inputs[name] / "heldout").columns()
        for record in range(len(column))
    }
    if EARLIER_HELDOUT in job.inputs:  # as text, which gets the tokens of tonight's tokenizer
        encoder = encoder_of(str(job.inputs["tokenizer"]))
        for document in heldout_documents(job.inputs[EARLIER_HELDOUT]):
            held_out.add(_digest(encode_records(encoder, "documents", [document]), 0))
    directory = job.output / "train"
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    for nights_since, sources in zip(reversed(range(len(names))), learnt.values(), strict=True):
        for source in sources:
            column = sample(
                source, sampled_share, training.seed, nights_since, held_out, row_length
            )
            path = directory / f"{len(entries):06}.arrow"
            entries.append(
                {
                    **write_shard(path, column, new.index["vocab_size"]),
                    "bytes": 0,  # of text, which is not there
                    "group": 0,
                }
            )
    index = write_index(
        directory,
        kind=new.index["kind"],
        vocab_size=new.index["vocab_size"],
        tokenizer=tokenizer,
        shards=entries,
        **({TEMPLATE: new.index[TEMPLATE]} if TEMPLATE in new.index else {}),
        **{SHARE: share},
    )
    return {
        "records": index["rows"],
        "tokens": index["tokens"],
        "share": share,
        "nights": len(names),
    }


def _sources(shards: ShardSet) -> Iterator[ShardSet]:
    numbers = range(len(shards.weights))
    yield from (
        (source for source in map(shards.group, numbers) if len(source)) if numbers else [shards]
    )


def sample(
    source: ShardSet,
    share: float,
    seed: int,
    nights_since: int,
    heldout: Collection[bytes],
    row_length: int | None,
) -> Column:
    """Sample parts of a source up to `share` of its tokens, rounded up; skip held-out records.

    A part is a window of `row_length` + 1 tokens, or a record. The seed and the source fix the
    order of the parts; `nights_since`, the nights since the source's own, sets where the sample
    begins in that order.
    """
    records, begins, lengths = _parts(source, row_length)
    own_seed = int(digest_of([seed, [entry["sha256"] for entry in source.entries]])[:8], 16)
    order = permute(np.arange(len(records)), len(records), own_seed, 0) if len(records) else records
    order = np.roll(order, -int(nights_since * GOLDEN % 1 * len(order)))
    earlier_tokens = lengths[order].cumsum() - lengths[order]
    chosen = np.sort(order[earlier_tokens < share * lengths.sum()])
    columns = source.columns()
    firsts = offsets_of([len(column) for column in columns])
    of_columns = np.split(chosen, records[chosen].searchsorted(firsts[1:-1]))
    samples: list[Column] = []
    for column, first, inside in zip(columns, firsts, of_columns, strict=False):
        rows = records[inside] - first
        held_out = [row for row in np.unique(rows).tolist() if _digest(column, row) in heldout]
        inside, rows = (numbers[~np.isin(rows, held_out)] for numbers in (inside, rows))
        places = counted_up(column.offsets[rows] + begins[inside], lengths[inside])
        lists = {name: values[places] for name, values in column.lists.items()}
        samples.append(Column(offsets=offsets_of(lengths[inside]), **lists))
    return concatenate(samples)


def _parts(source: ShardSet, row_length: int | None) -> tuple[Array, Array, Array]:
    # (number of the record, its tokens before the part, tokens), in order
    if row_length is None:
        return np.arange(len(source)), np.zeros(len(source), np.int64), source.lengths
    _, records, begins = document_windows(source.lengths, row_length, row_length)
    return records, begins, np.minimum(row_length + 1, source.lengths[records] - begins)


def _digest(column: Column, record: int) -> bytes:
    # The same in every set of one tokenizer
    return hash_of(column.tokens[column.offsets[record] : column.offsets[record + 1]].tobytes())
