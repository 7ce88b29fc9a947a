"""Check files: what sharding would keep, skip and reject, with the same reader and parser, without writing anything.

Beside the counts: copies, lengths and scripts.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ttrain.config import Reading
from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.data import blocks, first_rows, records
from ttrain.data.blocks import Block, BlockRecipe, Table
from ttrain.data.pool import Pool
from ttrain.data.records import Tally
from ttrain.data.selection import DUPLICATE, is_first
from ttrain.errors import DataError

BLOCK_BYTES = 8 << 20  # what one worker takes at a time
KEYS_SHOWN = 20
PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass
class Report:
    """Counts of the rows of a file, or of a block of one, with lengths and letters of the good rows.

    `error` says why the file cannot be used; the counts are then those up to the error.
    """

    file: str
    kind: str = "documents"
    tally: Tally = field(default_factory=Tally)
    error: str | None = None
    bytes: int = 0
    duplicates: int = 0
    bad_rows: list[JsonDict] = field(default_factory=list)  # of a block
    keys: Table = field(default_factory=lambda: np.zeros((0, 2), np.uint64))  # 16 bytes of each good row
    sizes: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))  # bytes of each good row's text
    letters: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> JsonDict:
        """file, rows, kept, skipped, rejected, with rows = kept + skipped + rejected; and further fields."""
        figures = {"file": redact.url(self.file), **self.tally.to_json(), "duplicates": self.duplicates, "kind": self.kind}
        figures["keys_seen"] = dict(self.tally.keys_seen.most_common(KEYS_SHOWN))
        if self.error:
            figures["error"] = self.error
        scripts = scripts_of(self.letters)
        figures |= {"documents": len(self.sizes), "bytes": int(self.sizes.sum()), "letters": scripts.total()}
        figures["scripts"] = {name: count / scripts.total() for name, count in scripts.most_common()}
        if len(self.sizes):
            lengths = np.percentile(self.sizes, (0, *PERCENTILES, 100), method="inverted_cdf").astype(int).tolist()
            names = ("min", *(f"{share} %" for share in PERCENTILES), "max")
            figures["lengths"] = {"mean": float(self.sizes.mean()), **dict(zip(names, lengths, strict=True))}
        return figures


def check(
    locations: Sequence[str],
    reading: Reading,
    *,
    pool: Pool,
    kind: str | None = None,
    quarantine: Callable[[JsonDict], object] | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> list[Report]:
    """A report on each file; a row that equals an earlier one in any file is skipped as "duplicate".

    `kind` None: by the keys of each file's rows. `quarantine` receives the bad rows,
    `progress` the bytes read so far. Memory use is some blocks, and 24 bytes a row.
    """
    reports = {name: Report(name, tally=Tally(quarantine=quarantine)) for name in locations}
    found: dict[str, list[Report]] = {name: [] for name in locations}
    size = 0
    with contextlib.closing(pool.map(examine, _tasks(reports.values(), kind, reading))) as results:
        for block in results:
            report = reports[block.file]
            report.tally.add_block(block.tally, block.bad_rows, block.file)
            report.letters.update(block.letters)
            report.error = report.error or block.error
            found[block.file].append(block)
            size += block.bytes
            progress(size)
    for name, report in reports.items():
        report.keys = np.concatenate([report.keys, *(block.keys for block in found[name])])
        report.sizes = np.concatenate([report.sizes, *(block.sizes for block in found[name])])
        with _error_in(report):
            if not report.error:
                expected_fields = records.expected_fields(report.kind, reading.text_field)
                report.tally.check(redact.url(name), reading.rejected_fraction, expected_fields)
    repeated = ~is_first(np.concatenate([np.zeros((0, 2), np.uint64), *(report.keys for report in reports.values())]))
    ends = np.cumsum([len(report.keys) for report in reports.values()], dtype=int)
    for report, flags in zip(reports.values(), np.split(repeated, ends)[:-1], strict=True):
        report.duplicates = int(flags.sum())
        if reading.deduplicate:
            report.tally.leave_out(DUPLICATE, report.duplicates)
    return list(reports.values())


@contextlib.contextmanager
def _error_in(report: Report) -> Iterator[None]:
    """Note an error of the file in its report; it ends that file only."""
    try:
        yield
    except DataError as error:
        report.error = str(error)


def examine(block: Block, recipe: BlockRecipe) -> Report:
    """The report on a block."""
    report = Report(block.location, recipe.kind)
    report.tally.quarantine = report.bad_rows.append
    hashes = list[bytes]()
    texts = list[str]()
    with _error_in(report):
        data = blocks.read(block)
        report.bytes = len(data)
        for _, record in blocks.records(data, block, recipe, report.tally):
            hashes.append(records.content_hash(record))
            texts.append(blocks.text_of(record))
    report.keys = blocks.table_of(b"".join(hashes), 2)
    report.sizes = np.array([len(text.encode("utf-8")) for text in texts], np.int64)
    # numpy counts 100 MB of text a second, `Counter` 30
    counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"))
    report.letters.update({chr(code): int(counts[code]) for code in np.flatnonzero(counts).tolist()})
    return report


def _tasks(reports: Iterable[Report], kind: str | None, reading: Reading) -> Iterator[tuple[Block, BlockRecipe]]:
    """The blocks of every file."""
    for number, report in enumerate(reports):
        with _error_in(report):
            report.kind = kind or first_rows.kind_of_file(report.file, reading) or "documents"
            recipe = BlockRecipe(
                report.kind, reading.text_field, 0.0, reading.max_line_bytes, tokenizer="", tokenizer_digest="", template="",
                code="",
            )  # fmt: skip
            yield from zip(blocks.cut(report.file, number, BLOCK_BYTES, recipe), itertools.repeat(recipe), strict=False)


def scripts_of(letters: Counter[str]) -> Counter[str]:
    """Number of letters per script; digits, punctuation and white space do not count."""
    scripts: Counter[str] = Counter()
    for letter, count in letters.items():
        if letter.isalpha():
            scripts[script_of(letter)] += count
    return scripts


def script_of(letter: str) -> str:
    """Script of a letter, by the first word of its Unicode name: "Latin", "Han", ..."""
    name = unicodedata.name(letter, "OTHER").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    first = re.split("[ -]", name)[0].title()
    return "Han" if first == "Cjk" else first
