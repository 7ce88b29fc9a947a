"""Rows of documents: no token lost, none counted twice, compared with a loop that a child could write."""

from __future__ import annotations

import itertools
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_data import write_shards

from ttrain.data.packing import IGNORE, Batch
from ttrain.data.record_rows import DocumentRows, SeparateDocumentRows
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError

PAD = 0
KINDS = [DocumentRows, SeparateDocumentRows]
PACKED = pytest.param(partial(SeparateDocumentRows, packed=True), id="packed")


def shard_set(path: Path, documents: list[list[int]], tokens_per_shard: int = 10**6) -> ShardSet:
    records: list[Any] = [(ids, []) for ids in documents]
    write_shards(path, records, kind="documents", vocab_size=1 << 20, tokens_per_shard=tokens_per_shard)
    return ShardSet(path)


def lines(batch: Batch, row: int = 0) -> tuple[list[int], ...]:
    arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
    return tuple(array[row].tolist() for array in arrays)


def some_documents(seed: int, count: int, longest: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, 100) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def naive_rows(documents: list[list[int]], row_length: int, stride: int, kind: Any) -> list[tuple[list[int], ...]]:
    """Token by token: what stands at each place, what comes after it in the same document, and where it stands there."""
    places = [[(number, at) for at in range(len(document))] for number, document in enumerate(documents)]
    streams = [list(itertools.chain.from_iterable(places))] if kind is DocumentRows else places
    rows: list[tuple[list[int], ...]] = []
    for stream in streams:
        start = 0
        while start < len(stream) - 1:
            row: tuple[list[int], ...] = ([], [], [], [])
            for number, at in stream[start : min(start + row_length, len(stream) - 1)]:
                ids, labels, positions, segments = row
                ids.append(documents[number][at])
                labels.append(documents[number][at + 1] if at + 1 < len(documents[number]) else IGNORE)
                positions.append(positions[-1] + 1 if segments and segments[-1] == number else 0)
                segments.append(number)
            missing = row_length - len(row[0])
            padding = (PAD, IGNORE, 0, -1)
            rows.append(tuple(part + [value] * missing for part, value in zip(row, padding, strict=True)))
            if start + row_length >= len(stream) - 1:
                break
            start += stride
    return rows


SHAPES = [(8, 8, 5), (8, 4, 40), (9, 5, 9), (64, 64, 10), (10, 1, 25), (8, 8, 40)]
CASES = [  # each shape with both kinds and with two sizes of a shard
    (kind, (10**6, 20, 1)[(shape + number) % 3], *SHAPES[shape])
    for shape in range(len(SHAPES))
    for number, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("kind", "tokens_per_shard", "row_length", "stride", "longest"), CASES)
def test_document_rows_equal_a_naive_loop(
    tmp_path: Path, kind: Any, tokens_per_shard: int, row_length: int, stride: int, longest: int
) -> None:
    documents = some_documents(row_length * longest, 30, longest)
    rows = kind(shard_set(tmp_path, documents, tokens_per_shard), row_length, PAD, stride=stride)
    rows.trimmed = False
    expected = naive_rows(documents, row_length, stride, kind)
    batch = rows.batch(range(len(rows)))
    assert [lines(batch, row) for row in range(len(rows))] == expected
    assert [lines(rows.batch([row])) for row in range(len(rows))] == expected, "a row does not depend on those beside it"
    assert rows.lengths().tolist() == [sum(segment >= 0 for segment in line[3]) for line in expected]
    counts = rows.counts()
    assert counts["dropped_tokens"] == counts["cut_records"] == counts["masked_tokens"] == 0
    assert counts["fill"] == pytest.approx(rows.lengths().sum() / (row_length * len(rows)))


@pytest.mark.parametrize("together", [4, 1 << 18])
def test_packed_rows_hold_whole_windows_of_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    """The rows of one document each, several in a row, as full as best fit makes them, each with its own positions."""
    monkeypatch.setattr("ttrain.data.record_rows.PACKED_TOGETHER", together)
    documents = some_documents(5, 30, 12)
    shards = shard_set(tmp_path, documents, 50)
    packed, alone = SeparateDocumentRows(shards, 8, PAD, packed=True), SeparateDocumentRows(shards, 8, PAD)
    batch, pieces = packed.batch(range(len(packed))), []
    for row in range(len(packed)):
        ids, labels, positions, segments = (np.array(part) for part in lines(batch, row))
        for begin in np.flatnonzero((positions == 0) & (segments >= 0)):
            length = next((n for n in range(1, 9 - begin) if begin + n == 8 or positions[begin + n] == 0), 8)
            pieces.append([part[begin : begin + length].tolist() for part in (ids, labels, positions, segments)])
    single = alone.batch(range(len(alone)))
    expected = [[part[:length] for part in lines(single, row)] for row, length in enumerate(alone.lengths())]
    assert sorted(pieces) == sorted(expected)
    assert len(packed) < len(alone) and packed.counts()["fill"] > (0.9 if together > 4 else 0.6)


@pytest.mark.parametrize("kind", [*KINDS, PACKED])
@pytest.mark.parametrize(("row_length", "stride"), [(8, 1), (9, 5), (6, 6)])
def test_the_multiplicity_is_what_a_count_of_all_labels_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, row_length: int, stride: int
) -> None:
    monkeypatch.setattr("ttrain.data.record_rows.TOKENS_PER_PASS", 13)
    documents = some_documents(3, 25, 20)
    rows = kind(shard_set(tmp_path, documents, 50), row_length, PAD, stride=stride)
    counts, live = rows.counts(), rows.batch(range(len(rows))).live_tokens
    assert counts["target_tokens"] == live
    assert counts["target_multiplicity"] == pytest.approx(live / sum(len(document) - 1 for document in documents))


@pytest.mark.parametrize(("lengths", "rows"), [([], 0), ([1], 0), ([2], 1), ([9], 1), ([10], 2), ([1, 1], 1), ([4, 5], 1)])
def test_the_number_of_rows_is_what_the_stream_needs(tmp_path: Path, lengths: list[int], rows: int) -> None:
    assert len(DocumentRows(shard_set(tmp_path, [[5] * length for length in lengths]), 8, PAD)) == rows


def test_opening_reads_the_index_only_and_a_row_only_its_shard(tmp_path: Path) -> None:
    shards = shard_set(tmp_path, some_documents(1, 40, 30), tokens_per_shard=100)
    last = sorted(tmp_path.glob("*.arrow"))[-1]
    for path in tmp_path.glob("*.arrow"):
        if path != last:
            path.unlink()
    rows = DocumentRows(shards, 8, PAD)
    assert rows.counts()["rows"] == len(rows) == len(rows.lengths())
    rows.batch([len(rows) - 1])
    with pytest.raises(ArtifactError):
        rows.batch([0])
    with pytest.raises(AssertionError, match="stride 9 with rows of 8"):
        DocumentRows(shards, 8, PAD, stride=9)
