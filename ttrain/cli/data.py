"""The `ttrain data` commands: what files hold, and what the model sees of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from ttrain.cli.options import (
    Output,
    SettingsOptions,
    argument,
    command,
    command_group,
    option,
)
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home

SECTION = "reading."  # of the settings among the words of `data check`
FILES_HELP = "JSONL (packed or not), parquet, or .txt: files, globs, folders, URLs, hf://owner/name; and settings of reading"

data_app = command_group(
    "data",
    "Data",
    help="Check training data, and show it as the model sees it.",
    epilog="Begin with:  ttrain data check docs.jsonl",
)


@command(
    data_app,
    "Examples:  ttrain data check docs.jsonl\n\n"
    "ttrain data check chats/ --kind chats --rejected bad.jsonl --json\n\n"
    "ttrain data check pairs.jsonl reading.rejected_fraction=0.1",
)
def data_check(
    words: Annotated[list[str], argument(FILES_HELP, metavar="FILE|KEY=VALUE")],
    kind: Annotated[
        Literal["auto", "documents", "chats", "pairs"],
        option("auto: by the keys of the first good rows"),
    ] = "auto",
    rejected: Annotated[Path | None, option("write the bad rows here: file, line, reason, text")] = None,
) -> Output:
    """Count what a run would keep, skip and reject, with lengths, scripts and copies."""
    from ttrain.cli import data_reports

    own = [word for word in words if "=" in word and word.startswith(SECTION)]
    files = [word for word in words if word not in own]
    return data_reports.report_on(files, SettingsOptions(own).load().settings, kind, rejected)


@command(
    data_app,
    "Examples:  ttrain data show shards-sft\n\nttrain data show $(ttrain artifacts path shards-sft 3f1c)/heldout --rows 10",
)
def data_show(
    shards: Annotated[str, argument("a stage such as shards-sft, or a directory of shards", metavar="SHARDS")],
    rows: Annotated[int, option("how many, from the first on", min=1)] = 3,
    row_length: Annotated[int, option("tokens of a packed row", min=8, max=2**20)] = 256,
) -> Output:
    """Show packed rows as text, with the tokens of the loss in green, or underlined with ^."""
    from ttrain.cli import data_reports

    return data_reports.show(shards, ArtifactStore(home()), rows, row_length)
