"""What Prefect records of a run, when it tries a stage again, and that none of it is needed."""

import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.pipeline_home import Cli

from ttrain.config.loading import load
from ttrain.engine.graph import Planned
from ttrain.errors import StageFailed
from ttrain.tasks import EVALUATE


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
    from prefect.cache_policies import NO_CACHE
    from prefect.states import Failed

    from ttrain.flows import prefect_run

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
