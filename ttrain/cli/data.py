"""The `ttrain data` and `ttrain tokenizer` commands, which need no pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from ttrain.cli.options import AsJson, Output, argument, command, command_group, files_and_settings, option
from ttrain.core.terminal import bar, print_json
from ttrain.errors import DataError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home

data_app = command_group(
    "data",
    "Data",
    help="Check, shard and show training data.",
    epilog="Begin with:  ttrain data check docs.jsonl",
)
tokenizer_app = command_group(
    "tokenizer",
    "Data",
    help="Train a tokenizer.",
    epilog="Example:  ttrain tokenizer train docs.jsonl --out tokenizer",
)

FILES_HELP = (
    "JSONL (packed or not), parquet, or .txt: files, globs, folders, URLs, hf://owner/name; and settings of reading, "
    "shards, tokenizer and runtime"
)
Files = Annotated[list[str], argument(FILES_HELP, metavar="FILE|KEY=VALUE")]
Kind = Annotated[Literal["auto", "documents", "chats", "pairs"], option("auto: by the keys of the first good rows")]
RowLength = Annotated[int, option("tokens of a packed row", min=8, max=2**20)]
TokenizerDirectory = Annotated[Path | None, option("its directory; without it, found by digest")]
HOLDS_NOTHING_OUT = "reading.heldout_fraction=0"  # unless it is set


@command(
    data_app,
    "Examples:  ttrain data shard docs-*.jsonl --tokenizer tokenizer --out shards\n\n"
    "ttrain data shard chats.jsonl.gz reading.heldout_fraction=0.01 --tokenizer $(ttrain artifacts path tokenizer) "
    "--out chats",
)
def data_shard(
    words: Files,
    tokenizer: Annotated[Path, option("directory of the tokenizer, or an artifact of its stage")],
    out: Annotated[Path, option("directory of the shards; it may hold those of an earlier run")],
    kind: Kind = "auto",
    as_json: AsJson = False,
) -> None:
    """Tokenize files into Arrow shards. A second call with other files tokenizes only the new ones."""
    from ttrain.cli import data_reports
    from ttrain.data import first_rows, locations

    files, settings = files_and_settings(words, HOLDS_NOTHING_OUT)
    sources = locations.expand(files, "FILE")
    data_reports.check_output(out, files, sources)
    chosen = data_reports.kind_of(kind, settings) or first_rows.kind_of_files(sources, settings.reading)
    with bar("sharding", "rows") as progress, data_reports.pool_for(sources, settings.runtime.workers) as pool:
        summary = data_reports.shard(sources, tokenizer, out, settings, kind=chosen, pool=pool, progress=progress)
    Output(summary, data_reports.tables(summary)).print(as_json=as_json)
    if "error" in summary:
        raise DataError(summary["error"])


@command(
    data_app,
    "Examples:  ttrain data check docs.jsonl\n\n"
    "ttrain data check chats/ --kind chats --rejected bad.jsonl --json\n\n"
    "ttrain data check pairs.jsonl reading.rejected_fraction=0.1",
)
def data_check(
    words: Files,
    kind: Kind = "auto",
    rejected: Annotated[Path | None, option("write the bad rows here: file, line, reason, text")] = None,
) -> Output:
    """Count what `data shard` would keep, skip and reject, with lengths, scripts and copies, and write nothing."""
    from ttrain.cli import data_reports

    files, settings = files_and_settings(words)
    return data_reports.report_on(files, settings, data_reports.kind_of(kind, settings), rejected=rejected)


@command(
    data_app,
    "Examples:  ttrain data show shards\n\nttrain data show $(ttrain artifacts path shards-sft) --rows 10",
)
def data_show(
    shards: Annotated[Path, argument("shards, the directory with train/ and heldout/, or an artifact", metavar="SHARDS")],
    rows: Annotated[int, option("how many, from the first on", min=1)] = 3,
    row_length: RowLength = 256,
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
    shown = [inspect.show_row(packed, number, pieces) for number in range(min(rows, len(packed)))]
    if as_json:
        print_json({"shards": str(shard_directory), "tokenizer": str(encoder.directory), "kind": shard_set.index["kind"],
                    "counts": packed.counts(), "rows": [row.to_json() for row in shown]})  # fmt: skip
        return
    heading = f"{len(shard_set):,} records in {shard_directory}; tokenizer {encoder.directory}"
    Output(None, [heading, *data_reports.tables(packed.counts())]).print(as_json=False)
    for row in shown:
        print(f"\nrow {row.number}: {len(row.ids)} tokens; {sum(row.live)} count in the loss")
        data_reports.print_tokens(row, pieces.special)


@command(
    tokenizer_app,
    "Examples:  ttrain tokenizer train docs.jsonl --out tokenizer tokenizer.vocab_size=6400\n\n"
    "ttrain tokenizer train docs.jsonl --out tokenizer tokenizer.max_documents=500_000\n\n"
    "ttrain tokenizer train docs.jsonl --out tokenizer tokenizer.existing=Qwen/Qwen3-0.6B",
)
def tokenizer_train(
    words: Files, out: Annotated[Path, option("directory for the tokenizer; it must be empty or missing")]
) -> Output:
    """Train a byte-level BPE on documents, or take an existing one and measure how well it fits them."""
    from ttrain.cli import data_reports
    from ttrain.data import locations

    files, settings = files_and_settings(words, HOLDS_NOTHING_OUT)
    sources = locations.expand(files, "FILE")
    with bar("reading", "documents") as progress:
        summary = data_reports.train_tokenizer(sources, out, settings, progress)
    return Output(summary, data_reports.tables(summary))
