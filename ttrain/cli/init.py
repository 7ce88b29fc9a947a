"""`ttrain init`: a first file of settings for a user's own data."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

from ttrain.cli.options import OWN_SETTINGS, Output, Table, app, argument, check_output_file, command, option
from ttrain.core.files import write_output
from ttrain.errors import UsageError


@command(
    app,
    "Examples:  ttrain init\n\nttrain init docs.jsonl chats.jsonl\n\nttrain init corpus/ --out corpus.yaml",
    "Train",
)
def init(
    files: Annotated[
        list[str] | None,
        argument("files, folders or globs; default: the data files of this directory", metavar="FILES"),
    ] = None,
    out: Annotated[Path, option("the file to write", metavar="FILE")] = OWN_SETTINGS,
    force: Annotated[bool, option("overwrite it", "--force")] = False,
) -> Output:
    """Write a file of settings for your own data: files of documents, chats and pairs are told by their rows."""
    from ttrain.data import locations, starter

    found = locations.expand(files, "FILES") if files else starter.files_in(Path())
    check_output_file(out)
    if out.exists() and not force:
        raise UsageError(f"--out is {out}, which exists; add --force to overwrite it, or name another file")
    datasets, left_out = starter.sort(found)
    if not datasets:
        reasons = "".join(f"\n{file}: {reason}" for file, reason in left_out.items())
        raise UsageError(
            f"there are no data in {', '.join(files or [str(Path.cwd())])}; name files of documents, chats or pairs: "
            f"ttrain init docs.jsonl chats.jsonl{reasons}"
        )
    text = starter.render(datasets, starter.run_name(Path.cwd()), shlex.quote(str(out)))
    write_output(out, text)
    next_command = f"ttrain pipeline run full -c {shlex.quote(str(out))}"
    value = {"path": str(out), "data": datasets, "left_out": left_out, "next": next_command}
    rows = [(file, f"data.{dataset}") for dataset, names in datasets.items() for file in names]
    lines = [f"left out: {file}: {reason}" for file, reason in left_out.items()]
    if "pretrain" not in datasets:
        lines.append("there are no documents; without data.pretrain, set sft.start_from to a model of yours")
    lines.append(f"wrote {out}; next: {next_command.replace(' run ', ' plan ')}, then {next_command}")
    return Output(value, [Table(("file", "setting"), rows), *lines])
