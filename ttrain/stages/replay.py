"""Stages `replay` and `replay-sft`: documents or chats that the champion has learnt before, for a night to read beside the
new ones.

A model that learns new documents alone forgets the old ones; a share of 5 % of old ones keeps most of them
(arXiv:2403.08763).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ttrain.config import ReplayConfig, ReplaySftConfig
from ttrain.core.hashing import digest_of
from ttrain.data.loader import permute
from ttrain.data.shards import Column, ShardSet, write_index, write_shard
from ttrain.stages import LEARNT_BEFORE, SHARE
from ttrain.stages.job import StageContext

STRATUM = 32  # documents; of a source with 100 documents and a share of 5 %, 5 give or take 1, where a draw has 5 ± 2.2
TEMPLATE = "template"  # in the index of chats: the digest of the template that they were made with


def run(config: ReplayConfig | ReplaySftConfig, job: StageContext) -> dict[str, Any]:
    """Write `train/`, a sample of the records of all nights, in proportion to their tokens by night, by source where sources
    have weights, and by place, so that each file has its share, and each source that stands together in one.

    It has as many tokens as the night reads again, or all of them. A record that the held-out part of tonight or of one of
    these nights has is left out. Seed and new records determine the sample.
    """
    training = config.pretrain if isinstance(config, ReplayConfig) else config.sft
    new = ShardSet(job.inputs["documents"] / "train")
    tokenizer, share = new.index["tokenizer"], config.nightly.replay
    names = sorted(name for name in job.inputs if name.startswith(LEARNT_BEFORE))
    learnt = {name: list(_sources(ShardSet(job.inputs[name] / "train", tokenizer))) for name in names}
    read = training.tokens or math.ceil((training.epochs or 0) * new.tokens / (1 - share))
    total = sum(source.tokens for sources in learnt.values() for source in sources)
    sampled_share = min(1.0, share * read / max(1, total))
    seed = int(digest_of([training.seed, [shard["sha256"] for shard in new.index["shards"]]])[:8], 16)
    held_out = {digest for name in ("documents", *names) for digest in _digests(ShardSet(job.inputs[name] / "heldout"))}
    directory = job.output / "train"
    directory.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    nights: dict[str, dict[str, int]] = {}
    for name, sources in learnt.items():
        numbered = enumerate(sources, len(entries))
        columns = [sample(source, sampled_share, seed, number, held_out) for number, source in numbered]
        nights[name.removeprefix(LEARNT_BEFORE)] = {
            "records": sum(map(len, columns)), "tokens": sum(len(column.tokens) for column in columns),
            "of": sum(source.tokens for source in sources),
        }  # fmt: skip
        for column in columns:
            entry = write_shard(directory / f"{len(entries):06}.arrow", column, new.index["vocab_size"])
            entries.append({**entry, "bytes": 0, "group": 0})  # of text, which is not there
    index = write_index(
        directory,
        kind=new.index["kind"],
        vocab_size=new.index["vocab_size"],
        tokenizer=tokenizer,
        shards=entries,
        **({TEMPLATE: new.index[TEMPLATE]} if TEMPLATE in new.index else {}),
        **{SHARE: share},
    )
    return {"records": index["rows"], "tokens": index["tokens"], "share": share, "nights": nights}


def _sources(shards: ShardSet) -> Iterator[ShardSet]:
    """The sources of a night, which are apart where they have weights."""
    numbers = range(len(shards.weights))
    yield from (source for source in map(shards.group, numbers) if len(source)) if numbers else [shards]


def sample(source: ShardSet, share: float, seed: int, number: int, heldout: Collection[bytes]) -> Column:
    """Documents of a source that have this share of its tokens, rounded up to a document, without held-out ones."""
    order = _spread(permute(np.arange(len(source)), len(source), seed, number))
    earlier_tokens = source.lengths[order].cumsum() - source.lengths[order]
    chosen = np.zeros(len(source), bool)
    chosen[order[earlier_tokens < share * source.tokens]] = True
    parts, first = [], 0
    for column in source.columns():
        flags = chosen[first : first + len(column)].copy()
        for record in np.flatnonzero(flags).tolist():
            flags[record] = _digest(column, record) not in heldout
        parts.append(column.select(flags))
        first += len(column)
    lengths = np.concatenate([np.diff(piece.offsets) for piece in parts])
    tokens: npt.NDArray[Any] = np.concatenate([piece.tokens for piece in parts])
    live = [piece.live for piece in parts if piece.live is not None]
    offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int64)
    return Column(tokens, offsets, np.concatenate(live) if live else None)


def _spread(order: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """A random order in which each stratum, STRATUM neighbouring documents, comes up once before any comes up again."""
    strata = order // STRATUM
    by_stratum = np.argsort(strata, kind="stable")
    firsts = np.searchsorted(strata[by_stratum], strata[by_stratum])  # where the stratum begins
    turns = np.empty_like(order)
    turns[by_stratum] = np.arange(len(order)) - firsts
    return order[np.argsort(turns, kind="stable")]


def _digests(shards: ShardSet) -> Iterator[bytes]:
    """The digest of each record."""
    for column in shards.columns():
        yield from (_digest(column, record) for record in range(len(column)))


def _digest(column: Column, record: int) -> bytes:
    """The digest of a record's tokens, which is the same in every set of one tokenizer."""
    return hashlib.blake2b(
        column.tokens[column.offsets[record] : column.offsets[record + 1]].tobytes(), digest_size=16
    ).digest()
