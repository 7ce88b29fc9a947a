"""Named sums that travel beside the loss, in an order that all ranks agree on in the first step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ttrain.errors import TTrainError
from ttrain.train.distributed import Ranks

Sums = Mapping[str, Sequence[float]]


class Totals:
    """Parts of the loss and other sums, as one list of numbers. The first step says what there is."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts: list[str] | None = None
        self._sums: list[tuple[str, int]] = []

    def flat(self, parts: Mapping[str, float], sums: Sums) -> list[float]:
        """All numbers in the agreed order, 0 for what is missing. Raises TTrainError for what the first step had not."""
        if self._parts is None:
            found = self._ranks.union([f"0/{name}" for name in parts] + [f"{len(sums[name])}/{name}" for name in sums])
            split = [(name.partition("/")[2], int(name.partition("/")[0])) for name in found]
            self._parts = [name for name, length in split if not length]
            self._sums = [(name, length) for name, length in split if length]
        unknown = sorted({*parts} - {*self._parts}) or sorted({*sums} - {name for name, _ in self._sums})
        if unknown:
            raise TTrainError(
                f"the loss has the part {unknown[0]!r}, which the first step had not; return the same parts from every "
                f"training step, with 0 where there is nothing"
            )
        values = [parts.get(name, 0.0) for name in self._parts]
        for name, length in self._sums:
            values += sums.get(name, [0.0] * length)
        return values

    def named(self, values: Sequence[float]) -> tuple[dict[str, float], dict[str, list[float]]]:
        """What `flat` made a list of: the parts, and the other sums."""
        assert self._parts is not None, "flat() comes first"
        start = len(self._parts)
        parts, sums = dict(zip(self._parts, values[:start], strict=True)), dict[str, list[float]]()
        for name, length in self._sums:
            sums[name] = [*values[start : start + length]]
            start += length
        return parts, sums
