"""Choose the rows of a set of shards: duplicates, the held-out part, limits."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ttrain.config import Reading
from ttrain.data import shards
from ttrain.data.blocks import BEYOND_LIMIT, BuiltBlock, Table
from ttrain.data.contamination import TextMatch
from ttrain.data.json_rows import Tally
from ttrain.data.packing import Flags, Ids

HELD_OUT = "stands in the held-out part"
DUPLICATE = "duplicate"

Tallies = Mapping[tuple[str, int], Tally]  # by role and number of the file


class Selection:
    """All rows of the blocks, and which are selected; a block's arrays are views of these."""

    def __init__(self, built_blocks: Sequence[BuiltBlock], tallies: Tallies, kind: str) -> None:
        self._tallies = tallies
        self._kind = kind
        lengths = [len(block.rows) for block in built_blocks]
        self._starts = shards.offsets_of(lengths)
        self.rows = np.concatenate(
            [np.zeros((0, 4), np.uint64), *(block.rows for block in built_blocks)]
        )
        self.selected = np.ones(len(self.rows), np.bool_)
        self.from_heldout = np.repeat(
            np.array([block.role == "heldout" for block in built_blocks], np.bool_), lengths
        )
        self._is_heldout: Flags = np.concatenate(
            [self.selected[:0], *(b.is_heldout for b in built_blocks)]
        )
        spans = itertools.starmap(slice, itertools.pairwise(self._starts.tolist()))
        # Each block with its part of the arrays.
        self._spans = list(zip(built_blocks, spans, strict=True))
        for block, span in self._spans:
            block.rows = self.rows[span]
            block.selected = self.selected[span]

    def leave_out(self, rule: str, flags: Flags) -> None:
        """Leave the flagged rows out by a rule, and count those that were selected."""
        flags = flags & self.selected
        for block, span in self._spans:
            self._tallies[block.role, block.file].leave_out(rule, int(flags[span].sum()))
        self.selected &= ~flags

    def select(self, reading: Reading) -> int:
        """Leave out training rows that a held-out file has, duplicates, and rows beyond the limit.

        Returns the number of duplicate rows.
        """
        repeated = ~is_first(self.rows)
        if self.from_heldout.any():
            keys = _split_keys(self.rows, self._kind)
            self.leave_out(HELD_OUT, ~self.from_heldout & np.isin(keys, keys[self.from_heldout]))
        repeated &= self.selected
        if reading.deduplicate:
            self.leave_out(DUPLICATE, repeated)
        if reading.limit:
            trained_on = self.selected & ~self.from_heldout
            self.leave_out(BEYOND_LIMIT, trained_on & (np.cumsum(trained_on) > reading.limit))
        return int(repeated.sum())

    def in_earlier_heldout(self, earlier_heldout: Table | None) -> Flags:
        """Flag the training rows whose content an earlier held-out set has."""
        if earlier_heldout is None:
            return np.zeros_like(self.selected)
        keys, earlier_keys = (
            _split_keys(table, self._kind) for table in (self.rows, earlier_heldout)
        )
        return self.selected & ~self._is_heldout & np.isin(keys, earlier_keys)

    def hold_out_lowest_row(self, kept_back: Flags) -> tuple[BuiltBlock, int] | None:
        """If nothing was held out, move the row with the lowest hash out of the training part.

        Returns the first block with the row, and its number there. Copies of the row, and other
        pairs of its prompt, leave the training part too. The last row that may be trained on
        stays; then the row is one of those `kept_back`.
        """
        if (self._is_heldout & self.selected).any():
            return None
        can_spare_one = int((self.selected & ~kept_back).sum()) > 1
        rows = np.flatnonzero(self.selected if can_spare_one else self.selected & kept_back)
        if not len(rows):
            return None
        lowest = int(rows[np.lexsort((self.rows[rows, 1], self.rows[rows, 0]))[0]])
        keys = _split_keys(self.rows, self._kind)
        same = self.selected & (keys == keys[lowest])
        self.selected[same.argmax()] = False  # it is kept, in the held-out part
        self.leave_out(HELD_OUT, same)
        block, span = self._spans[int(self._starts.searchsorted(lowest, "right")) - 1]
        return block, lowest - span.start

    def matched_rows(
        self, matches: Iterable[Sequence[TextMatch]]
    ) -> list[tuple[int, str, TextMatch]]:
        """(row, name of its file, match with its line there), of training files."""
        rows: list[tuple[int, str, TextMatch]] = []
        training_blocks = [(block, span) for block, span in self._spans if block.role == "train"]
        # The first rows alone need the first blocks.
        for (block, span), found in zip(training_blocks, matches, strict=False):
            lines = block.rows[:, 3]
            for match in found:
                row = int(lines.searchsorted(np.uint64(match.line)))
                is_there = row < len(lines) and lines[row] == match.line
                if is_there and not block.is_heldout[row]:
                    in_file = match._replace(line=block.line_of(row))
                    rows.append((span.start + row, block.source.name, in_file))
        return rows


def _split_keys(table: Table, kind: str) -> Ids:
    if kind == "pairs":
        return table[:, 0]
    return np.ascontiguousarray(table[:, :2]).view([("", np.uint64)] * 2).ravel()


def is_first(table: Table) -> Flags:
    """A flag per row: whether no earlier row has the same content."""
    flags = np.ones(len(table), np.bool_)
    halves = np.sort(table[:, 0])
    if (halves[1:] == halves[:-1]).any():  # sorting with indexes takes forty times as long
        order = np.lexsort(
            (table[:, 1], table[:, 0])
        )  # stable: of equal rows the first stays first
        ordered = table[order, :2]
        flags[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return flags
