"""Micro-batches and orders of rows: the same for any ranks and threads, resumed at any step."""

import itertools
import threading
from collections.abc import Iterable

import numpy as np
import pytest

from ttrain.data import order as ordering
from ttrain.data.loader import Loader, MicroBatch, pad_fraction
from ttrain.data.order import LengthGroupedOrder, Order, ShuffledOrder, WeightedOrder, permute
from ttrain.data.packing import IGNORE, Array, Batch, Rows
from ttrain.errors import DataError

Lists = list[tuple[int, list[list[int]], list[list[int]]]]


class NumberedRows(Rows):
    """Rows of these lengths, filled with their own number, the first position without a target."""

    pad_id, trimmed = 0, True

    def __init__(self, lengths: Array) -> None:
        self._lengths, self.row_length = lengths, max(16, int(lengths.max()))

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self) -> Array:
        return self._lengths

    def fill(self, rows: Array, batch: Batch, lines: Array) -> None:
        for row, at in zip(rows.tolist(), lines.tolist(), strict=True):
            batch.input_ids_BT[at, : self._lengths[row]] = row
            batch.labels_BT[at, 1 : self._lengths[row]] = row
            batch.segments_BT[at, : self._lengths[row]] = 0

    def counts(self) -> dict[str, int | float]:
        return {"rows": len(self)}


def lengths_of(count: int) -> Array:
    return 2 + np.arange(count) % 8


def orders(rows: int, per_step: int, total: int, seed: int = 5) -> list[Order]:
    return [
        ShuffledOrder(rows, per_step, total, seed),
        WeightedOrder([rows - 3, 3], [0.7, 0.3], per_step, total, seed),
        LengthGroupedOrder(lengths_of(rows), per_step, total, seed),
    ]


def loader(order: Order, *, rows_per_device: int = 2, rank: int = 0, world: int = 1) -> Loader:
    rows = NumberedRows(lengths_of(order.rows))
    return Loader(rows, order, rows_per_device=rows_per_device, rank=rank, world=world)


def live_rows(micro_batches: list[MicroBatch]) -> dict[int, list[int]]:
    """{number of the micro-batch: rows with targets}, without those for the collective only."""
    live = {}
    for micro_batch in micro_batches:
        batch = micro_batch.batch
        rows = batch.input_ids_BT[(batch.labels_BT != IGNORE).any(axis=1), 0].tolist()
        if rows:
            assert micro_batch.number not in live
            live[micro_batch.number] = rows
    return live


def as_lists(steps: Iterable[list[MicroBatch]]) -> list[Lists]:
    return [
        [(m.number, m.batch.input_ids_BT.tolist(), m.batch.labels_BT.tolist()) for m in step]
        for step in steps
    ]


@pytest.mark.parametrize(
    ("per_step", "rows_per_device", "kind"), [(2, 3, 1), (5, 3, 2), (8, 16, 0), (13, 1, 2)]
)
def test_any_ranks_see_the_same_batches(per_step: int, rows_per_device: int, kind: int) -> None:
    order = orders(17, per_step, 2 * 17 + 1)[kind]
    for step in range(order.steps):
        alone = live_rows(loader(order, rows_per_device=rows_per_device).step(step))
        rows_alone = [row for number in sorted(alone) for row in alone[number]]
        assert rows_alone == order.step_rows(step).tolist()
        for world in (2, 3, 4):
            split = {"rows_per_device": rows_per_device, "world": world}
            ranks = [loader(order, rank=rank, **split).step(step) for rank in range(world)]
            # All take part in every collective.
            assert len({len(micro_batches) for micro_batches in ranks}) == 1
            numbers = [micro.number for micro_batches in ranks for micro in micro_batches]
            assert len(numbers) == len(set(numbers))
            together: dict[int, list[int]] = {}
            for rows in map(live_rows, ranks):
                assert not together.keys() & rows.keys()
                together |= rows
            assert together == alone


@pytest.mark.parametrize(("kind", "rank", "world"), [(0, 0, 1), (1, 0, 3), (1, 2, 3), (2, 0, 1)])
def test_a_loader_resumes_at_any_step(kind: int, rank: int, world: int) -> None:
    order = orders(11, 4, 30, seed=3)[kind]

    def opened() -> Loader:
        return loader(order, rank=rank, world=world)

    through = as_lists(opened())
    assert len(through) == order.steps == 8
    # The steps of an iteration are prepared ahead.
    assert through == as_lists(opened().step(step) for step in range(order.steps))
    for stop in range(order.steps + 1):
        first, second = opened(), opened()
        steps = iter(first)
        before = as_lists(next(steps) for _ in range(stop))
        assert first.state_dict() == {"consumed_steps": stop}
        steps.close()  # type: ignore[attr-defined]
        second.load_state_dict(first.state_dict())
        assert before + as_lists(second) == through
        assert as_lists(opened().steps(stop, order.steps)) == through[stop:]
        assert second.state_dict() == {"consumed_steps": order.steps} and as_lists(second) == []


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

    broken = Loader(Broken(lengths_of(4)), ShuffledOrder(4, 2, 4, seed=1), rows_per_device=1)
    with pytest.raises(OSError, match="the disk is gone"):
        list(broken)
    assert broken.state_dict() == {"consumed_steps": 0}


@pytest.mark.parametrize("kind", range(3))
def test_the_pad_fraction_is_that_of_the_batches(kind: int) -> None:
    made = loader(orders(50, 10, 150)[kind], rows_per_device=4)
    segments = [micro.batch.segments_BT for step in made for micro in step]
    empty = sum(int((array == -1).sum()) for array in segments)
    positions = sum(array.size for array in segments)
    assert pad_fraction(made.rows, made) == pytest.approx(empty / positions)


def test_the_order_is_a_permutation_of_any_size_of_which_any_place_can_be_asked_for_alone() -> None:
    for size in (1, 2, 3, 7, 16, 39, 63, 64, 65, 257, 1000, 4097, 50_000):
        order = permute(np.arange(size), size, 2**32 - 1, 3)
        assert np.array_equal(np.sort(order), np.arange(size))
        some = permute(np.arange(size)[size // 2 :: 7], size, 2**32 - 1, 3)
        assert some.tolist() == order[size // 2 :: 7].tolist()
    images = permute(np.arange(10**12 - 1000, 10**12), 10**12, 1, 0)  # a huge set costs no memory
    assert len(set(images.tolist())) == 1000 and 0 <= images.min() <= images.max() < 10**12


def test_the_order_looks_random() -> None:
    size, counts = 50, np.zeros((50, 10))
    for epoch in range(1000):
        order = permute(np.arange(size), size, 3, epoch)
        counts[order, np.arange(size) * 10 // size] += 1
    assert abs(counts - 100).max() < 100 * 0.5
    epochs = itertools.product(range(3), range(3))
    orders = {tuple(permute(np.arange(100), 100, seed, epoch)) for seed, epoch in epochs}
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
    assert weighted.step_rows(0).tolist() == [9, 0, 4, 1, 3, 2, 5, 3]
    assert weighted.step_rows(5).tolist() == [4, 5, 3, 2, 1, 0, 4, 7]
    steps = [grouped.step_rows(step).tolist() for step in range(4)]
    assert steps == [[3, 4], [5, 7], [1, 6], [0, 2]]


def all_rows(order: Order) -> list[int]:
    return [row for step in range(order.steps) for row in order.step_rows(step).tolist()]


def place(number: int, size: int, seed: int, epoch: int) -> int:
    return int(permute(np.array([number]), size, seed, epoch)[0])


def test_a_step_takes_the_next_places_of_its_epochs_order_and_each_epoch_has_its_own() -> None:
    expected = [place(number % 30, 30, 9, number // 30) for number in range(100)]
    assert all_rows(ShuffledOrder(rows=30, rows_per_step=8, total_rows=100, seed=9)) == expected
    assert len({tuple(expected[start : start + 30]) for start in (0, 30, 60)}) == 3


def naive_weighted(group_rows: list[int], weights: list[float], total: int, seed: int) -> list[int]:
    """Draw after draw: whose turn it is, and the next row of that group's pass."""
    cycle_length = ordering.DRAWS_PER_CYCLE
    owners = np.repeat(np.arange(len(weights)), ordering.quotas(weights, cycle_length))
    drawn, draws = [0] * len(group_rows), []
    for draw in range(total):
        cycle, at = divmod(draw, cycle_length)
        group = owners[place(at, cycle_length, ordering.derived_seed(seed, 0), cycle)]
        turn, row = divmod(drawn[group], group_rows[group])
        drawn[group] += 1
        drawn_row = place(row, group_rows[group], ordering.derived_seed(seed, group + 1), turn)
        draws.append(sum(group_rows[:group]) + drawn_row)
    return draws


@pytest.mark.parametrize(("group_rows", "weights"), [([5, 40, 11], [0.2, 0.5, 0.3]), ([13], [2.0])])
def test_a_weighted_order_equals_draws(
    monkeypatch: pytest.MonkeyPatch, group_rows: list[int], weights: list[float]
) -> None:
    monkeypatch.setattr(ordering, "DRAWS_PER_CYCLE", 50)
    order = WeightedOrder(group_rows, weights, rows_per_step=7, total_rows=230, seed=4, draws=50)
    expected = naive_weighted(group_rows, weights, 230, seed=4)
    assert all_rows(order) == expected
    assert order.step_rows(20).tolist() == expected[140:147]
    assert order.step_rows(3).tolist() == expected[21:28]


def test_quotas_are_rounded_by_the_largest_remainder_and_spread_over_the_cycle() -> None:
    assert ordering.quotas([1, 1, 1], 10_000) == [3334, 3333, 3333]
    assert ordering.quotas([5, 3, 1], 10) == [6, 3, 1]  # 5.56, 3.33, 1.11
    order = WeightedOrder([50, 5000], [9, 1], rows_per_step=500, total_rows=10_000, seed=1)
    groups = np.array(all_rows(order)) >= 50
    share = groups.reshape(-1, 1000).mean(axis=1)
    assert groups.mean() == 0.1 and 0.06 < share.min() < share.max() < 0.14


def test_sources_never_drawn_are_refused() -> None:
    with pytest.raises(DataError, match=r"source 2 .* 0\.5 "):
        WeightedOrder([5, 0], [0.5, 0.5], 4, 100, seed=1)
    with pytest.raises(DataError, match=r"source 1 .* 1e-06 .*10000"):
        WeightedOrder([5, 5], [1e-6, 1.0], 4, 100, seed=1)


def log_normal(count: int) -> Array:
    lengths = np.exp(np.random.default_rng(1).normal(4.5, 0.8, count))
    return np.clip(lengths, 2, 512).astype(np.int64)


def naive_length_grouped(
    lengths: Array, per_step: int, total: int, seed: int, part_steps: int
) -> list[int]:
    """Epoch by epoch: parts of complete steps, each sorted and dealt out in random order."""
    size, order = len(lengths), list[int]()
    while len(order) < total:
        epoch = len(order) // size
        shuffled = [place(at, size, seed, epoch) for at in range(size)]
        left, rooms = size, []
        while left:  # room for this epoch in each step: the first begins where the last epoch ended
            rooms.append(min(left, per_step - (len(order) + size - left) % per_step))
            left -= rooms[-1]
        taken = 0
        for part, first in enumerate(range(0, len(rooms), part_steps)):
            mine = rooms[first : first + part_steps]
            rows = sorted(shuffled[taken : taken + sum(mine)], key=lambda row: lengths[row])
            taken += sum(mine)
            dealt: dict[int, list[int]] = {}
            key = ordering.derived_seed(seed, epoch)
            ranks = [place(step, len(mine), key, part) for step in range(len(mine))]
            for step in sorted(range(len(mine)), key=ranks.__getitem__):
                dealt[step], rows = rows[: mine[step]], rows[mine[step] :]
            order += [row for step in range(len(mine)) for row in dealt[step]]
    return order[:total]


@pytest.mark.parametrize(("count", "per_step"), [(61, 4), (10, 7), (33, 5), (8, 8)])
def test_grouping_equals_a_loop(monkeypatch: pytest.MonkeyPatch, count: int, per_step: int) -> None:
    monkeypatch.setattr(ordering, "GROUPED_STEPS", 3)
    lengths, total = log_normal(count), 3 * count - 2
    order = LengthGroupedOrder(lengths, per_step, total_rows=total, seed=6)
    part_steps = max(1, min(3, count // (4 * per_step)))
    expected = naive_length_grouped(lengths, per_step, total, 6, part_steps)
    assert all_rows(order) == expected
    alone = order.steps - 2
    assert order.step_rows(alone).tolist() == expected[alone * per_step : (alone + 1) * per_step]


def test_grouping_halves_the_padding_with_steps_in_random_order() -> None:
    rows = NumberedRows(log_normal(2000))
    grouped = LengthGroupedOrder(rows.lengths(), 32, 2000, seed=1)
    shuffled = ShuffledOrder(2000, 32, 2000, seed=1)
    loaders = [Loader(rows, order, rows_per_device=8) for order in (grouped, shuffled)]
    assert pad_fraction(rows, loaders[0]) < pad_fraction(rows, loaders[1]) / 2
    lengths = log_normal(8000)
    order = LengthGroupedOrder(lengths, 16, 8000, seed=3)
    means = np.array([lengths[order.step_rows(step)].mean() for step in range(order.steps)])
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.1
    assert abs(np.corrcoef(means[1:], means[:-1])[0, 1]) < 0.1


@pytest.mark.parametrize("kind", range(3))
def test_a_token_budget_ends_within_its_step(monkeypatch: pytest.MonkeyPatch, kind: int) -> None:
    monkeypatch.setattr(ordering, "COUNTED_TOGETHER", 7)
    order = orders(rows=16, per_step=3, total=3 * 90)[kind]
    order.row_tokens = lengths_of(16)
    read = np.cumsum([lengths_of(16)[order.step_rows(step)].sum() for step in range(90)])
    assert [order.step_tokens(step) for step in range(90)] == np.diff(read, prepend=0).tolist()
    for budget in (1, 2, 40, 87, 88, 89, 300, 1000, int(read[-1])):
        assert order.steps_to_read(budget) == 1 + np.searchsorted(read, budget)


def test_an_epoch_ends_with_the_step_that_holds_its_last_row() -> None:
    """Rows 0-8, 9-17, 18-26 and 27-29 in steps of six."""
    order = ShuffledOrder(9, 6, 30, 1)
    ends = [order.epoch_ends(epochs) for epochs in (1, 2, 4, None)]
    assert ends == [{2, 3, 5}, {3}, set(), set()]


def test_rows_that_count_alike_have_their_tokens_without_being_drawn() -> None:
    order = ShuffledOrder(10, 4, 22, 1, row_tokens=8)
    assert [order.step_tokens(step) for step in range(order.steps)] == [32, 32, 32, 32, 32, 16]
    assert order.steps_to_read(33) == 2


def test_skipping_a_million_steps_is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    work, inner = [0], ordering.feistel

    def counted(values: Array, *arguments: int) -> Array:
        work[0] += len(values)
        return inner(values, *arguments)  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(ordering, "feistel", counted)
    for order in (
        ShuffledOrder(5000, 32, 10**9, 1),
        WeightedOrder([4900, 100], [0.9, 0.1], 32, 10**9, 1),
        LengthGroupedOrder(log_normal(5000), 32, 10**9, 1),
    ):
        work[0] = 0
        assert len(order.step_rows(10**6)) == 32
        assert 32 <= work[0] < 8 * (ordering.DRAWS_PER_CYCLE + 2 * ordering.GROUPED_STEPS * 32)
