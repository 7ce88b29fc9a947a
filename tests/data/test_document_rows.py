"""Rows of documents and of several sources: no token is lost or counted twice."""

import itertools
import random
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_data import NumberedRows, write_shards

from ttrain.data.packing import IGNORE, Array, Batch, Counts, MixedRows, best_fit, masked
from ttrain.data.record_rows import ChatRows, DocumentRows, SeparateDocumentRows
from ttrain.data.shards import ShardSet
from ttrain.errors import ArtifactError

PAD = 0
KINDS = [DocumentRows, SeparateDocumentRows]
PAIRS = ((1, 2), (3, 4))
Pairs = tuple[tuple[int, int], ...]
marked_record = st.lists(st.integers(1, 6), min_size=1, max_size=24)
records_of_markers = st.lists(marked_record, min_size=1, max_size=6)
PACKED = pytest.param(partial(SeparateDocumentRows, packed=True), id="packed")


def shard_set(path: Path, documents: list[list[int]], per_shard: int = 10**6) -> ShardSet:
    common: Any = {"kind": "documents", "vocab_size": 1 << 20, "tokens_per_shard": per_shard}
    write_shards(path, [(ids, []) for ids in documents], **common)
    return ShardSet(path)


def lines(batch: Batch, row: int = 0) -> tuple[list[int], ...]:
    arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
    return tuple(array[row].tolist() for array in arrays)


def some_documents(seed: int, count: int, longest: int) -> list[list[int]]:
    chance = random.Random(seed)
    return [chance.choices(range(3, 100), k=chance.randint(1, longest)) for _ in range(count)]


def naive_rows(
    documents: list[list[int]], row_length: int, stride: int, kind: Any
) -> list[tuple[list[int], ...]]:
    """Token by token: the token, the next one of its document, its position and its document."""
    places = [list(itertools.product([n], range(len(ids)))) for n, ids in enumerate(documents)]
    streams = [list(itertools.chain.from_iterable(places))] if kind is DocumentRows else places
    rows: list[tuple[list[int], ...]] = []
    for stream in streams:
        start = 0
        while start < len(stream) - 1:
            row: tuple[list[int], ...] = ([], [], [], [])
            for number, at in stream[start : min(start + row_length, len(stream) - 1)]:
                ids, labels, positions, segments = row
                ids.append(documents[number][at])
                labels.append([*documents[number], IGNORE][at + 1])
                positions.append(positions[-1] + 1 if segments and segments[-1] == number else 0)
                segments.append(number)
            for part, padding in zip(row, (PAD, IGNORE, 0, -1), strict=True):
                part += [padding] * (row_length - len(part))
            rows.append(row)
            if start + row_length >= len(stream) - 1:
                break
            start += stride
    return rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("per_shard", "row_length", "stride", "longest"),
    [
        *[(10**6, 8, 8, 5), (20, 8, 4, 40), (1, 9, 5, 9)],
        *[(10**6, 64, 64, 10), (20, 10, 1, 25), (1, 8, 8, 40)],
    ],
)
def test_document_rows_equal_a_naive_loop(
    tmp_path: Path, kind: Any, per_shard: int, row_length: int, stride: int, longest: int
) -> None:
    if kind is SeparateDocumentRows:  # each shape with two sizes of a shard
        per_shard = {10**6: 20, 20: 1, 1: 10**6}[per_shard]
    documents = some_documents(row_length * longest, 30, longest)
    rows = kind(shard_set(tmp_path, documents, per_shard), row_length, PAD, stride=stride)
    rows.trimmed = False
    expected = naive_rows(documents, row_length, stride, kind)
    batch, counts = rows.batch(range(len(rows))), rows.counts()
    assert [lines(batch, row) for row in range(len(rows))] == expected
    # A row does not depend on the rows of its batch.
    assert [lines(rows.batch([row])) for row in range(len(rows))] == expected
    lengths = [row_length - segments.count(-1) for *_, segments in expected]
    assert rows.lengths().tolist() == lengths
    assert counts["dropped_tokens"] == counts["cut_records"] == counts["masked_tokens"] == 0
    assert counts["fill"] == pytest.approx(rows.lengths().sum() / (row_length * len(rows)))


@pytest.mark.parametrize("together", [4, 1 << 18])
def test_packed_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int) -> None:
    monkeypatch.setattr("ttrain.data.packing.PACKED_TOGETHER", together)
    documents = some_documents(5, 30, 12)
    shards = shard_set(tmp_path, documents, 50)
    packed = SeparateDocumentRows(shards, 8, PAD, packed=True)
    alone = SeparateDocumentRows(shards, 8, PAD)
    batch, pieces = packed.batch(range(len(packed))), []
    for row in range(len(packed)):
        ids, labels, positions, segments = (np.array(part) for part in lines(batch, row))
        for begin in np.flatnonzero((positions == 0) & (segments >= 0)):
            (next_begins,) = np.nonzero(positions[begin + 1 :] == 0)
            end = begin + 1 + next_begins[0] if len(next_begins) else 8
            pieces.append([part[begin:end].tolist() for part in (ids, labels, positions, segments)])
    single = alone.batch(range(len(alone)))
    lengths = enumerate(alone.lengths())
    expected = [[part[:length] for part in lines(single, row)] for row, length in lengths]
    assert sorted(pieces) == sorted(expected)
    assert len(packed) < len(alone) and packed.counts()["fill"] > (0.9 if together > 4 else 0.6)


@pytest.mark.parametrize("kind", [*KINDS, PACKED])
@pytest.mark.parametrize(("row_length", "stride"), [(8, 1), (9, 5), (6, 6)])
def test_the_multiplicity_is_a_count_of_all_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, row_length: int, stride: int
) -> None:
    monkeypatch.setattr("ttrain.data.record_rows.TOKENS_PER_PASS", 13)
    documents = some_documents(3, 25, 20)
    rows = kind(shard_set(tmp_path, documents, 50), row_length, PAD, stride=stride)
    counts, live = rows.counts(), rows.batch(range(len(rows))).live_tokens
    assert counts["target_tokens"] == live
    targets = sum(len(document) - 1 for document in documents)
    assert counts["target_multiplicity"] == pytest.approx(live / targets)


SIZES = [([], 0), ([1], 0), ([2], 1), ([9], 1), ([10], 2), ([1, 1], 1), ([4, 5], 1)]


@pytest.mark.parametrize(("lengths", "count"), SIZES)
def test_the_number_of_rows_is_minimal(tmp_path: Path, lengths: list[int], count: int) -> None:
    rows = DocumentRows(shard_set(tmp_path, [[5] * length for length in lengths]), 8, PAD)
    assert len(rows) == count


def test_opening_reads_the_index_only_and_a_row_only_its_shard(tmp_path: Path) -> None:
    shards = shard_set(tmp_path, some_documents(1, 40, 30), per_shard=100)
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


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    """Documents of 30, 7 and 12 tokens in groups 0, 1 and 0."""
    documents: list[Any] = [([*range(10, 40)], []), ([*range(50, 57)], []), ([*range(60, 72)], [])]
    mixture: Any = {"tokens_per_shard": 1, "groups": [0, 1, 0], "weights": [0.9, 0.1]}
    write_shards(tmp_path, documents, kind="documents", vocab_size=100, **mixture)
    return ShardSet(tmp_path)


def test_mixed_rows_are_the_rows_of_the_groups_one_after_the_other(shards: ShardSet) -> None:
    groups = [DocumentRows(shards.group(number), 8, 0) for number in range(2)]
    mixed = MixedRows(groups, shards.weights)
    assert len(mixed) == len(groups[0]) + len(groups[1]) == 6 + 1
    alone = [lines(group.batch([row])) for group in groups for row in range(len(group))]
    assert [lines(mixed.batch([row])) for row in range(len(mixed))] == alone
    lengths = [length for group in groups for length in group.lengths()]
    assert mixed.lengths().tolist() == lengths == [8] * 5 + [1, 6]


def test_counts_of_mixed_rows_are_sums_and_weighted_means(shards: ShardSet) -> None:
    groups = [DocumentRows(shards.group(number), 8, 0, stride=4) for number in range(2)]
    counts = MixedRows(groups, [1, 1]).counts()
    rows = sum(group.counts()["rows"] for group in groups)
    assert counts["rows"] == rows == counts["rows_of_source_0"] + counts["rows_of_source_1"]
    assert (counts["records"], counts["row_length"]) == (3, 8)
    assert counts["target_multiplicity"] == pytest.approx(counts["target_tokens"] / (29 + 6 + 11))
    assert counts["fill"] == pytest.approx((9 * 8 + 5 + 6) / (8 * rows))


def test_a_batch_is_as_wide_as_the_setting_unless_it_is_trimmed(shards: ShardSet) -> None:
    assert NumberedRows(3).batch([0, 1]).input_ids_BT.shape == (2, 16)
    rows = SeparateDocumentRows(shards, 30, 0)
    trimmed = lines(rows.batch([1]))
    rows.trimmed = False
    full = lines(rows.batch([1]))
    assert trimmed == tuple(array[:8] for array in full)
    assert {*full[3][8:]} == {-1}, "what is cut off is padding"
    rows.trimmed = True
    assert rows.lengths().tolist() == [29, 6, 11]
    widths = {(0,): 30, (1,): 8, (2,): 16, (1, 2): 16, (0, 1, 2): 30}
    assert {numbers: rows.batch(numbers).input_ids_BT.shape[1] for numbers in widths} == widths
    assert MixedRows([rows, rows], [1, 1]).batch([1, 4]).input_ids_BT.shape == (2, 8)


def naive_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The longest first, each into the fullest bin that still has room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [number for number, room in enumerate(rooms) if room >= lengths[item]]
        if not fitting:
            fitting = [len(bins)]
            bins.append([])
            rooms.append(capacity)
        number = min(fitting, key=lambda number: rooms[number])
        bins[number].append(item)
        rooms[number] -= lengths[item]
    return bins


@settings(max_examples=50, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 40))
def test_best_fit_equals_a_search_over_all_bins(data: Any, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit(lengths, capacity)
    assert bins == naive_best_fit(lengths, capacity)
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))


def state_machine(record: list[int], pairs: Pairs) -> list[bool]:
    """Which tokens are masked, one token after the other."""
    flags = []
    inside = dict.fromkeys(pairs, False)
    for token in record:
        for pair in pairs:
            if token == pair[0]:
                inside[pair] = True
        flags.append(any(inside.values()) or any(token in pair for pair in pairs))
        for pair in pairs:
            if token == pair[1]:
                inside[pair] = False
    return flags


def begins(records: list[list[int]]) -> Any:
    return np.concatenate([np.arange(len(record)) == 0 for record in records])


@settings(max_examples=100, deadline=None)
@given(pairs=st.sampled_from([(), PAIRS[:1], PAIRS, ((1, 2), (2, 1))]), records=records_of_markers)
def test_masks_equal_a_state_machine_token_by_token(pairs: Pairs, records: list[list[int]]) -> None:
    flags = masked(pairs, np.concatenate(records), begins(records)).tolist()
    assert flags == [flag for record in records for flag in state_machine(record, pairs)]


def numbered(records: list[list[int]]) -> tuple[list[list[int]], set[int]]:
    """The records with all tokens but the markers made unique, and the possible targets."""
    unique, free = [], set()
    for number, record in enumerate(records):
        first = 100 + 1000 * number
        named = [token if token <= 4 else first + at for at, token in enumerate(record)]
        flags = state_machine(record, PAIRS)
        free |= {token for token, masked in zip(named[1:], flags[1:], strict=True) if not masked}
        unique.append(named)
    return unique, free


def rows_of(kind: Any, records: Any, row_length: int, **options: Any) -> tuple[Array, Counts]:
    """(labels of all rows, counts)."""
    with tempfile.TemporaryDirectory() as folder:
        name = "chats" if kind is ChatRows else "documents"
        write_shards(Path(folder), records, kind=name, vocab_size=1 << 20, tokens_per_shard=9)
        rows = kind(ShardSet(Path(folder)), row_length, 0, masks=PAIRS, **options)
        return rows.batch(range(len(rows))).labels_BT, rows.counts()


@pytest.mark.parametrize("kind", [*KINDS, PACKED])
@settings(max_examples=20, deadline=None)
@given(records=records_of_markers, row_length=st.integers(2, 9))
def test_free_tokens_are_learnt_once(kind: Any, records: list[list[int]], row_length: int) -> None:
    unique, free = numbered(records)
    labels, counts = rows_of(kind, [(ids, []) for ids in unique], row_length)
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(free)
    # The label of the second head at t is the token at t+2, the first head's label at t+1.
    second_head = labels[:, 1:]
    assert set(second_head[second_head != IGNORE].tolist()) <= free
    learnable = sum(len(ids) - 1 for ids in unique)
    assert (counts["target_tokens"], counts["masked_tokens"]) == (len(free), learnable - len(free))


@settings(max_examples=20, deadline=None)
@given(st.booleans(), records_of_markers, st.integers(2, 9), st.integers(0, 9))
def test_masked_answers(packed: bool, records: list[list[int]], row_length: int, seed: int) -> None:
    unique, free = numbered(records)
    chance = random.Random(seed)
    chats = [(ids, [chance.random() < 0.7 for _ in ids]) for ids in unique]
    learnt = [
        {token for token, live in list(zip(*chat, strict=True))[1:] if live and token in free}
        for chat in chats
    ]
    labels, counts = rows_of(ChatRows, chats, row_length, end_id=2, packed=packed)
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(set().union(*learnt))
    assert counts["all_masked_dropped"] == sum(not some for some in learnt)
    assert (labels != IGNORE).any(axis=1).all(), "no row without a target"
