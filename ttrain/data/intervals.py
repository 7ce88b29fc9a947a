"""Regions of a record that are never learnt: from one marker token to another, both of them included.

The rule is about labels, not about inputs: a token is masked wherever it is the target, by whichever head predicts it. Each
occurrence of a marker is masked; a region that is not closed reaches to the end of its record; the next record begins
outside every region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LOOK_BACK = 65_536  # tokens read at once while looking for the last marker before a row
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Intervals:
    """Pairs (from, to) of token ids; each pair is followed on its own, and what any of them masks is masked."""

    pairs: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        assert all(opens != closes for opens, closes in self.pairs), f"a region that opens and closes alike: {self.pairs}"

    def __bool__(self) -> bool:
        return bool(self.pairs)

    def masked(self, ids: npt.NDArray[Any], begins: Flags, opened: Sequence[bool] | None = None) -> Flags:
        """Which of the N tokens are no targets.

        `begins[t]` says that a record begins at t. `opened` says, for each pair, whether its region is open before ids[0];
        it matters where ids[0] continues a record.
        """
        found = np.zeros(len(ids), bool)
        for (opens, closes), before in zip(self.pairs, opened or [False] * len(self.pairs), strict=True):
            closing = ids == closes
            events = np.flatnonzero((ids == opens) | closing | begins)  # where the state may change
            states = np.concatenate([[before], ids[events] == opens])
            found |= np.repeat(states, np.diff(events, prepend=0, append=len(ids))) | closing
        return found

    def opened(self, read: Callable[[int, int], npt.NDArray[Any]], first: int, place: int) -> list[bool]:
        """For each pair, whether its region is open just before `place`, in a record that begins at `first`.

        `read(start, end)` gives tokens. It looks back for the last marker, so it costs what lies between the two.
        """
        states = []
        for opens, closes in self.pairs:
            end, last = place, closes
            while end > first:
                start = max(first, end - LOOK_BACK)
                ids = read(start, end)
                events = np.flatnonzero((ids == opens) | (ids == closes))
                if len(events):
                    last = int(ids[events[-1]])
                    break
                end = start
            states.append(last == opens)
        return states


NO_MASKS = Intervals()
