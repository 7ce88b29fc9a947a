"""`ttrain eval`: its arguments, and what it prints."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ttrain.cli.chat import Base, Device, Dtype, before_torch
from ttrain.cli.options import AsJson, RunName
from ttrain.store import layout

if TYPE_CHECKING:
    from ttrain.evaluate.results import Results
    from ttrain.evaluate.suites import Loaded

EPILOG = (
    "Examples:  ttrain eval sft\n\nttrain eval pretrain sft --choices poems.jsonl --last-word passages.jsonl\n\n"
    "ttrain eval sft mine-sft@champion --suite mine.yaml --json\n\n"
    "ttrain eval owner/name ./model --suite english --limit 200"
)
MODELS_HELP = (
    "runs, stages such as sft, registered NAME@ALIAS, directories, or owner/name on the Hub; the first is what "
    "the others are compared with"
)
KINDS = ("text", "chats", "choices", "last_word", "generation")
ModelNames = Annotated[list[str], typer.Argument(help=MODELS_HELP, metavar="MODEL...")]
Suites = Annotated[
    list[str] | None, typer.Option("--suite", "-s", metavar="SUITE", help="tasks: a name, or a YAML file; repeatable")
]


def _file(name: str, shape: str) -> Any:
    return typer.Option(name, metavar="FILE", help=f"JSON Lines, {shape}; repeatable")


def evaluate(
    models: ModelNames,
    suite: Suites = None,
    text: Annotated[list[Path] | None, _file("--text", "{text}: bits per byte")] = None,
    chats: Annotated[list[Path] | None, _file("--chats", "{messages}: loss on the answers, and what they look like")] = None,
    choices: Annotated[list[Path] | None, _file("--choices", "{question, choices, answer}: multiple choice")] = None,
    last_word: Annotated[list[Path] | None, _file("--last-word", "{context, target}")] = None,
    generation: Annotated[list[Path] | None, _file("--generation", "{question, answer}: answers in its own words")] = None,
    match: Annotated[
        Literal["auto", "exact", "numeric"] | None,
        typer.Option(help="how answers of --generation are compared; auto: as numbers where all are", show_default=False),
    ] = None,
    shots: Annotated[int | None, typer.Option(min=0, max=64, help="worked examples before each item")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="items of each task, drawn by its seed")] = None,
    items: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write every item and answer there, as JSON Lines")
    ] = None,
    track: Annotated[bool, typer.Option("--track", help="keep the results in MLflow, below the run of the model")] = False,
    run: RunName = None,
    base: Base = None,
    device: Device = "auto",
    dtype: Dtype = "fp32",
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="padded tokens of a forward pass: bounds the memory", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure models, with intervals; compare them on the same items, with what these items can tell.

    Without a task, on what their own runs held out.
    """
    from ttrain.cli import evaluation_run
    from ttrain.core.terminal import escaped, print_json
    from ttrain.evaluate.statistics import Rule
    from ttrain.pipeline import identities
    from ttrain.pipeline import names as references
    from ttrain.store import artifacts

    files = dict(zip(KINDS, (text, chats, choices, last_word, generation), strict=True))
    asked = [_changed(loaded, shots=shots, limit=limit, match=match) for loaded in _asked(suite or (), files)]
    found = references.resolve_all(models, base=base, from_hub=True, run=run)
    home = artifacts.Store(layout.home())
    heldout = evaluation_run.heldout_of(found, home)
    identified, notes = identities.lines_of(found, home), list[str]()
    if not asked:
        default, left_out = evaluation_run.default_suite(heldout, found)
        asked, notes = [_changed(default, limit=limit)], left_out
    _check_used(asked, shots=shots, match=match)
    if track:
        evaluation_run.check_tracked(found, home)
    if items is not None:
        evaluation_run.check_writable(items, asked)
    for line in identified:
        print(escaped(line), file=sys.stderr if as_json else sys.stdout, flush=True)
    before_torch()
    results = _with_bar(found, asked, heldout, evaluation_run.How(device, dtype, batch_tokens), Rule())
    notes += results.notes()
    if as_json:
        by_name = dict(zip(evaluation_run.names_of(found), map(identities.to_json, found), strict=True))
        print_json({**results.to_json(), "identities": by_name, "notes": notes})
    else:
        _show(results, notes)
    told = []  # after the results: these are there, whatever becomes of the rest
    if items is not None:
        evaluation_run.write_items(items, results)
        told.append(f"every item is in {items}")
    if track:
        told.append(f"in MLflow: {', '.join(evaluation_run.track(found, results, home))}; `ttrain ui` opens it")
    for line in () if as_json else told:
        print(line)


def _asked(names: Sequence[str], files: dict[str, list[Path] | None]) -> list[Loaded]:
    """The suites that are named, and one of the files that are. Raises UsageError for a file that is none, or that is named
    twice."""
    from ttrain.errors import UsageError
    from ttrain.evaluate import suites

    tasks: dict[str, dict[str, Any]] = {}
    named: dict[str, str] = {}
    for kind, paths in files.items():
        option, seen = f"--{kind.replace('_', '-')}", set[Path]()
        for path in paths or ():
            file = path.expanduser()
            if not file.is_file():
                what = (
                    f"a directory; name each file in it with {option}"
                    if file.is_dir()
                    else "no file; name a JSON Lines file"
                )
                raise UsageError(f"{option} is {path}, which is {what}")
            if file.resolve() in seen:
                raise UsageError(f"{option} names {path} twice, whose items would count twice; leave one out")
            seen.add(file.resolve())
            task = _task_name(path, tasks)
            tasks[task], named[task] = {"kind": kind, "file": str(file.absolute())}, option
    return [*map(suites.load, names), *([suites.of_tasks(tasks, "the command line", named)] if tasks else [])]


def _task_name(path: Path, taken: dict[str, Any]) -> str:
    """The file's name without its endings, as a task may be called; a second file of the same name gets a number."""
    stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", path.name.partition(".")[0]).lstrip("-_.") or "task"
    return next(name for name in (stem, *(f"{stem}-{number}" for number in range(2, 10**6))) if name not in taken)


def _changed(loaded: Loaded, **settings: Any) -> Loaded:
    from ttrain.evaluate import suites

    return suites.changed(loaded, **{name: value for name, value in settings.items() if value is not None})


def _check_used(asked: Sequence[Loaded], **settings: Any) -> None:
    """Raise UsageError for an option that no task has: it would change nothing."""
    from ttrain.errors import UsageError

    for name, value in settings.items():
        if value is not None and not any(hasattr(task, name) for one in asked for task in one.suite.tasks.values()):
            kinds = sorted({task.kind for one in asked for task in one.suite.tasks.values()})
            raise UsageError(
                f"--{name} is {value}, but no task has that setting; what is asked is of kind {', '.join(kinds)}"
            )


def _with_bar(references: Any, asked: Any, heldout: Any, how: Any, rule: Any) -> Results:
    from ttrain.cli import evaluation_run
    from ttrain.core.terminal import bar

    names = evaluation_run.names_of(references)
    with bar("evaluating", "% of all tasks", 100) as progress:

        def told(model: str, task: str, done: float, total: int) -> None:
            progress(int(100 * (names.index(model) + done / total) / len(names)))

        return evaluation_run.evaluate(references, asked, heldout, how=how, rule=rule, told=told)


def _show(results: Results, notes: Sequence[str]) -> None:
    from ttrain.core.terminal import escaped, table

    table(*results.table())
    header, rows = results.comparison_table()
    if rows:
        print()
        table(header, rows)
    for line in notes:
        print(escaped(line))
