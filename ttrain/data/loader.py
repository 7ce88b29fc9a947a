"""From an order of rows to the micro-batches of one rank, built ahead in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, Self

from ttrain.data.packing import Array, Rows
from ttrain.data.samplers import Order


class Counted(Protocol):
    """A batch, which can be asked for one like it that does not count in the loss."""

    def without_targets(self) -> Self: ...


class BatchSource(Protocol):
    """Any rows that can be read by number."""

    def __len__(self) -> int: ...

    def batch(self, rows: Collection[int], /) -> Counted: ...


@dataclass(frozen=True)
class MicroBatch:
    """`number` counts the step's micro-batches over all ranks: it seeds dropout, so it does not matter who computes it."""

    number: int
    batch: Any
    filler: bool = False  # without targets, so that a rank takes part in the collectives of a step that has no rows for it


class Loader:
    """The same global micro-batches for any number of ranks: rank r of W takes numbers r, r+W, r+2W, ...

    A rank that would have one less than the others gets one without targets, since all take part in the collective.
    `consumed` is the number of steps that were handed out, whatever was prepared beyond; the next iteration goes on there.
    """

    def __init__(
        self,
        rows: BatchSource,
        order: Order,
        *,
        rows_per_device: int,
        rank: int = 0,
        world: int = 1,
        prefetch_steps: int = 1,
    ) -> None:
        self.rows, self.order = rows, order
        self.rows_per_device, self.rank, self.world = rows_per_device, rank, world
        self.prefetch_steps = prefetch_steps
        self.consumed = 0

    def step(self, step: int) -> list[MicroBatch]:
        """Micro-batches of this rank in a step; any step can be asked for."""
        parts = self.parts(step)
        mine = [MicroBatch(number, self.rows.batch(parts[number])) for number in range(self.rank, len(parts), self.world)]
        if len(mine) < -(-len(parts) // self.world):
            mine.append(MicroBatch(len(parts) + self.rank, self.rows.batch(parts[0]).without_targets(), True))
        return mine

    def steps(self, first: int, last: int) -> Iterator[list[MicroBatch]]:
        """Steps `first` to `last` (not included), the next `prefetch_steps` in preparation."""
        if self.prefetch_steps == 0:
            for step in range(first, last):
                micro_batches = self.step(step)
                self.consumed = step + 1
                yield micro_batches
            return
        pool = ThreadPoolExecutor(self.prefetch_steps, thread_name_prefix="loader")
        try:
            coming: deque[Future[list[MicroBatch]]] = deque()
            for step in range(first, last):
                while len(coming) <= self.prefetch_steps and step + len(coming) < last:
                    coming.append(pool.submit(self.step, step + len(coming)))
                micro_batches = coming.popleft().result()
                self.consumed = step + 1
                yield micro_batches
        finally:
            pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        return self.steps(self.consumed, self.order.steps)

    def state_dict(self) -> dict[str, int]:
        """The whole state: the number of consumed steps."""
        return {"consumed_steps": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the steps that another loader of the same rows and order, on any number of ranks, has consumed."""
        self.consumed = state["consumed_steps"]

    def parts(self, step: int) -> list[Array]:
        """Row numbers of each micro-batch of a step, over all ranks."""
        numbers, size = self.order.step_rows(step), self.rows_per_device
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def pad_fraction(rows: Rows, loader: Loader, steps: int = 100) -> float:
    """Share of the positions without a token, in the micro-batches of the first steps over all ranks; reads no row."""
    lengths = rows.lengths()
    padded = width = 0
    for step in range(min(steps, loader.order.steps)):
        for part in loader.parts(step):
            positions = len(part) * rows.width(part)
            width, padded = width + positions, padded + positions - int(lengths[part].sum())
    return padded / max(1, width)
