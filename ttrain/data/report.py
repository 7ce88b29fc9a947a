"""The report on a file or on a set of shards: counts of rows, reasons, lengths, examples; and its JSON."""

from __future__ import annotations

import contextlib
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ttrain.core import redact
from ttrain.data import chat_shapes, inspect, records
from ttrain.data.records import FIRST_REJECTED, Tally
from ttrain.data.shards import COUNTED, ShardSet
from ttrain.errors import DataError, UsageError
from ttrain.store.artifacts import ArtifactStore

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
KEYS_SHOWN = 20
CODE_POINTS = 0x110000
COUNTED_CHARACTERS = 2_000_000  # characters are counted in groups of this size: a table of all code points is 9 MB
OTHER, HAN = "Other", "Han"
# First words of Unicode names of letters that are not the name of the script.
SCRIPT_OF = {"Cjk": HAN, "Ideographic": HAN, "Modifier": OTHER, "Mathematical": OTHER, "Micro": "Greek", "Feminine": "Latin",
             "Masculine": "Latin", "Kelvin": "Latin", "Angstrom": "Latin", "Ohm": "Greek"}  # fmt: skip
WIDTHS = ("FULLWIDTH ", "HALFWIDTH ")
Keys = npt.NDArray[np.uint64]
Lengths = npt.NDArray[np.int64]


@dataclass
class Report:
    """Counts of the rows of a file, or of a block of one; if `measured`, with lengths and scripts of the good rows.

    `error` says why the file cannot be used; the counts are then those up to the error.
    """

    file: str
    kind: str = "documents"
    measured: bool = False
    tally: Tally = field(default_factory=Tally)
    duplicates: int = 0
    error: str | None = None
    lines: int = 0
    bytes: int = 0
    rejected: list[dict[str, Any]] = field(default_factory=list)  # of a block, as many as were requested
    keys: list[Keys] = field(default_factory=list)  # 16 bytes of each kept row, in blocks of shape [rows, 2]
    sizes: list[Lengths] = field(default_factory=list)  # bytes of each good row's text
    letters: Counter[str] = field(default_factory=Counter)  # by their script

    @property
    def shown_file(self) -> str:
        """The file without the secrets of its URL."""
        return redact.url(self.file)

    def add(self, block: Report, quarantine: Callable[[dict[str, Any]], object] | None) -> None:
        """Add the next block of the file, and pass its bad rows to `quarantine`."""
        self.tally.add(block.tally)
        self.keys += block.keys
        self.sizes += block.sizes
        self.letters.update(block.letters)
        self.error = self.error or block.error
        for row in block.rejected:
            row["line"] += self.lines
            if len(self.tally.first_rejected) < FIRST_REJECTED:
                self.tally.first_rejected.append(f"{self.shown_file}:{row['line']}: {row['reason']}")
            if quarantine:
                quarantine(row)
        unlisted = block.tally.rejected.total() - len(block.rejected)
        if quarantine and unlisted:
            reason = f"{unlisted} more bad rows of this block are counted but not listed"
            quarantine({"file": self.shown_file, "reason": reason})
        self.lines += block.lines
        self.bytes += block.bytes

    def check(self, rejected_fraction: float, text_field: str) -> None:
        """Set `error` if the file as a whole cannot be used."""
        if self.error:
            return
        if not self.tally.rows:
            self.error = f"{self.shown_file}: no rows: it is empty, or holds nothing but blank lines"
            return
        expected_fields = chat_shapes.CHAT_FIELDS if self.kind == "chats" else records.document_fields(text_field)
        try:
            self.tally.check(self.shown_file, rejected_fraction, expected_fields)
        except DataError as error:
            self.error = str(error)

    def to_json(self) -> dict[str, Any]:
        """file, rows, kept, skipped, rejected, with rows = kept + skipped + rejected; and further fields."""
        figures = {"file": self.shown_file, **self.tally.to_json(), "duplicates": self.duplicates, "kind": self.kind}
        figures["keys_seen"] = dict(self.tally.keys_seen.most_common(KEYS_SHOWN))
        if self.error:
            figures["error"] = self.error
        if self.measured:
            lengths = np.concatenate([np.zeros(0, np.int64), *self.sizes])
            total = self.letters.total()
            figures |= {"documents": len(lengths), "bytes": int(lengths.sum()), "lengths": lengths_json(lengths, "bytes")}
            figures |= {"letters": total, "scripts": {name: n / total for name, n in self.letters.most_common()}}
        return figures


def report_on_shards(path: Path, row_length: int, tokenizer: Path | None, store: ArtifactStore) -> dict[str, Any]:
    """Figures of every part of a set of shards, and fields of its summary, as JSON. Raises the errors of `inspect`.

    Without the tokenizer, whose token ends a turn, chats have no rows.
    """
    parts = {}
    for name, directory in inspect.parts_of(path).items():
        shards = ShardSet(directory)
        index, encoder = shards.index, None
        if index["kind"] == "chats" or tokenizer is not None:
            with contextlib.suppress(UsageError):
                encoder = inspect.encoder_of(directory, tokenizer, store)
        has_rows = index["kind"] == "documents" or encoder is not None
        parts[name] = {
            "kind": index["kind"],
            **{count: index[count] for count in COUNTED if count != "rows"},
            "documents": index["rows"],
            "bytes_per_token": index["bytes"] / max(1, index["tokens"]),
            "shards": len(index["shards"]),
            "lengths": lengths_json(shards.lengths, "tokens"),
            "rows": inspect.rows_of(shards, encoder, row_length).counts() if has_rows else None,
        }
        summary = inspect.summary_of(directory)
    return {"path": str(path), "parts": parts, **{name: summary.get(name) for name in ("duplicates", "files")}}


def lengths_json(lengths: Lengths, unit: str) -> dict[str, Any]:
    """Mean, percentiles and a histogram of powers of two: [from, to, records] with both ends included."""
    if not len(lengths):
        return {"unit": unit, "records": 0, "histogram": []}
    percentiles = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    powers, counts = np.unique(np.ceil(np.log2(np.maximum(lengths, 1) + 1)).astype(int), return_counts=True)
    by_power = dict(zip(powers.tolist(), counts.tolist(), strict=True))
    return {
        "unit": unit,
        "records": len(lengths),
        "mean": float(lengths.mean()),
        "min": int(lengths.min()),
        "max": int(lengths.max()),
        "percentiles": {str(share): int(value) for share, value in zip(PERCENTILES, percentiles, strict=True)},
        "histogram": [
            [1 << power >> 1, (1 << power) - 1, by_power.get(power, 0)]
            for power in range(int(powers.min()), int(powers.max()) + 1)
        ],
    }


def count_letters(texts: Sequence[str]) -> Counter[str]:
    """Number of letters per script; digits, punctuation and white space do not count.

    numpy counts 100 MB of text a second, `collections.Counter` 30.
    """
    joined = "".join(texts)
    counts = np.zeros(CODE_POINTS, np.int64)
    for start in range(0, len(joined), COUNTED_CHARACTERS):
        part = joined[start : start + COUNTED_CHARACTERS].encode("utf-32-le")
        counts += np.bincount(np.frombuffer(part, "<u4"), minlength=CODE_POINTS)
    letters: Counter[str] = Counter()
    for code in np.flatnonzero(counts).tolist():
        if script := script_of(chr(code)):
            letters[script] += int(counts[code])
    return letters


def script_of(letter: str) -> str | None:
    """Script of a letter, by the first word of its Unicode name: "Latin", "Han", ...; None if it is not a letter."""
    if not unicodedata.category(letter).startswith("L"):
        return None
    name = unicodedata.name(letter, "")
    for width in WIDTHS:
        name = name.removeprefix(width)
    first = name.split(" ")[0].split("-")[0].title()
    return SCRIPT_OF.get(first, first or OTHER)
