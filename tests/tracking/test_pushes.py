"""Pushes of runs to a real MLflow: all of a run, once, in its state, within the home."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT
from support.recorded_homes import BEGAN, Made, alive, falling, make_run, rows_of
from support.tracked_stores import (
    client_of,
    files_of,
    only,
    pushed,
    rows_of_database,
    steps,
    tracked,
)

from ttrain.core.files import write_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED
from ttrain.tracking import pusher
from ttrain.tracking.client import artifacts_of, open_client, own_uri
from ttrain.tracking.mlflow_mirror import Mirror

A, B = "full-20261121-100000-0001a", "full-20261121-110000-0002b"
STAGE_ID = f"{A}/pretrain"
SWEEP = "sweep-20260101-000000-00000"
LOSSES = falling(8, gap=3)
PRETRAIN = Made("pretrain", LOSSES, result={"steps": 8}, texts={"run/log.txt": "a line\n"})
TRAINING = Made("pretrain", outcome="running", key="f" * 64)
PUSH = """
import pathlib
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun
run = TrackedRun("r", "r", "x", 1.0, "FINISHED", params={"a": 1}, files={"a/b.txt": "hello"})
assert Mirror(pathlib.Path("home")).push(run)
"""


def in_progress(home: Path, run: str, *stages: Made) -> None:
    make_run(home, run, stages, outcome="running", process=alive(), seconds=None)


def write_work(home: Path, run: str, losses: list[float | None]) -> Path:
    """The curve in the work directory of a training that A began."""
    work = ArtifactStore(home).work(TRAINING.stage, TRAINING.key)
    curve = work / "output" / "run" / "metrics.jsonl"
    curve.parent.mkdir(parents=True, exist_ok=True)
    write_json(work / TRACKED, {"run": run, "id": STAGE_ID})
    curve.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(losses, BEGAN)))
    return curve


def status(home: Path, identity: str) -> str:
    return str(only(home, identity).info.status)


def test_a_run_is_in_mlflow_with_its_stages_and_their_records(tracked_home: Path) -> None:
    failed = Made("sft", outcome="failed", noted={"error": "out of memory"})
    stages = [PRETRAIN, failed, Made("lora", outcome="pending")]
    metrics = {"eval/bits_per_byte": 2.5, "bad": math.nan}
    make_run(tracked_home, A, stages, metrics=metrics, outcome="failed", note="why")
    pushed(tracked_home)
    run = only(tracked_home, A)
    times = (1000 * BEGAN, 1000 * (BEGAN + 60.5))
    assert (run.info.start_time, run.info.end_time, run.info.status) == (*times, "FAILED")
    assert run.data.metrics["eval/bits_per_byte"] == 2.5
    assert run.data.tags["mlflow.note.content"].startswith("why")
    assert {"settings.yaml", "report.html"} <= files_of(run).keys()
    stage = only(tracked_home, STAGE_ID)
    assert stage.data.tags["mlflow.parentRunId"] == run.info.run_id
    points = client_of(tracked_home).get_metric_history(stage.info.run_id, "loss")
    seconds = [(step, BEGAN + 2 * step) for step in range(1, 9)]
    assert [(point.step, point.timestamp / 1000) for point in points] == seconds
    values = [None if math.isnan(point.value) else point.value for point in points]
    assert values == LOSSES
    files = {"pretrain/manifest.json", "pretrain/run/metrics.jsonl", "pretrain/run/log.txt"}
    assert files <= files_of(stage).keys()
    sft = only(tracked_home, f"{A}/sft")
    assert (sft.info.status, sft.data.tags["ttrain.error"]) == ("FAILED", "out of memory")
    assert tracked(tracked_home, f"{A}/lora") == [], "it never began"
    before = rows_of_database(tracked_home)
    pushed(tracked_home, [A])
    assert rows_of_database(tracked_home) == before, "a second push changes nothing"
    assert pushed(tracked_home) == [], "an unchanged run is skipped"


def test_a_curve_that_was_cut_back_has_each_step_once(tracked_home: Path) -> None:
    in_progress(tracked_home, A, TRAINING)
    curve, mirror = write_work(tracked_home, A, falling(20)), Mirror(tracked_home)
    pusher.push_run(mirror, A)
    assert (status(tracked_home, STAGE_ID), status(tracked_home, A)) == ("RUNNING", "RUNNING")
    with curve.open("a") as file:
        file.write('{"step": 21, "tokens": 1, "ti')
    pusher.push_run(mirror, A)
    stage_id = only(tracked_home, STAGE_ID).info.run_id
    assert steps(tracked_home, stage_id) == list(range(1, 21)), "a half-written line waits"
    write_work(tracked_home, A, falling(12))  # back to the checkpoint
    pusher.push_run(mirror, A)
    write_work(tracked_home, A, falling(2000, 2.0))  # more than MLflow takes at once
    pusher.push_run(mirror, A)
    pusher.push_run(Mirror(tracked_home), A)  # another process, which knows nothing
    for metric in ("loss", "tokens"):
        assert steps(tracked_home, stage_id, metric) == list(range(1, 2001))


def test_a_resumed_stage_is_one_curve_under_the_run_that_began_it(tracked_home: Path) -> None:
    noted = {"tracked": STAGE_ID}
    write_work(tracked_home, A, falling(20))
    interrupted = Made("pretrain", outcome="interrupted", key=TRAINING.key, noted=noted)
    make_run(tracked_home, A, [interrupted], outcome="interrupted")
    pushed(tracked_home)
    assert status(tracked_home, STAGE_ID) == "KILLED"
    write_work(tracked_home, B, falling(30, 2.0))
    done = Made("pretrain", falling(30, 2.0), key=TRAINING.key, noted=noted)
    make_run(tracked_home, B, [done], number=1)
    pushed(tracked_home)
    before = rows_of_database(tracked_home)
    pushed(tracked_home, [A])
    assert rows_of_database(tracked_home) == before
    stage = only(tracked_home, STAGE_ID)
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 31))
    assert (stage.info.status, stage.data.tags["ttrain.run"]) == ("FINISHED", B)
    assert stage.data.tags["mlflow.parentRunId"] == only(tracked_home, B).info.run_id
    assert tracked(tracked_home, f"{B}/pretrain") == []


def test_a_killed_run_is_killed_and_its_published_stage_finished(tracked_home: Path) -> None:
    published = Made("pretrain", LOSSES, noted={"outcome": "running"}, result={"steps": 8})
    open_stage = Made("sft", outcome="running", key="e" * 64)
    in_progress(tracked_home, A, Made("pretrain", outcome="running", key=published.key), open_stage)
    pusher.push_run(Mirror(tracked_home), A)
    assert status(tracked_home, STAGE_ID) == "RUNNING"
    make_run(tracked_home, A, [published, open_stage], outcome="running")  # its process is gone
    pushed(tracked_home)
    assert (status(tracked_home, A), status(tracked_home, f"{A}/sft")) == ("KILLED", "KILLED")
    stage = only(tracked_home, STAGE_ID)
    assert (stage.info.status, stage.data.params["result.steps"]) == ("FINISHED", "8")
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 9))


def test_a_run_that_was_deleted_in_mlflow_stays_deleted(tracked_home: Path) -> None:
    client_of(tracked_home).delete_run(make_run(tracked_home, A, [PRETRAIN], tracked=True))
    make_run(tracked_home, B, [Made("tokenizer")], number=1)
    pushed(tracked_home)
    assert pushed(tracked_home, [A]) == [None] and tracked(tracked_home, A) == []
    assert status(tracked_home, B) == "FINISHED"


def test_a_sweep_is_pushed_with_its_settings_and_trials(tracked_home: Path) -> None:
    setting = {"setting": "baseline", "changes": {}, "seeds": [1], "mean": 1.5, "difference": None}
    setting |= {"verdict": "baseline", "over_seeds": None, "over_records": None}
    record = {"sweep": SWEEP, "experiment": "ttrain", "started": "2026-01-01T00:00:00+00:00"}
    record |= {"seeds": 1, "measure": {"metric": "loss"}, "verdict": "", "changes": []}
    trials = [{"change": 0, "seed": seed, "outcome": "completed"} for seed in (1, 2, 3)]
    record |= {"trials": trials, "judged_trials": 2}  # the third has ended since
    record |= {"settings": [setting], "outcome": "completed", "process": alive()}
    (tracked_home / "sweeps" / SWEEP).mkdir(parents=True)
    write_json(tracked_home / "sweeps" / SWEEP / "sweep.json", record)
    make_run(tracked_home, "full-20260101-000001-aaaaa", [], sweep={"name": SWEEP, "change": 0})
    sweep, trial = pushed(tracked_home)
    mlflow = client_of(tracked_home)
    setting_run = mlflow.get_run(mlflow.get_run(trial).data.tags["mlflow.parentRunId"])
    assert setting_run.data.tags["ttrain.id"] == f"{SWEEP}/0"
    assert setting_run.data.tags["mlflow.parentRunId"] == sweep
    assert steps(tracked_home, setting_run.info.run_id) == [2]
    assert pushed(tracked_home) == []


def test_a_fresh_home_is_made_quietly_and_keeps_everything_under_itself(tmp_path: Path) -> None:
    environment = {"HOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    output = subprocess.check_output(
        [sys.executable, "-c", PUSH], cwd=tmp_path, env=environment, stderr=subprocess.STDOUT
    )
    assert output == b""
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    folder = tmp_path / "home" / "mlflow"
    assert {"mlflow.db", "artifacts"} <= {path.name for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_copied_home_keeps_its_files_in_itself(tracked_home: Path, tmp_path: Path) -> None:
    make_run(tracked_home, A, [PRETRAIN], tracked=True)
    new = shutil.copytree(tracked_home, tmp_path / "home #1 50%" / "home")
    shutil.rmtree(tracked_home / "mlflow" / "artifacts")  # what still named it would be missing
    open_client(own_uri(new), new)
    make_run(new, B, [Made("sft", [2.0])], number=1, tracked=True)
    for run in (only(new, A), only(new, STAGE_ID), only(new, B)):
        assert run.info.artifact_uri.startswith(f"{artifacts_of(new)}/") and files_of(run)
