"""An experiment as trackers show it: a run with a run below it for each setting, and below these the trials."""

from dataclasses import replace
from datetime import datetime

from ttrain.experiments.records import RUNNING
from ttrain.experiments.verdict import HEADER, Judgement, Verdict
from ttrain.reports.summary import markdown
from ttrain.store.runs import MetricRow
from ttrain.tracking.mlflow_mirror import TrackedRun
from ttrain.tracking.pusher import keep_sweep
from ttrain.tracking.tracked_runs import NOTE, setting_id, status_of


def keep(judgement: Judgement, tracker_experiment: str) -> None:
    """Keep what trackers show of an experiment in the home, for the next push."""
    experiment, rows = judgement.experiment, judgement.verdicts
    ended = sum(trial.outcome != RUNNING for trial in experiment.trials)
    started = datetime.fromisoformat(experiment["started"]).timestamp()
    status = status_of(experiment.outcome)
    table = markdown([row.row for row in rows], HEADER)
    whole = TrackedRun(experiment.name, experiment.name, experiment.name, tracker_experiment, started, status)
    whole.tags = {
        "ttrain.pipeline": "sweep",
        "ttrain.sweep": experiment.name,
        "ttrain.outcome": experiment.outcome,
        NOTE: f"{judgement.sentence}\n\n{table}",
    }
    whole.params = {"metric": experiment.measure.metric, "seeds": experiment["seeds"]}
    for number, (change, row) in enumerate(zip(experiment.changes, rows, strict=True)):
        child = replace(whole, id=setting_id(experiment.name, number), name=change.name, stages=[])
        child.params = dict(change.values)
        child.tags = {"ttrain.sweep": experiment.name, "ttrain.setting": change.name, "ttrain.verdict": row.verdict}
        child.rows = _points(row, experiment.measure.metric, ended, started)
        whole.stages.append(child)
    keep_sweep(experiment.path.parents[1], whole)


def _points(row: Verdict, metric: str, ended: int, started: float) -> list[MetricRow]:
    """The metrics of a setting; the step is the number of trials that had ended, so that the newest count."""
    values = {metric: row.mean, "sweep/seeds": float(len(row.seeds)), "sweep/difference": row.difference}
    for name, interval in {"seeds": row.over_seeds, "records": row.over_records}.items():
        if interval:
            values |= {f"sweep/low_over_{name}": interval[0], f"sweep/high_over_{name}": interval[1]}
    known = {name: value for name, value in values.items() if value is not None}
    # of one time, by whichever process the row is pushed: then MLflow has it once
    return [{"step": ended, "time": started + ended, "metrics": known}]
