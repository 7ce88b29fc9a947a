"""Saved views of MLflow's table of runs, one for each `name`, and addresses of its pages.

MLflow's table shows no metric until somebody chooses some of hundreds. A view is a tag of the
experiment, `mlflow.sharedViewState.<id>`, with the page's state as JSON (MLflow 3.17).
"""

import json
import re
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from urllib.parse import quote, urlencode

from ttrain.config import by_weight
from ttrain.config.training import PRIMARY_METRICS, VALIDATION_LOSS
from ttrain.errors import UsageError
from ttrain.store import runs
from ttrain.tracking.mlflow_mirror import FAILED, KILLED, NAME, Bound, Mirror
from ttrain.tracking.sweeps import COMPARED, SWEEP, VERDICT
from ttrain.tracking.tracked_runs import id_of, is_tracked

TRAINING_PAGES = "workflowType=machine_learning"  # not those for agents and traces
NEWEST_RUNS = 30  # the runs whose metrics and settings choose the columns
MOST_SETTINGS = 12  # with them the tag has 3,000 of the 5,000 characters that MLflow takes
SHOWN_SETTING = re.compile(r"[^\[{(/\\]{0,24}")  # what fits into a column


def addresses_of(home: Path, chosen: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """Relative addresses of MLflow's pages: `table` and `curves` of a name, `url` of these runs.

    Several runs, or stages of runs, are compared. Raises UsageError for one that MLflow lacks.
    """
    mirror = Mirror(home)
    found = list[Bound]()
    records = [runs.read(home, name) or {} for name, _ in chosen]
    shown = next(filter(is_tracked, [*records, *runs.newest_first(home)]), None)
    if shown is None:
        raise UsageError(f"no run of {home} is tracked; begin with `ttrain pipeline run full`")
    experiment = str(shown["settings"]["tracking"]["experiment"])
    for record, (name, stage) in zip(records, chosen, strict=True):
        bound = mirror.find(str(record["settings"]["tracking"]["experiment"]), id_of(record, stage))
        if bound is None:
            label = f"{name}:{stage}" if stage else name
            raise UsageError(
                f"MLflow does not have {label}; `ttrain report {name}` shows what there is"
            )
        found.append(bound)
    query = f"viewStateShareKey=ttrain-{shown['settings'].get('name', '')}&{TRAINING_PAGES}"
    table = f"#/experiments/{mirror.experiment_id(experiment)}/runs?{query}"
    links = {"table": table, "curves": f"{table}&compareRunsMode=CHART", "experiment": experiment}
    if len(found) == 1:
        links["url"] = f"{found[0].page}?{TRAINING_PAGES}"
    elif found:
        run_ids = json.dumps([bound.run_id for bound in found])
        experiments = json.dumps(sorted({bound.experiment_id for bound in found}))
        query = urlencode({"runs": run_ids, "experiments": experiments}, quote_via=quote)
        links["url"] = f"#/compare-runs?{query}&{TRAINING_PAGES}"
    return links


def refresh_view(mirror: Mirror, experiment: str, name: str) -> None:
    """Bring the view of the runs with this `name` up to date. Raises MLflow's errors."""
    ended = f"attributes.status != '{FAILED}' and attributes.status != '{KILLED}'"
    chosen = f"tags.`{NAME}` = '{name}' and {ended}"
    title = f"{name}: which is better, and why"
    save_view(mirror, experiment, f"ttrain-{name}", title, chosen, ["attributes.`Description`"])


def refresh_sweeps(mirror: Mirror, experiment: str) -> None:
    """Bring the view of all settings that sweeps compare up to date. Raises MLflow's errors."""
    columns = [f"tags.`{VERDICT}`", f"tags.`{SWEEP}`", *(f"metrics.`{key}`" for key in COMPARED)]
    save_view(
        mirror,
        experiment,
        "ttrain-sweeps",
        "sweeps: settings and their verdicts",
        f"tags.`{VERDICT}` != ''",
        columns,
        # the lowest value first; MLflow shows no run below another in a sorted table
        orderByKey=columns[2],
        orderByAsc=True,
    )


def save_view(
    mirror: Mirror,
    experiment: str,
    name: str,
    title: str,
    chosen: str,
    first: Sequence[str],
    **sorting: object,
) -> None:
    """Save a view of the runs that a filter of MLflow chooses; the newest decide the columns.

    `first`: its first columns, as MLflow names them.
    """
    experiment_id = mirror.experiment_id(experiment)
    runs = mirror.client.search_runs([experiment_id], chosen, max_results=NEWEST_RUNS)
    columns = [
        *first,
        *(f"metrics.`{key}`" for key in deciding([run.data.metrics for run in runs])),
        *(f"params.`{key}`" for key in differing([run.data.params for run in runs])),
    ]
    state = {
        "searchFilter": chosen,
        "selectedColumns": columns,
        "columnOrder": ["attributes.`Run Name`", *columns],  # MLflow puts others behind: "Duration"
        **sorting,
    }
    tag = f"mlflow.sharedViewState.{name}"
    present = mirror.client.get_experiment(experiment_id).tags.get(tag, "{}")
    if json.loads(present).get("state") != (text := json.dumps(state)):
        view = {"name": title, "createdAt": int(1000 * time.time()), "state": text}
        mirror.client.set_experiment_tag(experiment_id, tag, json.dumps(view))


def deciding(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics that say which run is better, one for each model.

    A model is judged by its evaluation, in runs without one by its validation loss.
    """
    columns: list[str] = []
    for stage, metric in PRIMARY_METRICS.items():
        loss = f"{stage}/{VALIDATION_LOSS}"
        if any(metric.of_run in run for run in runs):
            columns.append(metric.of_run)
        if any(loss in run and metric.of_run not in run for run in runs):
            columns.append(loss)
    return columns


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that differ between runs, those that shape the models first.

    A default setting is a missing parameter. Paths, lists and long texts are left to the
    description.
    """
    names = sorted({name for run in runs for name in run}, key=by_weight)

    def is_shown(name: str) -> bool:
        values = {run.get(name, "") for run in runs}
        return len(values) > 1 and all(map(SHOWN_SETTING.fullmatch, values))

    return list(islice(filter(is_shown, names), MOST_SETTINGS))
