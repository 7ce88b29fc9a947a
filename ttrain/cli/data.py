"""The `ttrain data` commands, and `ttrain init`."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from ttrain.cli.options import (
    OWN_SETTINGS,
    Output,
    SettingsOptions,
    Table,
    app,
    argument,
    check_output_file,
    command,
    command_group,
    option,
)
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home

SECTION = "reading."  # of the settings among the words of `data check`
FILES_HELP = (
    "JSONL (packed or not), parquet, or .txt: files, globs, folders, URLs, "
    "hf://owner/name; and settings of reading"
)

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
    rejected: Annotated[
        Path | None, option("write the bad rows here: file, line, reason, text")
    ] = None,
) -> Output:
    """Count what a run would keep, skip and reject, with lengths, scripts and copies."""
    from ttrain.cli import data_reports

    own = [word for word in words if "=" in word and word.startswith(SECTION)]
    files = [word for word in words if word not in own]
    return data_reports.report_on(files, SettingsOptions(own).load().settings, kind, rejected)


@command(
    data_app,
    "Examples:  ttrain data show shards-sft\n\nttrain data show $(ttrain artifacts path "
    "shards-sft 3f1c)/heldout --rows 10",
)
def data_show(
    shards: Annotated[
        str, argument("a stage such as shards-sft, or a directory of shards", metavar="SHARDS")
    ],
    rows: Annotated[int, option("how many, from the first on", min=1)] = 3,
    row_length: Annotated[int, option("tokens of a packed row", min=8, max=2**20)] = 256,
) -> Output:
    """Show packed rows as text, with the tokens of the loss in green, or underlined with ^."""
    from ttrain.cli import data_reports

    return data_reports.show(shards, ArtifactStore(home()), rows, row_length)


@command(
    app,
    "Examples:  ttrain init\n\nttrain init docs.jsonl chats.jsonl\n\nttrain init corpus/ --out "
    "corpus.yaml",
    "Train",
)
def init(
    files: Annotated[
        list[str] | None,
        argument(
            "files, folders or globs; default: the data files of this directory", metavar="FILES"
        ),
    ] = None,
    out: Annotated[Path, option("the file to write", metavar="FILE")] = OWN_SETTINGS,
    force: Annotated[bool, option("overwrite it", "--force")] = False,
) -> Output:
    """Write a settings file for your own data: rows tell documents, chats and pairs apart."""
    from ttrain.data import locations, starter

    found = locations.expand(files, "FILES") if files else starter.files_in(Path())
    check_output_file(out)
    if out.exists() and not force:
        raise UsageError(
            f"--out is {out}, which exists; add --force to overwrite it, or name another file"
        )
    datasets, left_out = starter.sort(found)
    if not datasets:
        reasons = "".join(f"\n{file}: {reason}" for file, reason in left_out.items())
        raise UsageError(
            f"there are no data in {', '.join(files or [str(Path.cwd())])}; name files of "
            "documents, chats or pairs: "
            f"ttrain init docs.jsonl chats.jsonl{reasons}"
        )
    text = starter.render(datasets, starter.run_name(Path.cwd()), shlex.quote(str(out)))
    out.write_text(text, encoding="utf-8")
    next_command = f"ttrain pipeline run full -c {shlex.quote(str(out))}"
    value = {"path": str(out), "data": datasets, "left_out": left_out, "next": next_command}
    rows = [(file, f"data.{dataset}") for dataset, names in datasets.items() for file in names]
    lines = [f"left out: {file}: {reason}" for file, reason in left_out.items()]
    if "pretrain" not in datasets:
        lines.append(
            "there are no documents; without data.pretrain, set sft.start_from to a model of yours"
        )
    lines.append(
        f"wrote {out}; next: {next_command.replace(' run ', ' plan ')}, then {next_command}"
    )
    return Output(value, [Table(("file", "setting"), rows), *lines])
