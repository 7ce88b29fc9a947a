"""Rows: no token lost, none counted twice, each compared with a loop that a child could write."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ttrain.data import shards
from ttrain.data.packing import IGNORE, Batch, ChatRows, DocumentRows, best_fit
from ttrain.data.shards import ShardSet, ShardWriter

PAD, BOS, END = 0, 1, 2
Record = tuple[list[int], list[bool]]


def shard_set(path: Path, rows: list[Record], *, kind: str, tokens_per_shard: int = 10**6) -> ShardSet:
    writer = ShardWriter(path, kind=kind, vocab_size=100, tokenizer="t", tokens_per_shard=tokens_per_shard)
    for ids, live in rows:
        writer.add(ids, live, text_bytes=len(ids))
    writer.close()
    return ShardSet(path)


@pytest.fixture(params=[(10**6, 2048), (10**6, 2), (20, 2048), (20, 3), (1, 1)], ids=str)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of a shard and rows of a record batch: one or many of each."""
    monkeypatch.setattr(shards, "ROWS_PER_BATCH", request.param[1])
    return int(request.param[0])


def lines(batch: Batch, row: int = 0) -> tuple[list[int], ...]:
    arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
    return tuple(array[row].tolist() for array in arrays)


# --- documents


def some_documents(seed: int, count: int, longest: int) -> list[Record]:
    chance = random.Random(seed)
    return [([chance.randrange(3, 100) for _ in range(chance.randint(1, longest))], []) for _ in range(count)]


def naive_document_rows(documents: list[list[int]], row_length: int) -> list[tuple[list[int], ...]]:
    """Token by token: what stands at each place, what comes after it in the same document, and where it stands there."""
    stream = [(number, at) for number, document in enumerate(documents) for at in range(len(document))]
    rows: list[tuple[list[int], ...]] = []
    for first in range(0, len(stream) - 1, row_length):
        ids: list[int] = []
        labels: list[int] = []
        positions: list[int] = []
        segments: list[int] = []
        for number, at in stream[first : min(first + row_length, len(stream) - 1)]:
            document = documents[number]
            ids.append(document[at])
            labels.append(document[at + 1] if at + 1 < len(document) else IGNORE)
            positions.append(positions[-1] + 1 if segments and segments[-1] == number else 0)
            segments.append(number)
        missing = row_length - len(ids)
        rows.append(
            (ids + [PAD] * missing, labels + [IGNORE] * missing, positions + [0] * missing, segments + [-1] * missing)
        )
    return rows


@pytest.mark.parametrize(("row_length", "longest"), [(8, 5), (8, 8), (8, 40), (16, 3), (9, 9), (64, 10)])
def test_document_rows_equal_a_naive_loop(tmp_path: Path, layout: int, row_length: int, longest: int) -> None:
    documents = some_documents(row_length * longest, 30, longest)
    rows = DocumentRows(shard_set(tmp_path, documents, kind="documents", tokens_per_shard=layout), row_length, PAD)
    expected = naive_document_rows([ids for ids, _ in documents], row_length)
    batch = rows.batch(range(len(rows)))
    assert [lines(batch, row) for row in range(len(rows))] == expected
    alone = [lines(rows.batch([row])) for row in range(len(rows))]
    assert alone == expected, "a row does not depend on those beside it"


def test_each_token_but_a_documents_first_is_a_target_exactly_once(tmp_path: Path) -> None:
    """With every token of another id, the targets are the ids of all but the first tokens."""
    documents: list[Record] = []
    number = 3
    for length in (1, 2, 3, 8, 9, 17, 1, 30, 2):
        documents.append((list(range(number, number + length)), []))
        number += length
    rows = DocumentRows(shard_set(tmp_path, documents, kind="documents"), 8, PAD)
    labels = rows.batch(range(len(rows))).labels_BT
    expected = [token for ids, _ in documents for token in ids[1:]]
    assert sorted(labels[labels != IGNORE].tolist()) == expected
    counts = rows.counts()
    assert counts["target_tokens"] == len(expected)
    assert counts["dropped_tokens"] == counts["cut_records"] == 0
    assert counts["rows"] == len(rows)
    assert counts["fill"] == pytest.approx(len(expected) / (8 * len(rows)))


@pytest.mark.parametrize(("lengths", "rows"), [([], 0), ([1], 0), ([2], 1), ([9], 1), ([10], 2), ([1, 1], 1), ([4, 5], 1)])
def test_the_number_of_rows_is_what_the_stream_needs(tmp_path: Path, lengths: list[int], rows: int) -> None:
    documents: list[Record] = [([5] * length, []) for length in lengths]
    assert len(DocumentRows(shard_set(tmp_path, documents, kind="documents"), 8, PAD)) == rows


# --- chats


def chat(chance: random.Random, turns: int, longest: int) -> Record:
    """bos, then turns of a role token, a text and an end; every second one is an answer, whose text and end are live."""
    ids, live = [BOS], [False]
    for turn in range(turns):
        text = [chance.randrange(10, 100) for _ in range(chance.randint(0, longest))]
        ids += [3 + turn % 2, *text, END]
        live += [False] + [turn % 2 == 1] * (len(text) + 1)
    return ids, live


def some_chats(seed: int, count: int, turns: int, longest: int) -> list[Record]:
    chance = random.Random(seed)
    return [chat(chance, 2 * chance.randint(1, turns), longest) for _ in range(count)]


def chat_rows(path: Path, chats: list[Record], row_length: int, tokens_per_shard: int = 10**6) -> ChatRows:
    return ChatRows(shard_set(path, chats, kind="chats", tokens_per_shard=tokens_per_shard), row_length, PAD, END)


def segments_of(rows: ChatRows) -> list[tuple[list[int], list[int], list[int]]]:
    """(input ids, labels, positions) of every piece in every row."""
    found = []
    batch = rows.batch(range(len(rows)))
    for row in range(len(rows)):
        ids, labels, positions, segments = (np.array(line) for line in lines(batch, row))
        for segment in range(segments.max() + 1):
            there = segments == segment
            assert np.flatnonzero(np.diff(there)).size <= 2, "a piece lies in one stretch"
            found.append((ids[there].tolist(), labels[there].tolist(), positions[there].tolist()))
    return found


def test_chats_that_fit_come_whole_and_once_with_their_mask(tmp_path: Path, layout: int) -> None:
    chats = some_chats(1, 60, turns=2, longest=6)
    rows = chat_rows(tmp_path, chats, row_length=48, tokens_per_shard=layout)
    expected = []
    for ids, live in chats:
        labels = [token if scored else IGNORE for token, scored in zip(ids[1:], live[1:], strict=True)]
        expected.append((ids[:-1], labels, list(range(len(ids) - 1))))
    assert sorted(segments_of(rows)) == sorted(expected)
    counts = rows.counts()
    assert counts["records"] == 60
    assert counts["cut_records"] == counts["dropped_tokens"] == 0
    assert counts["target_tokens"] == sum(sum(live[1:]) for _, live in chats)


def test_padding_is_no_input_no_target_and_a_segment_of_its_own(tmp_path: Path) -> None:
    rows = chat_rows(tmp_path, some_chats(1, 3, turns=1, longest=3), row_length=64)
    batch = rows.batch(range(len(rows)))
    padding = batch.segments_BT == -1
    assert padding.any()
    assert set(batch.input_ids_BT[padding].tolist()) == {PAD}
    assert set(batch.labels_BT[padding].tolist()) == {IGNORE}


@pytest.mark.parametrize("row_length", [8, 12, 20, 33])
@pytest.mark.parametrize("seed", range(4))
def test_long_chats_are_cut_so_that_something_is_learnt_and_all_is_counted(
    tmp_path: Path, row_length: int, seed: int
) -> None:
    chats = some_chats(seed, 50, turns=4, longest=15)
    rows = chat_rows(tmp_path, chats, row_length)
    pieces = segments_of(rows)
    assert len(pieces) == len(chats)
    whole = sum(len(ids) for ids, _ in chats)
    used = sum(len(ids) for ids, _, _ in pieces)
    live = sum(label != IGNORE for _, labels, _ in pieces for label in labels)
    batch, counts = rows.batch(range(len(rows))), rows.counts()
    assert batch.input_ids_BT.shape == (len(rows), row_length)
    assert (batch.labels_BT != IGNORE).any(axis=1).all(), "no row without a target"
    assert all(any(label != IGNORE for label in labels) for _, labels, _ in pieces), "no piece without a target"
    assert counts["cut_records"] == sum(len(ids) > row_length + 1 for ids, _ in chats) > 0
    assert counts["dropped_tokens"] == whole - (used + len(pieces))  # a piece's last token is a target only
    assert counts["target_tokens"] == live == batch.live_tokens
    assert counts["fill"] == pytest.approx(used / (len(rows) * row_length))


def test_every_piece_is_a_stretch_of_its_chat_with_its_own_mask(tmp_path: Path) -> None:
    chats = [(ids, live) for ids, live in some_chats(7, 40, turns=4, longest=12)]
    for number, (ids, live) in enumerate(chats):
        (piece,) = segments_of(chat_rows(tmp_path / str(number), [(ids, live)], 16))
        inputs, labels, positions = piece
        starts = [at for at in range(len(ids)) if ids[at : at + len(inputs)] == inputs]
        targets = [
            [ids[at + 1 + t] if live[at + 1 + t] else IGNORE for t in range(len(inputs))]
            for at in starts if at + len(inputs) < len(ids)
        ]  # fmt: skip
        assert labels in targets
        assert positions == list(range(len(inputs)))


def test_a_long_chat_is_cut_at_the_border_of_the_last_turn_that_fits(tmp_path: Path) -> None:
    first = ([BOS, 3, 11, END, 4, 21, END], [False] * 5 + [True] * 2)
    second = ([3, 12, END, 4, *[22] * 20, END], [False] * 4 + [True] * 21)
    rows = chat_rows(tmp_path, [(first[0] + second[0], first[1] + second[1])], 16)
    ids, labels, positions, segments = lines(rows.batch([0]))
    assert ids == [BOS, 3, 11, END, 4, 21, END, 3, 12] + [PAD] * 7, "up to the end of the second question"
    assert [label for label in labels if label != IGNORE] == [21, END]
    assert (positions[:9], segments) == (list(range(9)), [0] * 9 + [-1] * 7)
    assert rows.counts()["cut_records"] == 1


def test_a_prompt_longer_than_a_row_leaves_room_for_its_answer(tmp_path: Path) -> None:
    prompt, answer = [BOS, 3, *[11] * 100, END, 4], [*range(20, 60), END]
    rows = chat_rows(tmp_path, [(prompt + answer, [False] * len(prompt) + [True] * len(answer))], 16)
    _, labels, _, segments = lines(rows.batch([0]))
    learnt = [label for label in labels if label != IGNORE]
    assert segments == [0] * 16
    assert learnt == answer[: len(learnt)]
    assert 4 <= len(learnt) < 16


def test_a_batch_without_targets_keeps_its_inputs(tmp_path: Path) -> None:
    batch = chat_rows(tmp_path, some_chats(1, 9, turns=1, longest=3), 16).batch([0, 1])
    muted = batch.without_targets()
    assert batch.live_tokens > 0
    assert muted.live_tokens == 0
    assert np.array_equal(muted.input_ids_BT, batch.input_ids_BT)
    assert np.array_equal(muted.segments_BT, batch.segments_BT)


# --- best fit


def naive_best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """The longest first, each into the fullest bin that still has room."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        fitting = [number for number in range(len(bins)) if rooms[number] >= lengths[item]]
        if fitting:
            number = min(fitting, key=lambda number: rooms[number])
        else:
            number = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[number].append(item)
        rooms[number] -= lengths[item]
    return bins


@settings(max_examples=400, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 40))
def test_best_fit_equals_a_search_over_all_bins_and_never_exceeds_one(data: Any, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit(lengths, capacity)
    assert bins == naive_best_fit(lengths, capacity)
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))


def test_best_fit_refuses_what_fits_nowhere() -> None:
    with pytest.raises(AssertionError, match="item of 9 in bins of 8"):
        best_fit([3, 9], 8)
