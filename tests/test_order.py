"""The order: a permutation, another one each epoch, the same global steps for any number of ranks, resumed at any step."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from ttrain.data.loader import Loader, MicroBatch
from ttrain.data.packing import IGNORE, Batch, Rows
from ttrain.data.samplers import ShuffledOrder, permute

SIZES = [*range(1, 40), 63, 64, 65, 255, 256, 257, 1000, 4095, 4097, 50_000]


class NumberedRows(Rows):
    """Rows of length 4 that are filled with their own number, the first position without a target."""

    row_length, pad_id = 4, 0

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def fill(self, row: int, batch: Batch, at: int) -> None:
        batch.input_ids_BT[at] = row
        batch.labels_BT[at, 1:] = row

    def counts(self) -> dict[str, int | float]:
        return {"rows": self._count}


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


def loader(order: ShuffledOrder, *, rows_per_device: int = 2, rank: int = 0, world: int = 1) -> Loader:
    return Loader(NumberedRows(order.rows), order, rows_per_device=rows_per_device, rank=rank, world=world)


def live_rows(micro_batches: list[MicroBatch]) -> dict[int, list[int]]:
    """{number of the micro-batch: rows with targets}, without those that are there for the collective only."""
    found = {}
    for micro_batch in micro_batches:
        batch = micro_batch.batch
        rows = batch.input_ids_BT[(batch.labels_BT != IGNORE).any(axis=1), 0].tolist()
        if rows:
            assert micro_batch.number not in found
            found[micro_batch.number] = rows
    return found


@pytest.mark.parametrize("per_step", [2, 5, 8, 12, 13])
@pytest.mark.parametrize("rows_per_device", [1, 2, 3, 16])
def test_every_number_of_ranks_sees_the_same_global_batch_in_every_step(per_step: int, rows_per_device: int) -> None:
    order = ShuffledOrder(rows=17, rows_per_step=per_step, total_rows=2 * 17 + 1, seed=5)
    for step in range(order.steps):
        alone = live_rows(loader(order, rows_per_device=rows_per_device).step(step))
        assert [row for number in sorted(alone) for row in alone[number]] == order.step_rows(step).tolist()
        for world in (2, 3, 4):
            ranks = [
                loader(order, rows_per_device=rows_per_device, rank=rank, world=world).step(step) for rank in range(world)
            ]
            assert len({len(micro_batches) for micro_batches in ranks}) == 1, "all take part in every collective"
            numbers = [micro_batch.number for micro_batches in ranks for micro_batch in micro_batches]
            assert len(numbers) == len(set(numbers))
            together: dict[int, list[int]] = {}
            for found in map(live_rows, ranks):
                assert not together.keys() & found.keys()
                together |= found
            assert together == alone


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_each_row_is_learnt_once_per_epoch_over_all_ranks(world: int) -> None:
    order = ShuffledOrder(rows=23, rows_per_step=6, total_rows=23 * 2, seed=2)
    seen: Counter[int] = Counter()
    for rank in range(world):
        for micro_batches in loader(order, rank=rank, world=world).steps(0, order.steps):
            seen.update(row for rows in live_rows(micro_batches).values() for row in rows)
    assert seen == dict.fromkeys(range(23), 2)


def as_lists(micro_batches: list[MicroBatch]) -> list[tuple[int, list[list[int]], list[list[int]]]]:
    return [(m.number, m.batch.input_ids_BT.tolist(), m.batch.labels_BT.tolist()) for m in micro_batches]


@pytest.mark.parametrize("world", [1, 3])
def test_what_comes_from_step_n_on_is_what_comes_after_n_steps(world: int) -> None:
    order = ShuffledOrder(rows=11, rows_per_step=4, total_rows=30, seed=3)
    for rank in range(world):
        through = [as_lists(m) for m in loader(order, rank=rank, world=world).steps(0, order.steps)]
        assert len(through) == order.steps == 8
        for step in range(order.steps + 1):
            resumed = loader(order, rank=rank, world=world).steps(step, order.steps)
            assert [as_lists(micro_batches) for micro_batches in resumed] == through[step:]
            if step < order.steps:
                assert as_lists(loader(order, rank=rank, world=world).step(step)) == through[step]


def test_a_loader_that_is_left_early_takes_its_thread_with_it() -> None:
    order = ShuffledOrder(rows=11, rows_per_step=4, total_rows=30, seed=3)
    steps = loader(order).steps(0, order.steps)
    first = as_lists(next(steps))
    steps.close()  # type: ignore[attr-defined]
    assert as_lists(next(loader(order).steps(0, 1))) == first


def test_an_error_in_the_thread_rises_where_the_step_is_asked_for() -> None:
    class Broken(NumberedRows):
        def fill(self, row: int, batch: Batch, at: int) -> None:
            raise OSError("the disk is gone")

    order = ShuffledOrder(rows=4, rows_per_step=2, total_rows=4, seed=1)
    with pytest.raises(OSError, match="the disk is gone"):
        list(Loader(Broken(4), order, rows_per_device=1).steps(0, 2))
