"""Micro-batches: the same global ones for any number of ranks and of threads, resumed at any step."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import numpy as np
import pytest

from ttrain.data.loader import LengthGroupedOrder, Loader, MicroBatch, Order, ShuffledOrder, WeightedOrder, pad_fraction
from ttrain.data.packing import IGNORE, Array, Batch, Rows

Lists = list[tuple[int, list[list[int]], list[list[int]]]]


class NumberedRows(Rows):
    """Rows filled with their own number, one place longer for each of eight, the first position without a target."""

    row_length, pad_id, trimmed = 16, 0, True

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def lengths(self) -> Array:
        return 2 + np.arange(self._count) % 8

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        for row, at in zip(rows.tolist(), lines.tolist(), strict=True):
            length = int(self.lengths()[row])
            batch.input_ids_BT[at, :length] = row
            batch.labels_BT[at, 1:length] = row
            batch.segments_BT[at, :length] = 0

    def counts(self) -> dict[str, int | float]:
        return {"rows": self._count}


def orders(rows: int, per_step: int, total: int, seed: int = 5) -> list[Order]:
    """One of each kind over the same rows."""
    return [
        ShuffledOrder(rows, per_step, total, seed),
        WeightedOrder([rows - 3, 3], [0.7, 0.3], per_step, total, seed),
        LengthGroupedOrder(NumberedRows(rows).lengths(), per_step, total, seed),
    ]


def loader(order: Order, *, rows_per_device: int = 2, rank: int = 0, world: int = 1) -> Loader:
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


def as_lists(steps: Iterable[list[MicroBatch]]) -> list[Lists]:
    return [[(m.number, m.batch.input_ids_BT.tolist(), m.batch.labels_BT.tolist()) for m in step] for step in steps]


@pytest.mark.parametrize(
    ("per_step", "rows_per_device", "kind"),
    [
        (2, 3, 1), (5, 1, 1), (5, 3, 2), (8, 16, 0), (13, 1, 2), (13, 3, 0),
    ],
)  # fmt: skip
def test_every_number_of_ranks_sees_the_same_global_batch_in_every_step(
    per_step: int, rows_per_device: int, kind: int
) -> None:
    order = orders(17, per_step, 2 * 17 + 1)[kind]
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


@pytest.mark.parametrize(("kind", "world"), [(0, 1), (1, 3), (2, 1)])
def test_what_comes_from_step_n_on_is_what_comes_after_n_steps(kind: int, world: int) -> None:
    order = orders(11, 4, 30, seed=3)[kind]
    for rank in range(world):
        through = as_lists(loader(order, rank=rank, world=world).steps(0, order.steps))
        assert len(through) == order.steps == 8
        for step in range(order.steps + 1):
            resumed = loader(order, rank=rank, world=world).steps(step, order.steps)
            assert as_lists(resumed) == through[step:]
            if step < order.steps:
                assert as_lists([loader(order, rank=rank, world=world).step(step)]) == through[step : step + 1]


@pytest.mark.parametrize("kind", range(3))
def test_the_state_counts_what_was_consumed_and_not_what_was_prepared(kind: int) -> None:
    order = orders(11, 4, 30)[kind]
    through = as_lists(loader(order))
    assert through == as_lists(loader(order).step(step) for step in range(order.steps)), "prepared a step ahead"
    for stop in range(order.steps + 1):
        first = loader(order)
        steps = iter(first)
        before = as_lists(next(steps) for _ in range(stop))
        assert first.state_dict() == {"consumed_steps": stop}
        steps.close()  # type: ignore[attr-defined]
        second = loader(order)
        second.load_state_dict(first.state_dict())
        assert before + as_lists(second) == through
        assert second.state_dict() == {"consumed_steps": order.steps}
        assert as_lists(second) == [], "all is consumed"


def test_a_loader_that_is_left_early_takes_its_threads_with_it() -> None:
    order = orders(11, 4, 30)[0]
    started = set(threading.enumerate())
    steps = loader(order).steps(0, order.steps)
    first = as_lists([next(steps)])
    assert set(threading.enumerate()) != started
    steps.close()  # type: ignore[attr-defined]
    assert set(threading.enumerate()) == started
    assert as_lists([next(loader(order).steps(0, 1))]) == first


def test_an_error_in_a_thread_rises_where_the_step_is_asked_for() -> None:
    class Broken(NumberedRows):
        def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
            raise OSError("the disk is gone")

    broken = Loader(Broken(4), ShuffledOrder(4, 2, 4, seed=1), rows_per_device=1)
    with pytest.raises(OSError, match="the disk is gone"):
        list(broken)
    assert broken.state_dict() == {"consumed_steps": 0}


@pytest.mark.parametrize("kind", range(3))
def test_the_pad_fraction_is_that_of_the_batches(kind: int) -> None:
    made = loader(orders(50, 10, 150)[kind], rows_per_device=4)
    segments = [micro.batch.segments_BT for step in made for micro in step]
    empty, positions = sum(int((array == -1).sum()) for array in segments), sum(array.size for array in segments)
    assert pad_fraction(made.rows, made) == pytest.approx(empty / positions)
