"""Rows of chats: every live token a target once, cut at turns, and what is dropped is counted."""

import itertools
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from support.tiny_data import write_shards

from ttrain.data.packing import IGNORE
from ttrain.data.record_rows import ChatRows, cut
from ttrain.data.shards import ShardSet

PAD, BOS, END = 0, 1, 2
Record = tuple[list[int], list[bool]]
Piece = tuple[list[int], list[int], list[int]]


def chat(chance: random.Random, turns: int, longest: int) -> Record:
    """bos, then turns of a role token, a text and an end; text and end of every second are live."""
    ids, live = [BOS], [False]
    for turn in range(turns):
        text = [chance.randrange(10, 100) for _ in range(chance.randint(0, longest))]
        ids += [3 + turn % 2, *text, END]
        live += [False] + [turn % 2 == 1] * (len(text) + 1)
    return ids, live


def some_chats(seed: int, count: int, turns: int, longest: int) -> list[Record]:
    chance = random.Random(seed)
    return [chat(chance, chance.randint(2, 2 * turns), longest) for _ in range(count)]


def chat_rows(
    path: Path, chats: list[Record], row_length: int, *, packed: bool = True, per_shard: int = 10**6
) -> ChatRows:
    write_shards(path, chats, kind="chats", vocab_size=1 << 20, tokens_per_shard=per_shard)
    return ChatRows(ShardSet(path), row_length, PAD, END, packed=packed)


def pieces_of(rows: ChatRows) -> list[Piece]:
    """(input ids, labels, positions) of every piece in every row."""
    pieces = []
    for row in range(len(rows)):
        batch = rows.batch([row])
        segments = batch.segments_BT[0]
        assert (segments >= 0).sum() == rows.lengths()[row]
        padding = segments == -1
        assert {*batch.input_ids_BT[0][padding].tolist()} <= {PAD}
        assert {*batch.labels_BT[0][padding].tolist()} <= {IGNORE}
        for segment in range(segments.max() + 1):
            places = np.flatnonzero(segments == segment)
            assert (np.diff(places) == 1).all(), "a piece lies in one stretch"
            arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT)
            pieces.append(tuple(array[0][places].tolist() for array in arrays))
    return pieces


@pytest.mark.parametrize(("packed", "per_shard"), [(True, 100), (False, 10**6), (False, 1)])
def test_chats_that_fit_come_whole_and_once(tmp_path: Path, packed: bool, per_shard: int) -> None:
    chats = some_chats(1, 60, turns=2, longest=6)
    rows = chat_rows(tmp_path, chats, row_length=48, packed=packed, per_shard=per_shard)
    expected = []
    for ids, live in chats:
        labels = [ids[at] if live[at] else IGNORE for at in range(1, len(ids))]
        expected.append((ids[:-1], labels, list(range(len(ids) - 1))))
    assert sorted(pieces_of(rows)) == sorted(expected)
    counts = rows.counts()
    assert counts["records"] == counts["pieces"] == 60
    assert counts["cut_records"] == counts["dropped_tokens"] == counts["all_masked_dropped"] == 0
    assert counts["target_tokens"] == sum(sum(live[1:]) for _, live in chats)
    assert counts["fill"] == pytest.approx(sum(len(ids) - 1 for ids, _ in chats) / (48 * len(rows)))
    assert len(rows) == 60 if not packed else len(rows) < 30
    batch = rows.batch(range(3))
    muted = batch.without_targets()
    assert batch.live_tokens > 0 == muted.live_tokens
    assert np.array_equal(muted.input_ids_BT, batch.input_ids_BT)
    assert np.array_equal(muted.segments_BT, batch.segments_BT)


# --- long ones


def numbered(chats: list[Record]) -> tuple[list[Record], list[int]]:
    """The chats with every token but the ends made unique, and all of these tokens."""
    unique = [
        ([10_000 * (n + 1) + at if ids[at] != END else END for at in range(len(ids))], live)
        for n, (ids, live) in enumerate(chats)
    ]
    return unique, [token for ids, _ in unique for token in ids if token != END]


@pytest.mark.parametrize(
    ("packed", "row_length", "seed"), [(True, 8, 0), (True, 20, 1), (False, 12, 2), (False, 33, 3)]
)
def test_live_tokens_are_targets(tmp_path: Path, packed: bool, row_length: int, seed: int) -> None:
    """Every piece has one and is a stretch of its chat; an answer that fits is in one piece."""
    chats, tokens = numbered(some_chats(seed, 50, turns=4, longest=25))
    rows = chat_rows(tmp_path, chats, row_length, packed=packed, per_shard=300)
    pieces, counts, stretches, seen = pieces_of(rows), rows.counts(), [], set[int]()
    for inputs, labels, positions in pieces:
        ids, live = next((ids, live) for ids, live in chats if {*inputs} - {END} <= {*ids})
        start = next(at for at in range(len(ids)) if ids[at : at + len(inputs)] == inputs)
        end = start + len(inputs)
        assert labels == [ids[at] if live[at] else IGNORE for at in range(start + 1, end + 1)]
        assert any(live[start + 1 : end + 1]) and positions == list(range(len(inputs)))
        stretches.append((ids, start, end + 1))
        seen |= {*inputs, *labels}
    learnt = Counter(label for _, labels, _ in pieces for label in labels if label != IGNORE)
    assert learnt == Counter(token for chat in chats for token in itertools.compress(*chat))
    assert len(pieces) == counts["pieces"] > 60
    assert counts["target_tokens"] == learnt.total()
    assert counts["cut_records"] == sum(len(ids) > row_length + 1 for ids, _ in chats) > 0
    assert counts["all_masked_dropped"] == 0
    gone = [token for token in tokens if token not in seen]
    # What is dropped are turns of context, with their ends.
    assert len(gone) <= counts["dropped_tokens"] <= 2 * len(gone)
    whole = 0
    for ids, live in chats:
        for first in (at for at in range(1, len(ids)) if live[at] and not live[at - 1]):
            last = ids.index(END, first)
            if last + 1 - first <= row_length:
                whole += 1
                spans_of = [(start, end) for of, start, end in stretches if of is ids]
                assert any(start < first and last < end for start, end in spans_of)
    assert whole > 15


def spans(turns: list[tuple[bool, int]], row_length: int) -> list[tuple[int, int]]:
    """Pieces of a conversation of turns (is an answer?, tokens); the first token is a role."""
    live = np.concatenate([[answer and at > 0 for at in range(size)] for answer, size in turns])
    return cut(live, np.cumsum([size for _, size in turns]), row_length)


def test_where_chats_are_cut() -> None:
    question, answer = (False, 5), (True, 5)
    # A question stays with its answer.
    assert spans([question, answer, question, answer], 16) == [(0, 10), (10, 20)]
    assert spans([question, answer] * 4, 20) == [(0, 20), (20, 40)], "as many turns as fit"
    # As much context as fits; nothing is made of what follows.
    assert spans([question, answer, question], 8) == [(1, 10)]
    # Of a long prompt, what stands before the answer.
    assert spans([(False, 100), answer], 16) == [(88, 105)]
    # Half a row of prompt, then pieces that share a token.
    assert spans([(False, 100), (True, 41)], 16) == [(93, 110), (109, 126), (125, 141)]
    assert spans([question, (True, 30), question, answer], 16) == [(0, 17), (16, 33), (32, 45)]


def test_chats_without_an_answer_are_dropped_and_counted(tmp_path: Path) -> None:
    asked = ([BOS, 3, 11, 12, END], [False] * 5)
    answered = ([BOS, 3, 13, END, 4, 21, END], [False] * 5 + [True] * 2)
    only_first = ([99, 98], [True, False])  # nothing predicts the first token of a record
    rows = chat_rows(tmp_path, [asked, answered, asked, only_first], 16, per_shard=1)
    counts = rows.counts()
    assert len(rows) == counts["pieces"] == 1
    assert (counts["all_masked_dropped"], counts["dropped_tokens"]) == (3, 12)
    assert rows.batch([0]).input_ids_BT[0, :6].tolist() == answered[0][:-1]
    for packed in (True, False):
        rows = chat_rows(tmp_path / str(packed), [asked] * 3, 16, packed=packed)
        assert len(rows) == len(rows.lengths()) == 0
        assert rows.counts()["all_masked_dropped"] == 3
