"""The shuffled order: a permutation, another one each epoch, of which any place can be asked for alone."""

from __future__ import annotations

import numpy as np
import pytest

from ttrain.data.loader import ShuffledOrder, permute

SIZES = [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4095, 4097, 50_000]


@pytest.mark.parametrize("size", SIZES)
def test_the_order_is_a_permutation_of_any_size(size: int) -> None:
    for seed, epoch in ((1, 0), (2**32 - 1, 3)):
        assert np.array_equal(np.sort(permute(np.arange(size), size, seed, epoch)), np.arange(size))


def test_one_place_can_be_asked_for_alone() -> None:
    whole = permute(np.arange(1000), 1000, 7, 2)
    assert [int(permute(np.array([place]), 1000, 7, 2)[0]) for place in (0, 1, 500, 999)] == whole[[0, 1, 500, 999]].tolist()


def test_a_huge_set_costs_no_memory() -> None:
    size = 10**12
    images = permute(np.arange(size - 1000, size), size, 1, 0)
    assert len(set(images.tolist())) == 1000
    assert 0 <= images.min() <= images.max() < size


def test_another_seed_and_another_epoch_give_another_order() -> None:
    orders = {tuple(permute(np.arange(100), 100, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert tuple(range(100)) not in orders


def test_the_order_looks_random() -> None:
    """Every row comes about equally often to every tenth of the epoch, and neighbours do not stay neighbours."""
    size, counts = 50, np.zeros((50, 10))
    for epoch in range(2000):
        order = permute(np.arange(size), size, 3, epoch)
        counts[order, np.arange(size) * 10 // size] += 1
    assert abs(counts - 200).max() < 200 * 0.4
    whole = permute(np.arange(10_000), 10_000, 3, 0)
    assert abs(np.corrcoef(whole[:-1], whole[1:])[0, 1]) < 0.05
    assert np.mean(np.diff(whole) == 1) < 0.01


def test_the_order_does_not_change_between_versions() -> None:
    """A run that was saved under one version continues under the next, so these numbers stay."""
    assert permute(np.arange(10), 10, 1, 0).tolist() == [3, 4, 9, 7, 1, 6, 2, 0, 8, 5]
    assert permute(np.arange(10), 10, 1, 1).tolist() == [0, 3, 8, 4, 5, 9, 2, 7, 1, 6]
    last = [915, 986, 916, 652, 650, 123, 871, 84, 425, 366]
    assert permute(np.arange(990, 1000), 1000, 2**32 - 1, 7).tolist() == last


@pytest.mark.parametrize(("rows", "per_step", "epochs"), [(10, 4, 3), (7, 7, 2), (5, 8, 4), (12, 3, 2), (1, 4, 5)])
def test_each_row_comes_once_per_epoch_also_across_steps(rows: int, per_step: int, epochs: int) -> None:
    order = ShuffledOrder(rows, per_step, rows * epochs, seed=1)
    flat = [row for step in range(order.steps) for row in order.step_rows(step).tolist()]
    assert len(flat) == rows * epochs
    for epoch in range(epochs):
        assert sorted(flat[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_step_takes_the_next_places_of_its_epochs_order_and_each_epoch_has_its_own() -> None:
    order = ShuffledOrder(rows=30, rows_per_step=8, total_rows=100, seed=9)
    places = [(number // 30, number % 30) for number in range(100)]
    expected = [int(permute(np.array([place]), 30, 9, epoch)[0]) for epoch, place in places]
    assert [row for step in range(order.steps) for row in order.step_rows(step).tolist()] == expected
    assert len({tuple(expected[start : start + 30]) for start in (0, 30, 60)}) == 3


@pytest.mark.parametrize(("total", "sizes"), [(10, [4, 4, 2]), (8, [4, 4]), (3, [3]), (9, [4, 4, 1])])
def test_the_last_step_may_be_smaller_and_is_not_dropped(total: int, sizes: list[int]) -> None:
    order = ShuffledOrder(6, 4, total, seed=1)
    assert [len(order.step_rows(step)) for step in range(order.steps)] == sizes
