"""Rows of several sources side by side, the width of a batch, and best fit against a search over all bins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tiny_data import NumberedRows, write_shards

from ttrain.data.packing import MixedRows, best_fit
from ttrain.data.record_rows import DocumentRows, SeparateDocumentRows
from ttrain.data.shards import ShardSet


def lines(batch: Any) -> list[Any]:
    return [batch.input_ids_BT.tolist(), batch.labels_BT.tolist(), batch.positions_BT.tolist(), batch.segments_BT.tolist()]


# --- several sources


@pytest.fixture
def shards(tmp_path: Path) -> ShardSet:
    """Documents of 30, 7 and 12 tokens in groups 0, 1 and 0."""
    documents: list[Any] = [([*range(10, 40)], []), ([*range(50, 57)], []), ([*range(60, 72)], [])]
    write_shards(
        tmp_path, documents, kind="documents", vocab_size=100, tokens_per_shard=1, groups=[0, 1, 0], weights=[0.9, 0.1]
    )
    return ShardSet(tmp_path)


def test_mixed_rows_are_the_rows_of_the_groups_one_after_the_other(shards: ShardSet) -> None:
    groups = [DocumentRows(shards.group(number), 8, 0) for number in range(2)]
    mixed = MixedRows(groups, shards.weights)
    assert len(mixed) == len(groups[0]) + len(groups[1]) == 6 + 1
    alone = [lines(group.batch([row])) for group in groups for row in range(len(group))]
    assert [lines(mixed.batch([row])) for row in range(len(mixed))] == alone
    assert mixed.lengths().tolist() == [*groups[0].lengths(), *groups[1].lengths()] == [8] * 5 + [1, 6]


def test_counts_of_mixed_rows_are_sums_and_weighted_means(shards: ShardSet) -> None:
    groups = [DocumentRows(shards.group(number), 8, 0, stride=4) for number in range(2)]
    counts, (first, second) = MixedRows(groups, [1, 1]).counts(), (group.counts() for group in groups)
    assert counts["rows"] == first["rows"] + second["rows"] == counts["rows_of_source_0"] + counts["rows_of_source_1"]
    assert counts["records"] == 3
    assert counts["row_length"] == 8
    assert counts["target_multiplicity"] == pytest.approx(counts["target_tokens"] / (29 + 6 + 11))
    assert counts["fill"] == pytest.approx((9 * 8 + 5 + 6) / (8 * counts["rows"]))


# --- width


def test_a_batch_is_as_wide_as_the_setting_unless_it_is_trimmed(shards: ShardSet) -> None:
    assert NumberedRows(3).batch([0, 1]).input_ids_BT.shape == (2, 16)
    rows = SeparateDocumentRows(shards, 30, 0)
    trimmed = lines(rows.batch([1]))
    rows.trimmed = False
    full = lines(rows.batch([1]))
    assert trimmed == [[row[:8] for row in array] for array in full]
    assert np.all(np.array(full[3])[:, 8:] == -1), "what is cut off is padding"
    rows.trimmed = True
    assert rows.lengths().tolist() == [29, 6, 11]
    widths = {(0,): 30, (1,): 8, (2,): 16, (1, 2): 16, (0, 1, 2): 30}
    assert {numbers: rows.batch(numbers).input_ids_BT.shape[1] for numbers in widths} == widths
    assert MixedRows([rows, rows], [1, 1]).batch([1, 4]).input_ids_BT.shape == (2, 8)


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


@settings(max_examples=50, deadline=None)
@given(data=st.data(), capacity=st.integers(1, 40))
def test_best_fit_equals_a_search_over_all_bins_and_never_exceeds_one(data: Any, capacity: int) -> None:
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=60))
    bins = best_fit(lengths, capacity)
    assert bins == naive_best_fit(lengths, capacity)
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
