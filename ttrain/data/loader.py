"""Build the micro-batches of one rank from an order of rows, a step ahead in a thread."""

from collections.abc import Collection, Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from ttrain.data.order import Order
from ttrain.data.packing import Array, Rows


class BatchSource(Protocol):
    """Rows to read by number, in batches that have `without_targets`."""

    def __len__(self) -> int: ...

    def batch(self, rows: Collection[int], /) -> Any: ...


@dataclass(frozen=True)
class MicroBatch:
    """A batch; `number` counts a step's micro-batches over all ranks and seeds dropout."""

    number: int
    batch: Any


@dataclass(eq=False)
class Loader:
    """The same global micro-batches for any number of ranks: rank r of W takes r, r+W, r+2W, ...

    `consumed` counts the steps returned, not prefetched ones; the next iteration continues there.
    """

    rows: BatchSource
    order: Order
    rows_per_device: int
    rank: int = 0
    world: int = 1
    consumed: int = 0
    _running: Generator[list[MicroBatch], None, None] | None = None

    def step(self, step: int) -> list[MicroBatch]:
        """Micro-batches of this rank in any step."""
        parts = self.parts(step)
        mine = [
            MicroBatch(number, self.rows.batch(parts[number]))
            for number in range(self.rank, len(parts), self.world)
        ]
        # All ranks take part in the collective: one that would have fewer gets one without targets.
        if len(mine) < -(-len(parts) // self.world):
            mine.append(
                MicroBatch(len(parts) + self.rank, self.rows.batch(parts[0]).without_targets())
            )
        return mine

    def steps(self, first: int, last: int) -> Generator[list[MicroBatch], None, None]:
        """Steps `first` to `last` (not included), the next one in preparation."""
        with ThreadPoolExecutor(1, thread_name_prefix="loader") as pool:
            coming: Future[list[MicroBatch]] | None = None
            for step in range(first, last):
                micro_batches = (coming or pool.submit(self.step, step)).result()
                coming = pool.submit(self.step, step + 1) if step + 1 < last else None
                self.consumed = step + 1
                yield micro_batches

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        self.close()
        self._running = self.steps(self.consumed, self.order.steps)
        return self._running

    def close(self) -> None:
        """End the iteration and its thread."""
        # The garbage collector must not do it: it may run while another thread starts, which holds
        # the lock that waiting for this thread's end needs, and the process hangs.
        if self._running is not None:
            self._running.close()
        self._running = None

    def state_dict(self) -> dict[str, int]:
        """The whole state: the number of consumed steps."""
        return {"consumed_steps": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue after the steps that another loader of the same rows and order consumed."""
        self.consumed = state["consumed_steps"]

    def parts(self, step: int) -> list[Array]:
        """Row numbers of each micro-batch of a step, over all ranks."""
        numbers = self.order.step_rows(step)
        size = self.rows_per_device
        return [numbers[start : start + size] for start in range(0, len(numbers), size)]


def pad_fraction(rows: Rows, loader: Loader, steps: int = 100) -> float:
    """Fraction of padding positions in the first steps over all ranks; reads no row."""
    lengths = rows.lengths()
    padded = width = 0
    for step in range(min(steps, loader.order.steps)):
        for row_numbers in loader.parts(step):
            positions = len(row_numbers) * rows.width(row_numbers)
            width += positions
            padded += positions - int(lengths[row_numbers].sum())
    return padded / max(1, width)
