"""What Prefect records of a run, when it tries a stage again, and shards made on a Dask cluster."""

import json
import socket
import ssl
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from distributed import LocalCluster
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed
from support.pipeline_home import Cli

from ttrain.config import Runtime
from ttrain.config.loading import load
from ttrain.engine.graph import Planned
from ttrain.errors import StageFailed
from ttrain.flows import prefect_run
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import EVALUATE

STAGES = "tokenizer,shards-pretrain,shards-sft"
SHARDS = ("pipeline", "run", "full", "--only", STAGES, "shards.block_bytes=1024")


def test_a_run_shows_its_stages_with_logs_and_its_results(finished: Cli) -> None:
    run = finished.runs()[-1]
    query = "select id, name, state_name from flow_run order by created desc limit 1"
    [(id_, name, state)] = finished.rows("prefect", query)
    assert (name, state) == (f"tiny-test: {run['run']}", "Completed")
    query = "select name, state_name, tags from task_run where flow_run_id = ?"
    tasks = finished.rows("prefect", query, id_)
    stages = [stage["name"] for stage in run["stages"]]
    assert {task: state for task, state, _ in tasks} == dict.fromkeys(stages, "Completed")
    # For each tag Prefect asks its server for a slot
    assert not any(json.loads(tags) for *_, tags in tasks)
    logged = finished.rows("prefect", "select 1 from log where message like '%step 40/40%'")
    assert logged != []
    [[report]] = finished.rows("prefect", "select data from artifact where key = 'report'")
    assert "byte" in report and f"ttrain report {run['run']}" in report


def test_a_task_waits_longer_before_each_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    killed = StageFailed("its process was killed")
    settings = load(["runtime.retries=3"], environment={}).settings
    fails = Mock(side_effect=killed)
    run: Any = Mock(settings=settings, signum=0, wait=waits.append, run_stage=fails)
    task = prefect_run.stage_task(Planned(EVALUATE, "run", ()), run)
    monkeypatch.setattr(prefect_run, "get_run_logger", Mock())
    for count in (1, 2, 3):
        monkeypatch.setattr(prefect_run, "task_run", SimpleNamespace(run_count=count))
        state = task.fn()
        assert state.is_failed() and state.message == str(killed)
    assert waits == [10.0, 20.0]
    assert task.retries == 3 and task.cache_policy == NO_CACHE
    is_retried = task.retry_condition_fn
    assert is_retried(task, None, Failed(data=killed))
    assert not is_retried(task, None, Failed(data=StageFailed("bad.jsonl:3", "DataError")))
    run.signum = 15
    assert not is_retried(task, None, Failed(data=killed))


def test_nobody_without_the_keys_of_the_cluster_reaches_its_scheduler() -> None:
    """It runs the code of whoever connects, and all accounts of a machine reach 127.0.0.1."""
    runner, _ = prefect_run.task_runner(Runtime(workers=2))
    with LocalCluster(**{**runner.cluster_kwargs, "n_workers": 0}) as cluster:
        address = urlsplit(cluster.scheduler_address)
        assert (address.scheme, address.hostname) == ("tls", "127.0.0.1")
        stranger = ssl.create_default_context()
        stranger.check_hostname = False
        stranger.verify_mode = ssl.CERT_NONE
        place = (address.hostname, address.port or 0)
        with socket.create_connection(place, timeout=10) as connection:
            with pytest.raises(ssl.SSLError, match="certificate required"):
                stranger.wrap_socket(connection).recv(1)


@pytest.mark.soak
def test_dask_makes_the_shards_that_one_process_makes(fresh: Cli, tmp_path: Path) -> None:
    alone = Cli(tmp_path / "alone", fresh.data)
    alone.here(*SHARDS, "--engine", "none")
    output = fresh(*SHARDS, "runtime.sharding=dask", "runtime.workers=2")
    assert [*fresh.outcomes().values()] == ["completed"] * 3, output
    for name in ("shards-pretrain", "shards-sft"):
        made = ArtifactStore(fresh.home).latest(name)
        expected = ArtifactStore(alone.home).latest(name)
        assert (made.key, made.content) == (expected.key, expected.content)
        assert made.result["blocks"] == expected.result["encoded_blocks"] > 5
        assert made.result["encoded_blocks"] == 0, "the stage reads what Dask made"
