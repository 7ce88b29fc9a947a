"""A sweep as MLflow shows it: a run, below it a run for each setting, below these the trials."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ttrain.core.files import JsonDict, JsonObject, read_object
from ttrain.reports.summary import markdown
from ttrain.store.sweeps import Experiment, list_experiments, sweep_file
from ttrain.tracking.mlflow_mirror import TrackedRun
from ttrain.tracking.tracked_runs import NOTE, setting_id, status_of

SWEEP = "ttrain.sweep"  # a tag, as the next one
VERDICT = "ttrain.verdict"
COMPARED = ("sweep/difference", "sweep/over_seeds_low", "sweep/over_seeds_high", "sweep/seeds")
COLUMNS = ("setting", "seeds", "mean", "difference", "verdict")


def tracked_names(home: Path) -> list[str]:
    """The sweeps that are tracked, oldest first."""
    return sorted(record.name for record in list_experiments(home) if record["experiment"])


def tracked_sweep(home: Path, name: str) -> TrackedRun:
    """A sweep with its settings; killed if its process is gone."""
    file = sweep_file(home, name)
    record = Experiment(file.parent, read_object(file))
    status = status_of(record.outcome)
    settings = record["settings"]
    metric = record["measure"]["metric"]
    started = datetime.fromisoformat(record["started"]).timestamp()
    whole = TrackedRun(name, name, record["experiment"], started, status)
    rows = [
        (one["setting"], len(one["seeds"]), one["mean"], one["difference"], one["verdict"])
        for one in settings
    ]
    note = f"{record['verdict']}\n\n{markdown([[*map(str, row)] for row in rows], COLUMNS)}"
    tags = {SWEEP: name, "ttrain.outcome": record.outcome}
    whole.tags = {**tags, "ttrain.pipeline": "sweep", NOTE: note}
    whole.params = {"metric": metric, "seeds": record["seeds"]}
    for number, setting in enumerate(settings):
        child = replace(whole, id=setting_id(name, number), name=setting["setting"], stages=[])
        child.params = dict(setting["changes"])
        child.tags = {
            **tags,
            "ttrain.setting": setting["setting"],
            VERDICT: setting["verdict"],
        }
        # of one time, by whichever process the row is pushed: then MLflow has it once. Not the
        # trials of now: one may have ended since the verdicts.
        ended = record["judged_trials"] or 0
        child.rows = [
            {"step": ended, "time": started + ended, "metrics": _metrics(setting, metric)}
        ]
        whole.stages.append(child)
    return whole


def _metrics(setting: JsonObject, metric: str) -> JsonDict:
    values = {
        metric: setting["mean"],
        "sweep/seeds": len(setting["seeds"]),
        "sweep/difference": setting["difference"],
    }
    for name in ("over_seeds", "over_records"):
        low, high = setting[name] or (None, None)
        values |= {f"sweep/{name}_low": low, f"sweep/{name}_high": high}
    return {name: value for name, value in values.items() if value is not None}
