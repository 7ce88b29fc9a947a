"""Check files with the reader and parser of sharding, and measure their good rows."""

from __future__ import annotations

import itertools
import re
import unicodedata
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ttrain.config import Reading
from ttrain.core import redact
from ttrain.core.files import JsonDict
from ttrain.data import blocks, first_rows, records
from ttrain.data.json_rows import Tally
from ttrain.data.selection import DUPLICATE
from ttrain.errors import DataError

BATCH_ROWS = 64  # measured together; a row has up to 32 MiB
KEYS_SHOWN = 20
PERCENTILES = {
    "min": 0,
    **{f"{share} %": share for share in (1, 5, 25, 50, 75, 95, 99)},
    "max": 100,
}


@dataclass
class Report:
    """Counts of the rows of a file, with lengths and letters of the good rows.

    error       why the file cannot be used; the counts are then up to the error
    sizes       bytes of each good row's text
    """

    file: str
    tally: Tally
    kind: str = "documents"
    error: str | None = None
    duplicates: int = 0
    sizes: array[int] = field(default_factory=lambda: array("q"))
    letters: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> JsonDict:
        """The counts, with rows = kept + skipped + rejected; lengths and scripts."""
        scripts: Counter[str] = Counter()
        for letter, count in self.letters.items():
            if letter.isalpha():  # neither a digit nor punctuation nor white space
                scripts[script_of(letter)] += count
        counts: JsonDict = {
            "file": redact.url(self.file),
            **self.tally.to_json(),
            "duplicates": self.duplicates,
            "kind": self.kind,
            "keys_seen": dict(self.tally.keys_seen.most_common(KEYS_SHOWN)),
            "documents": len(self.sizes),
            "bytes": sum(self.sizes),
            "letters": scripts.total(),
            "scripts": {name: count / scripts.total() for name, count in scripts.most_common()},
        }
        if self.error:
            counts["error"] = self.error
        if self.sizes:
            sizes = np.percentile(self.sizes, [*PERCENTILES.values()], method="inverted_cdf")
            counts["lengths"] = {
                "mean": float(np.mean(self.sizes)),
                **dict(zip(PERCENTILES, sizes.astype(int).tolist(), strict=True)),
            }
        return counts


def check(
    locations: Sequence[str],
    reading: Reading,
    *,
    kind: str | None = None,
    quarantine: Callable[[JsonDict], object] | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[Report]:
    """A report on each file; a row that equals an earlier one in any file is a duplicate.

    `kind` None: by the keys of each file's rows. `quarantine` receives the bad rows, `progress` the
    rows read so far. 55 MB of text a second; memory is 100 bytes a row.
    """
    reports: list[Report] = []
    hashes: set[bytes] = set()
    text_field = reading.text_field
    for location in locations:
        report = Report(location, Tally(quarantine=quarantine))
        reports.append(report)
        try:
            report.kind = kind or first_rows.kind_of_file(location, reading) or "documents"
            rows = records.read(
                [location],
                records.parser_of(report.kind, text_field),
                report.tally,
                reading.max_line_bytes,
                text_field,
            )
            while batch := list(itertools.islice(rows, BATCH_ROWS)):
                _measure(report, batch, hashes)
                progress(sum(each.tally.rows for each in reports))
            report.tally.check(
                redact.url(location),
                reading.rejected_fraction,
                records.expected_fields(report.kind, text_field),
            )
        except DataError as error:  # of this file only
            report.error = str(error)
        if reading.deduplicate:
            report.tally.leave_out(DUPLICATE, report.duplicates)
    return reports


def _measure(report: Report, batch: Sequence[records.Record], hashes: set[bytes]) -> None:
    for record in batch:
        content_hash = records.content_hash(record)
        report.duplicates += content_hash in hashes
        hashes.add(content_hash)
    texts = list(map(blocks.text_of, batch))
    report.sizes.extend(len(text.encode("utf-8")) for text in texts)
    # numpy counts 100 MB of text a second, `Counter` 30
    counts = np.bincount(np.frombuffer("".join(texts).encode("utf-32-le"), "<u4"))
    report.letters.update({chr(code): int(counts[code]) for code in np.flatnonzero(counts)})


def script_of(letter: str) -> str:
    """Script of a letter, by its Unicode name: "Latin", "Han", ..."""
    name = unicodedata.name(letter, "OTHER").removeprefix("FULLWIDTH ").removeprefix("HALFWIDTH ")
    first = re.split("[ -]", name)[0].title()
    return "Han" if first == "Cjk" else first
