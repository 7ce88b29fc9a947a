"""Servers that are dead, hang, fail or lose their answers: nothing is lost, nothing is doubled, nobody waits."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.outage_proxy import Proxy, mlflow_server
from support.recorded_homes import BEGAN, rows_of
from support.tracked_stores import client_of, only, pushed, steps

from ttrain.config import Settings
from ttrain.core.files import write_json
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import TRACKED
from ttrain.store.registry import Registry
from ttrain.store.runs import RunRecord
from ttrain.tracking import pusher
from ttrain.tracking.mlflow_mirror import Mirror, TrackedRun

STAGE, KEY = "sft", "a" * 64
WEIGHTS = 100_000  # bytes


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "4")
        patch.setattr(pusher, "INTERVAL_SECONDS", 0.02)
        patch.setattr(pusher, "RETRY_SECONDS", 0.1)
        patch.setattr(pusher, "SILENT_SECONDS", 3.0)
        with mlflow_server(tmp_path_factory.mktemp("server")) as url:
            patch.setenv("MLFLOW_TRACKING_URI", url)
            Mirror(tmp_path_factory.mktemp("first")).find(
                "first", "none"
            )  # its first answers take seconds
            yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    between = Proxy(server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", between.url)
    yield between
    between.mode = "well"
    between.close()


def whole_run(home: Path, before: Callable[[int], object] = lambda part: None) -> tuple[str, bool]:
    """A run that trains a model and is pushed meanwhile; `before` each part something may happen to the server. Returns its
    name, and whether the end was pushed."""
    before(1)
    settings = Settings().replaced(
        {"tracking": {"experiment": home.parent.name}, "notify": {"webhook": "hf_abc"}}
    )
    record, store = (
        RunRecord(home, "full", [STAGE], settings.model_dump(mode="json")),
        ArtifactStore(home),
    )
    work, identity = store.work(STAGE, KEY), f"{record.run}/{STAGE}"
    curve, model = work / "output" / "run" / "metrics.jsonl", work / "output" / "model"
    curve.parent.mkdir(parents=True)
    model.mkdir()
    write_json(work / TRACKED, {"run": record.run, "id": identity})
    lines = [f"{json.dumps(row)}\n" for row in rows_of([5 / step for step in range(1, 61)], BEGAN)]
    record.stage(STAGE, outcome="running", key=KEY, tracked=identity)
    follower = pusher.Pusher(home, record.run)
    follower.start()
    before(2)
    curve.write_text("".join(lines[:30]))
    follower.push()  # a push
    before(3)
    curve.write_text("".join(lines))
    follower.push()
    before(4)
    (model / "weights").write_bytes(b"w" * WEIGHTS)
    (model / "config.json").write_text("{}")
    manifest = {
        "result": {"steps": 60},
        "inputs": {},
        "ingredients": {"settings": {}},
        "provenance": {"run": record.run},
    }
    artifact = store.publish(STAGE, KEY, work / "output", manifest)
    record.stage(STAGE, outcome="completed", seconds=1.0, key=KEY)
    member = Registry(home).register_model(f"{home.parent.name}-sft", artifact, record.run)
    assert member.version == "1"
    before(5)
    record.finish("completed", {"eval/bits_per_byte": 1.5})
    return record.run, follower.finish()


def assert_all_is_there(home: Path, name: str) -> None:
    run, stage = (only(home, identity, home.parent.name) for identity in (name, f"{name}/{STAGE}"))
    assert (run.info.status, stage.info.status) == ("FINISHED", "FINISHED")
    for metric in ("loss", "tokens"):
        assert steps(home, stage.info.run_id, metric) == list(range(1, 61)), "0 lost, 0 doubled"
    assert stage.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert (run.data.metrics["eval/bits_per_byte"], run.data.params["notify.webhook"]) == (
        1.5,
        "***",
    )
    mlflow = client_of(home)
    sizes = {
        file.path: file.file_size
        for file in mlflow.list_artifacts(stage.info.run_id, f"{STAGE}/model")
    }
    assert (sizes[f"{STAGE}/model/weights"], sizes[f"{STAGE}/model/config.json"]) == (WEIGHTS, 2)
    [version] = mlflow.search_model_versions(f"run_id = '{stage.info.run_id}'")
    assert (version.name, str(version.version)) == (f"{home.parent.name}-sft", "1")


def test_what_an_outage_from_the_start_missed_is_there_after_a_push(
    proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.mode = "dead"
    name, is_there = whole_run(tmp_path / "home")
    assert not is_there
    [warning] = [
        record.getMessage() for record in caplog.records if "MLflow at" in record.getMessage()
    ]
    assert "`ttrain track push`" in warning and "\n" not in warning and len(warning) < 300
    proxy.mode = "well"
    pushed(tmp_path / "home")
    assert_all_is_there(tmp_path / "home", name)


@pytest.mark.parametrize("mode", ["no replies", pytest.param("hanging", marks=pytest.mark.soak)])
def test_what_an_outage_in_the_middle_missed_is_there_after_a_push(
    proxy: Proxy, tmp_path: Path, mode: str
) -> None:
    name, _ = whole_run(
        tmp_path / "home", lambda part: setattr(proxy, "mode", mode if part == 3 else "well")
    )
    pushed(tmp_path / "home", [name])
    assert_all_is_there(tmp_path / "home", name)


def test_an_outage_that_ends_before_the_run_needs_no_further_push(
    proxy: Proxy, tmp_path: Path
) -> None:
    name, is_there = whole_run(
        tmp_path / "home", lambda part: setattr(proxy, "mode", "dead" if part == 2 else "well")
    )
    assert is_there
    assert_all_is_there(tmp_path / "home", name)


def test_an_answer_that_was_lost_doubles_nothing(proxy: Proxy, tmp_path: Path) -> None:
    """Neither the run, nor points that are no number: MLflow's key of a point has a column for NaN."""
    losses = [math.inf if step % 2 else None for step in range(6)]
    rows = [
        {"step": step, "time": BEGAN + step, "metrics": {"loss": loss}}
        for step, loss in enumerate(losses)
    ]
    run = TrackedRun(
        "lost", "lost", tmp_path.name, BEGAN, rows=rows, params={"lr": 1}, files={"a.txt": "a"}
    )
    for _ in range(3):  # the run is made, then its parameters, then its points
        proxy.mode = "no replies"
        with pytest.raises(Exception, match="failed with exception"):
            Mirror(tmp_path).push(run)
    proxy.mode = "well"
    bound = Mirror(tmp_path).push(run)
    assert bound
    assert only(tmp_path, "lost", tmp_path.name).info.run_id == bound.run_id
    points = client_of(tmp_path).get_metric_history(bound.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(6)) and all(
        math.isnan(point.value) for point in points
    )
