"""`ttrain data` and `ttrain tokenizer`: what can be done with files, shards and tokenizers without a pipeline."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

if TYPE_CHECKING:
    from ttrain.config import Reading, Section
    from ttrain.data.inspect import Shown
    from ttrain.data.sharding import Pool
    from ttrain.data.validate import Report

    S = TypeVar("S", bound=Section)

SMALL_BYTES = 32 << 20  # files of this size together are encoded in this process: starting others takes a second
SMALL_UNENCODED_BYTES = 256 << 20  # the same where they are only read, at 65 to 170 MB a second
SHOWN_BAD_ROWS = 10
LINE_WIDTH = 100  # of text in a pipe

data_app = typer.Typer(
    no_args_is_help=True,
    help="Check, shard, look at and count training data.",
    epilog="Begin with:  ttrain data validate docs.jsonl",
)
tokenizer_app = typer.Typer(
    no_args_is_help=True,
    help="Train a tokenizer, or look at one.",
    epilog="Example:  ttrain tokenizer train docs.jsonl --out tokenizer",
)

FILES_HELP = "JSONL (packed or not), parquet, or .txt: files, globs, folders, URLs, hf://owner/name"
Files = Annotated[list[str], typer.Argument(help=FILES_HELP, metavar="FILE", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON for scripts")]
Kind = Annotated[Literal["auto", "documents", "chats"], typer.Option(help="auto: by the keys of the first good rows")]
TextField = Annotated[str | None, typer.Option(help="a document's key; without it text, content, body or paragraphs")]
MaxRejected = Annotated[float, typer.Option(min=0, max=1, help="a larger share of bad rows is an error")]
KeepDuplicates = Annotated[bool, typer.Option("--keep-duplicates", help="keep rows that repeat an earlier one")]
Workers = Annotated[int | None, typer.Option(min=1, help="processes; without it the cores")]
RowLength = Annotated[int, typer.Option(min=8, help="tokens of a packed row")]
Sample = Annotated[Literal["reservoir", "head"], typer.Option(help="which ones are taken: any, or the first")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="of the reservoir")]
TokenizerDirectory = Annotated[Path | None, typer.Option("--tokenizer", help="its directory; without it, found by digest")]


@data_app.command(
    "shard",
    epilog="Examples:  ttrain data shard docs-*.jsonl --tokenizer tokenizer --out shards\n\n"
    "ttrain data shard chats.jsonl.gz --tokenizer $(ttrain artifacts path tokenizer) --out chats --val-fraction 0.01",
)
def data_shard(
    files: Files,
    tokenizer: Annotated[Path, typer.Option(help="directory of the tokenizer, or an artifact of its stage")],
    out: Annotated[Path, typer.Option(help="directory of the shards; it may hold those of an earlier run")],
    kind: Kind = "auto",
    text_field: TextField = None,
    val_fraction: Annotated[float, typer.Option(min=0, max=1, help="share of rows held out, by content hash")] = 0.0,
    limit: Annotated[int | None, typer.Option(min=1, help="rows to use; without it all")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="how many times --limit distinct rows to use")] = 1,
    sample: Sample = "reservoir",
    seed: Seed = 1,
    keep_duplicates: KeepDuplicates = False,
    max_rejected: MaxRejected = 0.01,
    workers: Workers = None,
    block_bytes: Annotated[int, typer.Option(min=1024, help="text of one shard")] = 16 << 20,
    as_json: AsJson = False,
) -> None:
    """Tokenize files into Arrow shards. Run it again with other files, and only what is new is tokenized."""
    from ttrain.cli import data_tables, data_work
    from ttrain.core.terminal import bar, escaped, print_json, table
    from ttrain.data import locations
    from ttrain.data import validate as validating
    from ttrain.errors import DataError

    reading = _reading(
        text_field, heldout_fraction=val_fraction, rejected_fraction=max_rejected, limit=limit, rounds=rounds,
        sample=sample, seed=seed, deduplicate=not keep_duplicates,
    )  # fmt: skip
    found = locations.expand(files, "FILE")
    data_work.check_output(out, files, found)
    chosen = _kind(kind, text_field) or validating.kind_of_all(found, reading.max_line_bytes)
    with bar("sharding", "rows") as progress, _pool(found, workers, SMALL_BYTES) as pool:
        summary = data_work.shard(
            found, tokenizer, out, reading, kind=chosen, block_bytes=block_bytes, pool=pool,
            progress=progress, waiting=lambda: print(f"waiting: another process writes {out}", file=sys.stderr),
        )  # fmt: skip
    if as_json:
        print_json(summary)
    else:
        table(("what", "value"), data_tables.sharded_rows(summary))
    if "error" in summary:
        raise DataError(escaped(summary["error"]))


@data_app.command(
    "validate",
    epilog="Examples:  ttrain data validate docs.jsonl\n\n"
    "ttrain data validate chats/ --kind chats --rejected bad.jsonl --json",
)
def data_validate(
    files: Files,
    kind: Kind = "auto",
    text_field: TextField = None,
    max_rejected: MaxRejected = 0.01,
    rejected: Annotated[Path | None, typer.Option(help="write the bad rows here: file, line, reason, text")] = None,
    keep_duplicates: KeepDuplicates = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Say what `data shard` would keep, skip and reject, by reading files as it does. Nothing is tokenized."""
    from ttrain.cli import data_tables
    from ttrain.core.terminal import bar, print_json, table
    from ttrain.data.validate import validate

    reading = _reading(text_field, rejected_fraction=max_rejected, deduplicate=not keep_duplicates)
    found, missing = _expanded(files)
    with (
        _pool(found, workers, SMALL_UNENCODED_BYTES) as pool,
        _quarantine(rejected, found) as quarantine,
        bar("reading", "bytes", _unpacked_bytes(found)) as progress,
    ):
        chosen = _kind(kind, text_field)
        present = validate(found, reading, pool=pool, kind=chosen, quarantine=quarantine, progress=progress)
    reports = [*present, *missing]
    values = [report.to_json() for report in reports]
    if as_json:
        print_json(values if len(values) > 1 else values[0])
    elif present:
        rows = [data_tables.validated_row(report.to_json()) for report in present]
        table(("file", "kind", "rows", "kept", "skipped", "rejected"), rows)
        bad = [line for report in reports for line in report.tally.first_rejected]
        if bad:
            table(("first bad rows",), [(line,) for line in bad[:SHOWN_BAD_ROWS]])
    _end(reports, missing)


@data_app.command(
    "inspect",
    epilog="Examples:  ttrain data inspect shards\n\n"
    "ttrain data inspect $(ttrain artifacts path shards-sft) --records --seed 1",
)
def data_inspect(
    shards: Annotated[Path, typer.Argument(help="shards, the directory with train/ and heldout/, or an artifact")],
    rows: Annotated[int, typer.Option(min=1, help="how many")] = 3,
    row_length: RowLength = 256,
    seed: Annotated[int | None, typer.Option(min=0, help="any rows, chosen under this seed; without it the first")] = None,
    records: Annotated[bool, typer.Option("--records", help="records as they are stored, instead of packed rows")] = False,
    tokenizer: TokenizerDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Show packed rows as text, with what the loss counts in bold green, or underlined with ^ where there is no colour."""
    from ttrain.core.terminal import print_json
    from ttrain.data import inspect
    from ttrain.data.shards import ShardSet
    from ttrain.store.artifacts import Store
    from ttrain.store.layout import home

    part = next(iter(inspect.parts_of(shards).values()))
    encoder = inspect.encoder_of(part, tokenizer, Store(home()))
    pieces, found = inspect.Pieces(encoder), ShardSet(part)
    packed = inspect.rows_of(found, encoder, row_length)
    numbers = inspect.chosen(len(found if records else packed), rows, seed)
    if records:
        shown = [inspect.show_record(found, number, pieces) for number in numbers]
    else:
        shown = [inspect.show_row(packed, number, pieces) for number in numbers]
    if as_json:
        print_json({"shards": str(part), "tokenizer": str(encoder.directory), "kind": found.index["kind"],
                    "records" if records else "rows": [one.to_json() for one in shown]})  # fmt: skip
        return
    what = "record" if records else "row"
    print(f"{len(found):,} records, {len(packed):,} rows of {row_length} tokens; tokenizer {encoder.directory}")
    for one in shown:
        live = sum(one.live)
        print(f"\n{what} {one.number}: {len(one.ids)} tokens, {live} of them count in the loss")
        _print_tokens(one, pieces.special)


@data_app.command(
    "stats",
    epilog="Examples:  ttrain data stats shards --row-length 512\n\nttrain data stats docs.jsonl chats.parquet --json",
)
def data_stats(
    paths: Annotated[list[str], typer.Argument(help="shards, or files as of `data shard`", metavar="PATH")],
    row_length: RowLength = 256,
    kind: Kind = "auto",
    text_field: TextField = None,
    tokenizer: TokenizerDirectory = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Count documents, tokens, bytes and duplicates; lengths, how full rows get, and the scripts of raw files."""
    from ttrain.cli import data_tables
    from ttrain.core.terminal import bar, print_json, table
    from ttrain.data import inspect, statistics
    from ttrain.store.artifacts import Store
    from ttrain.store.layout import home

    reading = _reading(text_field, rejected_fraction=1.0, deduplicate=False)
    is_shards = {path: inspect.holds_shards(Path(path)) for path in paths}
    found, missing = _expanded([path for path in paths if not is_shards[path]])
    store = Store(home())
    values = [statistics.of_directory(Path(path), row_length, tokenizer, store) for path in paths if is_shards[path]]
    with (
        _pool(found, workers, SMALL_UNENCODED_BYTES) as pool,
        bar("reading", "bytes", _unpacked_bytes(found)) as progress,
    ):
        measured = statistics.of_files(found, reading, pool=pool, kind=_kind(kind, text_field), progress=progress)
    values += [{**report.to_json(), **figures} for report, figures in measured]
    values += [report.to_json() for report in missing]
    if as_json:
        print_json(values if len(values) > 1 else values[0])
    else:
        for value in values:
            for header, rows in data_tables.statistics_tables(value):
                table(header, rows)
                print()
    _end([*(report for report, _ in measured), *missing], missing)


@tokenizer_app.command(
    "train",
    epilog="Examples:  ttrain tokenizer train docs.jsonl --out tokenizer --vocab-size 6400\n\n"
    "ttrain tokenizer train docs.jsonl --out tokenizer --max-lines 500000 --sample reservoir --seed 1\n\n"
    "ttrain tokenizer train docs.jsonl --out tokenizer --existing Qwen/Qwen3-0.6B",
)
def tokenizer_train(
    files: Files,
    out: Annotated[Path, typer.Option(help="directory for the tokenizer; it must be empty or missing")],
    vocab_size: Annotated[int, typer.Option(min=300, help="entries, with the 256 bytes and the special tokens")] = 6400,
    max_lines: Annotated[int | None, typer.Option(min=1, help="documents to learn from; without it all")] = None,
    sample: Sample = "reservoir",
    seed: Seed = 1,
    max_bytes: Annotated[int, typer.Option(min=10_000, help="text to learn from, in UTF-8 bytes")] = 50_000_000,
    text_field: TextField = None,
    template: Annotated[Literal["ttrain", "tinyseek", "own"], typer.Option(help="own: the existing tokenizer's")] = "ttrain",
    existing: Annotated[str | None, typer.Option(help="take this one: a folder, or owner/name[@revision]")] = None,
    max_rejected: MaxRejected = 0.01,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE on documents, or take one that exists and measure how well it fits them."""
    from ttrain.cli import data_tables, data_work
    from ttrain.config import Tokenizer
    from ttrain.core.terminal import bar, print_json, table
    from ttrain.data import locations

    config = _valid(
        Tokenizer, vocab_size=vocab_size, template=template, existing=existing, sample=sample, seed=seed,
        max_documents=max_lines, max_bytes=max_bytes,
    )  # fmt: skip
    reading = _reading(text_field, heldout_fraction=0.0, rejected_fraction=max_rejected)
    found = locations.expand(files, "FILE")
    with bar("reading", "documents") as progress:
        summary = data_work.train_tokenizer(found, out, config, reading, progress)
    if as_json:
        print_json(summary)
        return
    table(("what", "value"), data_tables.tokenizer_rows(summary))
    table(("file", "bytes per token"), [(file["name"], f"{file['bytes_per_token']:.3f}") for file in summary["files"]])


@tokenizer_app.command(
    "inspect",
    epilog="Examples:  ttrain tokenizer inspect tokenizer --text 'Hello, world'\n\n"
    "echo '{\"messages\": [...]}' | ttrain tokenizer inspect tokenizer --chat -",
)
def tokenizer_inspect(
    directory: Annotated[Path, typer.Argument(help="directory of the tokenizer, or an artifact of its stage")],
    text: Annotated[str | None, typer.Option(help="show the tokens of this text")] = None,
    chat: Annotated[
        str | None, typer.Option(help="show the tokens and the loss mask of this JSON chat; -: standard input")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a tokenizer's vocabulary, special tokens and template, and the tokens of a text or a chat."""
    from ttrain.core.terminal import print_json, table
    from ttrain.data import inspect
    from ttrain.data.encoder import Encoder
    from ttrain.errors import UsageError

    if text is not None and chat is not None:
        raise UsageError("--text and --chat are both given; give one of them")
    encoder = Encoder(inspect.tokenizer_at(directory), fast=False)
    about = inspect.describe(encoder)
    shown = None
    if text is not None:
        shown = inspect.show_text(encoder, text)
    elif chat is not None:
        data = sys.stdin.buffer.read() if chat == "-" else Path(chat).read_bytes()
        shown = inspect.show_chat(encoder, inspect.chat_of(data, "standard input" if chat == "-" else chat))
    if as_json:
        print_json({**about, **({"tokens": shown.to_json()} if shown else {})})
        return
    table(("what", "value"), [(name, about[name]) for name in ("path", "vocab_size", "digest", "template")])
    table(("id", "special token", "name"), [(one["id"], one["token"], one["name"] or "") for one in about["special_tokens"]])
    if shown is None:
        table(("id", "longest tokens"), [(one["id"], repr(one["text"])) for one in about["longest"]])
        return
    print(f"\n{len(shown.ids)} tokens")
    _print_tokens(shown, encoder.special_ids())
    pieces = [(number, repr(piece)) for number, piece in zip(shown.ids, shown.pieces, strict=True)]
    if chat is None:
        table(("id", "piece"), pieces)
    else:
        table(("id", "piece", "loss"), [(*piece, "^" * live) for piece, live in zip(pieces, shown.live, strict=True)])


def _reading(text_field: str | None, **values: Any) -> Reading:
    from ttrain.config import Reading

    return _valid(Reading, **values, **({"text_field": text_field} if text_field is not None else {}))


def _valid(section: type[S], **values: Any) -> S:
    """A section of the settings from options. Raises UsageError for a value that the section refuses."""
    from pydantic import ValidationError

    from ttrain.errors import UsageError

    try:
        return section(**values)
    except ValidationError as error:
        lines = (
            f"{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}" for item in error.errors()
        )
        raise UsageError("; ".join(lines)) from None


def _kind(kind: str, text_field: str | None) -> str | None:
    """The kind that the options name; a text field is one of documents. None: the rows decide."""
    return kind if kind != "auto" else "documents" if text_field is not None else None


@contextlib.contextmanager
def _pool(found: Sequence[str], workers: int | None, small_bytes: int) -> Iterator[Pool]:
    """This process, where there is little to do, else as many as are asked for, which start while the rest is prepared."""
    from ttrain.data.worker_pools import Here, Processes

    size = _bytes(found)
    if size is not None and size < small_bytes:
        yield Here()
        return
    with Processes(workers or os.cpu_count() or 1) as pool:
        if pool.workers > 1:
            pool.begin()
        yield pool


def _bytes(found: Sequence[str]) -> int | None:
    """Size of the files; None where some are not on this machine."""
    from ttrain.data import locations

    if any(locations.is_remote(location) for location in found):
        return None
    return sum(locations.local_path(location).stat().st_size for location in found)


def _unpacked_bytes(found: Sequence[str]) -> int | None:
    """How much text the files hold; None where that is not known before they are read."""
    from ttrain.data.locations import PACKED

    return None if any(location.endswith((*PACKED, ".parquet")) for location in found) else _bytes(found)


def _expanded(patterns: Sequence[str]) -> tuple[list[str], list[Report]]:
    """(files that the patterns name, a report on each pattern that names none)."""
    from ttrain.data import locations
    from ttrain.data.validate import Report
    from ttrain.errors import UsageError

    found: dict[str, None] = {}
    missing = []
    for pattern in patterns:
        try:
            found.update(dict.fromkeys(locations.expand([pattern], "FILE")))
        except UsageError as error:
            missing.append(Report(pattern, error=str(error)))
    return list(found), missing


@contextlib.contextmanager
def _quarantine(path: Path | None, found: Sequence[str]) -> Iterator[Callable[[dict[str, Any]], object] | None]:
    """Takes bad rows and writes them to the path, where there is one."""
    if path is None:
        yield None
        return
    import orjson

    from ttrain.data import locations
    from ttrain.errors import UsageError

    if any(
        not locations.is_remote(name) and Path(name).exists() and path.exists() and path.samefile(name) for name in found
    ):
        raise UsageError(f"--rejected is {path}, which is a file to be read; name another")
    with path.open("wb") as file:
        yield lambda row: file.write(orjson.dumps(row) + b"\n")


def _end(reports: Sequence[Report], missing: Sequence[Report]) -> None:
    """Name what is wrong with each file on standard error, and end with 2 where one is missing, else 1."""
    from ttrain.core.terminal import escaped

    wrong = [report for report in reports if report.error]
    for report in wrong:
        print(f"error: {escaped(report.error or '')}", file=sys.stderr)
    if wrong:
        raise typer.Exit(2 if missing else 1)


def _print_tokens(shown: Shown, special: frozenset[int]) -> None:
    """The text of a row or a record, each record in it under a line of its own."""
    from ttrain.core.terminal import console, print_spans
    from ttrain.data.inspect import lines

    for segment in range(1 + max(shown.segments, default=-1)):
        if shown.segments[-1]:
            print(f"-- record {segment} of the row")
        print_spans(lines(shown, segment, special, console().width if sys.stdout.isatty() else LINE_WIDTH))
