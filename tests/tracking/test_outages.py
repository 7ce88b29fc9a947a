"""Servers that are dead, hang, fail or lose their answers: nothing is lost, nothing is doubled."""

import json
from collections.abc import Callable, Iterator, Sequence
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
from ttrain.tracking.mlflow_mirror import Mirror

STAGE, KEY = "sft", "a" * 64
WEIGHTS = b"w" * 100_000


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with (
        pytest.MonkeyPatch.context() as patch,
        mlflow_server(tmp_path_factory.mktemp("server")) as url,
    ):
        proxy = Proxy(url)
        patch.setenv("MLFLOW_TRACKING_URI", proxy.url)
        Mirror(tmp_path_factory.mktemp("first")).find("first", "none")  # its first answer is slow
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "4")
        patch.setattr(pusher, "INTERVAL_SECONDS", 0.02)
        patch.setattr(pusher, "RETRY_SECONDS", 0.1)
        patch.setattr(pusher, "SILENT_SECONDS", 3.0)
        yield proxy
        proxy.close()


def run_and_push(home: Path, before: Callable[[int], object]) -> tuple[str, bool]:
    """Run a training in five parts; returns its name, and whether its end was pushed."""
    before(1)
    changes = {"tracking": {"experiment": home.parent.name}, "notify": {"webhook": "hf_abc"}}
    settings = Settings().replaced(changes).model_dump(mode="json")
    record, store = RunRecord(home, "full", [STAGE], settings), ArtifactStore(home)
    work, identity = store.work(STAGE, KEY), f"{record.run}/{STAGE}"
    output = work / "output"
    for folder in ("run", "model"):
        (output / folder).mkdir(parents=True)
    write_json(work / TRACKED, {"run": record.run, "id": identity})
    losses = [None if step % 7 == 0 else 5 / step for step in range(1, 61)]
    lines = [f"{json.dumps(row)}\n" for row in rows_of(losses, BEGAN)]
    record.stage(STAGE, outcome="running", key=KEY, tracked=identity)
    follower = pusher.Pusher(home, record.run)
    follower.start()
    for part, rows in ((2, lines[:30]), (3, lines)):
        before(part)
        (output / "run" / "metrics.jsonl").write_text("".join(rows))
        follower.push()
    before(4)
    (output / "model" / "weights").write_bytes(WEIGHTS)
    manifest = {"result": {}, "inputs": {}, "ingredients": {}, "provenance": {"run": record.run}}
    artifact = store.publish(STAGE, KEY, output, manifest)
    record.stage(STAGE, outcome="completed", seconds=1.0, key=KEY)
    Registry(home).register_model(f"{home.parent.name}-sft", artifact, record.run)
    before(5)
    record.finish("completed", {"eval/bits_per_byte": 1.5})
    return record.run, follower.finish()


@pytest.mark.parametrize(
    ("mode", "parts"), [("dead", (1, 2, 3, 4, 5)), ("dead", (2,)), ("no replies", (1, 3))]
)
def test_nothing_is_lost_and_nothing_doubled_in_an_outage(
    proxy: Proxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: str, parts: Sequence[int]
) -> None:
    def before(part: int) -> None:
        proxy.mode = mode if part in parts else "well"

    home, experiment = tmp_path / "home", tmp_path.name
    name, is_pushed = run_and_push(home, before)
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
    run, stage = (only(home, identity, experiment) for identity in (name, f"{name}/{STAGE}"))
    stage_id, mlflow = stage.info.run_id, client_of(home)
    assert (run.info.status, stage.info.status) == ("FINISHED", "FINISHED")
    for metric in ("loss", "tokens"):
        assert steps(home, stage_id, metric) == list(range(1, 61)), "0 lost, 0 doubled"
    assert stage.data.tags["mlflow.parentRunId"] == run.info.run_id
    assert run.data.metrics["eval/bits_per_byte"] == 1.5
    assert run.data.params["notify.webhook"] == "***"
    [weights] = mlflow.list_artifacts(stage_id, f"{STAGE}/model")
    assert weights.file_size == len(WEIGHTS)
    [version] = mlflow.search_model_versions(f"run_id = '{stage_id}'")
    assert (version.name, str(version.version)) == (f"{experiment}-sft", "1")
