"""Statistics of shards and of raw files: sizes, lengths of records, fill of rows, scripts."""

from __future__ import annotations

import contextlib
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ttrain.config import Reading
from ttrain.data import blocks, inspect, records, validate
from ttrain.data.blocks import Block, BlockRecipe
from ttrain.data.packing import Rows
from ttrain.data.record_rows import ChatRows, DocumentRows
from ttrain.data.sharding import Pool
from ttrain.data.shards import COUNTED, ShardSet
from ttrain.data.validate import ExaminedBlock, Report
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)
CODE_POINTS = 0x110000
COUNTED_CHARACTERS = 2_000_000  # characters are counted in groups of this size: a table of all code points is 9 MB
OTHER, HAN = "Other", "Han"
# First words of Unicode names of letters that are not the name of the script.
SCRIPT_OF = {"Cjk": HAN, "Ideographic": HAN, "Modifier": OTHER, "Mathematical": OTHER, "Micro": "Greek", "Feminine": "Latin",
             "Masculine": "Latin", "Kelvin": "Latin", "Angstrom": "Latin", "Ohm": "Greek"}  # fmt: skip
WIDTHS = ("FULLWIDTH ", "HALFWIDTH ")
Lengths = npt.NDArray[np.int64]


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


def of_shards(shards: ShardSet, row_length: int, end_id: int | None) -> dict[str, Any]:
    """Statistics of one part of a set of shards. Without `end_id`, the token that ends a turn, chats have no rows."""
    index = shards.index
    figures = {"kind": index["kind"], **{name: index[name] for name in COUNTED}}
    figures["documents"] = figures.pop("rows")
    figures["bytes_per_token"] = index["bytes"] / max(1, index["tokens"])
    figures["shards"] = len(index["shards"])
    figures["lengths"] = lengths_json(shards.lengths, "tokens")
    if index["kind"] == "documents":
        rows: Rows = DocumentRows(shards, row_length, 0)
    elif end_id is not None:
        rows = ChatRows(shards, row_length, 0, end_id)
    else:
        return {**figures, "rows": None}
    return {**figures, "rows": rows.counts()}


def of_directory(path: Path, row_length: int, tokenizer: Path | None, store: ArtifactStore) -> dict[str, Any]:
    """Statistics of every part of a set of shards, and fields of its summary. Raises the errors of `inspect`."""
    parts = {}
    for name, shards_directory in inspect.parts_of(path).items():
        shards = ShardSet(shards_directory)
        end_id = None
        if shards.index["kind"] == "chats" or tokenizer is not None:
            with contextlib.suppress(UsageError):
                end_id = inspect.encoder_of(shards_directory, tokenizer, store).end_id
        parts[name] = of_shards(shards, row_length, end_id)
        summary = inspect.summary_of(shards_directory)
    summary_fields = {name: summary.get(name) for name in ("duplicates", "files")}
    return {"path": str(path), "parts": parts, **summary_fields}


@dataclass
class MeasuredBlock(ExaminedBlock):
    """Counts of a block's rows, the bytes of each good row's text, and the frequency of each code point in them."""

    sizes: Lengths = field(default_factory=lambda: np.zeros(0, np.int64))
    code_points: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, 0), np.int64))


def measure(block: Block, recipe: BlockRecipe, listed: int) -> MeasuredBlock:
    """`validate.examine`, with statistics of the texts."""
    sizes: list[int] = []
    characters = _CodePointCounter()

    def look(record: records.Record) -> None:
        text = blocks.text_of(record)
        sizes.append(len(text.encode("utf-8")))
        characters.add(text)

    examined = validate.examine(block, recipe, listed, look)
    return MeasuredBlock(**vars(examined), sizes=np.array(sizes, np.int64), code_points=characters.counts())


def of_files(
    locations: Sequence[str],
    reading: Reading,
    *,
    pool: Pool,
    kind: str | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> list[tuple[Report, dict[str, Any]]]:
    """(report, statistics of the good rows) of each file; the arguments are those of `validate`."""
    sizes: dict[str, list[Lengths]] = defaultdict(list)
    letters: dict[str, Counter[str]] = defaultdict(Counter)

    def each(report: Report, examined: ExaminedBlock) -> None:
        assert isinstance(examined, MeasuredBlock)
        sizes[report.file].append(examined.sizes)
        letters[report.file].update(_scripts(examined.code_points))

    reports = validate.validate(locations, reading, pool=pool, kind=kind, progress=progress, examine=measure, each=each)
    return [(report, _figures(sizes[report.file], letters[report.file])) for report in reports]


def _figures(sizes: Sequence[Lengths], letters: Counter[str]) -> dict[str, Any]:
    lengths = np.concatenate([np.zeros(0, np.int64), *sizes])
    total = letters.total()
    shares = {script: count / total for script, count in letters.most_common()}
    return {
        "documents": len(lengths),
        "bytes": int(lengths.sum()),
        "lengths": lengths_json(lengths, "bytes"),
        "letters": total,
        "scripts": shares,
    }


class _CodePointCounter:
    """Counts code points of many texts; numpy counts 100 MB a second, a loop over the characters 5."""

    def __init__(self) -> None:
        self._pending: list[str] = []
        self._size = 0
        self._counts = np.zeros(CODE_POINTS, np.int64)

    def add(self, text: str) -> None:
        self._pending.append(text)
        self._size += len(text)
        if self._size >= COUNTED_CHARACTERS:
            self._count()

    def counts(self) -> npt.NDArray[np.int64]:
        """(code points, how often), of shape [2, code points that occur]."""
        self._count()
        present = np.flatnonzero(self._counts)
        return np.stack([present, self._counts[present]])

    def _count(self) -> None:
        codes = np.frombuffer("".join(self._pending).encode("utf-32-le"), "<u4")
        if len(codes):
            self._counts += np.bincount(codes, minlength=CODE_POINTS)
        self._pending, self._size = [], 0


def _scripts(code_points: npt.NDArray[np.int64]) -> Counter[str]:
    """Number of letters per script; digits, punctuation and white space do not count."""
    letter_counts: Counter[str] = Counter()
    for code, count in code_points.T.tolist():
        script = script_of(chr(code))
        if script:
            letter_counts[script] += count
    return letter_counts


def script_of(letter: str) -> str | None:
    """Script of a letter, by the first word of its Unicode name: "Latin", "Han", ...; None if it is not a letter."""
    if not unicodedata.category(letter).startswith("L"):
        return None
    name = unicodedata.name(letter, "")
    for width in WIDTHS:
        name = name.removeprefix(width)
    first = name.split(" ")[0].split("-")[0].title()
    return SCRIPT_OF.get(first, first or OTHER)
