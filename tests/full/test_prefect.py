"""Prefect: what it records of a run, retries, shards made on Dask, runs of a served deployment."""

import json
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args, get_origin
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from distributed import LocalCluster
from prefect.cache_policies import NO_CACHE
from prefect.states import Failed
from support.pipeline_home import Cli
from support.served import call, ended, processes_of, run_of, serving, start
from support.waiting import wait_until

from ttrain.config import DATASETS, NAMES_CODE, TRAININGS, Runtime, Settings
from ttrain.config.loading import load, types_by_name
from ttrain.engine.graph import Planned
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import StageFailed, UsageError
from ttrain.flows import deploy, prefect_run
from ttrain.flows.deploy import Schedule
from ttrain.flows.serve import settings_to_run
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import EVALUATE

STAGES = "tokenizer,shards-pretrain,shards-sft"
SHARDS = ("pipeline", "run", "full", "--only", STAGES, "shards.block_bytes=1024")
CODE = (
    *("notify.command=[touch, /tmp/theirs]", "notify.webhook=https://theirs.example/hook"),
    *("notify.webhook_file=/theirs", "notify.on=[kept]", "runtime.loggers=wandb"),
    *("runtime.dask_address=tcp://theirs:8786", "runtime.rendezvous=theirs:1"),
    *("runtime.eval_suite=/theirs.yaml", "evaluate.suites=/theirs.yaml"),
    "shards.decontaminate=/theirs.yaml",
)
HARMLESS = {  # settings that hold a text
    *("name", "tracking.experiment"),
    *(f"data.{name}" for name in DATASETS),
    "reading.text_field",
    # These read JSON and safetensors alone
    *("tokenizer.existing", "pretrain.teacher", *(f"{name}.start_from" for name in TRAININGS)),
    # Of transformers; `fields` takes the architecture's own alone
    *("model.preset", "model.kind", "model.fields"),
    *(f"{name}.mask_intervals" for name in TRAININGS),
    *("dpo.targets", "lora.targets", "evaluate.documents", "evaluate.chats"),
    *("runtime.sample_prompts", "promotion.metric", "nightly.deadline", "nightly.timezone"),
    *(f"runtime.quiet_hours.{name}" for name in ("start", "end", "timezone")),
}


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


def set_state(cli: Cli, id_: str, type_: str, name: str) -> None:
    answer = call(cli.home, f"flow_runs/{id_}/set_state", {"state": {"type": type_, "name": name}})
    assert answer["status"] == "ACCEPT", answer


def test_changes_are_of_one_setting_and_leave_the_others(tmp_path: Path) -> None:
    overrides = [
        "data.sft=[{path: a.jsonl, weight: 3}]",
        "notify.webhook=https://host/token",
        "pretrain.epochs=2",
        "runtime.quiet_hours={start: '23:00'}",
        "sft.optim.betas=[0.8, 0.9]",
    ]
    settings = load(overrides, environment={}).settings
    path = deploy.write(tmp_path, Schedule("nightly", "mine", None, "UTC", settings.model_dump()))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    changed = settings_to_run(tmp_path, "nightly/mine", ["sft.optim.lr=2e-4"])
    assert changed.sft.optim.lr == 2e-4 and changed.sft.optim.betas == (0.8, 0.9)
    assert changed.model_copy(update={"sft": settings.sft}) == settings
    assert settings_to_run(tmp_path, "nightly/mine", ()) == settings
    deploy.write(tmp_path, Schedule("nightly", "old", None, "UTC", {"pretrain": {"bogus": 1}}))
    refused: list[tuple[str, list[str], str]] = [
        ("nightly/mine", ["sft.optim.lrr=1"], r"'sft\.optim\.lr'"),
        ("nightly/other", [], "'nightly/other' .*nightly/mine"),
        ("nightly/old", [], "bogus.*nightly/old|nightly/old.*bogus"),
    ]
    for change in CODE:
        pattern = rf"{change.partition('=')[0]}|notify.*nightly-mine\.json"
        refused.append(("nightly/mine", [change], pattern))
    for name, changes, pattern in refused:
        with pytest.raises(UsageError, match=pattern):
            settings_to_run(tmp_path, name, changes)


def test_every_setting_that_holds_a_text_names_code_or_is_known_to_be_harmless() -> None:
    """A new one is to be judged: can it name code, a command, or a machine that sends code?"""

    def holds_text(kind: Any) -> bool:
        has_text = any(map(holds_text, get_args(kind))) and get_origin(kind) is not Literal
        return kind in (str, Any) or has_text

    texts = {key for key, kind in types_by_name(Settings).items() if holds_text(kind)}
    prefixes = tuple(f"{name}." for name in NAMES_CODE)
    assert {key for key in texts if not f"{key}.".startswith(prefixes)} == HARMLESS
    assert {name.split(".")[0] for name in NAMES_CODE} <= set(Settings.model_fields)


@pytest.mark.long
@pytest.mark.soak
def test_what_is_cancelled_in_the_ui_is_continued_by_a_retry(copy_of: Callable[[], Cli]) -> None:
    cli = copy_of()
    cli("pipeline", "schedule", "full", "evaluate.new_tokens=1")
    settings = ("pretrain.tokens=245760", "pretrain.seed=2")
    with serving(cli) as served:
        served.wait_for("scheduled: full/tiny-test")
        id_ = start(cli, *settings)
        wait_until(cli.checkpoints, 200, lambda: served.said)
        set_state(cli, id_, "CANCELLING", "Cancelling")
        run = ended(cli, id_, served)
        assert run["state"]["name"] == "Cancelled"
        assert not [each for each in processes_of(cli.home) if each.name() == PROCESS_NAME]
        stopped = cli.runs()[0]
        assert stopped["run"] == run["name"] and stopped["outcome"] == "interrupted"
        saved = cli.newest_step()
        # The runner writes the state once more when the process has ended
        wait_until(lambda: "successfully" in run_of(cli, id_)["state"]["message"], 30)
        set_state(cli, id_, "SCHEDULED", "AwaitingRetry")
        run = ended(cli, id_, served, run_count=2)
        assert run["state"]["name"] == "Completed", run["state"]
    result = cli.manifest("pretrain", *settings, "evaluate.new_tokens=1")["result"]
    assert result["resumed_from_step"] == saved > 0 and result["steps"] == 480
    assert "Traceback" not in served.said
