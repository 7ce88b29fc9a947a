"""The callbacks of a run: told in their order, named where they raise."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ttrain.data.samplers import Order
from ttrain.errors import TTrainError
from ttrain.train.callbacks import Callback
from ttrain.train.distributed import Ranks

log = logging.getLogger("ttrain")


class Listeners:
    """Those of rank 0; on other ranks there are none. What they do is announced to the ranks that wait meanwhile."""

    def __init__(self, callbacks: Sequence[Callback], ranks: Ranks, order: Order) -> None:
        self.callbacks = list(callbacks) if ranks.first else []
        self._ranks, self._order = ranks, order

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the hook of this name."""
        with self._ranks.busy(event):
            for callback in self.callbacks:
                _call(callback, event, *arguments)

    def epoch_start(self, step: int, *, continued: bool) -> None:
        """Tell of the epochs whose first row is in this step, or in which the run begins."""
        before, after, start, _ = self._epochs(step)
        first = before if continued or start % self._order.rows == 0 else before + 1
        for epoch in range(first, after + 1):
            self.tell("epoch_start", epoch)

    def epoch_end(self, step: int) -> None:
        """Tell of the epochs whose last row is in this step, or with which the run ends."""
        before, after, _, end = self._epochs(step)
        over = end % self._order.rows == 0 or end == self._order.total_rows
        for epoch in range(before, after + 1 if over else after):
            self.tell("epoch_end", epoch)

    def figures(self, event: str, *arguments: Any) -> dict[str, float]:
        """What they add to the log."""
        found: dict[str, float] = {}
        for callback in self.callbacks:
            found |= _call(callback, event, *arguments)
        return found

    def ask(self) -> bool:
        """Whether one wants the run to end."""
        return any(_call(callback, "stop_reason") for callback in self.callbacks)

    def failed(self, error: BaseException) -> None:
        """Tell of the error, which must not be hidden by one of theirs."""
        for callback in self.callbacks:
            try:
                callback.failed(error)
            except Exception as second:
                log.warning("the callback %s.failed raised %r", type(callback).__name__, second)

    def state(self) -> list[dict[str, Any]]:
        """What checkpoints keep of those that have something to keep."""
        found = [{"name": type(callback).__name__, "state": _call(callback, "state")} for callback in self.callbacks]
        return [entry for entry in found if entry["state"]]

    def load_state(self, kept: Sequence[Mapping[str, Any]]) -> None:
        """Put it back, by the names of their classes."""
        states = {entry["name"]: entry["state"] for entry in kept}
        for callback in self.callbacks:
            if type(callback).__name__ in states:
                callback.load_state(states[type(callback).__name__])

    def _epochs(self, step: int) -> tuple[int, int, int, int]:
        """(epoch of the first row, of the last row, place of the first row, place after the last row) of a step."""
        order = self._order
        start = step * order.rows_per_step
        end = min(start + order.rows_per_step, order.total_rows)
        return start // order.rows, (end - 1) // order.rows, start, end


def _call(callback: Callback, event: str, *arguments: Any) -> Any:
    try:
        return getattr(callback, event)(*arguments)
    except TTrainError:
        raise
    except Exception as error:
        raise TTrainError(f"the callback {type(callback).__name__}.{event} raised {error!r}") from error
