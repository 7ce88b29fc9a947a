"""Servers that are dead, hang, fail or lose their answers: nothing is lost, nothing is doubled."""

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
            # its first answers take seconds
            Mirror(tmp_path_factory.mktemp("first")).find("first", "none")
            yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    proxy = Proxy(server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", proxy.url)
    yield proxy
    proxy.mode = "well"
    proxy.close()


def whole_run(home: Path, before: Callable[[int], object] = lambda part: None) -> tuple[str, bool]:
    """Run and push a training in five parts; `before` each the server may change.

    Returns the run's name, and whether its end was pushed.
    """
    before(1)
    changes = {"tracking": {"experiment": home.parent.name}, "notify": {"webhook": "hf_abc"}}
    settings = Settings().replaced(changes).model_dump(mode="json")
    record, store = RunRecord(home, "full", [STAGE], settings), ArtifactStore(home)
    work, identity = store.work(STAGE, KEY), f"{record.run}/{STAGE}"
    output = work / "output"
    for folder in ("run", "model"):
        (output / folder).mkdir(parents=True)
    write_json(work / TRACKED, {"run": record.run, "id": identity})
    lines = [f"{json.dumps(row)}\n" for row in rows_of([5 / step for step in range(1, 61)], BEGAN)]
    record.stage(STAGE, outcome="running", key=KEY, tracked=identity)
    follower = pusher.Pusher(home, record.run)
    follower.start()
    for part, rows in ((2, lines[:30]), (3, lines)):
        before(part)
        (output / "run" / "metrics.jsonl").write_text("".join(rows))
        follower.push()
    before(4)
    (output / "model" / "weights").write_bytes(b"w" * WEIGHTS)
    (output / "model" / "config.json").write_text("{}")
    manifest = {"result": {"steps": 60}, "inputs": {}, "ingredients": {"settings": {}}}
    manifest["provenance"] = {"run": record.run}
    artifact = store.publish(STAGE, KEY, output, manifest)
    record.stage(STAGE, outcome="completed", seconds=1.0, key=KEY)
    member = Registry(home).register_model(f"{home.parent.name}-sft", artifact, record.run)
    assert member.version == "1"
    before(5)
    record.finish("completed", {"eval/bits_per_byte": 1.5})
    return record.run, follower.finish()


def assert_all_is_pushed(home: Path, name: str) -> None:
    run, stage = (only(home, identity, home.parent.name) for identity in (name, f"{name}/{STAGE}"))
    stage_id = stage.info.run_id
    assert (run.info.status, stage.info.status) == ("FINISHED", "FINISHED")
    for metric in ("loss", "tokens"):
        assert steps(home, stage_id, metric) == list(range(1, 61)), "0 lost, 0 doubled"
    assert stage.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert run.data.metrics["eval/bits_per_byte"] == 1.5
    assert run.data.params["notify.webhook"] == "***"
    mlflow, folder = client_of(home), f"{STAGE}/model"
    sizes = {file.path: file.file_size for file in mlflow.list_artifacts(stage_id, folder)}
    assert (sizes[f"{folder}/weights"], sizes[f"{folder}/config.json"]) == (WEIGHTS, 2)
    [version] = mlflow.search_model_versions(f"run_id = '{stage_id}'")
    assert (version.name, str(version.version)) == (f"{home.parent.name}-sft", "1")


@pytest.mark.parametrize(
    ("mode", "parts"), [("dead", (1, 2, 3, 4, 5)), ("dead", (2,)), ("no replies", (3,))]
)
def test_nothing_is_lost_in_an_outage(
    proxy: Proxy,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: str,
    parts: tuple[int, ...],
) -> None:
    def before(part: int) -> None:
        proxy.mode = mode if part in parts else "well"

    home = tmp_path / "home"
    name, is_pushed = whole_run(home, before)
    if 5 in parts:
        assert not is_pushed
        messages = [record.getMessage() for record in caplog.records]
        [warning] = [message for message in messages if "MLflow at" in message]
        assert "track push" in warning and "\n" not in warning and len(warning) < 300
    proxy.mode = "well"
    if parts == (2,):
        assert is_pushed, "an outage that ends before the run needs no further push"
    else:
        pushed(home, [name])
    assert_all_is_pushed(home, name)


def test_an_answer_that_was_lost_doubles_nothing(proxy: Proxy, tmp_path: Path) -> None:
    """Neither the run nor points that are NaN, for which MLflow's key has a column."""
    losses = [math.inf, None] * 3
    run = TrackedRun("lost", "lost", tmp_path.name, BEGAN, params={"lr": 1}, files={"a.txt": "a"})
    run.rows = [
        {"step": step, "time": BEGAN + step, "metrics": {"loss": loss}}
        for step, loss in enumerate(losses)
    ]
    for _ in range(3):  # the run is made, then its parameters, then its points
        proxy.mode = "no replies"
        with pytest.raises(Exception, match="exception"):
            Mirror(tmp_path).push(run)
    proxy.mode = "well"
    bound = Mirror(tmp_path).push(run)
    assert bound and only(tmp_path, "lost", tmp_path.name).info.run_id == bound.run_id
    points = client_of(tmp_path).get_metric_history(bound.run_id, "loss")
    assert sorted(point.step for point in points) == list(range(6))
    assert all(math.isnan(point.value) for point in points)
