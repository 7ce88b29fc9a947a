"""The `ttrain compare` and `ttrain report` commands."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from ttrain.cli.options import Output, Table, app, argument, check_output_file, command, option
from ttrain.core.text import ABSENT, truncated
from ttrain.errors import UsageError
from ttrain.store.layout import home

RUN_HELP = (
    "a run or the beginning of its name, `latest`, an MLflow run id, or a registered "
    "NAME@ALIAS or NAME/VERSION"
)
SHOWN_SAMPLES = 6
LONGEST_CELL = 160  # characters of a text


@command(
    app,
    "Examples:  ttrain compare full-20261121-160222 latest\n\nttrain compare mine@champion "
    "mine@challenger "
    "--html compared.html\n\nttrain compare latest full-20261121-160222 --json",
    "Look",
)
def compare(
    runs: Annotated[list[str], argument(RUN_HELP, metavar="RUN")],
    html: Annotated[Path | None, option("write a page with curves to this file")] = None,
) -> Output:
    """Print how two or more runs differ: settings, data, code, figures, samples."""
    from ttrain.reports.compare import compare as compared
    from ttrain.reports.compare import run_rows
    from ttrain.reports.facts import REFERENCE, letter
    from ttrain.store.run_views import read_runs

    if len(runs) < 2:
        raise UsageError(
            f"compare got one run, {runs[0]}, but needs two or more; `ttrain pipeline status` "
            "lists them"
        )
    if html:
        check_output_file(html)
    views = read_runs(home(), runs)
    comparison = compared(views)
    letters = [letter(number) for number in range(len(views))]
    notes = [f"note: {remark}" for remark in (*comparison.remarks, *comparison.notes)]
    parts: list[str | Table] = [
        Table(("", "run", "outcome", "began", "took"), run_rows(views)),
        *("", comparison.verdict, *notes, ""),
    ]
    for title, rows in comparison.tables.items():
        cells: list[list[str]] = []
        for row in rows:
            texts = [truncated(text, LONGEST_CELL) for text in row.texts]
            if row.best is not None:
                texts[row.best] += "  * best"
            cells.append([row.title, *texts])
        parts.append(Table((title.lower(), *letters), cells or [["no difference"]]))
    different = [sample for sample in comparison.samples if len({*sample["answers"]}) > 1]
    for sample in different[:SHOWN_SAMPLES]:
        prompt = truncated(sample["prompt"], LONGEST_CELL)
        parts += ["", f"{sample['model']} model: {prompt}"]
        answers = (*sample["answers"], sample["reference"] or ABSENT)
        for name, answer in zip((*letters, REFERENCE), answers, strict=True):
            parts.append(f"  {name}  {truncated(answer, LONGEST_CELL)}")
    parts += ["", "--html and --json show the rest"]
    if html:
        from ttrain.reports.report import comparison_page

        html.write_text(comparison_page(views, comparison), encoding="utf-8")
        parts.append(f"written to {html}")
    return Output({**asdict(comparison), "page": html and str(html)}, parts)


@command(
    app,
    "Examples:  ttrain report\n\nttrain report full-20261121-160222 --out report.html\n\nttrain "
    "report mine@champion",
    "Look",
)
def report(
    run: Annotated[str, argument(RUN_HELP, metavar="RUN")] = "latest",
    out: Annotated[Path | None, option("the file; default: RUN.html here", "--out", "-o")] = None,
) -> Output:
    """Write a page about a run: stages, curves, data, evaluation, samples, lineage, problems.

    Of a sweep: its settings, each with seeds, mean and interval.
    """
    from ttrain.reports.report import report_of, sweep_page
    from ttrain.store.run_views import read_run
    from ttrain.store.sweeps import find_experiment, list_experiments

    if run.startswith("sweep-") and any(
        each.name.startswith(run) for each in list_experiments(home())
    ):
        from ttrain.experiments.verdict import Judgement
        from ttrain.store.artifacts import ArtifactStore

        experiment = find_experiment(home(), run)
        notes: list[str] = []
        name = experiment.name
        page = sweep_page(Judgement(experiment, ArtifactStore(home())).to_json())
    else:
        view = read_run(home(), run)
        name = view.name
        page = report_of(view)
        notes = list(view.notes)
    path = out or Path(f"{name}.html")
    check_output_file(path)
    path.write_text(page, encoding="utf-8")
    return Output({"run": name, "page": str(path), "notes": notes}, [str(path)])
