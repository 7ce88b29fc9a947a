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
from ttrain.data import blocks, records
from ttrain.data.assembly import DUPLICATE, is_first
from ttrain.data.blocks import Block, BlockRecipe
from ttrain.data.built_blocks import Pool, Table
from ttrain.data.records import Tally
from ttrain.errors import DataError, UsageError

LOOKED_AT = 100  # good rows whose keys decide the kind
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
    duplicates: int = 0
    error: str | None = None
    bytes: int = 0
    bad_rows: Iterable[JsonDict] = ()  # of a block
    keys: list[Table] = field(default_factory=list)  # 16 bytes of each kept row, of shape [rows, 2]
    sizes: list[npt.NDArray[np.int64]] = field(default_factory=list)  # bytes of each good row's text
    letters: Counter[str] = field(default_factory=Counter)

    def add(self, block: Report) -> None:
        """Add the next block of the file."""
        self.tally.add_block(block.tally, block.bad_rows, self.file)
        self.keys += block.keys
        self.sizes += block.sizes
        self.letters.update(block.letters)
        self.error = self.error or block.error
        self.bytes += block.bytes

    def check(self, rejected_fraction: float, text_field: str) -> None:
        """Set `error` if the file as a whole cannot be used."""
        if self.error is None:
            try:
                self.tally.check(redact.url(self.file), rejected_fraction, records.expected_fields(self.kind, text_field))
            except DataError as error:
                self.error = str(error)

    def to_json(self) -> JsonDict:
        """file, rows, kept, skipped, rejected, with rows = kept + skipped + rejected; and further fields."""
        figures = {"file": redact.url(self.file), **self.tally.to_json(), "duplicates": self.duplicates, "kind": self.kind}
        figures["keys_seen"] = dict(self.tally.keys_seen.most_common(KEYS_SHOWN))
        if self.error:
            figures["error"] = self.error
        lengths = np.concatenate([np.zeros(0, np.int64), *self.sizes])
        scripts = scripts_of(self.letters)
        total = scripts.total()
        figures |= {"documents": len(lengths), "bytes": int(lengths.sum()), "letters": total}
        figures["scripts"] = {name: count / total for name, count in scripts.most_common()}
        if len(lengths):
            shares = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
            figures["lengths"] = {"mean": float(lengths.mean()), "min": int(lengths.min()), "max": int(lengths.max())}
            figures["lengths"] |= {f"{share} %": int(value) for share, value in zip(PERCENTILES, shares, strict=True)}
        return figures


def kind_of(location: str, max_line_bytes: int) -> str | None:
    """The kind of record that the keys of most of the first good rows mean, else documents; None if no row is good.

    Raises DataError for a file that cannot be read.
    """
    rows = itertools.islice(records.records([location], Tally(), max_line_bytes), LOOKED_AT)
    kinds = Counter(records.kind_of_row(value) for _, _, value in rows)
    return next((kind for kind, count in kinds.items() if 2 * count > kinds.total()), "documents") if kinds else None


def kind_of_all(locations: Sequence[str], max_line_bytes: int) -> str:
    """The kind of all files. Raises UsageError if they differ."""
    by_kind: dict[str | None, str] = {}
    for location in locations:
        by_kind.setdefault(kind_of(location, max_line_bytes), location)
    by_kind.pop(None, None)
    if len(by_kind) > 1:
        (first, first_file), (second, second_file) = sorted(by_kind.items(), key=str)[:2]
        raise UsageError(f"{first_file} holds {first} but {second_file} {second}; shard them apart, or set --kind")
    return next(filter(None, by_kind), "documents")


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
    tasks = _tasks(reports.values(), kind, reading)
    size = 0
    with contextlib.closing(pool.map(examine, tasks)) as results:
        for block in results:
            reports[block.file].add(block)
            size += block.bytes
            progress(size)
    for report in reports.values():
        report.check(reading.rejected_fraction, reading.text_field)
    _mark_duplicates(list(reports.values()), deduplicate=reading.deduplicate)
    return list(reports.values())


def examine(block: Block, recipe: BlockRecipe) -> Report:
    """The report on a block."""
    bad_rows = list[JsonDict]()
    tally = Tally(quarantine=bad_rows.append)
    report = Report(block.location, recipe.kind, tally, bad_rows=bad_rows)
    hashes = list[bytes]()
    texts = list[str]()
    try:
        data = blocks.read(block)
        report.bytes = len(data)
        for _, record in blocks.records(data, block, recipe, tally):
            hashes.append(records.content_hash(record))
            texts.append(blocks.text_of(record))
    except DataError as error:
        report.error = str(error)
    report.keys.append(np.frombuffer(b"".join(hashes), ">u8").astype(np.uint64).reshape(-1, 2))
    report.sizes.append(np.array([len(text.encode("utf-8")) for text in texts], np.int64))
    # numpy counts 100 MB of text a second, `Counter` 30
    counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"))
    report.letters.update({chr(code): int(counts[code]) for code in np.flatnonzero(counts).tolist()})
    return report


def _tasks(reports: Iterable[Report], kind: str | None, reading: Reading) -> Iterator[tuple[Block, BlockRecipe]]:
    """The blocks of every file. An error in a file ends that file only."""
    for number, report in enumerate(reports):
        try:
            report.kind = kind or kind_of(report.file, reading.max_line_bytes) or "documents"
            recipe = BlockRecipe(
                report.kind, reading.text_field, 0.0, reading.max_line_bytes, tokenizer="", tokenizer_digest="", template="",
                code="",
            )  # fmt: skip
            for block in blocks.cut(report.file, number, BLOCK_BYTES, recipe):
                yield block, recipe
        except DataError as error:
            report.error = str(error)


def _mark_duplicates(reports: Sequence[Report], *, deduplicate: bool) -> None:
    """Count the rows that equal an earlier one."""
    keys = itertools.chain.from_iterable(report.keys for report in reports)
    repeated, start = ~is_first(np.concatenate([np.zeros((0, 2), np.uint64), *keys])), 0
    for report in reports:
        end = start + sum(map(len, report.keys))
        report.duplicates = int(repeated[start:end].sum())
        report.keys.clear()
        if deduplicate:
            report.tally.leave_out(DUPLICATE, report.duplicates)
        start = end


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
