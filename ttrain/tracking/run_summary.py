"""Summary of a tracked run: curves by tokens, changed settings, a description."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import mode

from ttrain.config import by_weight, flatten
from ttrain.config.training import BITS_PER_BYTE, TRAININGS
from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.redact import HIDDEN, masked
from ttrain.core.text import first_of, truncated
from ttrain.reports import facts, summary
from ttrain.store import runs

# Before the slash is a section of the run's page, which MLflow sorts by character code: with a
# capital it comes before `eval`. The rest is the title of the chart; where runs are compared, the
# title is the complete name, of which 27 letters fit.
SECTION = "Curves"

QUICK = "validation_loss_quick"

POINTS = 1000  # of a curve on the pipeline's run; the stage's own run has them all

SHOWN_SETTINGS = 6
EARLIER_RUNS = 20  # the most common value in these runs counts as the usual one


def curves(stage: str, rows: Iterable[JsonObject]) -> Iterator[JsonDict]:
    """Rows for the pipeline's run from those of a stage's `metrics.jsonl`: losses by tokens.

    So runs with different step sizes align in MLflow's charts. Quick validations, of a few rows,
    are the curve if there are any; the last of them is of all rows.
    """
    rows = [row for row in rows if row.get("tokens") is not None]
    validation = QUICK if any(QUICK in row["metrics"] for row in rows) else "validation_loss"
    # MLflow sorts charts by name, so `then` moves a stage behind those before it: `then lora loss`
    before = TRAININGS[: TRAININGS.index(stage)] if stage in TRAININGS else ()
    prefix = f"{SECTION}/then " if any(name > stage for name in before) else f"{SECTION}/"
    for metric, title in (("loss", "loss"), (validation, "validation")):
        having = [row for row in rows if metric in row["metrics"]]
        for row in reversed(having[:: min(-1, -len(having) // POINTS)]):  # with the last one
            yield {
                "step": int(row["tokens"]),
                "time": row.get("time"),
                "metrics": {f"{prefix}{stage} {title}": row["metrics"][metric]},
            }


def description(
    home: Path,
    run: runs.RecordedRun,
    metrics: Mapping[str, float],
    measured: Sequence[summary.EvaluationRow] = (),
) -> str:
    """Describe a run and its results in markdown.

    The note, the unusual settings and the metric come first: a table of runs shows no more.
    `measured`: the table of its evaluation.
    """
    bits = metrics.get(BITS_PER_BYTE.of_run)
    stages = [tuple(map(_cell, summary.status_row(stage)[:4])) for stage in run["stages"]]
    parts = [
        note(run["note"]) if run.get("note") else "",
        difference(home, run) + (f": {bits:.4f} {BITS_PER_BYTE.label}" if bits is not None else ""),
        f"**{run['outcome']}**: {_cell(run['error'])}" if run.get("error") else "",
        summary.markdown(measured, ("evaluation", "", "")) if measured else "",
        summary.markdown(stages, ("stage", "outcome", "time", "figures")),
        "`settings.yaml` among the artifacts has all settings; the same again: "
        f"`ttrain pipeline run {run['pipeline']} -c settings.yaml`. "
        f"In the terminal: `ttrain report {run['run']}`.",
    ]
    return "\n\n".join(filter(None, parts))


def difference(home: Path, run: runs.RecordedRun) -> str:
    """How the settings of a run differ from the usual ones of its `name`.

    Usual is the most common value in the earlier runs, the oldest if several are.
    """
    name = run["settings"].get("name")
    time = runs.time_in_name(run["run"])
    older = (
        dict(flatten(record["settings"]))
        for record in runs.newest_first(home)
        if record["settings"].get("name") == name and runs.time_in_name(record["run"]) < time
    )
    earlier = [*islice(older, EARLIER_RUNS)]
    if not earlier:
        return f"the first run of {name}"
    settings = masked(dict(flatten(run["settings"])))
    follow = facts.set_by_rule(settings).keys()  # from other settings
    changes = []
    for setting in sorted(settings.keys() - follow, key=by_weight):
        values = [str(record[setting]) for record in reversed(earlier) if setting in record]
        value = settings[setting]
        if values and str(value) not in (mode(values), HIDDEN):
            shown = f"{value:g}" if isinstance(value, float) else str(value)
            text = shown.translate({ord(mark): None for mark in "[] '`"})
            changes.append(f"`{setting}={truncated(text, 40)}`")
    return first_of(changes, SHOWN_SETTINGS) or "the usual settings"


def note(text: str) -> str:
    """A user's note in markdown, line by line."""
    return "  \n".join(text.replace("<", "&lt;").split("\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("<", "&lt;")[:300]
