"""Print reports on data, shards and tokenizers; make shards and tokenizers outside of a pipeline."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import orjson

from ttrain.cli.options import Output, Table, check_no_artifact
from ttrain.config import Reading, Settings
from ttrain.core.files import JsonDict, JsonObject, exclusive, output_file, temporary_path, write_json
from ttrain.core.terminal import bar, escaped, print_spans
from ttrain.core.text import format_value
from ttrain.data import inspect, locations, records, sharding
from ttrain.data.assembly import REJECTED
from ttrain.data.blocks import BLOCKS, PARTS
from ttrain.data.built_blocks import DataFile, Pool
from ttrain.data.check import Report, check
from ttrain.data.encoder import Encoder
from ttrain.data.inspect import SUMMARY, TokenView
from ttrain.data.sharding import Here, Processes
from ttrain.data.shards import COUNTED, INDEX
from ttrain.errors import DataError, UsageError
from ttrain.store.runs import remove_interrupted_writes

SMALL_BYTES = 32 << 20  # files of this size together are encoded in this process: starting others takes a second
SMALL_UNENCODED_BYTES = 64 << 20  # the same where they are only counted, at 55 MB a second

LOCK = Path("run", "lock")
SMALLEST_SHARE = 0.001  # of a script that is named
SHOWN_BAD_ROWS = 10
OVERVIEW = ("file", "kind", "rows", "kept", "skipped", "rejected", "duplicates")
LENGTHS = ("mean", "min", "5 %", "50 %", "95 %", "max")  # in bytes
# Of a summary: names of versions and digests, and what its directory lists in detail
NOT_SHOWN = ("train", "heldout", "tokenizer", "reading", "keys_seen", "first_rejected", "files", "error")


def tables(summary: JsonObject) -> list[Table]:
    """The counts of shards, of packed rows or of a tokenizer, with those of the rows that were read; the first bad rows."""
    rows = summary.get("rows")
    of_rows = rows if isinstance(rows, Mapping) else {}
    figures = {**summary, **of_rows, "held-out rows": summary.get("heldout", {}).get("rows")}
    named = {name: value for name, value in figures.items() if name not in NOT_SHOWN and value not in (None, "", {})}
    counts = Table(("property", "value"), [(name.replace("_", " "), _shown(name, value)) for name, value in named.items()])
    return [counts, *_bad_rows([of_rows])]


def _bad_rows(reports: Sequence[JsonObject]) -> list[Table]:
    bad = [(line,) for report in reports for line in report.get("first_rejected", ())]
    return [Table(("first bad rows",), bad[:SHOWN_BAD_ROWS])] if bad else []


def _checks(reports: Sequence[JsonObject]) -> Iterator[Table]:
    """What was counted of files: outcomes of their rows, lengths and scripts, texts that are not read."""
    yield Table(OVERVIEW, [[_shown(name, report.get(name)) for name in OVERVIEW] for report in reports])
    yield Table(("file", "bytes", *LENGTHS, "letters, by their script"), [_measures(report) for report in reports])
    for report in reports:
        if unread := report.get("unread_keys"):
            yield Table((f"texts of answers that are not read: {report['file']}", "rows"), list(unread.items()))
    yield from _bad_rows(reports)


def _measures(report: JsonObject) -> list[str]:
    """File, bytes, lengths, and the scripts of at least a thousandth of the letters."""
    lengths = report.get("lengths", {})
    scripts = [f"{name} {share:.1%}" for name, share in report["scripts"].items() if share >= SMALLEST_SHARE]
    shown = [_shown(name, lengths.get(name)) for name in LENGTHS]
    return [report["file"], _shown("bytes", report["bytes"]), *shown, ", ".join(scripts)]


def _shown(name: str, value: object) -> str:
    """A count as text; counts by reason as "3: duplicate 2, empty text 1"."""
    if isinstance(value, Mapping):
        reasons = ", ".join(f"{reason} {count}" for reason, count in value.items())
        whole = [count for count in value.values() if isinstance(count, int)]
        return f"{sum(whole):,}: {reasons}" if value else "0"
    return f"{value:.1%}" if name == "fill" and isinstance(value, float) else format_value(value)


def print_tokens(shown: TokenView, special: frozenset[int]) -> None:
    """Print the text of a row or a record, each record of a row under its own heading."""
    for segment in range(1 + max(shown.segments, default=-1)):
        if shown.segments[-1]:
            heading = shown.headings[segment] if shown.headings else f"record {segment} of the row"
            print(f"-- {heading}")
        print_spans(inspect.lines(shown, segment, special))


@contextlib.contextmanager
def pool_for(sources: Iterable[str], workers: int | None, small_bytes: int = SMALL_BYTES) -> Iterator[Pool]:
    """A pool: this process if there is little to do, else worker processes, which start while the rest is prepared."""
    size = _total_bytes(sources)
    if size is not None and size < small_bytes:
        yield Here()
    else:
        with Processes(workers or os.cpu_count() or 1) as pool:
            if pool.workers > 1:
                pool.begin()
            yield pool


def _total_bytes(sources: Iterable[str]) -> int | None:
    """Total size of the files; None if some are not on this machine."""
    if any(locations.is_remote(location) for location in sources):
        return None
    return sum(locations.local_path(location).stat().st_size for location in sources)


def kind_of(kind: str, settings: Settings) -> str | None:
    """The kind that the command names; a `reading.text_field` of its own means documents. None: the rows decide."""
    names_a_field = settings.reading.text_field != Reading().text_field
    return kind if kind != "auto" else "documents" if names_a_field else None


def report_on(patterns: Sequence[str], settings: Settings, kind: str | None, *, rejected: Path | None) -> Output:
    """The reports on files. The code is 2 if a file is missing, 1 if one is unusable."""
    sources: dict[str, None] = {}
    missing = []
    for pattern in patterns:
        try:
            sources |= dict.fromkeys(locations.expand([pattern], "FILE"))
        except UsageError as error:
            missing.append(Report(pattern, error=str(error)))
    if rejected and rejected.exists() and any(rejected.samefile(path) for path in sources if Path(path).exists()):
        raise UsageError(f"--rejected is {rejected}, which is one of the input files; name another file")
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_for(sources, settings.runtime.workers, SMALL_UNENCODED_BYTES))
        file = stack.enter_context(output_file(rejected)) if rejected else None
        progress = stack.enter_context(bar("reading", "bytes"))
        reports = check(
            list(sources), settings.reading, pool=pool, kind=kind, progress=progress,
            quarantine=(lambda row: file.write(orjson.dumps(row) + b"\n")) if file else None,
        )  # fmt: skip
    failed = [report.error for report in (*reports, *missing) if report.error]
    for message in failed:
        print(f"error: {escaped(message)}", file=sys.stderr)
    values = [report.to_json() for report in (*reports, *missing)]
    shown = [*_checks([report.to_json() for report in reports])] if reports else []
    return Output(values if len(values) > 1 else values[0], shown, code=2 if missing else int(bool(failed)))


def shard(
    sources: Sequence[str],
    tokenizer: Path,
    output: Path,
    settings: Settings,
    *,
    kind: str,
    pool: Pool,
    progress: Callable[[int], None] = lambda rows: None,
) -> JsonDict:
    """Make the shards of the files (which `locations.expand` found) in `output`, which `check_output` allowed.

    Returns the figures, also in `run/summary.json`. If too many rows are bad, they have an "error", and `output` is
    not a set of shards, although the blocks stay there for the next run.
    """
    from ttrain.tasks.shards import check, recipe_of

    reading = records.with_heldout_share(settings.reading, sources, records.parser_of(kind, settings.reading.text_field))
    recipe = recipe_of(reading, inspect.tokenizer_at(tokenizer), kind)
    (output / BLOCKS).mkdir(parents=True, exist_ok=True)
    with exclusive(output / LOCK, lambda: print(f"waiting: another process writes {output}", file=sys.stderr)):
        built = sharding.build(
            output,
            {"train": [DataFile(path, locations.name(path)) for path in sources]},
            recipe,
            reading,
            block_bytes=settings.shards.block_bytes,
            pool=pool,
            progress=lambda rows, blocks: progress(rows),
        )
        totals = {name: sum(part_counts[name] for part_counts in built.parts.values()) for name in COUNTED}
        summary = {
            "out": str(output),
            "kind": kind,
            **built.to_json(),
            "rows": built.tallies["train"].to_json(),
            "documents": totals["rows"],
            **{name: totals[name] for name in COUNTED[1:]},
            "bytes_per_token": totals["bytes"] / max(1, totals["tokens"]),
            "quarantine": str(output / REJECTED),
            "tokenizer": recipe.tokenizer,
            "tokenizer_digest": recipe.tokenizer_digest,
            "reading": reading.model_dump(mode="json"),
        }
        try:
            check(built, reading, _sources_label(sources), kind)
        except DataError as error:
            summary["error"] = f"{error}. There are no shards in {output} now; {output / REJECTED} lists the bad rows"
            for part_name in PARTS:
                (output / part_name / INDEX).unlink()
        write_json(output / SUMMARY, summary)
    return summary


def check_output(output: Path, patterns: Sequence[str], sources: Sequence[str]) -> None:
    """Raise UsageError where shards must not be written: over other files, or into an input folder."""
    check_no_artifact(output)
    if output.exists() and not (output / BLOCKS).is_dir() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which holds files that are not shards; name an empty directory or a new one")
    names = [locations.local_path(name).resolve() for name in (*patterns, *sources) if not locations.is_remote(name)]
    if inside := [path for path in names if path.is_dir() and output.resolve().is_relative_to(path)]:
        raise UsageError(
            f"--out is {output} but {inside[0]} is an input, so that the shards would be read too; name another"
        )


def train_tokenizer(sources: Sequence[str], output: Path, settings: Settings, progress: Callable[[int], None]) -> JsonDict:
    """Train a tokenizer on the files (or take `tokenizer.existing`) and leave it in `output`, all of it or nothing.

    Returns the figures, which are also in `run/summary.json`, and the peak memory of this process. Raises UsageError where
    `output` holds something: a tokenizer is never trained over another, whose shards would then be of no use.
    """
    from ttrain.tasks.tokenizer import train_directory

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which is not empty; name an empty directory or a new one")
    destination = output.absolute()  # "." has no name
    destination.parent.mkdir(parents=True, exist_ok=True)
    remove_interrupted_writes(destination)
    work, config = temporary_path(destination), settings.tokenizer
    label = _sources_label(sources)
    try:
        figures = train_directory(sources, work, config, settings.reading, progress=progress, setting=label)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        summary = {
            "out": str(output),
            **figures,
            "template": config.template,
            "tokenizer_digest": Encoder(work, fast=False).digest,
            "peak_memory_bytes": peak if sys.platform == "darwin" else peak * 1024,  # Linux counts KiB
        }
        (work / "run").mkdir()
        write_json(work / SUMMARY, summary)
        work.rename(destination)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return summary


def _sources_label(sources: Sequence[str]) -> str:
    return sources[0] if len(sources) == 1 else f"{len(sources)} files"
