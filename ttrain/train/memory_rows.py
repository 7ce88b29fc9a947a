"""A few rows in memory, for checks and measurements that need no shards."""

# Letters in names: B rows, T positions.

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, replace

import numpy as np
import numpy.typing as npt

from ttrain.data.packing import IGNORE, Batch, Rows
from ttrain.data.pair_rows import PairBatch, finished_pairs

POSITIONS = 192  # of a cut row: several blocks of the attention on CPUs, of 32 and 64


class InMemoryRows:
    """A few of the user's rows. `references`: log-probabilities by the numbers of answers."""

    def __init__(self, whole: Batch, references: npt.NDArray[np.float64] | None = None) -> None:
        self.whole = whole
        self.references = references
        self.row_length = whole.input_ids_BT.shape[1]

    def __len__(self) -> int:
        return len(self.whole.input_ids_BT)

    def batch(self, rows: Collection[int]) -> Batch:
        """A batch of the rows with these numbers."""
        names = [array.name for array in fields(self.whole) if array.name.endswith("_BT")]
        numbers = np.asarray(rows, np.int64)
        batch = replace(self.whole, **{name: getattr(self.whole, name)[numbers] for name in names})
        if not isinstance(batch, PairBatch):
            return batch
        answer_ids = np.append(batch.answer_ids_A, -1)  # -1: no answer
        pairs = finished_pairs(replace(batch, answers_BT=answer_ids[batch.answers_BT]))
        if self.references is None:
            return pairs
        return replace(pairs, references_A=self.references[pairs.answer_ids_A])


def select_rows(
    rows: Rows | InMemoryRows,
    count: int,
    positions: int | None = POSITIONS,
) -> InMemoryRows:
    """`count` of the rows, evenly spread, cut to `positions` around their first target."""
    step = max(1, len(rows) // count)
    batch = rows.batch([number * step % len(rows) for number in range(count)])
    if not batch.divisible:
        return InMemoryRows(batch, getattr(rows, "references", None))
    width = batch.input_ids_BT.shape[1]
    length = min(positions or width, width)
    firsts_B = (batch.labels_BT != IGNORE).argmax(axis=1)
    starts_B = np.clip(firsts_B - length // 2, 0, width - length)
    places_BT = starts_B[:, None] + np.arange(length)
    whole = (getattr(batch, array.name) for array in fields(batch))
    return InMemoryRows(Batch(*(np.take_along_axis(array, places_BT, 1) for array in whole)))


def unevenly_masked(rows: InMemoryRows) -> InMemoryRows:
    """The rows with all, 1/2, 1/4, 1/8 of their targets: the mean of means is then not the mean."""
    if not rows.whole.divisible:
        return rows  # whose loss counts pairs, of which rows have different numbers
    labels_BT = rows.whole.labels_BT.copy()
    for row, labels in enumerate(labels_BT):
        labels[np.delete(np.flatnonzero(labels != IGNORE), np.s_[:: 1 << row % 4])] = IGNORE
    return InMemoryRows(replace(rows.whole, labels_BT=labels_BT))


def made_up_rows(count: int, row_length: int, vocabulary: int, kind: str) -> InMemoryRows:
    """Rows of two records each. Of `chats` the second half of each record counts: the answers."""
    ids_BT = np.random.default_rng(1).integers(10, vocabulary, (count, row_length + 1))
    half = -(-row_length // 2)
    segments, positions = (
        np.tile(row, (count, 1)) for row in np.divmod(np.arange(row_length), half)
    )
    first_target = half // 2 if kind == "chats" else 0
    labels_BT = np.where(positions >= first_target, ids_BT[:, 1:], IGNORE)
    return InMemoryRows(Batch(ids_BT[:, :-1], labels_BT, positions, segments))
