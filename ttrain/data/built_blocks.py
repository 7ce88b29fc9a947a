"""Input files and finished blocks, as the selection of rows sees them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Flags = npt.NDArray[np.bool_]
Table = npt.NDArray[np.uint64]  # shape [rows, 4]: hash, hash, bytes of text, line of the block


class Pool(Protocol):
    """Calls a function with many tuples of arguments, in any process; results in order, a bounded number ahead."""

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]: ...


@dataclass(frozen=True)
class DataFile:
    """An input file: its location, display name, and the number of its weighted source."""

    location: str
    name: str
    group: int = 0


FilesByRole = Mapping[str, Sequence[DataFile]]  # of the roles "train" and, if the user names such files, "heldout"


@dataclass
class BuiltBlock:
    """A finished block: its directory, its manifest, and which of its rows are selected."""

    role: str
    file: int
    source: DataFile
    directory: Path
    encoded: bool
    manifest: Mapping[str, Any]
    rows: Table
    lines_before: int  # of the file
    selected: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    def shard(self, part_name: str) -> Path:
        """The file with the rows of a part, in their order."""
        return self.directory / f"{part_name}.arrow"

    @property
    def is_heldout(self) -> Flags:
        if (threshold := self.manifest["threshold"]) < 2**64:
            return self.rows[:, 0] < np.uint64(threshold)
        return np.ones(len(self.rows), np.bool_)

    def in_part(self, part_name: str) -> Flags:
        """A flag per row: whether it is in "train", or in "heldout"."""
        return self.is_heldout if part_name == "heldout" else ~self.is_heldout

    def line_of(self, row: int) -> int:
        """The line of a row in its file."""
        return self.lines_before + int(self.rows[row, 3])
