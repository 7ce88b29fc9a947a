"""`ttrain compare`, `ttrain report`, `ttrain plot`: runs side by side, as pages, as pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import escaped, print_json, table

if TYPE_CHECKING:
    from ttrain.reports.compare import Comparison, Difference, Sample
    from ttrain.tracking import RunView

RUN_HELP = "a run or the beginning of its name, `latest`, an MLflow run id, or a registered NAME@ALIAS or NAME/VERSION"
SIDE_BY_SIDE = 4  # runs that are columns; more are rows
SAMPLES_OF_A_MODEL = 2
LONGEST_CELL = 160
FIGURES_OF_MANY = 3

Run = Annotated[str, typer.Argument(help=RUN_HELP)]
Runs = Annotated[list[str], typer.Argument(help=RUN_HELP, metavar="RUN...")]


def add_pages(app: typer.Typer) -> None:
    """Put the commands onto the command line."""
    app.command(
        "compare",
        epilog="Examples:  ttrain compare full-20261121-160222 latest\n\nttrain compare mine@champion mine@challenger "
        "--html compared.html\n\nttrain compare latest full-20261121-160222 --json",
    )(compare)
    app.command(
        "report",
        epilog="Examples:  ttrain report\n\nttrain report full-20261121-160222 --out report.html\n\n"
        "ttrain report mine@champion",
    )(report)
    app.command(
        "plot",
        epilog="Examples:  ttrain plot latest\n\nttrain plot latest --metric grad_norm --metric lr_adamw --axis step\n\n"
        "ttrain plot full-20261121-160222 latest --stage pretrain --out losses.png",
    )(plot)


def compare(
    runs: Runs,
    html: Annotated[
        Path | None, typer.Option("--html", help="write a page with curves to this file", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what two or more runs have different: settings, data, code, figures, samples."""
    from ttrain.errors import UsageError
    from ttrain.reports.compare import compare as compared
    from ttrain.store.layout import home
    from ttrain.tracking import read_runs

    if len(runs) < 2:
        raise UsageError(f"compare got one run, {runs[0]}, but needs two or more; `ttrain pipeline status` lists them")
    views = read_runs(home(), runs)
    twice = next((text for place, text in enumerate(runs) if views[place].name in [one.name for one in views[:place]]), None)
    if twice is not None:
        raise UsageError(f"'{twice}' is a run that was named before; compare takes different runs")
    found = compared(views)
    if html:
        from ttrain.reports.compare_page import page_of

        _write(html, page_of(views, found))
    if as_json:
        print_json({**found.to_json(), "page": str(html) if html else None})
        return
    _print_comparison(found, views)
    if html:
        print(f"\nwritten to {escaped(str(html))}")


def report(
    run: Run = "latest",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the file; by default RUN.html where you stand", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one page about a run: stages, curves, data, evaluation, samples, lineage, and what went wrong."""
    from ttrain.reports.report import report_of
    from ttrain.store.layout import home
    from ttrain.tracking import read_run

    view = read_run(home(), run)
    path = out or Path(f"{view.name}.html")
    _write(path, report_of(home(), view))
    for note in view.notes:
        typer.echo(escaped(note), err=True)
    if as_json:
        print_json({"run": view.name, "page": str(path), "notes": list(view.notes)})
    else:
        print(escaped(str(path)))


def plot(
    runs: Runs,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", "-m", help="a curve; may be repeated", show_default=False)
    ] = None,
    stage: Annotated[
        list[str] | None, typer.Option("--stage", help="of this stage alone; may be repeated", show_default=False)
    ] = None,
    axis: Annotated[str, typer.Option("--axis", help="tokens, step or time")] = "tokens",
    log: Annotated[bool, typer.Option("--log", help="with a logarithmic axis")] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="the file; by default RUN.png where you stand", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Draw curves of one or more runs as PNG: losses, perplexity and learning rate, or the metrics that you name."""
    from ttrain.errors import UsageError
    from ttrain.reports import plots, vega_charts
    from ttrain.store.layout import home
    from ttrain.tracking import read_runs

    if axis not in vega_charts.AXES:
        raise UsageError(f"--axis is {axis}, but must be one of {', '.join(vega_charts.AXES)}")
    views = read_runs(home(), runs)
    rows = plots.panels_of(views, metric or (), stage or ())
    path = out or Path(f"{views[0].name}.png")
    _writable(path)
    plots.save(plots.draw(rows, axis=axis, log=log, title=views[0].name if len(views) == 1 else ""), path)
    if as_json:
        drawn = [
            {"title": one.title, "points": {line.label: len(line.points) for line in one.lines}}
            for panels in rows
            for one in panels
        ]
        print_json({"runs": [view.name for view in views], "picture": str(path), "panels": drawn})
    else:
        print(escaped(str(path)))


def _write(path: Path, text: str) -> None:
    _writable(path)
    path.write_text(text, encoding="utf-8")


def _writable(path: Path) -> None:
    from ttrain.errors import UsageError

    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a directory" if path.is_dir() else f"lies in {path.parent}, which does not exist"
        raise UsageError(f"the file to write, {path}, {what}; name a file in a directory that exists")


def _print_comparison(found: Comparison, views: Sequence[RunView]) -> None:
    from datetime import UTC, datetime

    from ttrain.reports import figures
    from ttrain.reports.compare import labels

    names = labels(len(views))
    rows = [
        (
            name,
            view.name,
            view.status,
            f"{datetime.fromtimestamp(view.started, UTC).astimezone():%Y-%m-%d %H:%M}",
            figures.duration(view.seconds),
        )
        for name, view in zip(names, views, strict=True)
    ]
    table(("", "run", "outcome", "began", "took"), rows)
    print(f"\n{escaped(found.verdict)}")
    for remark in (*found.remarks, *found.notes):
        print(f"note: {escaped(remark)}")
    if len(views) > SIDE_BY_SIDE:
        _print_many(found, names)
        return
    _differences("settings that differ", found.settings, names, "the settings that shape results are the same")
    metrics = [
        (
            one.name,
            *(
                _figure(one.values[place], one.name, one.percent[place], place, place == one.best)
                for place in range(len(names))
            ),
        )
        for one in found.metrics
    ]
    if metrics:
        print()
        table(("figures that differ (* best)", *names), metrics)
    _differences("data that differs", found.data, names, "the data is the same")
    _differences("code, libraries and machine", found.code, names, "")
    _differences("settings that shape no result", found.settings_aside, names, "")
    different = [one for one in found.samples if len(set(one.answers)) > 1]
    shown = [one for model in dict.fromkeys(one.model for one in different) for one in _first(different, model)]
    if shown:
        print()
        table(
            ("samples", "prompt", *names),
            [(one.model, _cut(one.prompt), *(_cut(answer) for answer in one.answers)) for one in shown],
        )
    if len(found.samples) > len(shown):
        print(f"{len(found.samples) - len(shown)} samples more are shown by --html and --json")


def _first(samples: Sequence[Sample], model: str) -> list[Sample]:
    return [one for one in samples if one.model == model][:SAMPLES_OF_A_MODEL]


def _print_many(found: Comparison, names: Sequence[str]) -> None:
    """A run a line: the settings that differ, and the figures that decide; the best first."""
    from ttrain.reports import figures

    metrics = [one for one in found.metrics if one.better][:FIGURES_OF_MANY]
    order = list(range(len(names)))
    if metrics:
        first = metrics[0]
        order.sort(key=lambda place: (first.values[place] is None, -first.better * (first.values[place] or 0.0)))
    print()
    table(
        ("", *(one.name for one in metrics), *(one.name for one in found.settings)),
        [
            (
                names[place],
                *(figures.number(one.values[place], one.name) for one in metrics),
                *(_cut(one.values[place]) for one in found.settings),
            )
            for place in order
        ],
    )
    print("--html and --json show the rest")


def _differences(title: str, found: Sequence[Difference], names: Sequence[str], none: str) -> None:
    if found:
        print()
        table((title, *names), [(one.name, *map(_cut, one.values)) for one in found])
    elif none:
        print(f"\n{none}")


def _figure(value: float | None, name: str, percent: float | None, place: int, is_best: bool) -> str:
    from ttrain.reports import figures

    words: Iterator[str] = iter(
        (figures.number(value, name), figures.change(percent) if place else "", "*" if is_best else "")
    )
    return "  ".join(word for word in words if word)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 3]}..."
