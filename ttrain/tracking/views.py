"""How MLflow's own pages show the runs: saved views with useful columns, a description, and the addresses.

MLflow's table shows no metric and no parameter until somebody chooses some of hundreds. So the experiment carries two
views, as MLflow saves those of its users: a tag `mlflow.sharedViewState.<id>` with a name and the page's state as JSON
(its browser code, 3.17: `selectedColumns` and so on). They are listed under "Views" and have addresses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ttrain.config import by_weight
from ttrain.config.training import PRIMARY_METRICS, VALIDATION_LOSS
from ttrain.core.files import JsonDict, JsonObject, parse_json
from ttrain.tracking.mirror import Mirror

TABLE, CURVES = "ttrain-table", "ttrain-curves"
VIEW = "mlflow.sharedViewState."
NOTE = "mlflow.note.content"
PIPELINES = "tags.`ttrain.pipeline` != ''"  # stages' runs have no such tag: one row a pipeline run
NEWEST_RUNS = 30  # whose settings are compared
MOST_SETTINGS = 4  # of the columns: with the figures before them a table of 1600 pixels is full
LONGEST_SETTING = 24  # characters of a value that a column shows

# Columns, if the runs have them: the metric that a stage is judged by, and its validation loss for runs without it.
JUDGED_BY = {metric.of_run: f"{stage}/{VALIDATION_LOSS}" for stage, metric in PRIMARY_METRICS.items()}
EXTRA_METRICS = ("pretrain/tokens", "pretrain/tokens_per_second", "total/device_hours")
NAME = "attributes.`Run Name`"  # MLflow itself puts it before "Created"

DESCRIPTION = """\
Each row is one run of a pipeline. Lower is better for bits per byte and losses; the settings beside them show why.

- [**Which is better, and why**]({table}): the figures, then the settings that differ. Stages are the runs below a row.
- [**Curves by tokens**]({curves}): the losses of all stages over the tokens trained on, whatever a step was.

In the terminal: `ttrain compare A B` and `ttrain report RUN`. `ttrain up --open` brings the columns up to date.
"""


@dataclass(frozen=True)
class Addresses:
    """Addresses of MLflow's pages about some runs, to append to the address of a server."""

    experiment: str
    experiment_ids: tuple[str, ...]  # of the runs, or of the one whose table is shown
    run_ids: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The page of one run, of a pipeline or of a stage; the comparison of several; the table for none."""
        if not self.run_ids:
            return self.table
        if len(self.run_ids) == 1:
            return f"{self._runs}/{self.run_ids[0]}?workflowType=machine_learning"
        both = (list(self.run_ids), list(self.experiment_ids))
        runs, experiments = (quote(compact(values), safe="") for values in both)
        return f"#/compare-runs?runs={runs}&experiments={experiments}&workflowType=machine_learning"

    @property
    def table(self) -> str:
        """The table of runs with their metrics, and the settings that differ."""
        return f"{self._runs}?viewStateShareKey={TABLE}&workflowType=machine_learning"

    @property
    def curves(self) -> str:
        """The curves of all runs."""
        return f"{self._runs}?viewStateShareKey={CURVES}&workflowType=machine_learning&compareRunsMode=CHART"

    @property
    def _runs(self) -> str:
        return f"#/experiments/{self.experiment_ids[0]}/runs"


def refresh_views(mirror: Mirror, experiment: str) -> None:
    """Bring the views of an experiment up to date with its newest runs."""
    write_views(mirror.client, mirror.experiment_id(experiment))


def write_views(client: Any, experiment_id: str, newest: int = NEWEST_RUNS) -> None:
    """Bring the views of an experiment up to date with its newest runs; writes only what changed.

    A description that a user wrote stays as it is. Raises what MLflow does.
    """
    runs = client.search_runs([experiment_id], PIPELINES, max_results=newest, order_by=["attributes.start_time DESC"])
    tags = client.get_experiment(experiment_id).tags
    metrics = [run.data.metrics for run in runs]
    first, others = figures(metrics)
    columns = [f"metrics.`{name}`" for name in first]
    columns += [f"params.`{name}`" for name in differing([run.data.params for run in runs])]
    columns += [f"metrics.`{name}`" for name in (*others, *varying(EXTRA_METRICS, metrics))]
    columns += ["attributes.`Description`", "attributes.`Dataset`"]
    views = {TABLE: ("ttrain: which is better, and why", columns), CURVES: ("ttrain: curves by tokens", columns)}
    for name, (title, shown) in views.items():
        _save(client, experiment_id, tags.get(f"{VIEW}{name}"), name, title, state_of(shown))
    if not tags.get(NOTE):
        pages = Addresses("", (experiment_id,))
        text = DESCRIPTION.format(table=pages.table, curves=pages.curves)
        client.set_experiment_tag(experiment_id, NOTE, text)


def state_of(columns: Sequence[str]) -> JsonDict:
    """The state of MLflow's page of runs: pipelines only, the newest first, these columns.

    It names no charts, so that MLflow draws them as for a single run: sections by their names, the curves' section
    first, and titles without the section.
    """
    return {
        "searchFilter": PIPELINES,
        "orderByKey": "attributes.start_time",
        "orderByAsc": False,
        "selectedColumns": list(columns),
        "columnOrder": [NAME, *columns],
    }


def figures(runs: Sequence[Mapping[str, float]]) -> tuple[list[str], list[str]]:
    """(metrics that say which run is better, at most one for each model; their substitutes in runs without an evaluation,
    if other runs have one). If no metric differs between runs, as with a single run, all of the former."""
    first, others = [], []
    for judged, instead in JUDGED_BY.items():
        is_measured = any(judged in run for run in runs)
        first += [judged] if is_measured else [instead] if any(instead in run for run in runs) else []
        others += [instead] if is_measured and any(instead in run and judged not in run for run in runs) else []
    return varying(first, runs) or first, varying(others, runs)


def varying(names: Sequence[str], runs: Sequence[Mapping[str, object]]) -> list[str]:
    """The names whose values differ between the runs that have them."""
    return [name for name in names if len({run[name] for run in runs if name in run}) > 1]


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that differ between runs, no more than fit a table: those that shape the models first, and only one of
    those that split the runs in the same way, as long as there are others.

    A column shows a number or a word: no lists, paths or texts.
    """
    names = {name for run in runs for name in run if not name.startswith("data.")}
    varied = sorted(varying(list(names), runs), key=by_weight)
    candidates = [name for name in varied if all(_fits(run[name]) for run in runs if name in run)]
    groupings: dict[tuple[int, ...], str] = {}
    for name in candidates:
        values = [run.get(name) for run in runs]
        groupings.setdefault(tuple(map(values.index, values)), name)  # which of the runs have equal values
    chosen = dict.fromkeys([*groupings.values()][:MOST_SETTINGS] + candidates)
    return sorted([*chosen][:MOST_SETTINGS], key=by_weight)


def _fits(value: str) -> bool:
    return len(value) <= LONGEST_SETTING and not value.startswith(("[", "{", "(")) and not set(value) & {"/", "\\"}


def _save(client: Any, experiment_id: str, present: str | None, name: str, title: str, state: JsonObject) -> None:
    """Save a view unless it is unchanged. It keeps its creation time, by which MLflow sorts views."""
    now = int(1000 * time.time())
    try:
        saved_view = parse_json(present or "{}")
        if saved_view.get("name") == title and parse_json(saved_view["state"]) == state:
            return
        created = int(saved_view["createdAt"])
    except (ValueError, KeyError, TypeError):
        created = now
    view = {"name": title, "createdAt": created, "updatedAt": now, "state": compact(state)}
    client.set_experiment_tag(experiment_id, f"{VIEW}{name}", compact(view))


def compact(value: object) -> str:
    """Compact JSON: MLflow accepts 5000 characters."""
    return json.dumps(value, separators=(",", ":"))
