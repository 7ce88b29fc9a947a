"""Pushes of runs to a real MLflow: all of a run, once, in its state, and again from nothing."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.recorded_homes import BEGAN, TOKENS_PER_STEP, Made, alive, falling, make_run, rows_of
from support.tracked_stores import (
    client_of,
    files_of,
    only,
    pushed,
    rows_of_database,
    steps,
    tracked,
)
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.core.files import write_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED
from ttrain.store.registry import Registry
from ttrain.tracking import pusher, run_summary
from ttrain.tracking.client import database_of
from ttrain.tracking.mlflow_mirror import Mirror

A, B = "full-20261121-100000-0001a", "full-20261121-110000-0002b"
STAGE_ID = f"{A}/pretrain"
SWEEPS_VIEW = "mlflow.sharedViewState.ttrain-sweeps"
SWEEP, TRIAL = "sweep-20260101-000000-00000", "full-20260101-000001-aaaaa"
LOSSES = falling(8, gap=3)
TOKENIZER = Made("tokenizer", result={"vocab_size": 400, "bytes_per_token": 3.5, "unk_rate": 0.0})
SHARD_COUNTS = {"train": {"rows": 80, "tokens": 700, "bytes": 2700}, "heldout": {"rows": 10}}
SHARDS = Made("shards-pretrain", result=SHARD_COUNTS, files={"docs.jsonl": "5" * 64})
PRETRAIN = Made(
    "pretrain",
    LOSSES,
    inputs={"shards": (SHARDS.stage, SHARDS.key, "c1")},
    result={"steps": 8, "optimizer_groups": [{"optimizer": "AdamW", "lr": 0.5}]},
    texts={"run/log.txt": "a line\n"},
)
FAILED = Made("sft", outcome="failed", noted={"error": "out of memory"})
TRAINING = Made("pretrain", outcome="running", key="f" * 64)


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
    stages = [TOKENIZER, SHARDS, PRETRAIN, FAILED, Made("lora", outcome="pending")]
    settings = {"pretrain": {"optim": {"lr": 0.5}}}
    labels: dict[str, Any] = {"tags": {"purpose": "a smaller rate"}, "note": "why"}
    metrics = {"eval/bits_per_byte": 2.5, "bad": math.nan}
    make_run(
        tracked_home, A, stages, settings=settings, metrics=metrics, outcome="failed", **labels
    )
    pushed(tracked_home)
    run, mlflow = only(tracked_home, A), client_of(tracked_home)
    assert (run.info.run_name, run.info.status, run.info.start_time) == (A, "FAILED", 1000 * BEGAN)
    assert run.info.end_time == 1000 * (BEGAN + 60.5)
    assert run.data.params["pretrain.optim.lr"] == "0.5"
    assert run.data.metrics["eval/bits_per_byte"] == 2.5
    assert run.data.tags["purpose"] == "a smaller rate"
    assert run.data.tags["ttrain.outcome"] == "failed"
    assert run.data.tags["mlflow.note.content"].startswith("why")
    assert {"settings.yaml", "report.html"} <= files_of(run).keys()
    by_tokens = mlflow.get_metric_history(run.info.run_id, "Curves/pretrain loss")
    assert [point.step for point in by_tokens] == [TOKENS_PER_STEP * step for step in range(1, 9)]
    stage = only(tracked_home, STAGE_ID)
    assert stage.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert stage.data.tags["ttrain.key"] == PRETRAIN.key
    assert (stage.info.status, stage.data.params["optim.groups.0.lr"]) == ("FINISHED", "0.5")
    points = mlflow.get_metric_history(stage.info.run_id, "loss")
    values = [math.nan if loss is None else loss for loss in LOSSES]
    assert str([(point.step, point.timestamp, point.value) for point in points]) == str(
        [(step, int(1000 * (BEGAN + 2 * step)), value) for step, value in enumerate(values, 1)]
    )
    assert steps(tracked_home, stage.info.run_id, "tokens") == list(range(1, 9))
    names = ("manifest.json", "run/metrics.jsonl", "run/log.txt")
    assert {f"pretrain/{name}" for name in names} <= files_of(stage).keys()
    [data] = [entry.dataset for entry in stage.inputs.dataset_inputs]
    assert (data.name, json.loads(data.profile)) == ("pretrain", {"documents": 80, "bytes": 2700})
    tokenizer = only(tracked_home, f"{A}/tokenizer")
    assert tokenizer.data.metrics == {"tok/bytes_per_token": 3.5, "tok/unk_rate": 0.0}
    assert status(tracked_home, f"{A}/sft") == "FAILED"
    assert only(tracked_home, f"{A}/sft").data.tags["ttrain.error"] == "out of memory"
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
    assert "pretrain/manifest.json" in files_of(stage)


def test_a_run_that_was_deleted_in_mlflow_stays_deleted(tracked_home: Path) -> None:
    client_of(tracked_home).delete_run(make_run(tracked_home, A, [PRETRAIN], tracked=True))
    make_run(tracked_home, B, [TOKENIZER], number=1)
    pushed(tracked_home)
    assert pushed(tracked_home, [A]) == [None] and tracked(tracked_home, A) == []
    assert status(tracked_home, B) == "FINISHED"


def shown(home: Path) -> dict[str, Any]:
    """All that MLflow shows of a home, without the ids and times that are MLflow's own."""
    mlflow, views = client_of(home), dict[str, Any]()
    experiment = mlflow.get_experiment_by_name("ttrain").experiment_id
    runs = mlflow.search_runs([experiment], max_results=1000)
    names = {run.info.run_id: run.data.tags["ttrain.id"] for run in runs}
    for run in runs:
        run_id, info = run.info.run_id, run.info
        histories = {key: mlflow.get_metric_history(run_id, key) for key in run.data.metrics}
        views[names[run_id]] = (
            (info.run_name, info.status, info.start_time, info.end_time),
            run.data.params,
            {key: names.get(value, value) for key, value in run.data.tags.items()},
            {key: str(points).replace(run_id, "") for key, points in histories.items()},
            sorted((one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs),
            sorted(files_of(run)),
        )
    for version in mlflow.search_model_versions():
        place = version.source.split("/", 1)[0]
        details = (version.description, version.tags, names.get(version.run_id), place)
        views[f"{version.name}/{version.version}"] = details
    aliases = {model.name: model.aliases for model in mlflow.search_registered_models()}
    return {**views, "aliases": aliases}


@pytest.fixture(scope="module")
def four_runs(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> Path:
    home = tmp_path_factory.mktemp("several") / "home"
    add_database(home)
    registry, store = Registry(home), ArtifactStore(home)
    for number in range(4):
        run, model = f"full-20261121-10{number:02}00-0001a", Made("sft", falling(4 + number))
        metrics = {"eval/bits_per_byte": 3.0 - number / 10}
        make_run(home, run, [TOKENIZER, model], number=number, metrics=metrics)
        artifact = store.find("sft", model.key)
        if artifact and number % 2 == 0:
            member = registry.register_model("quickstart-sft", artifact, run)
            registry.register_set("quickstart", run, [member], {"sft": model.key}, {})
    registry.promote("quickstart", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_summary, "page_of", lambda home, run: None)  # 2 s of CPU each time
        assert len(pushed(home)) == 4
    return home


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "damaged"])
def test_a_database_that_is_gone_or_damaged_is_made_again_from_the_home(
    four_runs: Path, is_gone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, home = shown(four_runs), tmp_path / "home"
    shutil.copytree(four_runs, home)
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    monkeypatch.setattr(run_summary, "page_of", lambda home, run: None)
    for name in ("quickstart", "quickstart-sft"):
        assert before["aliases"][name] == {"champion": 1, "challenger": 2}
    assert len(before) == 3 * 4 + 4 + 1, "runs with two stages each, versions, aliases"
    if is_gone:
        database_of(home).unlink()
    else:
        database_of(home).write_bytes(bytes(range(256)) * 4000)
    done = CliRunner().invoke(app, ["track", "push", "--json"])
    assert done.exit_code == 0, done.output
    assert shown(home) == before
    assert (champion := Registry(home).champion("quickstart")) and champion.version == "1"
    assert len([*database_of(home).parent.glob("mlflow.db.damaged-*")]) == (0 if is_gone else 1)


def keep_sweep(home: Path, outcome: str, process: Any) -> None:
    """A sweep of one setting with two trials, one of which has a run."""
    setting = {"setting": "baseline", "changes": {}, "seeds": [1], "mean": 1.5, "difference": None}
    setting |= {"verdict": "baseline", "over_seeds": None, "over_records": None}
    record = {
        "sweep": SWEEP,
        "changes": [],
        "experiment": "ttrain",
        "started": "2026-01-01T00:00:00+00:00",
        "seeds": 1,
        "measure": {"metric": "loss"},
        "verdict": "nothing yet",
        "trials": [{"change": 0, "seed": seed, "outcome": "completed"} for seed in (1, 2, 3)],
        "judged_trials": 2,  # the third has ended since
        "settings": [setting],
        "outcome": outcome,
        "process": process,
    }
    (home / "sweeps" / SWEEP).mkdir(parents=True)
    write_json(home / "sweeps" / SWEEP / "sweep.json", record)
    make_run(home, TRIAL, [], sweep={"name": SWEEP, "change": 0})


def test_a_sweep_is_pushed_with_its_settings_and_trials(tracked_home: Path) -> None:
    keep_sweep(tracked_home, "completed", alive())
    for _ in range(2):
        sweep, trial = pushed(tracked_home)
        mlflow = Mirror(tracked_home).client  # of the present file
        setting = mlflow.get_run(mlflow.get_run(trial).data.tags["mlflow.parentRunId"])
        assert setting.data.tags["ttrain.id"] == f"{SWEEP}/0"
        assert setting.data.tags["mlflow.parentRunId"] == sweep
        points = mlflow.get_metric_history(setting.info.run_id, "loss")
        assert [point.step for point in points] == [2]
        view = mlflow.get_experiment_by_name("ttrain").tags[SWEEPS_VIEW]
        assert "metrics.`sweep/difference`" in json.loads(json.loads(view)["state"])["orderByKey"]
        assert pushed(tracked_home) == []
        database_of(tracked_home).unlink()
