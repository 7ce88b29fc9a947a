"""The `ttrain compare` and `ttrain report` commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from ttrain.cli.options import AsJson, app, argument, check_output_file, command, option, run_words
from ttrain.core.files import write_output
from ttrain.core.terminal import escaped, print_escaped, print_json, table
from ttrain.core.text import truncated
from ttrain.errors import UsageError
from ttrain.store.layout import home

if TYPE_CHECKING:
    from ttrain.reports.compare import ComparedMetric, Difference, RunComparison
    from ttrain.store.run_views import RunView

RUN_HELP = "a run or the beginning of its name, `latest`, an MLflow run id, or a registered NAME@ALIAS or NAME/VERSION"
SIDE_BY_SIDE = 4  # runs that are columns; more are rows
SHOWN_SAMPLES = 6
FIGURES_OF_MANY = 3

Axis = Annotated[Literal["tokens", "step", "time"], option("of the curves")]
Log = Annotated[bool, option("draw the curves with a logarithmic axis", "--log")]


@command(
    app,
    "Examples:  ttrain compare full-20261121-160222 latest\n\nttrain compare mine@champion mine@challenger "
    "--html compared.html\n\nttrain compare latest full-20261121-160222 --json",
    "Look",
)
def compare(
    runs: Annotated[list[str], argument(RUN_HELP, metavar="RUN", autocompletion=run_words)],
    html: Annotated[Path | None, option("write a page with curves to this file")] = None,
    axis: Axis = "tokens",
    log: Log = False,
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
    if len({view.name for view in views}) < len(views):
        raise UsageError(f"{', '.join(runs)} name the same run twice; compare needs different runs")
    comparison = compared(views)
    if html:
        from ttrain.reports.report import comparison_page

        write_output(html, comparison_page(views, comparison, axis=axis, log=log))
    if as_json:
        print_json({**comparison.to_json(), "page": str(html) if html else None})
        return
    _print_comparison(comparison, views)
    if html:
        print(f"\nwritten to {escaped(str(html))}")


@command(
    app,
    "Examples:  ttrain report\n\nttrain report full-20261121-160222 --out report.html\n\n"
    "ttrain report mine@champion --axis step",
    "Look",
)
def report(
    run: Annotated[str, argument(RUN_HELP, metavar="RUN", autocompletion=run_words)] = "latest",
    out: Annotated[Path | None, option("the file; default: RUN.html here", "--out", "-o")] = None,
    axis: Axis = "tokens",
    log: Log = False,
    as_json: AsJson = False,
) -> None:
    """Write one page about a run: stages, curves, data, evaluation, samples, lineage, and what went wrong."""
    from ttrain.reports.report import report_of
    from ttrain.store.run_views import read_run

    view = read_run(home(), run)
    path = out or Path(f"{view.name}.html")
    check_output_file(path)
    write_output(path, report_of(home(), view, axis=axis, log=log))
    for note in view.notes:
        print_escaped(note, stderr=True)
    if as_json:
        print_json({"run": view.name, "page": str(path), "notes": list(view.notes)})
    else:
        print_escaped(str(path))


def _print_comparison(comparison: RunComparison, views: Sequence[RunView]) -> None:
    from ttrain.reports.compare import labels, run_rows, sections
    from ttrain.reports.sections import print_section

    names = labels(len(views))
    table(("", "run", "outcome", "began", "took"), run_rows(views))
    print(f"\n{escaped(comparison.verdict)}")
    for remark in (*comparison.remarks, *comparison.notes):
        print(f"note: {escaped(remark)}")
    if len(views) > SIDE_BY_SIDE:
        _print_many(comparison, names)
        return
    different = tuple(sample for sample in comparison.samples if len(set(sample.answers)) > 1)
    for section in sections(replace(comparison, samples=different[:SHOWN_SAMPLES]), names):
        print_section(section)
    if different[SHOWN_SAMPLES:]:
        print("\nmore samples are shown by --html and --json")


def _print_many(comparison: RunComparison, names: Sequence[str]) -> None:
    """Print one line per run: the deciding figures and the settings that differ; the best run first."""
    from ttrain.reports.sections import LONGEST_CELL

    metrics = [metric for metric in comparison.metrics if metric.better][:FIGURES_OF_MANY]
    order = list(range(len(names)))
    if metrics and not metrics[0].not_judged:
        first = metrics[0]
        order.sort(key=lambda run: (first.values[run] is None, -first.better * (first.values[run] or 0.0)))
    differing: list[ComparedMetric | Difference] = [*metrics, *comparison.settings]
    rows = [[names[run], *(truncated(entry.cell(run).text, LONGEST_CELL) for entry in differing)] for run in order]
    print()
    table(("", *(entry.name for entry in differing)), rows)
    print("--html and --json show the rest")
