"""The `ttrain data` and `ttrain tokenizer` commands, which need no pipeline."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from ttrain.cli.options import AsJson, argument, command, command_group, option
from ttrain.core.files import JsonDict
from ttrain.core.terminal import bar, encodable, escaped, print_json, table
from ttrain.core.text import invalid_values
from ttrain.errors import DataError, UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.config import Reading, Section
    from ttrain.data.built_blocks import Pool
    from ttrain.data.contamination import EvaluationItem, OverlapCheck

    S = TypeVar("S", bound=Section)

data_app = command_group(
    "data",
    "Data",
    help="Check, shard and show training data.",
    epilog="Begin with:  ttrain data check docs.jsonl",
)
tokenizer_app = command_group(
    "tokenizer",
    "Data",
    help="Train or inspect a tokenizer.",
    epilog="Example:  ttrain tokenizer train docs.jsonl --out tokenizer",
)

FILES_HELP = "JSONL (packed or not), parquet, or .txt: files, globs, folders, URLs, hf://owner/name"
Files = Annotated[list[str], argument(FILES_HELP, metavar="FILE")]
Kind = Annotated[Literal["auto", "documents", "chats", "pairs"], option("auto: by the keys of the first good rows")]
TextField = Annotated[str | None, option("a document's key; without it text, content, body or paragraphs")]
MaxRejected = Annotated[float, option("a larger share of bad rows is an error", min=0, max=1)]
KeepDuplicates = Annotated[bool, option("keep rows that repeat an earlier one", "--keep-duplicates")]
NearDuplicates = Annotated[
    float | None,
    option("leave out documents this similar to an earlier one, such as 0.8", min=0, max=1),
]
Workers = Annotated[int | None, option("processes; without it the cores", min=1)]
RowLength = Annotated[int, option("tokens of a packed row", min=8, max=2**20)]
SampleMethod = Annotated[Literal["reservoir", "head"], option("which rows are taken: random ones, or the first")]
Seed = Annotated[int, option("of the reservoir", min=0, max=2**32 - 1)]
TokenizerDirectory = Annotated[Path | None, option("its directory; without it, found by digest")]


@command(
    data_app,
    "Examples:  ttrain data shard docs-*.jsonl --tokenizer tokenizer --out shards\n\n"
    "ttrain data shard chats.jsonl.gz --tokenizer $(ttrain artifacts path tokenizer) --out chats --heldout-fraction 0.01",
)
def data_shard(
    files: Files,
    tokenizer: Annotated[Path, option("directory of the tokenizer, or an artifact of its stage")],
    out: Annotated[Path, option("directory of the shards; it may hold those of an earlier run")],
    kind: Kind = "auto",
    text_field: TextField = None,
    heldout_fraction: Annotated[float, option("share of rows held out, by content hash", min=0, max=1)] = 0.0,
    limit: Annotated[int | None, option("rows to use; without it all", min=1)] = None,
    rounds: Annotated[int, option("how many times --limit distinct rows to use", min=1)] = 1,
    sample: SampleMethod = "reservoir",
    seed: Seed = 1,
    keep_duplicates: KeepDuplicates = False,
    near_duplicates: NearDuplicates = None,
    max_rejected: MaxRejected = 0.01,
    workers: Workers = None,
    block_bytes: Annotated[int, option("text of one shard", min=1024, max=2**30)] = 16 << 20,
    as_json: AsJson = False,
) -> None:
    """Tokenize files into Arrow shards. A second call with other files tokenizes only the new ones."""
    from ttrain.cli import data_reports
    from ttrain.data import locations
    from ttrain.data.check import kind_of_all

    reading = _reading(
        text_field, heldout_fraction=heldout_fraction, rejected_fraction=max_rejected, limit=limit, rounds=rounds,
        sample=sample, seed=seed, deduplicate=not keep_duplicates, near_duplicates=near_duplicates,
    )  # fmt: skip
    sources = locations.expand(files, "FILE")
    data_reports.check_output(out, files, sources)
    chosen = _kind(kind, text_field) or kind_of_all(sources, reading.max_line_bytes)
    with bar("sharding", "rows") as progress, data_reports.pool_for(sources, workers) as pool:
        summary = data_reports.shard(
            sources, tokenizer, out, reading, kind=chosen, block_bytes=block_bytes, pool=pool,
            progress=progress, waiting=lambda: print(f"waiting: another process writes {out}", file=sys.stderr),
        )  # fmt: skip
    counts = {"heldout_rows": summary["heldout"]["rows"], "reused_blocks": summary["blocks"] - summary["encoded_blocks"]}
    counts["near_duplicates"] = summary.get("near_duplicates", {}).get("dropped")
    data_reports.show([summary if as_json else {**summary, **counts, "files": ()}], as_json=as_json)
    if "error" in summary:
        raise DataError(escaped(summary["error"]))


@command(
    data_app,
    "Examples:  ttrain data check docs.jsonl\n\n"
    "ttrain data check chats/ --kind chats --rejected bad.jsonl --json\n\n"
    "ttrain data check pairs.jsonl --kind pairs",
)
def data_check(
    files: Files,
    kind: Kind = "auto",
    text_field: TextField = None,
    max_rejected: MaxRejected = 0.01,
    rejected: Annotated[Path | None, option("write the bad rows here: file, line, reason, text")] = None,
    keep_duplicates: KeepDuplicates = False,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Count what `data shard` would keep, skip and reject, with lengths, scripts and copies, and write nothing."""
    from ttrain.cli import data_reports

    reading = _reading(text_field, rejected_fraction=max_rejected, deduplicate=not keep_duplicates)
    data_reports.report_on(files, reading, _kind(kind, text_field), workers, rejected=rejected, as_json=as_json)


@command(
    data_app,
    "Examples:  ttrain data show shards\n\nttrain data show $(ttrain artifacts path shards-sft) --seed 1",
)
def data_show(
    shards: Annotated[Path, argument("shards, the directory with train/ and heldout/, or an artifact", metavar="SHARDS")],
    rows: Annotated[int, option("how many", min=1)] = 3,
    row_length: RowLength = 256,
    seed: Annotated[int | None, option("seed for choosing random rows; without it the first rows", min=0)] = None,
    tokenizer: TokenizerDirectory = None,
    as_json: AsJson = False,
) -> None:
    """Show packed rows as text, with the tokens of the loss in bold green, or underlined with ^ if there is no colour."""
    from ttrain.cli import data_reports
    from ttrain.data import inspect
    from ttrain.data.shards import ShardSet

    shard_directory = next(iter(inspect.parts_of(shards).values()))
    encoder = inspect.encoder_of(shard_directory, tokenizer, ArtifactStore(home()))
    pieces, shard_set = inspect.TokenDecoder(encoder), ShardSet(shard_directory)
    packed = inspect.rows_of(shard_set, encoder, row_length)
    numbers = inspect.row_numbers(len(packed), rows, seed)
    shown = [inspect.show_row(packed, number, pieces) for number in numbers]
    if as_json:
        print_json({"shards": str(shard_directory), "tokenizer": str(encoder.directory), "kind": shard_set.index["kind"],
                    "counts": packed.counts(), "rows": [row.to_json() for row in shown]})  # fmt: skip
        return
    print(f"{len(shard_set):,} records in {shard_directory}; tokenizer {encoder.directory}")
    data_reports.show([{name: count for name, count in packed.counts().items() if count}], as_json=False)
    for row in shown:
        print(f"\nrow {row.number}: {len(row.ids)} tokens; {sum(row.live)} count in the loss")
        data_reports.print_tokens(row, pieces.special)


@command(
    tokenizer_app,
    "Examples:  ttrain tokenizer train docs.jsonl --out tokenizer --vocab-size 6400\n\n"
    "ttrain tokenizer train docs.jsonl --out tokenizer --max-lines 500000 --sample reservoir --seed 1\n\n"
    "ttrain tokenizer train docs.jsonl --out tokenizer --existing Qwen/Qwen3-0.6B",
)
def tokenizer_train(
    files: Files,
    out: Annotated[Path, option("directory for the tokenizer; it must be empty or missing")],
    vocab_size: Annotated[int, option("entries, with the 256 bytes and the special tokens", min=300, max=2**24)] = 6400,
    max_lines: Annotated[int | None, option("documents to learn from; without it all", min=1)] = None,
    sample: SampleMethod = "reservoir",
    seed: Seed = 1,
    max_bytes: Annotated[int, option("text to learn from, in UTF-8 bytes", min=10_000)] = 50_000_000,
    text_field: TextField = None,
    template: Annotated[Literal["ttrain", "tinyseek", "own"], option("own: the existing tokenizer's")] = "ttrain",
    existing: Annotated[str | None, option("take this tokenizer: a folder, or owner/name[@revision]")] = None,
    max_rejected: MaxRejected = 0.01,
    as_json: AsJson = False,
) -> None:
    """Train a byte-level BPE on documents, or take an existing one and measure how well it fits them."""
    from ttrain.cli import data_reports
    from ttrain.config import Tokenizer
    from ttrain.data import locations

    config = _valid(
        Tokenizer, vocab_size=vocab_size, template=template, existing=existing, sample=sample, seed=seed,
        max_documents=max_lines, max_bytes=max_bytes,
    )  # fmt: skip
    reading = _reading(text_field, heldout_fraction=0.0, rejected_fraction=max_rejected)
    sources = locations.expand(files, "FILE")
    with bar("reading", "documents") as progress:
        summary = data_reports.train_tokenizer(sources, out, config, reading, progress)
    memory = {"peak_memory_mib": summary["peak_memory_bytes"] // 2**20}
    data_reports.show([summary if as_json else {**summary, **memory}], as_json=as_json)


@command(tokenizer_app, "Example:  ttrain tokenizer inspect tokenizer --text 'Hello, world'")
def tokenizer_inspect(
    directory: Annotated[Path, argument("directory of the tokenizer, or an artifact of its stage", metavar="DIRECTORY")],
    text: Annotated[str | None, option("show the tokens of this text")] = None,
    as_json: AsJson = False,
) -> None:
    """Show a tokenizer's vocabulary, special tokens and template, and the tokens of a text."""
    from ttrain.cli import data_reports
    from ttrain.data import inspect
    from ttrain.data.encoder import Encoder

    encoder = Encoder(inspect.tokenizer_at(directory), fast=False)
    description = inspect.describe(encoder)
    shown = None if text is None else inspect.show_text(encoder, encodable(text))
    data_reports.show([{**description, **({"tokens": shown.to_json()} if shown and as_json else {})}], as_json=as_json)
    if as_json:
        return
    if shown is None:
        table(("id", "longest tokens"), [(token["id"], repr(token["text"])) for token in description["longest"]])
        return
    print(f"\n{len(shown.ids)} tokens")
    data_reports.print_tokens(shown, encoder.special_ids())
    table(("id", "piece"), [(number, repr(piece)) for number, piece in zip(shown.ids, shown.pieces, strict=True)])


def _reading(text_field: str | None, **values: Any) -> Reading:
    from ttrain.config import Reading

    return _valid(Reading, **values, **({"text_field": text_field} if text_field is not None else {}))


OPTIONS = {"heldout_fraction": "--heldout-fraction", "rejected_fraction": "--max-rejected"}  # of settings with another name


def _valid(section: type[S], **values: Any) -> S:
    """Build a section of the settings from options. Raises UsageError for an invalid value."""
    from pydantic import ValidationError

    try:
        return section(**values)
    except ValidationError as error:
        options = ({**item, "loc": [OPTIONS.get(str(name), f"--{name}") for name in item["loc"]]} for item in error.errors())
        raise UsageError(invalid_values(options)) from None


def _kind(kind: str, text_field: str | None) -> str | None:
    """The kind that the options name; --text-field means documents. None: the rows decide."""
    return kind if kind != "auto" else "documents" if text_field is not None else None


SHOWN_ITEMS = 10


@command(
    data_app,
    "Examples:  ttrain data contamination shards --items poems.jsonl\n\n"
    "ttrain data contamination $(ttrain artifacts path shards-pretrain) --items suite.yaml --json",
)
def data_contamination(
    shards: Annotated[list[Path], argument("shards, directories with train/ in them, or artifacts", metavar="SHARDS")],
    items: Annotated[
        list[str] | None,
        option("a suite, or JSONL with items; without it the records held out beside the shards"),
    ] = None,
    overlap_share: Annotated[float, option("share of an item's 13-grams that a document must have", min=0.01, max=1)] = 0.5,
    tokenizer: TokenizerDirectory = None,
    workers: Workers = None,
    as_json: AsJson = False,
) -> None:
    """Look for the items of evaluations in training shards, whatever their case and punctuation.

    With shards.decontaminate, the pipeline does this and leaves such documents out.
    """
    from ttrain.data.sharding import Processes

    with Processes(workers or os.cpu_count() or 1) as pool, bar("searching", "shards") as progress:
        report = scan_directories(
            shards,
            tuple(items or ()),
            overlap_share,
            tokenizer=tokenizer,
            store=ArtifactStore(home()),
            pool=pool,
            progress=progress,
        )
    if as_json:
        print_json(report)
        return
    table(*report_table(report))
    shown = [
        (
            item["where"],
            f"{item['share']:.0%}",
            f"{occurrence['file']} record {occurrence['record']}",
        )
        for item in report["items"][:SHOWN_ITEMS]
        for occurrence in item["places"][:1]
    ]
    if shown:
        table(("item", "share", "found in"), shown)
    documents = report["documents"]
    print(f"{documents:,} training documents contain an item: {overlap_share:.0%} of its 13-grams of words, or more")


def scan_directories(
    directories: Sequence[Path],
    item_sources: tuple[str, ...],
    share: float,
    *,
    tokenizer: Path | None,
    store: ArtifactStore,
    pool: Pool,
    progress: Callable[[int], None],
) -> JsonDict:
    """Scan all training shards of the directories. `item_sources`: suites or files of items; none: the held-out records.

    `progress` is called with the number of finished shards. Raises UsageError where there are no shards or no items.
    """
    from ttrain.data import contamination, inspect
    from ttrain.data.shards import ShardSet
    from ttrain.pipeline.input_files import evaluation_files

    parts = [part for directory in directories for part in inspect.parts_of(directory).items()]
    shard_directories = [shard_directory for name, shard_directory in parts if name != "heldout"]
    against = (
        contamination.overlap_check(evaluation_files(item_sources, "--items"), share, remove=False)
        if item_sources
        else _heldout(shard_directories, share)
    )
    tasks, places = [], []
    for shard_directory in shard_directories:
        encoder = inspect.encoder_of(shard_directory, tokenizer, store)
        first = 0
        shards = ShardSet(shard_directory, encoder.digest)
        shards.verify()
        for shard in shards.index["shards"]:
            tasks.append((str(shard_directory / shard["file"]), str(encoder.directory), against.texts, share))
            places.append(({"shards": str(shard_directory), "file": shard["file"]}, first))
            first += shard["rows"]
    scans = []
    with contextlib.closing(pool.map(contamination.scan, iter(tasks))) as results:
        for number, ((location, first), matches) in enumerate(zip(places, results, strict=True), 1):
            numbered = [match._replace(record=first + match.record) for match in matches]
            scans.append((location, numbered))  # counted over all shards
            progress(number)
    return contamination.report(against, scans)


def report_table(report: JsonDict) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(header, rows) of the table of tasks."""
    header = ("task", "items", "in training", "share", "too short", "not read")
    return header, [
        (
            name,
            *(f"{task[figure]:,}" for figure in ("items", "overlapping")),
            f"{task['share']:.1%}",
            *(f"{task[figure]:,}" for figure in ("too_short", "left_out")),
        )
        for name, task in report["tasks"].items()
    ]


def _heldout(shard_directories: Sequence[Path], share: float) -> OverlapCheck:
    """The records that were held out beside these shards, as items. Raises UsageError where there are none."""
    from ttrain.data import contamination, inspect
    from ttrain.data.contamination import OverlapCheck
    from ttrain.data.shards import ShardSet

    items: list[EvaluationItem] = []
    for shard_directory in shard_directories:
        heldout = shard_directory.parent / "heldout"
        if inspect.holds_shards(heldout):
            for shard in ShardSet(heldout).index["shards"]:
                items += contamination.read_items(str(heldout / shard["records"]), "heldout")[0]
    if not items:
        raise UsageError("no records were held out beside these shards; name what to look for with --items")
    return OverlapCheck(tuple(items), share, remove=False, left_out={})
