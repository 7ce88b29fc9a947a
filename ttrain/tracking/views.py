"""How MLflow's pages show the runs: a saved view of its table for each `name`, and addresses.

MLflow's table shows no metric until somebody chooses some of hundreds. So the experiment carries
views as MLflow saves those of its users: a tag `mlflow.sharedViewState.<id>` with a title and the
page's state as JSON (`selectedColumns` and so on in its browser code, 3.17). The page lists them
under "Views", and each has an address.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from ttrain.config import by_weight
from ttrain.config.training import PRIMARY_METRICS, VALIDATION_LOSS
from ttrain.errors import UsageError
from ttrain.store import runs
from ttrain.tracking.mirror import FAILED, KILLED, NAME, Bound, Mirror
from ttrain.tracking.tracked_runs import id_of, is_tracked

NEWEST_RUNS = 30  # the runs whose metrics and settings choose the columns
MOST_SETTINGS = 12  # with them the tag has 3,000 of the 5,000 characters that MLflow takes
LONGEST_SETTING = 24  # characters of a value in a column


@dataclass(frozen=True)
class Addresses:
    """Addresses of MLflow's pages, to append to the address of a server.

    `name`: the setting `name`, whose view the table is; `pages` and `run_ids`: of the runs to open.
    """

    experiment: str
    experiment_ids: tuple[str, ...]
    name: str
    pages: tuple[str, ...] = ()
    run_ids: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The page of one run or stage; the comparison of several; the table if there is none."""
        if not self.run_ids:
            return self.table
        if len(self.run_ids) == 1:
            return f"{self.pages[0]}?workflowType=machine_learning"
        lists = {"runs": json.dumps(self.run_ids), "experiments": json.dumps(self.experiment_ids)}
        query = urlencode({**lists, "workflowType": "machine_learning"}, quote_via=quote)
        return f"#/compare-runs?{query}"

    @property
    def table(self) -> str:
        """The table of the runs of this name: what they are, their metrics, what differs."""
        query = f"viewStateShareKey=ttrain-{self.name}&workflowType=machine_learning"
        return f"#/experiments/{self.experiment_ids[0]}/runs?{query}"

    @property
    def curves(self) -> str:
        """The curves of the runs of the table."""
        return f"{self.table}&compareRunsMode=CHART"


def addresses_of(home: Path, chosen: Sequence[tuple[str, str | None]]) -> Addresses:
    """The pages of these runs, or stages of runs; of the newest run's experiment where there are none.

    Raises UsageError for one that MLflow lacks.
    """
    mirror, found = Mirror(home), list[Bound]()
    newest = next(filter(is_tracked, runs.newest_first(home)), None)
    if newest is None:
        raise UsageError(f"no run of {home} is tracked; begin with `ttrain pipeline run full`")
    records = [(runs.read(home, name) or {}, name, stage) for name, stage in chosen]
    shown = records[0][0] if records else newest
    experiment = str(shown["settings"]["tracking"]["experiment"])
    for record, name, stage in records:
        bound = mirror.find(record["settings"]["tracking"]["experiment"], id_of(record, stage))
        if bound is None:
            label = f"{name}:{stage}" if stage else name
            raise UsageError(f"MLflow has no run of {label}: it was not tracked; `ttrain report {name}` shows what there is")
        found.append(bound)
    experiments = [bound.experiment_id for bound in found] or [mirror.experiment_id(experiment)]
    return Addresses(
        experiment,
        tuple(dict.fromkeys(experiments)),
        str(shown["settings"].get("name", "")),
        tuple(bound.page for bound in found),
        tuple(bound.run_id for bound in found),
    )


def refresh_view(mirror: Mirror, experiment: str, name: str) -> None:
    """Bring the view of the runs with this `name` up to date. Raises MLflow's errors."""
    experiment_id = mirror.experiment_id(experiment)
    chosen = f"tags.`{NAME}` = '{name}' and attributes.status != '{FAILED}' and attributes.status != '{KILLED}'"
    runs = mirror.client.search_runs([experiment_id], chosen, max_results=NEWEST_RUNS)
    columns = [
        "attributes.`Description`",
        *(f"metrics.`{key}`" for key in deciding([run.data.metrics for run in runs])),
        *(f"params.`{key}`" for key in differing([run.data.params for run in runs])),
    ]
    state = json.dumps(
        {
            "searchFilter": chosen,
            "selectedColumns": columns,
            "columnOrder": ["attributes.`Run Name`", *columns],  # MLflow puts others behind: "Duration"
        }
    )
    tag = f"mlflow.sharedViewState.ttrain-{name}"
    present = mirror.client.get_experiment(experiment_id).tags.get(tag, "{}")
    if json.loads(present).get("state") != state:
        title = f"{name}: which is better, and why"
        view = {"name": title, "createdAt": int(1000 * time.time()), "state": state}
        mirror.client.set_experiment_tag(experiment_id, tag, json.dumps(view))


def deciding(runs: Sequence[Mapping[str, float]]) -> list[str]:
    """The metrics that say which run is better, one for each model.

    A model is judged by its evaluation, in runs without one by its validation loss.
    """
    columns: list[str] = []
    for stage, metric in PRIMARY_METRICS.items():
        loss = f"{stage}/{VALIDATION_LOSS}"
        lacks_evaluation = any(loss in run and metric.of_run not in run for run in runs)
        columns += [metric.of_run] * any(metric.of_run in run for run in runs)
        columns += [loss] * lacks_evaluation
    return columns


def differing(runs: Sequence[Mapping[str, str]]) -> list[str]:
    """The settings that differ between runs, those that shape the models first.

    A run has its default settings as no parameters, so a missing value is a value. Paths, lists
    and long texts are left to the description.
    """
    names = sorted({name for run in runs for name in run}, key=by_weight)
    values = {name: {run.get(name, "") for run in runs} for name in names}
    varied = [name for name in names if len(values[name]) > 1 and all(map(_fits, values[name]))]
    return varied[:MOST_SETTINGS]


def _fits(value: str) -> bool:
    return len(value) <= LONGEST_SETTING and not set(value) & set("[{(/\\")
