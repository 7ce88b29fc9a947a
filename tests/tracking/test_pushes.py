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
LOSSES = falling(8, gap=3)
TOKENIZER = Made("tokenizer", result={"vocab_size": 400, "bytes_per_token": 3.5, "unk_rate": 0.0})
SHARDS = Made(
    "shards-pretrain",
    result={
        "train": {"rows": 80, "tokens": 700, "bytes": 2700},
        "heldout": {"rows": 10, "tokens": 100, "bytes": 300},
    },
    files={"docs.jsonl": "5" * 64},
    noted={"metric": "80 rows"},
)
PRETRAIN = Made(
    "pretrain",
    LOSSES,
    inputs={"shards": (SHARDS.stage, SHARDS.key, "c1")},
    result={"steps": 8, "optimizer_groups": [{"optimizer": "AdamW", "lr": 0.5}]},
    texts={"run/log.txt": "a line\n"},
)
FAILED = Made("sft", outcome="failed", noted={"error": "out of memory"})


def in_progress(home: Path, run: str, *stages: Made, number: int = 0) -> None:
    make_run(home, run, stages, number=number, outcome="running", process=alive(), seconds=None)


def work_of(home: Path, stage: Made, run: str, identity: str, losses: list[float | None]) -> Path:
    work = ArtifactStore(home).work(stage.stage, stage.key)
    curve = work / "output" / "run" / "metrics.jsonl"
    curve.parent.mkdir(parents=True, exist_ok=True)
    write_json(work / TRACKED, {"run": run, "id": identity})
    curve.write_text("".join(f"{json.dumps(row)}\n" for row in rows_of(losses, BEGAN)))
    return curve


SETTINGS = {"pretrain": {"optim": {"lr": 0.5}}}


def test_a_run_is_in_mlflow_with_its_stages_and_all_that_they_left(tracked_home: Path) -> None:
    stages = [TOKENIZER, SHARDS, PRETRAIN, FAILED, Made("lora", outcome="pending")]
    noted: dict[str, Any] = {
        "tags": {"purpose": "a smaller rate"},
        "note": "why",
        "outcome": "failed",
    }
    make_run(
        tracked_home, A, stages, settings=SETTINGS, metrics={"eval/bits_per_byte": 2.5}, **noted
    )
    pushed(tracked_home)
    run, stage, mlflow = (
        only(tracked_home, A),
        only(tracked_home, f"{A}/pretrain"),
        client_of(tracked_home),
    )
    assert (run.info.run_name, run.info.status, run.info.start_time) == (A, "FAILED", 1000 * BEGAN)
    assert run.info.end_time == 1000 * (BEGAN + 60.5)
    assert (
        run.data.params["pretrain.optim.lr"] == "0.5"
        and run.data.metrics["eval/bits_per_byte"] == 2.5
    )
    assert (
        run.data.tags["purpose"] == "a smaller rate" and run.data.tags["ttrain.outcome"] == "failed"
    )
    assert run.data.tags["mlflow.note.content"].startswith("why")
    assert {"settings.yaml", "report.html"} <= files_of(run).keys()
    by_tokens = mlflow.get_metric_history(run.info.run_id, "Curves/pretrain loss")
    assert [point.step for point in by_tokens] == [TOKENS_PER_STEP * step for step in range(1, 9)]
    assert (
        stage.data.tags["mlflow.parentRunId"] == run.info.run_id
        and stage.data.tags["ttrain.key"] == PRETRAIN.key
    )
    assert (stage.info.status, stage.data.params["optim.groups.0.lr"]) == ("FINISHED", "0.5")
    points = mlflow.get_metric_history(stage.info.run_id, "loss")
    assert [(point.step, point.timestamp) for point in points] == [
        (n, 1000 * (BEGAN + 2 * n)) for n in range(1, 9)
    ]
    assert str([point.value for point in points]) == str(
        [math.nan if loss is None else loss for loss in LOSSES]
    )
    assert steps(tracked_home, stage.info.run_id, "tokens") == list(range(1, 9))
    assert {
        "pretrain/manifest.json",
        "pretrain/run/metrics.jsonl",
        "pretrain/run/log.txt",
    } <= files_of(stage).keys()
    inputs = [(one.dataset.name, one.dataset.profile) for one in stage.inputs.dataset_inputs]
    assert inputs == [("pretrain", '{"documents": 80, "bytes": 2700}')]
    assert only(tracked_home, f"{A}/tokenizer").data.metrics == {
        "tok/bytes_per_token": 3.5,
        "tok/unk_rate": 0.0,
    }
    failed = only(tracked_home, f"{A}/sft")
    assert (failed.info.status, failed.data.tags["ttrain.error"]) == ("FAILED", "out of memory")
    assert tracked(tracked_home, f"{A}/lora") == [], "it never began"


def test_a_second_push_changes_nothing(tracked_home: Path) -> None:
    make_run(
        tracked_home,
        A,
        [TOKENIZER, SHARDS, PRETRAIN, FAILED],
        metrics={"eval/bits_per_byte": 2.5, "bad": math.nan},
    )
    pushed(tracked_home)
    before = rows_of_database(tracked_home)
    pushed(tracked_home, [A])
    assert rows_of_database(tracked_home) == before
    assert pushed(tracked_home) == [], "what has not changed is not looked at"


def test_a_stage_is_pushed_while_it_trains_and_a_curve_that_was_cut_back_has_each_step_once(
    tracked_home: Path,
) -> None:
    training = Made("pretrain", outcome="running", key="f" * 64)
    curve = work_of(tracked_home, training, A, f"{A}/pretrain", falling(20))
    in_progress(tracked_home, A, training)
    mirror = Mirror(tracked_home)
    pusher.push_run(mirror, A)
    stage = only(tracked_home, f"{A}/pretrain")
    assert (stage.info.status, only(tracked_home, A).info.status) == ("RUNNING", "RUNNING")
    with curve.open("a") as file:
        file.write('{"step": 21, "tokens": 1, "ti')
    pusher.push_run(mirror, A)
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 21)), (
        "a line that is half written waits"
    )
    work_of(
        tracked_home, training, A, f"{A}/pretrain", falling(12)
    )  # back to the checkpoint, with other lines
    pusher.push_run(mirror, A)
    work_of(tracked_home, training, A, f"{A}/pretrain", falling(2000, 2.0))
    pusher.push_run(mirror, A)
    pusher.push_run(Mirror(tracked_home), A)  # another process, which knows nothing
    for metric in ("loss", "tokens"):
        assert steps(tracked_home, stage.info.run_id, metric) == list(range(1, 2001)), (
            "more than MLflow takes at once"
        )


def test_a_resumed_stage_is_one_curve_under_the_run_that_began_it(tracked_home: Path) -> None:
    training = Made(
        "pretrain", outcome="interrupted", key="f" * 64, noted={"tracked": f"{A}/pretrain"}
    )
    work_of(tracked_home, training, A, f"{A}/pretrain", falling(20))
    make_run(tracked_home, A, [training], outcome="interrupted")
    pushed(tracked_home)
    assert only(tracked_home, f"{A}/pretrain").info.status == "KILLED"
    work_of(tracked_home, training, B, f"{A}/pretrain", falling(30, 2.0))
    done = Made("pretrain", falling(30, 2.0), key="f" * 64, noted={"tracked": f"{A}/pretrain"})
    make_run(tracked_home, B, [done], number=1)
    pushed(tracked_home)
    before = rows_of_database(tracked_home)
    pushed(tracked_home, [A])
    assert rows_of_database(tracked_home) == before
    stage = only(tracked_home, f"{A}/pretrain")
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 31))
    assert (stage.info.status, stage.data.tags["ttrain.run"]) == ("FINISHED", B)
    assert stage.data.tags["mlflow.parentRunId"] == only(tracked_home, B).info.run_id
    assert tracked(tracked_home, f"{B}/pretrain") == []


def test_a_killed_run_is_killed_after_the_next_push_and_a_stage_that_it_published_is_finished(
    tracked_home: Path,
) -> None:
    published = Made("pretrain", LOSSES, noted={"outcome": "running"}, result={"steps": 8})
    open_stage = Made("sft", outcome="running", key="e" * 64)
    in_progress(tracked_home, A, Made("pretrain", outcome="running", key=published.key), open_stage)
    shutil.rmtree(tracked_home / "store", ignore_errors=True)
    pusher.push_run(Mirror(tracked_home), A)
    assert only(tracked_home, f"{A}/pretrain").info.status == "RUNNING"
    make_run(tracked_home, A, [published, open_stage], outcome="running")  # its process is gone
    pushed(tracked_home)
    stage = only(tracked_home, f"{A}/pretrain")
    assert (only(tracked_home, A).info.status, only(tracked_home, f"{A}/sft").info.status) == (
        "KILLED",
        "KILLED",
    )
    assert (stage.info.status, stage.data.params["result.steps"]) == ("FINISHED", "8")
    assert steps(tracked_home, stage.info.run_id) == list(range(1, 9))
    assert "pretrain/manifest.json" in files_of(stage)


def test_a_run_that_was_deleted_in_mlflow_stays_deleted_and_holds_up_no_other(
    tracked_home: Path,
) -> None:
    [first] = (make_run(tracked_home, A, [PRETRAIN], tracked=True),)
    client_of(tracked_home).delete_run(first)
    make_run(tracked_home, B, [TOKENIZER], number=1)
    assert (
        pushed(tracked_home) == [None, only(tracked_home, B).info.run_id]
        or pushed(tracked_home) == []
    )
    assert pushed(tracked_home, [A]) == [None] and tracked(tracked_home, A) == []
    assert only(tracked_home, B).info.status == "FINISHED"


def shown(home: Path) -> dict[str, Any]:
    """All that MLflow shows of a home, without the ids and times that are MLflow's own."""
    mlflow, runs = client_of(home), dict[str, Any]()
    experiment = mlflow.get_experiment_by_name("ttrain").experiment_id
    found = mlflow.search_runs([experiment], max_results=1000)
    names = {run.info.run_id: run.data.tags["ttrain.id"] for run in found}
    for run in found:
        tags = {key: names.get(value, value) for key, value in run.data.tags.items()}
        curves = {
            key: str(mlflow.get_metric_history(run.info.run_id, key)) for key in run.data.metrics
        }
        curves = {key: text.replace(run.info.run_id, "") for key, text in curves.items()}
        inputs = sorted((one.dataset.name, one.dataset.digest) for one in run.inputs.dataset_inputs)
        info = (run.info.run_name, run.info.status, run.info.start_time, run.info.end_time)
        runs[names[run.info.run_id]] = (
            info,
            run.data.params,
            tags,
            curves,
            inputs,
            sorted(files_of(run)),
        )
    versions = {
        (one.name, one.version): (
            one.description,
            one.tags,
            names.get(one.run_id),
            one.source.split("/", 1)[0],
        )
        for one in mlflow.search_model_versions()
    }
    aliases = {one.name: one.aliases for one in mlflow.search_registered_models()}
    return {"runs": runs, "versions": versions, "aliases": aliases}


@pytest.fixture(scope="module")
def several(
    tmp_path_factory: pytest.TempPathFactory, add_database: Callable[[Path], None]
) -> tuple[Path, dict[str, Any]]:
    home = tmp_path_factory.mktemp("several") / "home"
    add_database(home)
    registry, store = Registry(home), ArtifactStore(home)
    for number in range(4):
        run, model = f"full-20261121-10{number:02}00-0001a", Made("sft", falling(4 + number))
        make_run(
            home,
            run,
            [TOKENIZER, model],
            number=number,
            metrics={"eval/bits_per_byte": 3.0 - number / 10},
        )
        if number % 2 == 0:
            artifact = store.find("sft", model.key)
            assert artifact
            member = registry.register_model("quickstart-sft", artifact, run)
            registry.register_set(
                "quickstart", run, [member], {"sft": model.key}, {"bits_per_byte": 3.0}
            )
    registry.promote("quickstart", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_summary, "page_of", lambda home, run: None)  # 2 s of CPU each time
        assert len(pushed(home)) == 4
    return home, shown(home)


@pytest.mark.parametrize("is_gone", [True, False], ids=["gone", "damaged"])
def test_a_database_that_is_gone_or_damaged_is_made_again_from_the_home(
    several: tuple[Path, dict[str, Any]],
    is_gone: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(several[0], home := tmp_path / "home")
    monkeypatch.setenv("TTRAIN_HOME", str(home))
    monkeypatch.setattr(run_summary, "page_of", lambda home, run: None)
    before = several[1]
    assert (
        before["aliases"]["quickstart"]
        == before["aliases"]["quickstart-sft"]
        == {"champion": 1, "challenger": 2}
    )
    assert len(before["runs"]) == 3 * 4 and len(before["versions"]) == 4
    if is_gone:
        database_of(home).unlink()
    else:
        database_of(home).write_bytes(bytes(range(256)) * 4000)
    done = CliRunner().invoke(app, ["track", "push", "--json"])
    assert done.exit_code == 0, done.output
    assert shown(home) == before
    assert (champion := Registry(home).champion("quickstart")) and champion.version == "1"
    assert len([*database_of(home).parent.glob("mlflow.db.damaged-*")]) == (0 if is_gone else 1)


def test_track_push_says_what_it_did(tracked_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(tracked_home))
    command = CliRunner().invoke
    make_run(tracked_home, A, [TOKENIZER])
    assert "1 run" in command(app, ["track", "push"]).stdout
    assert "date" in command(app, ["track", "push"]).stdout
    [again] = json.loads(command(app, ["track", "push", A, "--json"]).stdout)
    assert again == {
        "run": A,
        "run_id": only(tracked_home, A).info.run_id,
        "pushed": True,
        "why": "",
    }
    unknown = command(app, ["track", "push", "other"])
    assert unknown.exit_code and "'other'" in str(unknown.exception)


SWEEPS_VIEW = "mlflow.sharedViewState.ttrain-sweeps"
SWEEP, TRIAL = "sweep-20260101-000000-00000", "full-20260101-000001-aaaaa"


def keep(home: Path, outcome: str, process: Any) -> None:
    setting = {
        "setting": "baseline",
        "changes": {},
        "seeds": [1],
        "mean": 1.5,
        "difference": None,
        "verdict": "baseline",
    }
    facts = {
        "sweep": SWEEP,
        "changes": [],
        "experiment": "ttrain",
        "started": "2026-01-01T00:00:00+00:00",
        "seeds": 1,
    }
    trials = [{"change": 0, "seed": seed, "outcome": "completed"} for seed in (1, 2, 3)]
    found = {"measure": {"metric": "loss"}, "verdict": "nothing yet", "trials": trials}
    found |= {"judged_trials": 2}  # the third has ended since
    settings = [{**setting, "over_seeds": None, "over_records": None}]
    record = {**facts, **found, "settings": settings, "outcome": outcome, "process": process}
    (home / "sweeps" / SWEEP).mkdir(parents=True)
    write_json(home / "sweeps" / SWEEP / "sweep.json", record)
    make_run(home, TRIAL, [], sweep={"name": SWEEP, "change": 0})


def test_a_sweep_is_there_again_with_its_settings_and_their_trials_below_it(
    tracked_home: Path,
) -> None:
    keep(tracked_home, "completed", alive())
    for _ in range(2):
        parent, child = pushed(tracked_home)
        client_now = Mirror(tracked_home).client  # of the file that is there now
        setting = client_now.get_run(client_now.get_run(child).data.tags["mlflow.parentRunId"])
        assert (
            setting.data.tags["ttrain.id"] == f"{SWEEP}/0"
            and setting.data.tags["mlflow.parentRunId"] == parent
        )
        assert [
            point.step for point in client_now.get_metric_history(setting.info.run_id, "loss")
        ] == [2]
        view = client_now.get_experiment_by_name("ttrain").tags[SWEEPS_VIEW]
        assert "metrics.`sweep/difference`" in json.loads(json.loads(view)["state"])["orderByKey"]
        assert pushed(tracked_home) == []
        database_of(tracked_home).unlink()


def test_a_sweep_whose_process_is_gone_is_killed(tracked_home: Path) -> None:
    keep(tracked_home, "running", {**alive(), "started": 0})
    pushed(tracked_home)
    assert only(tracked_home, SWEEP).info.status == "KILLED"
    assert pushed(tracked_home) == []
