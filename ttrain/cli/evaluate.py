"""The `ttrain eval` command: arguments and output."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson

from ttrain.cli.chat import LoadingOptions, before_torch
from ttrain.cli.options import (
    AsJson,
    Output,
    Table,
    app,
    argument,
    check_output_file,
    command,
    option,
)
from ttrain.core.terminal import print_escaped
from ttrain.errors import UsageError

MODELS_HELP = (
    "runs, stages such as sft, registered NAME@ALIAS, directories, or owner/name on the Hub; "
    "the others are "
    "compared with the first"
)


def _file(shape: str) -> Any:
    return option(f"JSON Lines, {shape}; repeatable", metavar="FILE")


@dataclass(frozen=True)
class TaskFiles:
    """Options that name files of items, one for each kind of task."""

    text: Annotated[list[Path] | None, _file("{text}: bits per byte")] = None
    chats: Annotated[
        list[Path] | None, _file("{messages}: loss on the answers, and what they look like")
    ] = None
    pairs: Annotated[
        list[Path] | None, _file("{prompt, chosen, rejected}: which answer is likelier")
    ] = None
    choices: Annotated[list[Path] | None, _file("{question, choices, answer}: multiple choice")] = (
        None
    )
    last_word: Annotated[list[Path] | None, _file("{context, target}")] = None
    generation: Annotated[
        list[Path] | None, _file("{question, answer}: answers in its own words")
    ] = None


@command(
    app,
    "Examples:  ttrain eval sft\n\nttrain eval pretrain sft --choices poems.jsonl --last-word "
    "passages.jsonl\n\n"
    "ttrain eval sft mine-sft@champion --suite mine.yaml --json\n\n"
    "ttrain eval owner/name ./model --suite english --limit 200",
    "Use",
    name="eval",
)
def evaluate(
    models: Annotated[list[str], argument(MODELS_HELP, metavar="MODEL")],
    suite: Annotated[
        list[str] | None,
        option("tasks: a name, or a YAML file; repeatable", "--suite", "-s", metavar="SUITE"),
    ] = None,
    *,
    files: TaskFiles,
    limit: Annotated[int | None, option("items of each task, drawn by its seed", min=1)] = None,
    items: Annotated[
        Path | None, option("write every item here, as JSON Lines", metavar="FILE")
    ] = None,
    as_json: AsJson = False,
    loading_options: LoadingOptions,
) -> None:
    """Evaluate models with confidence intervals, and compare them on the same items.

    Without a task: on the data that their own runs held out.
    """
    if items is not None:
        check_output_file(items)
        if items.exists():
            raise UsageError(f"--items is {items}, which exists; name a new file")
    before_torch()
    from ttrain.cli import evaluation

    results, identities, notes = evaluation.evaluate(
        models,
        evaluation.load_suites(suite or (), asdict(files)),
        limit,
        loading_options,
        say=lambda line: print_escaped(line, stderr=as_json),
    )
    comparison = Table(*results.comparison_table())
    tables = [Table(*results.table()), comparison][: 1 + bool(comparison.rows)]
    value = {**results.to_json(), "identities": identities, "notes": notes}
    Output(value, [*tables, *notes]).print(as_json=as_json)
    if items is not None:  # after the results, which are valid even if what follows fails
        with items.open("wb") as file:
            file.writelines(orjson.dumps(row) + b"\n" for row in results.rows())
        print_escaped(f"every item is in {items}", stderr=as_json)
