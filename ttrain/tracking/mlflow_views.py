"""How MLflow's own pages show the runs: saved views with useful columns, a description, and the addresses.

MLflow's table shows no metric and no parameter until somebody chooses some of hundreds. So the experiment carries two
views, as MLflow saves those of its users: a tag `mlflow.sharedViewState.<id>` with a name and the page's state as JSON
(its browser code, 3.17: `selectedColumns` and so on). They are listed under "Views" and have addresses.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from ttrain.config import SHAPE_NO_RESULT
from ttrain.config.training import PRIMARY_METRICS, TRAININGS, VALIDATION_LOSS
from ttrain.core.files import JsonDict, JsonObject, parse_json
from ttrain.tracking.tracker import AnyStore, MlflowStore

TABLE, CURVES = "ttrain-table", "ttrain-curves"
VIEW = "mlflow.sharedViewState."
NOTE = "mlflow.note.content"
PIPELINES = "tags.`ttrain.pipeline` != ''"  # stages' runs have no such tag: one row a pipeline run
NEWEST_RUNS = 50  # whose settings are compared: 0.7 CPU seconds
FEW_RUNS = 10  # at the end of each run
MOST_SETTINGS = 4  # of the columns: with the figures before them a table of 1600 pixels is full
LONGEST_SETTING = 24  # characters of a value that a column shows

# Columns, if the runs have them: the metric that a stage is judged by, and its validation loss for runs without it.
JUDGED_BY = {metric.of_run: f"{stage}/{VALIDATION_LOSS}" for stage, metric in PRIMARY_METRICS.items()}
EXTRA_METRICS = ("pretrain/tokens", "pretrain/tokens_per_second", "total/device_hours")
# Settings of these groups shape the models; those of others come after them. Data sets have MLflow's own column.
SHAPING = ("reading", "tokenizer", "model", *TRAININGS, "evaluate", "source")
NAME = "attributes.`Run Name`"  # MLflow itself puts it before "Created"
LETTER_WIDTH, MARGIN, LEAST_WIDTH = 5.7, 22, 84  # pixels of a column's title; MLflow's 100 a column cut the names off
WIDTHS = {NAME: 230, "attributes.`Description`": 260, "attributes.`Dataset`": 160}

# MLflow colours a run by its id, one of some twenty: of ten runs two mostly have the same.
RUN_COLOUR = "mlflow.runColor"
COLOURS = (
    "#2563eb", "#d9480f", "#0f8a5f", "#9333ea", "#b7791f", "#0891b2", "#db2777", "#4b5563", "#65a30d", "#7f1d1d",
)  # fmt: skip

DESCRIPTION = """\
Each row is one run of a pipeline. Lower is better for bits per byte and losses; the settings beside them show why.

- [**Which is better, and why**]({table}): the figures, then the settings that differ. Stages are the runs below a row.
- [**Curves by tokens**]({curves}): the losses of all stages over the tokens trained on, whatever a step was.

In the terminal: `ttrain compare A B` and `ttrain report RUN`. `ttrain up --open` brings the columns up to date.
"""


@dataclass(frozen=True)
class Addresses:
    """Addresses of MLflow's pages about one experiment, to append to the address of a server."""

    experiment: str
    experiment_id: str
    others: tuple[str, ...] = ()  # ids of further experiments that runs to be compared are in

    @property
    def table(self) -> str:
        """The table of runs with their metrics, and the settings that differ."""
        return f"{self._runs}?viewStateShareKey={TABLE}&workflowType=machine_learning"

    @property
    def curves(self) -> str:
        """The curves of all runs."""
        return f"{self._runs}?viewStateShareKey={CURVES}&workflowType=machine_learning&compareRunsMode=CHART"

    def run(self, run_id: str) -> str:
        """The page of one run, of a pipeline or of a stage."""
        return f"{self._runs}/{run_id}?workflowType=machine_learning"

    def compare(self, run_ids: Sequence[str]) -> str:
        """MLflow's page that compares runs side by side."""
        both = (list(run_ids), [self.experiment_id, *self.others])
        runs, experiments = (quote(compact(values), safe="") for values in both)
        return f"#/compare-runs?runs={runs}&experiments={experiments}&workflowType=machine_learning"

    @property
    def _runs(self) -> str:
        return f"#/experiments/{self.experiment_id}/runs"


def source_tags(pipeline: str) -> dict[str, str]:
    """Tags for MLflow's own columns that say who started a run and how."""
    tags = {"mlflow.source.name": f"ttrain pipeline run {pipeline}", "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def refresh_views(store: AnyStore) -> None:
    """Bring the views up to date at the end of a run; if MLflow does not answer, the next run or `ttrain up` does."""
    if isinstance(store, MlflowStore) and not store.caller.is_silent:
        store.caller.try_call(lambda: write_views(store.client, store.experiment_id(), newest=FEW_RUNS))


def write_views(client: Any, experiment_id: str, newest: int = NEWEST_RUNS) -> None:
    """Bring the views of an experiment up to date with its newest runs; writes only what changed.

    A description that a user wrote stays as it is, and so does a run's colour. Raises what MLflow does.
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
        pages = Addresses("", experiment_id)
        text = DESCRIPTION.format(table=pages.table, curves=pages.curves)
        client.set_experiment_tag(experiment_id, NOTE, text)
    colours = Counter(run.data.tags.get(RUN_COLOUR) for run in runs)
    for run in reversed(runs):
        if RUN_COLOUR not in run.data.tags:
            colour = min(COLOURS, key=colours.__getitem__)  # the first of those that the fewest runs have
            colours[colour] += 1
            client.set_tag(run.info.run_id, RUN_COLOUR, colour)


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
        "columnWidths": {**{name: _width(name) for name in columns}, **WIDTHS},
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


def _width(column: str) -> int:
    return max(LEAST_WIDTH, round(LETTER_WIDTH * len(column.partition("`")[2]) + MARGIN))


def by_weight(name: str) -> tuple[int, str]:
    """Sort key of a setting: those that shape the models first, in the order of the pipeline; those of the machine last."""
    group = name.partition(".")[0]
    return (SHAPING.index(group) if group in SHAPING else len(SHAPING) + (group in (*SHAPE_NO_RESULT, "name"))), name


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


def addresses_of(client: Any, experiments: Iterable[str], run_ids: Sequence[str]) -> Addresses | None:
    """The pages of these runs' experiment, else of the first existing experiment with one of these names; None if there
    is none. Raises MLflow's errors."""
    ids = list(dict.fromkeys(str(client.get_run(run_id).info.experiment_id) for run_id in run_ids))
    candidates = (
        (client.get_experiment(experiment) for experiment in ids)
        if ids
        else (client.get_experiment_by_name(experiment) for experiment in experiments)
    )
    experiment = next(
        (experiment for experiment in candidates if experiment is not None and experiment.lifecycle_stage == "active"), None
    )
    if experiment is None:
        return None
    write_views(client, experiment.experiment_id)
    return Addresses(experiment.name, str(experiment.experiment_id), tuple(ids[1:]))
