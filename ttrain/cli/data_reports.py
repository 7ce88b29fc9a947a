"""What `ttrain data` prints: row counts of files, and packed rows token by token."""

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from ttrain.cli.options import Output, Spans, Table
from ttrain.config import Reading, Settings
from ttrain.core.files import JsonObject
from ttrain.core.terminal import bar, escaped
from ttrain.core.text import format_value
from ttrain.data import inspect, locations
from ttrain.data.check import check
from ttrain.data.encoder import open_tokenizer
from ttrain.data.shards import ShardSet
from ttrain.engine.artifact_commands import find_artifact
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import STAGES

SMALLEST_SHARE = 0.001  # of a script that is named
SHOWN_BAD_ROWS = 10
OVERVIEW = ("file", "kind", "rows", "kept", "skipped", "rejected", "duplicates")
LENGTHS = ("mean", "min", "5 %", "50 %", "95 %", "max")  # in bytes


def report_on(
    patterns: Sequence[str], settings: Settings, kind: str, rejected: Path | None
) -> Output:
    """The reports on files; exit code 1 if one is unusable."""
    sources = locations.expand(patterns, "FILE")
    if rejected and rejected.resolve() in [Path(source).resolve() for source in sources]:
        raise UsageError(f"--rejected is {rejected}, an input file; name another file")
    # Only documents have a text field.
    if kind == "auto" and settings.reading.text_field != Reading().text_field:
        kind = "documents"
    with (rejected or Path(os.devnull)).open("wb") as file, bar("reading", "rows") as progress:
        reports = check(
            sources,
            settings.reading,
            kind=None if kind == "auto" else kind,
            quarantine=lambda row: file.write(orjson.dumps(row) + b"\n"),
            progress=progress,
        )
    errors = [report.error for report in reports if report.error]
    for message in errors:
        print(f"error: {escaped(message)}", file=sys.stderr)
    values = [report.to_json() for report in reports]
    return Output(values if len(values) > 1 else values[0], _tables(values), int(bool(errors)))


def _tables(reports: Sequence[JsonObject]) -> Iterator[Table]:
    yield Table(OVERVIEW, [[_shown(report.get(name)) for name in OVERVIEW] for report in reports])
    header = ("file", "bytes", *LENGTHS, "letters, by their script")
    yield Table(header, [_measures(report) for report in reports])
    for report in reports:
        if unread := report.get("unread_keys"):
            title = f"texts of answers that are not read: {report['file']}"
            yield Table((title, "rows"), list(unread.items()))
    bad = [(line,) for report in reports for line in report.get("first_rejected", ())]
    if bad:
        yield Table(("first bad rows",), bad[:SHOWN_BAD_ROWS])


def _measures(report: JsonObject) -> list[str]:
    lengths = report.get("lengths", {})
    scripts = [
        f"{name} {share:.1%}"
        for name, share in report["scripts"].items()
        if share >= SMALLEST_SHARE
    ]
    shown = [_shown(lengths.get(name)) for name in LENGTHS]
    return [report["file"], _shown(report["bytes"]), *shown, ", ".join(scripts)]


def _shown(value: object) -> str:
    if not isinstance(value, Mapping):
        return format_value(value)
    reasons = ", ".join(f"{reason} {count}" for reason, count in value.items())
    return f"{sum(value.values()):,}: {reasons}" if value else "0"


def show(shards: str, store: ArtifactStore, count: int, row_length: int) -> Output:
    """The first packed rows of shards, as training with this row length would use them."""
    path = find_artifact(store, shards, "").path if shards in STAGES else Path(shards)
    shard_set = ShardSet(inspect.shards_at(path))
    encoder = inspect.encoder_of(shard_set, store)
    tokenizer = open_tokenizer(encoder.directory / "tokenizer.json")
    packed = inspect.rows_of(shard_set, encoder, row_length)
    counts = packed.counts()
    shown = [
        inspect.show_row(packed, number, tokenizer) for number in range(min(count, len(packed)))
    ]
    value = {
        "shards": str(shard_set.directory),
        "tokenizer": str(encoder.directory),
        "kind": shard_set.index["kind"],
        "counts": counts,
        "rows": list(map(asdict, shown)),
    }
    heading = f"{len(shard_set):,} records in {shard_set.directory}; tokenizer {encoder.directory}"
    cells = [(name.replace("_", " "), _shown(each)) for name, each in counts.items()]
    rows = itertools.chain.from_iterable(_row_parts(row, encoder.special_ids()) for row in shown)
    return Output(value, [heading, Table(("property", "value"), cells), *rows])


def _row_parts(row: inspect.TokenView, special: frozenset[int]) -> Iterator[str | Spans]:
    yield ""
    yield f"row {row.number}: {len(row.ids)} tokens; {sum(row.live)} count in the loss"
    for segment in range(1 + max(row.segments, default=-1)):
        if row.segments[-1]:
            yield f"-- {row.headings[segment] if row.headings else f'record {segment} of the row'}"
        yield Spans(inspect.lines(row, segment, special))
