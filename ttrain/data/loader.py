"""From an order of rows to the micro-batches of one rank, built one step ahead in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ttrain.data.packing import Batch, Rows
from ttrain.data.samplers import ShuffledOrder


@dataclass(frozen=True)
class MicroBatch:
    """`number` counts the step's micro-batches over all ranks: it seeds dropout, so it does not matter who computes it."""

    number: int
    batch: Batch


class Loader:
    """The same global micro-batches for any number of ranks: rank r of W takes numbers r, r+W, r+2W, ...

    A rank that would have one less than the others gets one without targets, since all take part in the collective.
    """

    def __init__(self, rows: Rows, order: ShuffledOrder, *, rows_per_device: int, rank: int = 0, world: int = 1) -> None:
        self.rows, self.order = rows, order
        self.rows_per_device, self.rank, self.world = rows_per_device, rank, world

    def step(self, step: int) -> list[MicroBatch]:
        """Micro-batches of this rank in a step; position means consumed, so any step can be asked for."""
        numbers = self.order.step_rows(step)
        size = self.rows_per_device
        parts = [numbers[start : start + size] for start in range(0, len(numbers), size)]
        mine = [MicroBatch(number, self.rows.batch(parts[number])) for number in range(self.rank, len(parts), self.world)]
        if len(mine) < -(-len(parts) // self.world):
            mine.append(MicroBatch(len(parts) + self.rank, self.rows.batch(parts[0]).without_targets()))
        return mine

    def steps(self, first: int, last: int) -> Iterator[list[MicroBatch]]:
        """Steps `first` to `last` (not included), the next one in preparation."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            coming: Future[list[MicroBatch]] | None = pool.submit(self.step, first) if first < last else None
            for step in range(first, last):
                assert coming is not None
                micro_batches = coming.result()
                coming = pool.submit(self.step, step + 1) if step + 1 < last else None
                yield micro_batches
