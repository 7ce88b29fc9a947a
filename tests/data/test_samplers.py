"""The orders of rows: shuffled, a permutation of which any place can be asked for alone; weighted and grouped by length,
against slow loops that build the whole run."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ttrain.data import loader
from ttrain.data.loader import LengthGroupedOrder, Loader, Order, ShuffledOrder, WeightedOrder, derived_seed, permute, quotas
from ttrain.data.packing import Array, Batch, Rows
from ttrain.errors import DataError


def test_the_order_is_a_permutation_of_any_size_of_which_any_place_can_be_asked_for_alone() -> None:
    for size in (1, 2, 3, 7, 16, 39, 63, 64, 65, 257, 1000, 4097, 50_000):
        whole = permute(np.arange(size), size, 2**32 - 1, 3)
        assert np.array_equal(np.sort(whole), np.arange(size))
        assert permute(np.arange(size)[size // 2 :: 7], size, 2**32 - 1, 3).tolist() == whole[size // 2 :: 7].tolist()
    images = permute(np.arange(10**12 - 1000, 10**12), 10**12, 1, 0)  # a huge set costs no memory
    assert len(set(images.tolist())) == 1000 and 0 <= images.min() <= images.max() < 10**12


def test_the_order_looks_random() -> None:
    """Every row comes about equally often to every tenth of the epoch, and neighbours do not stay neighbours."""
    size, counts = 50, np.zeros((50, 10))
    for epoch in range(1000):
        order = permute(np.arange(size), size, 3, epoch)
        counts[order, np.arange(size) * 10 // size] += 1
    assert abs(counts - 100).max() < 100 * 0.5
    orders = {tuple(permute(np.arange(100), 100, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9 and tuple(range(100)) not in orders
    whole = permute(np.arange(10_000), 10_000, 3, 0)
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.05
    assert np.mean(np.diff(whole) == 1) < 0.01


def test_the_orders_do_not_change_between_versions() -> None:
    """A run that was saved under one version continues under the next, so these numbers stay."""
    assert permute(np.arange(10), 10, 1, 0).tolist() == [3, 4, 9, 7, 1, 6, 2, 0, 8, 5]
    assert permute(np.arange(10), 10, 1, 1).tolist() == [0, 3, 8, 4, 5, 9, 2, 7, 1, 6]
    last = [915, 986, 916, 652, 650, 123, 871, 84, 425, 366]
    assert permute(np.arange(990, 1000), 1000, 2**32 - 1, 7).tolist() == last
    weighted = WeightedOrder([6, 4], [3, 1], 8, 100, seed=1)
    grouped = LengthGroupedOrder(np.array([5, 1, 9, 3, 7, 2, 8, 4]), 2, 100, seed=1)
    assert [weighted.step_rows(step).tolist() for step in (0, 5)] == [[9, 0, 4, 1, 3, 2, 5, 3], [4, 5, 3, 2, 1, 0, 4, 7]]
    assert [grouped.step_rows(step).tolist() for step in range(4)] == [[3, 4], [5, 7], [1, 6], [0, 2]]


def test_a_step_takes_the_next_places_of_its_epochs_order_and_each_epoch_has_its_own() -> None:
    order = ShuffledOrder(rows=30, rows_per_step=8, total_rows=100, seed=9)
    places = [(number // 30, number % 30) for number in range(100)]
    expected = [int(permute(np.array([place]), 30, 9, epoch)[0]) for epoch, place in places]
    assert [row for step in range(order.steps) for row in order.step_rows(step).tolist()] == expected
    assert len({tuple(expected[start : start + 30]) for start in (0, 30, 60)}) == 3


def all_rows(order: Order) -> list[int]:
    return [row for step in range(order.steps) for row in order.step_rows(step).tolist()]


def place(number: int, size: int, seed: int, epoch: int) -> int:
    return int(permute(np.array([number]), size, seed, epoch)[0])


# --- weighted


def naive_weighted(group_rows: list[int], weights: list[float], total: int, seed: int) -> list[int]:
    """Draw after draw: whose turn it is, and the next row of that group's pass."""
    cycle_length = loader.DRAWS_PER_CYCLE
    owners = [group for group, quota in enumerate(quotas(weights, cycle_length)) for _ in range(quota)]
    drawn, found = [0] * len(group_rows), []
    for draw in range(total):
        cycle, at = divmod(draw, cycle_length)
        group = owners[place(at, cycle_length, derived_seed(seed, 0), cycle)]
        turn, row = divmod(drawn[group], group_rows[group])
        drawn[group] += 1
        found.append(sum(group_rows[:group]) + place(row, group_rows[group], derived_seed(seed, group + 1), turn))
    return found


@pytest.mark.parametrize(("group_rows", "weights"), [([5, 40, 11], [0.2, 0.5, 0.3]), ([13], [2.0])])
def test_a_weighted_order_equals_drawing_one_row_after_the_other(
    monkeypatch: pytest.MonkeyPatch, group_rows: list[int], weights: list[float]
) -> None:
    monkeypatch.setattr(loader, "DRAWS_PER_CYCLE", 50)
    order = WeightedOrder(group_rows, weights, rows_per_step=7, total_rows=230, seed=4, draws=50)
    expected = naive_weighted(group_rows, weights, 230, seed=4)
    assert all_rows(order) == expected
    assert [order.step_rows(step).tolist() for step in (20, 3)] == [expected[140:147], expected[21:28]]


def test_nine_to_one_is_nine_to_one_in_ten_thousand_draws() -> None:
    order = WeightedOrder([50, 5000], [9, 1], rows_per_step=500, total_rows=10_000, seed=1)
    groups = np.array(all_rows(order)) >= 50
    assert groups.mean() == 0.1
    share = groups.reshape(-1, 1000).mean(axis=1)
    assert 0.06 < share.min() < share.max() < 0.14, "also evenly over the cycle"


def test_quotas_are_rounded_by_the_largest_remainder() -> None:
    assert quotas([1, 1, 1], 10_000) == [3334, 3333, 3333]
    assert quotas([0.7, 0.2, 0.1], 10) == [7, 2, 1]
    assert quotas([5, 3, 1], 10) == [6, 3, 1]  # 5.56, 3.33, 1.11
    assert quotas([0.9, 0.1], 10_000) == [9000, 1000]


def test_a_source_that_would_never_be_drawn_is_refused() -> None:
    with pytest.raises(DataError, match=r"source 2 has the weight 0\.5 but gave no row"):
        WeightedOrder([5, 0], [0.5, 0.5], 4, 100, seed=1)
    with pytest.raises(DataError, match=r"source 1 has the weight 1e-06 but would get none of 10000 draws"):
        WeightedOrder([5, 5], [1e-6, 1.0], 4, 100, seed=1)


# --- grouped by length


def log_normal(count: int) -> Array:
    return np.clip(np.exp(np.random.default_rng(1).normal(4.5, 0.8, count)), 2, 512).astype(np.int64)


def naive_length_grouped(lengths: Array, per_step: int, total: int, seed: int, part_steps: int) -> list[int]:
    """The whole run, epoch by epoch: parts of whole steps, each sorted and dealt out to its steps in random order."""
    size, found = len(lengths), list[int]()
    while len(found) < total:
        epoch = len(found) // size
        shuffled = [place(at, size, seed, epoch) for at in range(size)]
        left, rooms = size, []
        while left:  # room for this epoch in each step: the first begins where the last epoch ended
            rooms.append(min(left, per_step - (len(found) + size - left) % per_step))
            left -= rooms[-1]
        taken = 0
        for part, first in enumerate(range(0, len(rooms), part_steps)):
            mine = rooms[first : first + part_steps]
            rows = sorted(shuffled[taken : taken + sum(mine)], key=lambda row: lengths[row])
            taken += sum(mine)
            dealt: dict[int, list[int]] = {}
            ranks = [place(step, len(mine), derived_seed(seed, epoch), part) for step in range(len(mine))]
            for step in sorted(range(len(mine)), key=lambda step: ranks[step]):
                dealt[step], rows = rows[: mine[step]], rows[mine[step] :]
            found += [row for step in range(len(mine)) for row in dealt[step]]
    return found[:total]


@pytest.mark.parametrize(("count", "per_step"), [(61, 4), (10, 7), (33, 5), (8, 8)])
def test_a_length_grouped_order_equals_a_loop_over_the_whole_run(
    monkeypatch: pytest.MonkeyPatch, count: int, per_step: int
) -> None:
    monkeypatch.setattr(loader, "GROUPED_STEPS", 3)
    lengths = log_normal(count)
    order = LengthGroupedOrder(lengths, per_step, total_rows=3 * count - 2, seed=6)
    expected = naive_length_grouped(lengths, per_step, 3 * count - 2, 6, max(1, min(3, count // (4 * per_step))))
    assert all_rows(order) == expected
    alone = order.steps - 2
    assert order.step_rows(alone).tolist() == expected[alone * per_step : (alone + 1) * per_step]


class OfLength(Rows):
    """Rows of given lengths, one after the other filled with ones."""

    row_length, pad_id, trimmed = 512, 0, True

    def __init__(self, lengths: Array) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> Array:
        return self._lengths

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        for at, length in zip(lines.tolist(), self._lengths[rows].tolist(), strict=True):
            batch.segments_BT[at, :length] = 0

    def counts(self) -> dict[str, int | float]:
        return {}


def test_grouping_pads_less_than_half_of_what_a_random_order_does_with_steps_in_random_order() -> None:
    lengths, pads = log_normal(2000), []
    grouped = LengthGroupedOrder(lengths, 32, 2000, seed=1)
    for order in (grouped, ShuffledOrder(2000, 32, 2000, seed=1)):
        batches = [micro.batch for step in Loader(OfLength(lengths), order, rows_per_device=8) for micro in step]
        empty = sum(int((batch.segments_BT == -1).sum()) for batch in batches)
        pads.append(empty / sum(batch.segments_BT.size for batch in batches))
    assert pads[0] < pads[1] / 2
    lengths = log_normal(8000)
    order = LengthGroupedOrder(lengths, 16, 8000, seed=3)
    means = np.array([lengths[order.step_rows(step)].mean() for step in range(order.steps)])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.1
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.1


# --- all of them


def made(total: int, seed: int = 1) -> list[Order]:
    return [
        ShuffledOrder(5000, 32, total, seed),
        WeightedOrder([4900, 100], [0.9, 0.1], 32, total, seed),
        LengthGroupedOrder(log_normal(5000), 32, total, seed),
    ]


@pytest.mark.parametrize("kind", range(3))
def test_a_million_steps_are_skipped_by_the_work_of_at_most_one_part(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    work, inner = Counter[str](), loader.feistel

    def counted(values: Array, *arguments: int) -> Array:
        work["values"] += len(values)
        return inner(values, *arguments)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(loader, "feistel", counted)
    order = made(10**9)[kind]
    assert len(order.step_rows(10**6)) == 32
    most = 8 * (loader.DRAWS_PER_CYCLE + 2 * loader.GROUPED_STEPS * 32)
    assert 32 <= work["values"] < most
