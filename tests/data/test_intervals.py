"""Masked regions: by label, to the end of the record where nothing closes them, whatever row a region began in."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_data import write_shards

from ttrain.data import packing
from ttrain.data.packing import IGNORE, Intervals
from ttrain.data.record_rows import ChatRows, DocumentRows, SeparateDocumentRows
from ttrain.data.shards import ShardSet

PAIRS = ((1, 2), (3, 4))
Pairs = tuple[tuple[int, int], ...]
records_of_markers = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=24), min_size=1, max_size=6)


def state_machine(record: list[int], pairs: Pairs) -> list[bool]:
    """Which tokens are masked, one token after the other."""
    found = []
    inside = dict.fromkeys(pairs, False)
    for token in record:
        for pair in pairs:
            if token == pair[0]:
                inside[pair] = True
        found.append(any(inside.values()) or any(token in pair for pair in pairs))
        for pair in pairs:
            if token == pair[1]:
                inside[pair] = False
    return found


def begins(records: list[list[int]]) -> Any:
    return np.concatenate([np.arange(len(record)) == 0 for record in records])


def test_markers_and_what_is_between_them_are_masked_and_the_next_record_begins_outside() -> None:
    first, second = [1, 5, 9, 6, 7, 10, 8, 10, 5, 9, 4], [6, 9, 9, 5, 10, 7]
    masked = Intervals(((9, 10),)).masked(np.array(first + second), begins([first, second])).astype(int).tolist()
    assert masked[:11] == [0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1]
    assert masked[11:] == [0, 1, 1, 1, 1, 0]


@settings(max_examples=100, deadline=None)
@given(pairs=st.sampled_from([(), PAIRS[:1], PAIRS, ((1, 2), (2, 1))]), records=records_of_markers)
def test_masks_equal_a_state_machine_token_by_token(pairs: Pairs, records: list[list[int]]) -> None:
    found = Intervals(pairs).masked(np.concatenate(records), begins(records)).tolist()
    assert found == [flag for record in records for flag in state_machine(record, pairs)]


@settings(max_examples=100, deadline=None)
@given(look_back=st.sampled_from([1, 3, 65_536]), records=records_of_markers, place=st.integers(0, 200))
def test_a_row_that_begins_inside_a_region_knows_it(look_back: int, records: list[list[int]], place: int) -> None:
    ids, starts, masks = np.concatenate(records), begins(records), Intervals(PAIRS)
    place %= len(ids)
    first = int(np.flatnonzero(starts[: place + 1])[-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LOOK_BACK", look_back)
        opened = masks.opened(lambda start, end: ids[start:end], first, place)
    found = masks.masked(ids[place:], starts[place:], opened)
    assert found.tolist() == masks.masked(ids, starts)[place:].tolist()


def numbered(records: list[list[int]]) -> tuple[list[list[int]], set[int]]:
    """The records with every token but the markers made unique, and the tokens that may be a target."""
    unique, free = [], set()
    for number, record in enumerate(records):
        named = [token if token <= 4 else 100 + 1000 * number + at for at, token in enumerate(record)]
        flags = state_machine(record, PAIRS)
        free |= {token for token, masked in zip(named[1:], flags[1:], strict=True) if not masked}
        unique.append(named)
    return unique, free


@pytest.mark.parametrize("kind", [DocumentRows, SeparateDocumentRows, partial(SeparateDocumentRows, packed=True)])
@settings(max_examples=20, deadline=None)
@given(records=records_of_markers, row_length=st.integers(2, 9))
def test_no_head_ever_learns_a_masked_token_and_every_other_is_learnt_once(
    kind: Any, records: list[list[int]], row_length: int
) -> None:
    unique, free = numbered(records)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), [(ids, []) for ids in unique], kind="documents", vocab_size=1 << 20, tokens_per_shard=9)
        rows = kind(ShardSet(Path(folder)), row_length, 0, masks=Intervals(PAIRS))
        labels = rows.batch(range(len(rows))).labels_BT
        counts = rows.counts()
    assert sorted(labels[labels != IGNORE].tolist()) == sorted(free)
    second_head = labels[:, 1:]  # its label at t is the token at t+2, which is the first head's label at t+1
    assert set(second_head[second_head != IGNORE].tolist()) <= free
    learnable = sum(len(ids) - 1 for ids in unique)
    assert (counts["target_tokens"], counts["masked_tokens"]) == (len(free), learnable - len(free))


@settings(max_examples=30, deadline=None)
@given(packed=st.booleans(), records=records_of_markers, row_length=st.integers(2, 9), seed=st.integers(0, 9))
def test_masked_answers_are_not_learnt(packed: bool, records: list[list[int]], row_length: int, seed: int) -> None:
    unique, free = numbered(records)
    live = [np.random.default_rng(seed + len(ids)).random(len(ids)) < 0.7 for ids in unique]
    expected = sorted(
        token for ids, flags in zip(unique, live, strict=True)
        for token, flag in list(zip(ids, flags, strict=True))[1:] if flag and token in free
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        chats = [(ids, flags.tolist()) for ids, flags in zip(unique, live, strict=True)]
        write_shards(Path(folder), chats, kind="chats", vocab_size=1 << 20, tokens_per_shard=9)
        rows = ChatRows(ShardSet(Path(folder)), row_length, 0, end_id=2, packed=packed, masks=Intervals(PAIRS))
        labels = rows.batch(range(len(rows))).labels_BT
    assert sorted(labels[labels != IGNORE].tolist()) == expected
    learnt = [set(ids[1:]) & set(expected) for ids in unique]
    assert rows.counts()["all_masked_dropped"] == sum(not some for some in learnt)
    assert (labels != IGNORE).any(axis=1).all(), "no row without a target"
