"""Print reports on data, shards and tokenizers; make shards and tokenizers outside of a pipeline."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import orjson
from typer import Exit

from ttrain.cli.options import check_no_artifact
from ttrain.config import Reading, Tokenizer
from ttrain.core.files import JsonDict, JsonObject, exclusive, output_file, temporary_path, write_json
from ttrain.core.terminal import bar, console, escaped, print_json, print_spans, table
from ttrain.core.text import format_value
from ttrain.data import inspect, locations, sharding
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
LINE_WIDTH = 100  # of text in a pipe

SMALLEST_SHARE = 0.001  # of a script that is named
SHOWN_BAD_ROWS = 10
OVERVIEW = ("file", "kind", "rows", "kept", "skipped", "rejected", "duplicates")
LENGTHS = ("mean", "min", "5 %", "50 %", "95 %", "max")  # in bytes
# The figures of a report and what they are called, in the order in which they are printed.
FIGURES = {
    "path": "path", "kind": "kind", "vocab_size": "vocabulary", "rows": "rows", "kept": "  kept", "skipped": "  skipped",
    "rejected": "  rejected", "unread_keys": "  texts not read", "with_reasoning": "  with reasoning",
    "row_length": "  tokens of a row", "fill": "  fill", "dropped_tokens": "  dropped tokens",
    "cut_records": "  records cut", "too_long_dropped": "  pairs longer than a row",
    "documents": "documents", "documents_seen": "  read", "heldout_rows": "  held out", "duplicates": "duplicates",
    "near_duplicates": "near-duplicates",
    "tokens": "tokens", "live_tokens": "  that count in the loss", "bytes": "bytes", "bytes_per_token": "bytes per token",
    "shards": "shards", "encoded_blocks": "shards made", "reused_blocks": "shards reused", "encoder": "encoded by",
    "peak_memory_mib": "memory at most, MiB", "digest": "digest", "template": "template", "out": "written to",
    "quarantine": "bad rows in",
}  # fmt: skip
Table = tuple[tuple[str, ...], Sequence[Sequence[object]]]


def show(reports: Sequence[JsonObject], *, as_json: bool) -> None:
    """Print reports as JSON, one of them without a list around it, or as tables."""
    if as_json:
        print_json(reports if len(reports) > 1 else reports[0])
        return
    for number, (header, rows) in enumerate(section for report in reports for section in _tables(report)):
        if number:
            print()
        table(header, rows)
    _show_bad_rows(reports)


def _show_bad_rows(reports: Sequence[JsonObject]) -> None:
    if bad := [(line,) for report in reports for line in report.get("first_rejected", ())]:
        table(("first bad rows",), bad[:SHOWN_BAD_ROWS])


def _show_checks(reports: Sequence[JsonObject]) -> None:
    """Print what was counted of files: outcomes of their rows, lengths and scripts, texts that are not read."""
    table(OVERVIEW, [[_shown(name, report.get(name)) for name in OVERVIEW] for report in reports])
    print()
    table(("file", "bytes", *LENGTHS, "letters, by their script"), [_measures(report) for report in reports])
    for report in reports:
        if unread := report.get("unread_keys"):
            table((f"texts of answers that are not read: {report['file']}", "rows"), list(unread.items()))
    _show_bad_rows(reports)


def _tables(report: JsonObject) -> Iterator[Table]:
    """(header, rows) of each table: figures, lengths, scripts; of shards for each part; special tokens and files."""
    figures = {**report, **(report["rows"] if isinstance(report.get("rows"), Mapping) else {})}
    if not figures.get("rejected"):
        figures.pop("quarantine", None)
    yield (
        (report.get("file", "property"), ""),
        [(label, _shown(name, figures[name])) for name, label in FIGURES.items() if figures.get(name) not in (None, "")],
    )
    if "special_tokens" in report:
        tokens = [(token["id"], token["token"], token["name"] or "") for token in report["special_tokens"]]
        yield ("id", "special token", "name"), tokens
    if report.get("files"):
        names = [name for name in ("name", "role", "rows", "kept", "tokens", "bytes", "bytes_per_token") if any(
            name in file for file in report["files"])]  # fmt: skip
        yield tuple(names), [[_shown(name, file.get(name, "")) for name in names] for file in report["files"]]


def _measures(report: JsonObject) -> list[str]:
    """File, bytes, lengths, and the scripts of at least a thousandth of the letters."""
    lengths = report.get("lengths", {})
    scripts = [f"{name} {share:.1%}" for name, share in report["scripts"].items() if share >= SMALLEST_SHARE]
    shown = [_shown(name, lengths.get(name)) for name in LENGTHS]
    return [report["file"], _shown("bytes", report["bytes"]), *shown, ", ".join(scripts)]


def _shown(name: str, value: object) -> str:
    """A figure as text; counts by reason as "3: duplicate 2, empty text 1"."""
    if isinstance(value, Mapping):
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in value.items())
        return f"{sum(value.values()):,}: {reasons}" if value else "0"
    return f"{value:.1%}" if name == "fill" and isinstance(value, float) else format_value(value)


def print_tokens(shown: TokenView, special: frozenset[int]) -> None:
    """Print the text of a row or a record, each record of a row under its own heading."""
    width = console().width if sys.stdout.isatty() else LINE_WIDTH
    for segment in range(1 + max(shown.segments, default=-1)):
        if shown.segments[-1]:
            heading = shown.headings[segment] if shown.headings else f"record {segment} of the row"
            print(f"-- {heading}")
        print_spans(inspect.lines(shown, segment, special, width))


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


def report_on(
    patterns: Sequence[str],
    reading: Reading,
    kind: str | None,
    workers: int | None,
    *,
    rejected: Path | None,
    as_json: bool,
) -> None:
    """Print the reports on files. Exits with 2 if a file is missing, with 1 if one is unusable."""
    sources: dict[str, None] = {}
    missing = []
    for pattern in patterns:
        try:
            sources |= dict.fromkeys(locations.expand([pattern], "FILE"))
        except UsageError as error:
            missing.append(Report(pattern, error=str(error)))
    if rejected and rejected.exists() and any(rejected.samefile(path) for path in sources if Path(path).exists()):
        raise UsageError(f"--rejected is {rejected}, which is one of the input files; name another file")
    has_text = not any(location.endswith((*locations.PACKED, ".parquet")) for location in sources)
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(pool_for(sources, workers, SMALL_UNENCODED_BYTES))
        file = stack.enter_context(output_file(rejected)) if rejected else None
        progress = stack.enter_context(bar("reading", "bytes", _total_bytes(sources) if has_text else None))
        reports = check(
            list(sources), reading, pool=pool, kind=kind, progress=progress,
            quarantine=(lambda row: file.write(orjson.dumps(row) + b"\n")) if file else None,
        )  # fmt: skip
    if as_json:
        show([report.to_json() for report in (*reports, *missing)], as_json=True)
    elif reports:
        _show_checks([report.to_json() for report in reports])
    failed = [report.error for report in (*reports, *missing) if report.error]
    for message in failed:
        print(f"error: {escaped(message)}", file=sys.stderr)
    if failed:
        raise Exit(2 if missing else 1)


LOCK = Path("run", "lock")


def shard(
    sources: Sequence[str],
    tokenizer: Path,
    output: Path,
    reading: Reading,
    *,
    kind: str,
    block_bytes: int,
    pool: Pool,
    progress: Callable[[int], None] = lambda rows: None,
    waiting: Callable[[], None] = lambda: None,
) -> JsonDict:
    """Make the shards of the files (which `locations.expand` found) in `output`, which `check_output` allowed.

    Returns the figures, also in `run/summary.json`. If too many rows are bad, they have an "error", and `output` is
    not a set of shards, although the blocks stay there for the next run. `waiting` is called if another run is writing.
    """
    from ttrain.stages.shards import check, recipe_of

    recipe = recipe_of(reading, inspect.tokenizer_at(tokenizer), kind)
    files = [DataFile(path, locations.name(path)) for path in sources]
    (output / BLOCKS).mkdir(parents=True, exist_ok=True)
    with exclusive(output / LOCK, waiting):
        built = sharding.build(
            output,
            {"train": files},
            recipe,
            reading,
            block_bytes=block_bytes,
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
    real = output.resolve()
    paths = [locations.local_path(name).resolve() for name in (*patterns, *sources) if not locations.is_remote(name)]
    inside = [path for path in paths if (path.is_dir() and real.is_relative_to(path)) or path.is_relative_to(real)]
    if inside:
        raise UsageError(
            f"--out is {output} but {inside[0]} is an input, so that the shards would be read too; name another"
        )


def train_tokenizer(
    sources: Sequence[str], output: Path, config: Tokenizer, reading: Reading, progress: Callable[[int], None]
) -> JsonDict:
    """Train a tokenizer on the files (or take `config.existing`) and leave it in `output`, all of it or nothing.

    Returns the figures, which are also in `run/summary.json`, and the peak memory of this process. Raises UsageError where
    `output` holds something: a tokenizer is never trained over another, whose shards would then be of no use.
    """
    from ttrain.stages.tokenizer import train_directory

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"--out is {output}, which is not empty; name an empty directory or a new one")
    destination = output.absolute()  # "." has no name
    destination.parent.mkdir(parents=True, exist_ok=True)
    remove_interrupted_writes(destination)
    work = temporary_path(destination)
    train = partial(train_directory, sources, work, config, reading, progress=progress, setting=_sources_label(sources))
    try:
        figures = train()
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
