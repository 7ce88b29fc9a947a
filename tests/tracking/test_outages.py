"""Servers that are dead, hang, fail or answer into the void: nothing is lost, nothing is doubled, nobody waits."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import tracked_stores
from support.outage_proxy import FOREIGN, Proxy, mlflow_server
from support.tracked_writer import runs_of, steps
from support.waiting import stopwatch, wait_until
from typer.testing import CliRunner

from ttrain import tracking
from ttrain.cli.main import app
from ttrain.tracking import MetricsFollower, MlflowStore, TrackedRun, outbox


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One real server for all tests, which tell their runs by their homes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        patch.setattr("ttrain.tracking.client.PROBE_SECONDS", 0.5)
        patch.setattr("ttrain.tracking.tracker.RETRY_PAUSE_SECONDS", 0.1)
        directory = tmp_path_factory.mktemp("server")
        with mlflow_server(directory) as url:
            patch.setenv("MLFLOW_TRACKING_URI", url)
            started(opened(directory)).store.close()  # its first answers take seconds
            yield url


@pytest.fixture
def proxy(server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """What stands before it, and is the tracker."""
    found = Proxy(server)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.url)
    yield found
    found.close()


@pytest.fixture
def empty_home(tmp_path: Path) -> Path:
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


def opened(home: Path) -> MlflowStore:
    return tracked_stores.opened(home, "outages")


def started(store: MlflowStore, name: str = "stage", **options: Any) -> TrackedRun:
    return store.start_run(name, **{"tags": {"ttrain.run": name}, "params": {"lr": 0.02}, **options})


def rows(first: int, last: int) -> str:
    now = 1.7e9 + time.time() % 1e6
    made = ({"step": s, "tokens": s, "time": now, "metrics": {"loss": 5 / s}} for s in range(first, last + 1))
    return "".join(json.dumps(row) + "\n" for row in made)


def curve_of(store: MlflowStore, name: str = "stage") -> TrackedRun:
    """A run that tells a curve of twenty steps and its end."""
    run, path = started(store, name), store.home / f"{name}.jsonl"
    path.write_text(rows(1, 20))
    MetricsFollower(path, run).stop()
    run.finish("FINISHED")
    return run


CURVE = {"params": 1, "rows": 1, "end": 1}  # what waits of it where nothing could be told


def assert_curve_is_there(store: MlflowStore, run: TrackedRun) -> None:
    (only,) = runs_of(store.client, run.identity)
    assert (only.info.status, only.data.params) == ("FINISHED", {"lr": "0.02"})
    assert steps(store.client, only.info.run_id) == list(range(1, 21))


def also(*values: object) -> Any:
    """Values of a test that take too long for the default run."""
    return pytest.param(*values, marks=pytest.mark.soak)


def whole_life(home: Path, before: Callable[[int], object]) -> tuple[TrackedRun, TrackedRun]:
    """All that a run tells in its life; `before` each part something may happen to the server."""
    store = opened(home)
    before(1)
    parent = started(store, "full", params={"lr": 0.02, "hub.token": "hf_abc"})
    before(2)
    child = started(store, "sft", parent=parent, tags={"ttrain.stage": "sft"})
    child.link_to_parent("sft")
    path = home / "metrics.jsonl"
    follower = MetricsFollower(path, child, seconds=0.02)
    before(3)
    path.write_text(rows(1, 30))
    time.sleep(0.05)
    before(4)
    with path.open("a") as file:
        file.write(rows(31, 60))
    model = home / "store" / "sft" / "k1" / "model"
    model.mkdir(parents=True)
    (model / "weights").write_bytes(b"w" * 100_000)
    (model / "config.json").write_text("{}")
    follower.stop()
    path.unlink()
    before(5)
    child.log_directory(model, "model")
    store.register_model(
        "life-sft", run=child, artifact_path="model", tags={"ttrain.key": parent.identity, "ttrain.content": "c1"}
    )
    child.log_summary({"final/loss": 0.5})
    child.finish("FINISHED")
    before(6)
    parent.log_text("# table", "evaluation.md")
    parent.log_summary({"eval/bits_per_byte": 1.5})
    parent.set_tags({"ttrain.outcome": "completed"})
    parent.finish("FINISHED")
    store.close()
    return parent, child


def assert_all_is_there(url: str, parent: TrackedRun | SimpleNamespace, child: TrackedRun | SimpleNamespace) -> None:
    from mlflow import MlflowClient

    client: Any = MlflowClient(url, url)
    (above,), (below,) = runs_of(client, parent.identity), runs_of(client, child.identity)
    assert (above.info.status, below.info.status) == ("FINISHED", "FINISHED")
    assert steps(client, below.info.run_id) == steps(client, below.info.run_id, "tokens") == list(range(1, 61))
    assert below.data.tags["mlflow.parentRunId"] == above.info.run_id
    assert json.loads(above.data.tags["ttrain.stages"])["sft"] == {"run": below.info.run_id}
    assert above.data.params == {"lr": "0.02", "hub.token": "***"}
    assert (above.data.metrics["eval/bits_per_byte"], below.data.metrics["final/loss"]) == (1.5, 0.5)
    assert above.data.tags["ttrain.outcome"] == "completed"
    assert [file.path for file in client.list_artifacts(above.info.run_id)] == ["evaluation.md"]
    assert {file.path: file.file_size for file in client.list_artifacts(below.info.run_id, "model")} == {
        "model/config.json": 2,
        "model/weights": 100_000,
    }
    versions = client.search_model_versions(f"name = 'life-sft' and tags.`ttrain.key` = '{parent.identity}'")
    assert [version.run_id for version in versions] == [below.info.run_id]


@pytest.mark.parametrize("mode", ["hanging", also("no replies"), also("dead"), also("error")])
def test_what_an_outage_from_the_start_missed_is_delivered_by_sync(
    proxy: Proxy, server: str, empty_home: Path, mode: str
) -> None:
    proxy.mode = mode
    waited = stopwatch()
    parent, child = whole_life(empty_home, lambda part: None)
    assert waited() < 15, "nobody waits for a server that does not answer"
    proxy.mode = "well"
    assert [one.things for one in tracking.sync(empty_home)] == [{}, {}]
    assert_all_is_there(server, parent, child)
    assert not outbox.list_outboxes(empty_home) and tracking.sync(empty_home) == []


@pytest.mark.parametrize(("mode", "status"), [("no page", FOREIGN["no page"]), also("no entry", FOREIGN["no entry"])])
def test_a_server_that_is_no_mlflow_is_no_refusal(proxy: Proxy, empty_home: Path, mode: str, status: int) -> None:
    """What another web server says, or a door before MLflow, drops nothing; `track sync` tells what it said."""
    proxy.mode = mode
    store = opened(empty_home)
    run = curve_of(store)
    assert store.close() == 3
    (left,) = tracking.sync(empty_home)
    assert left.things == CURVE and str(status) in left.why
    proxy.mode = "well"
    assert [one.things for one in tracking.sync(empty_home)] == [{}]
    assert_curve_is_there(store, run)


@pytest.mark.parametrize(("part", "mode"), [(4, "hanging"), also(2, "no replies"), also(3, "error"), also(6, "dead")])
def test_what_an_outage_in_the_middle_missed_is_delivered(
    proxy: Proxy, server: str, empty_home: Path, part: int, mode: str
) -> None:
    def outage(at: int) -> None:
        proxy.mode = mode if at == part else "well" if at == part + 2 else proxy.mode

    parent, child = whole_life(empty_home, outage)
    proxy.mode = "well"
    tracking.sync(empty_home)
    assert_all_is_there(server, parent, child)


def test_a_runs_models_are_registered_from_its_stages_runs_and_uploaded_once(proxy: Proxy, empty_home: Path) -> None:
    proxy.mode = "dead"
    store, files = opened(empty_home), empty_home / "store" / "sft" / "k1"
    files.mkdir(parents=True)
    (files / "weights").write_bytes(b"w")
    parent = started(store, "full")
    child = started(store, "sft", parent=parent)
    tags = {"ttrain.stage": "sft", "ttrain.key": parent.identity, "ttrain.content": "c", "ttrain.loads": "transformers"}
    child.log_directory(files, "sft")
    store.register_model("once-sft", run=child, artifact_path="sft", tags=tags)
    model = {"name": "once-sft", "stage": "sft", "tags": tags, "artifact_path": "sft", "path": str(files)}
    store.register_models(f"set-{parent.identity}", run=parent, run_name="full", models=[model], keys={}, metrics={})
    store.close()
    proxy.mode = "well"
    proxy.requests.clear()
    assert [one.things for one in tracking.sync(empty_home)] == [{}, {}]
    assert len([request for request in proxy.requests if request.startswith("PUT")]) == 1
    (version,) = store.client.search_model_versions(f"name = 'once-sft' and tags.`ttrain.key` = '{parent.identity}'")
    (chosen,) = store.client.search_model_versions(f"name = 'set-{parent.identity}'")
    assert version.run_id == runs_of(store.client, child.identity)[0].info.run_id
    assert chosen.tags["ttrain.member.sft"] == f"once-sft/{version.version}"
    # The set opens as its model, and a server takes such a version from that model's run alone
    assert (chosen.source, chosen.run_id) == (f"models:/once-sft/{version.version}", version.run_id)
    assert chosen.tags["ttrain.run_id"] == runs_of(store.client, parent.identity)[0].info.run_id


def test_a_run_whose_making_was_not_answered_is_there_once(proxy: Proxy, server: str, empty_home: Path) -> None:
    store = opened(empty_home)
    proxy.mode = "hanging"  # what is asked now arrives all the same, when the server wakes up, and after what comes then
    run = started(store)
    assert run.id is None
    run.finish("FINISHED")
    proxy.mode = "well"
    wait_until(lambda: not run.waiting())
    store.close()
    (only,) = runs_of(store.client, run.identity)
    assert (only.info.run_id, only.info.status) == (run.id, "FINISHED")


def test_a_batch_whose_answer_was_lost_is_not_doubled_by_the_steps_made_again(proxy: Proxy, empty_home: Path) -> None:
    """The stage goes back to its checkpoint while the server hangs: the same steps come with other times."""
    store, path = opened(empty_home), empty_home / "metrics.jsonl"
    run = started(store)
    path.write_text(rows(1, 10))
    MetricsFollower(path, run).stop()
    proxy.mode = "hanging"
    path.write_text(rows(1, 20))
    follower = MetricsFollower(path, run, seconds=0.02)
    wait_until(lambda: store.caller.is_silent)
    path.write_text(rows(1, 30))  # again from step 1, say: other times
    proxy.mode = "well"
    follower.stop()
    wait_until(lambda: not run.waiting())
    assert steps(store.client, str(run.id)) == list(range(1, 31))
    store.close()


def _be_killed_before_any_note(home: str) -> None:
    def told(box: outbox.Outbox, entry: Any) -> None:
        box.entries.remove(entry)  # in memory, so that what comes after is told; the journal says nothing

    outbox.Outbox.mark_delivered = told  # type: ignore[method-assign]
    MlflowStore.close = lambda store: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment,method-assign]
    whole_life(Path(home), lambda part: None)


def test_what_arrived_before_a_kill_that_came_before_its_note_is_there_once(server: str, empty_home: Path) -> None:
    victim = multiprocessing.get_context("fork").Process(target=_be_killed_before_any_note, args=(str(empty_home),))
    victim.start()
    victim.join(60)
    assert victim.exitcode == -signal.SIGKILL
    left = [json.loads((folder / "run.json").read_text()) for folder in outbox.list_outboxes(empty_home)]
    assert [one.things["params"] for one in tracking.undelivered_runs(empty_home)] == [1, 1], "all of it is to be told again"
    assert [one.things for one in tracking.sync(empty_home)] == [{}, {}]
    above, below = (SimpleNamespace(identity=one["id"]) for one in sorted(left, key=lambda one: one["name"]))
    assert_all_is_there(server, above, below)


def test_two_pipelines_and_two_syncs_at_once_tell_everything_once(proxy: Proxy, empty_home: Path) -> None:
    proxy.mode = "dead"
    stores = [opened(empty_home), opened(empty_home)]
    runs = [curve_of(store, f"full-{number}") for number, store in enumerate(stores)]
    for store in stores:
        assert store.close() == 3
    proxy.mode = "well"
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(tracking.sync, [empty_home] * 2))
    assert not outbox.list_outboxes(empty_home)
    for run in runs:
        assert_curve_is_there(stores[0], run)


def test_what_is_no_number_is_there_once_also_where_it_was_sent_twice(proxy: Proxy, empty_home: Path) -> None:
    """MLflow's key of a point, on which this rests, has a column for NaN of its own."""
    store = opened(empty_home)
    run = started(store)
    lines = [{"step": step, "time": 1.7e9 + step, "metrics": {"loss": math.inf if step % 2 else None}} for step in (1, 2, 3)]
    proxy.mode = "no replies"
    assert not run.log_metrics(lines)
    proxy.mode = "well"
    wait_until(lambda: run.log_metrics(lines))
    found = store.client.get_metric_history(run.id, "loss")
    assert sorted(point.step for point in found) == [1, 2, 3] and all(math.isnan(point.value) for point in found)
    store.close()


def test_uploads_hold_up_no_metrics_and_an_interrupted_one_goes_on_where_it_was(proxy: Proxy, empty_home: Path) -> None:
    store, files = opened(empty_home), empty_home / "store" / "sft" / "k1"
    files.mkdir(parents=True)
    for number in range(5):
        (files / f"part-{number}").write_bytes(bytes([number]) * 1000)
    run, seen = started(store), list[tuple[int, int]]()
    store.on_upload(lambda done, total: seen.append((done, total)))
    proxy.mode = "no files"
    waited = stopwatch()
    run.log_directory(files, "sft")
    assert run.log_metrics([{"step": 1, "metrics": {"loss": 1.0}}]) and waited() < 5
    run.finish("FINISHED")
    assert store.close() == 1, "the files wait"
    assert tracking.undelivered_runs(empty_home)[0].things == {"directory": 1}
    assert "k1" in tracking.registered_keys(empty_home), "and are not cleaned away"

    real, sent = proxy.forward, list[str]()

    def three_arrive(request: Any, body: bytes) -> tuple[int, bytes, str]:
        if request.command == "PUT":
            sent.append(request.path.rpartition("/")[2])
            if len(sent) > 3:
                return 500, b"{}", "application/json"
        return real(request, body)

    proxy.forward = three_arrive  # type: ignore[method-assign]
    proxy.mode = "well"
    (left,) = tracking.sync(empty_home)
    assert left.things == {"directory": 1} and "500" in left.why
    proxy.forward = real  # type: ignore[method-assign]
    proxy.requests.clear()
    (done,) = tracking.sync(empty_home, on_progress=lambda done, total: seen.append((done, total)))
    assert done.things == {} and done.delivered["directory"] == 1
    uploaded = [request.rpartition("/")[2] for request in proxy.requests if request.startswith("PUT")]
    assert uploaded == ["part-3", "part-4"], "what had arrived is not sent again"
    assert seen[-1] == (2000, 2000)
    sizes = {file.path: file.file_size for file in store.client.list_artifacts(run.id, "sft")}
    assert sizes == {f"sft/part-{number}": 1000 for number in range(5)}


def test_sync_says_what_it_did_and_what_waits(proxy: Proxy, empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TTRAIN_HOME", str(empty_home))
    command = CliRunner().invoke
    proxy.mode = "dead"
    store = opened(empty_home)
    curve_of(store, "full-1")
    store.close()
    (waits,) = json.loads(command(app, ["track", "sync", "--dry-run", "--json"]).stdout)
    assert waits["waiting"] == CURVE and waits["tracker"] == proxy.url
    silent = command(app, ["track", "sync", "full", "--json"])
    assert silent.exit_code == 1 and "refused" in json.loads(silent.stdout)[0]["why"]
    proxy.mode = "well"
    told = command(app, ["track", "sync", "full-1", "--json"])
    assert told.exit_code == 0
    assert json.loads(told.stdout)[0]["told"] == CURVE
    assert "nothing waits" in command(app, ["track", "sync"]).stdout
    unknown = command(app, ["track", "sync", "other"])
    assert unknown.exit_code and "there is no run 'other'" in str(unknown.exception)


def test_a_run_that_a_process_has_is_left_to_it(proxy: Proxy, empty_home: Path) -> None:
    store = opened(empty_home)
    proxy.mode = "dead"
    run = started(store)
    assert store.deliver_orphan(outbox.list_outboxes(empty_home)[0]) is None
    proxy.mode = "well"
    (left,) = tracking.sync(empty_home)
    assert left.things and "a process still has its outbox" in left.why
    wait_until(lambda: not run.waiting())
    store.close()
