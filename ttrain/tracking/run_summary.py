"""Summary of a pipeline's tracked run: curves by tokens, changed settings, a description, its page."""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ttrain.config import by_weight, flatten
from ttrain.config.training import BITS_PER_BYTE, TRAININGS
from ttrain.core.files import JsonDict
from ttrain.core.redact import HIDDEN, masked
from ttrain.core.text import truncated
from ttrain.engine.execution import PipelineRun
from ttrain.reports import facts, summary
from ttrain.store import runs
from ttrain.store.runs import RecordedRun

log = logging.getLogger("ttrain")

REPORT = "report.html"  # the run's page among the files of the tracked run

# MLflow takes what stands before the slash as a section of the run's page, which it sorts by character code: with a capital
# it comes before `eval`. The rest is the title of the chart; where runs are compared, the whole is, of which 27 letters fit.
SECTION = "Curves"

QUICK = "validation_loss_quick"

TITLES = {"loss": "loss", "validation_loss": "validation", QUICK: "validation"}

POINTS = 1000  # of a curve on the pipeline's run; the stage's own run has them all

SHOWN_SETTINGS = 6
EARLIER_RUNS = 20  # of which the most common settings are usual


def curve_name(stage: str, metric: str) -> str:
    """The name of a curve on the pipeline's run.

    MLflow sorts charts by name, so `then` moves a stage behind those before it: `then lora loss`.
    """
    before = TRAININGS[: TRAININGS.index(stage)] if stage in TRAININGS else ()
    prefix = "then " if any(name > stage for name in before) else ""
    return f"{SECTION}/{prefix}{stage} {TITLES[metric]}"


def curves(stage: str, rows: Iterable[Mapping[str, Any]]) -> Iterator[JsonDict]:
    """Rows for the pipeline's run from those of a stage's `metrics.jsonl`: its losses by the number of tokens.

    So runs with different step sizes align on the step axis of MLflow's charts. All validations are kept, and at most a
    thousand losses. Quick validations, of a few rows, and the full one at the end are one curve.
    """
    rows = [row for row in rows if row.get("tokens") is not None]
    losses = [number for number, row in enumerate(rows) if "loss" in row["metrics"]]
    shown_losses = {*losses[:: max(1, -(-len(losses) // POINTS))], *losses[-1:]}
    for number, row in enumerate(rows):
        names = [name for name in TITLES if name in row["metrics"]]
        names = [name for name in names if name != "loss" or number in shown_losses]
        if names:
            metrics = {curve_name(stage, name): row["metrics"][name] for name in names}
            yield {"step": int(row["tokens"]), "time": row.get("time"), "metrics": metrics}


def as_yaml(changed: Mapping[str, Any], everything: Mapping[str, Any]) -> str:
    """Settings by dotted name as a YAML file for `-c`, without masked ones: those that differ from the defaults, and the
    others as comments."""
    others = _yaml({name: value for name, value in everything.items() if name not in changed})
    return f"{_yaml(changed)}\n# Everything else has its default:\n{textwrap.indent(others, '# ')}"


def _yaml(values: Mapping[str, Any]) -> str:
    import yaml

    tree: JsonDict = {}
    for name, value in values.items():
        if value == HIDDEN:
            continue
        *sections, last = name.split(".")
        group = tree
        for section in sections:
            group = group.setdefault(section, {})
        group[last] = value
    return str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))


def description(
    home: Path,
    run: RecordedRun,
    metrics: Mapping[str, float],
    measured: Sequence[summary.EvaluationRow] = (),
    registered: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Describe a run and its results in markdown.

    It begins with the note, what is unusual, and the metric: a table of runs shows no more.
    `run` is its record, `measured` the table of its evaluation, `registered` the versions that it
    registered, by name, which become links in MLflow.
    """
    bits = metrics.get(BITS_PER_BYTE.of_run)
    stages = [tuple(map(_cell, summary.status_row(stage)[:4])) for stage in run["stages"]]
    links = [
        f"[{name} version {version}](#/models/{quote(name, safe='')}/versions/{version})"
        for name, version in sorted(registered.items())
    ]
    parts = [
        note(run["note"]) if run.get("note") else "",
        difference(home, run) + (f": {bits:.4f} {BITS_PER_BYTE.label}" if bits is not None else ""),
        f"**{run['outcome']}**: {_cell(run['error'])}" if run.get("error") else "",
        summary.markdown(measured, ("evaluation", "", "")) if measured else "",
        summary.markdown(stages, ("stage", "outcome", "time", "figures")),
        f"Registered: {', '.join(links)}." if links else "",
        f"`settings.yaml` among the artifacts has all settings; the same again: `ttrain pipeline run "
        f"{run['pipeline']} -c settings.yaml`. In the terminal: `ttrain report {run['run']}`.",
    ]
    return "\n\n".join(filter(None, parts))


def description_of(execution: PipelineRun) -> str:
    """Describe a run that goes on, with its results so far."""
    measured, versions = execution.evaluation_table(), execution.versions
    return description(execution.store.root, execution.record.snapshot(), execution.metrics(), measured, versions)


def difference(home: Path, run: RecordedRun) -> str:
    """How the settings of a run differ from the usual ones of its `name`.

    The usual value of a setting is the most common one of the earlier runs, the oldest of them
    if several are: what one experiment changed is not usual for the next one.
    """
    name = run["settings"].get("name")
    earlier = []
    for record in runs.newest_first(home, [f'"name": "{name}"']):
        is_earlier = runs.time_in_name(record["run"]) < runs.time_in_name(run["run"])
        if is_earlier and record["settings"].get("name") == name:
            earlier.append(dict(flatten(record["settings"])))
        if len(earlier) == EARLIER_RUNS:
            break
    if not earlier:
        return f"the first run of {name}"
    settings = masked(dict(flatten(run["settings"])))
    by_rule = facts.set_by_rule(settings)  # they follow from other settings
    changes = []
    for setting in sorted(settings, key=by_weight):
        values = Counter(str(record[setting]) for record in reversed(earlier) if setting in record)
        usual = values.most_common(1)[0][0] if values else str(settings[setting])
        if str(settings[setting]) != usual and setting not in by_rule and settings[setting] != HIDDEN:
            value = _value(settings[setting]).replace("`", "'")
            changes.append(f"`{setting}={value}`")  # marks where the note ends, in tables too
    if len(changes) > SHOWN_SETTINGS:
        changes[SHOWN_SETTINGS:] = [f"and {len(changes) - SHOWN_SETTINGS} more settings"]
    return ", ".join(changes) or "the usual settings"


def note(text: str) -> str:
    """A user's note in markdown, as lines of text."""
    return "  \n".join(text.replace("<", "&lt;").split("\n"))


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_value, value))
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return truncated(text, 40)


def _cell(text: str) -> str:
    """Escape a text as one line of markdown."""
    return " ".join(text.split()).replace("<", "&lt;")[:300]


def page_of(home: Path, name: str) -> str:
    """The page of a run as a text, from this disk alone; "" if it cannot be made, which ends nothing."""
    try:
        from ttrain.reports.report import report_of  # the import may fail if a library was changed during the run
        from ttrain.store.run_views import read_run

        return report_of(read_run(home, name))
    except Exception:
        log.warning("the run's page could not be made; `ttrain report %s` tries again", name, exc_info=True)
        return ""
