"""The `ttrain compare` and `ttrain report` commands."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ttrain.cli.options import AsJson, Output, app, argument, check_output_file, command, option
from ttrain.core.terminal import escaped, print_json, table
from ttrain.core.text import ABSENT, truncated
from ttrain.errors import UsageError
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.reports.compare import Difference, RunComparison
    from ttrain.store.run_views import RunView

RUN_HELP = "a run or the beginning of its name, `latest`, an MLflow run id, or a registered NAME@ALIAS or NAME/VERSION"
SIDE_BY_SIDE = 4  # runs that are columns
SHOWN_SAMPLES = 6
FIGURES_OF_MANY = 3
LONGEST_CELL = 160  # characters of a text


@command(
    app,
    "Examples:  ttrain compare full-20261121-160222 latest\n\nttrain compare mine@champion mine@challenger "
    "--html compared.html\n\nttrain compare latest full-20261121-160222 --json",
    "Look",
)
def compare(
    runs: Annotated[list[str], argument(RUN_HELP, metavar="RUN")],
    html: Annotated[Path | None, option("write a page with curves to this file")] = None,
    as_json: AsJson = False,
) -> None:
    """Print how two or more runs differ: settings, data, code, figures, samples."""
    from ttrain.reports.compare import compare as compared
    from ttrain.store.run_views import read_runs

    if len(runs) < 2:
        raise UsageError(f"compare got one run, {runs[0]}, but needs two or more; `ttrain pipeline status` lists them")
    if html:
        check_output_file(html)
    views = read_runs(home(), runs)
    comparison = compared(views)
    if html:
        from ttrain.reports.report import comparison_page

        html.write_text(comparison_page(views, comparison), encoding="utf-8")
    if as_json:
        print_json({**comparison.to_json(), "page": str(html) if html else None})
        return
    _print_comparison(comparison, views)
    if html:
        print(f"\nwritten to {escaped(str(html))}")


@command(
    app,
    "Examples:  ttrain report\n\nttrain report full-20261121-160222 --out report.html\n\nttrain report mine@champion",
    "Look",
)
def report(
    run: Annotated[str, argument(RUN_HELP, metavar="RUN")] = "latest",
    out: Annotated[Path | None, option("the file; default: RUN.html here", "--out", "-o")] = None,
) -> Output:
    """Write one page about a run: stages, curves, data, evaluation, samples, lineage, and what went wrong."""
    from ttrain.reports.report import report_of
    from ttrain.store.run_views import read_run

    view = read_run(home(), run)
    path = out or Path(f"{view.name}.html")
    check_output_file(path)
    path.write_text(report_of(view), encoding="utf-8")
    return Output({"run": view.name, "page": str(path), "notes": list(view.notes)}, [str(path)])


def _print_comparison(comparison: RunComparison, views: Sequence[RunView]) -> None:
    from ttrain.reports.compare import run_rows
    from ttrain.reports.facts import letter

    letters = [letter(number) for number in range(len(views))]
    table(("", "run", "outcome", "began", "took"), run_rows(views))
    print(f"\n{escaped(comparison.verdict)}")
    for remark in (*comparison.remarks, *comparison.notes):
        print(f"note: {escaped(remark)}")
    show = _print_many if len(views) > SIDE_BY_SIDE else _print_few
    show(comparison, letters)
    print("\n--html and --json show the rest")


def _print_few(comparison: RunComparison, letters: Sequence[str]) -> None:
    """Print each table with a column for each run, and samples that differ."""
    from ttrain.reports.facts import REFERENCE

    for title, lines in comparison.tables.items():
        print()
        table((title.lower(), *letters), [*map(_row, lines)] or [["no difference"]])
    different = [sample for sample in comparison.samples if len({*sample.answers}) > 1]
    for sample in different[:SHOWN_SAMPLES]:
        print(f"\n{sample.model} model: {escaped(truncated(sample.prompt, LONGEST_CELL))}")
        for name, answer in zip((*letters, REFERENCE), (*sample.answers, sample.reference or ABSENT), strict=True):
            print(f"  {name}  {escaped(truncated(answer, LONGEST_CELL))}")


def _print_many(comparison: RunComparison, letters: Sequence[str]) -> None:
    """Print one line per run: the deciding figures and the settings that differ; the best run first."""
    from ttrain.reports.facts import ranked

    metrics = [metric for metric in comparison.metrics if metric.better][:FIGURES_OF_MANY]
    best = ranked(metrics[0].values, metrics[0].better) if metrics and not metrics[0].not_judged else []
    runs = [*best, *(run for run in range(len(letters)) if run not in best)]
    lines = [_row(line) for line in (*(metric.difference for metric in metrics), *comparison.settings)]
    print()
    table(("", *(line[0] for line in lines)), [(letters[run], *(line[run + 1] for line in lines)) for run in runs])


def _row(line: Difference) -> list[str]:
    """The name of a line and the text of each run; the best is marked."""
    texts = [truncated(text, LONGEST_CELL) for text in line.values]
    marks = ["  * best" if run == line.best else "" for run in range(len(texts))]
    return [line.name, *(text + mark for text, mark in zip(texts, marks, strict=True))]
