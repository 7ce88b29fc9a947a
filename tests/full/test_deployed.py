"""Runs of a served deployment: the form of their settings, changes, cancelling, a retry, a kill."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import stat
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_origin

import pytest
from support.deployments import ended, run_of, start
from support.pipeline_home import Cli
from support.served import Served, call, processes_of, serving
from support.waiting import wait_until

from ttrain.config import DATASETS, NAMES_CODE, TRAININGS, Settings
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.flows import flow_runs, servers
from ttrain.flows.deploy import Schedule

LONG = "pretrain.tokens=245760"


def set_state(cli: Cli, id_: str, type_: str, name: str) -> None:
    """As the UI does it."""
    answer = call(cli.home, f"flow_runs/{id_}/set_state", {"state": {"type": type_, "name": name}})
    assert answer["status"] == "ACCEPT", answer


def tasks_of(cli: Cli, id_: str, attempt: int) -> dict[str, str]:
    """State by stage, of one try of a flow run."""
    found = call(cli.home, "task_runs/filter", {"flow_runs": {"id": {"any_": [id_]}}})
    return {task["name"]: task["state"]["name"] for task in found if task["flow_run_run_count"] == attempt}


@pytest.fixture(scope="module")
def deployed(finished: Cli, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cli, Served]]:
    """A home in which the pipeline ran once, and its deployment, served for all tests: each pretrains with a seed of its
    own, and the last one kills what serves."""
    home = shutil.copytree(finished.home, tmp_path_factory.mktemp("deployed") / "home")
    cli = Cli(home, finished.data)
    cli("pipeline", "schedule", "full", "evaluate.new_tokens=1")
    with serving(cli) as served:
        served.wait_for("scheduled: full/tiny-test")
        yield cli, served


def test_the_form_of_the_settings_is_typed_and_refuses_what_does_not_fit() -> None:
    from prefect.utilities.schema_tools import validate

    from ttrain.flows import deployed

    for flow in (deployed.full, deployed.nightly):
        schema = flow.parameters.model_dump()
        sections = schema["definitions"]
        assert set(schema["properties"]) == {"settings", "changes"} and not schema.get("required")
        assert set(sections["Settings"]["properties"]) == set(Settings.model_fields)
        optimizer = sections["Optim"]["properties"]
        assert optimizer["lr"]["type"] == "number" and {"muon", "adamw"} < set(optimizer["kind"]["enum"])
        described = sections["Runtime"]["properties"]["retries"]["description"]
        assert "how often" in described
        assert not validate({"settings": Settings().model_dump(mode="json")}, schema)
        assert not validate({"settings": {"sft": {"epochs": 2}}, "changes": ["sft.epochs=3"]}, schema)
        for wrong in ({"sft": {"optim": {"lr": "fast"}}}, {"sft": {"optim": {"lr": -1}}}, {"srt": {}}):
            assert validate({"settings": wrong}, schema), wrong


def test_changes_are_of_one_setting_and_leave_the_others() -> None:
    from ttrain.config.loading import load
    from ttrain.errors import UsageError
    from ttrain.flows.deployed import settings_with_changes

    given = ["data.sft=[{path: a.jsonl, weight: 3}]", "notify.webhook=https://host/token", "pretrain.epochs=2"]
    settings = load([*given, "runtime.night={start: '23:00'}", "sft.optim.betas=[0.8, 0.9]"], environment={}).settings
    changed = settings_with_changes(settings, ["sft.optim.lr=2e-4"])
    assert changed.sft.optim.lr == 2e-4 and changed.sft.optim.betas == (0.8, 0.9)
    assert changed.model_copy(update={"sft": settings.sft}) == settings
    assert settings_with_changes(settings, ()) is settings
    with pytest.raises(UsageError, match=r"did you mean 'sft\.optim\.lr'"):
        settings_with_changes(settings, ["sft.optim.lrr=1"])


CODE = [
    "notify.command=[touch, /tmp/theirs]", "notify.webhook=https://theirs.example/hook", "notify.webhook_file=/theirs",
    "notify.on=[kept]", "runtime.loggers=wandb", "runtime.dask_address=tcp://theirs:8786", "runtime.rendezvous=theirs:1",
    "runtime.eval_suite=/theirs.yaml", "evaluate.suites=/theirs.yaml", "evaluate.suites.lora=/theirs.yaml",
    "shards.decontaminate=/theirs.yaml", "servers.auth=off",
]  # fmt: skip


def test_no_parameter_of_a_flow_run_names_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither as a change nor among the settings, whether the deployment has a value of its own or none."""
    from prefect.runtime import deployment

    from ttrain.config.loading import load
    from ttrain.errors import UsageError
    from ttrain.flows import deploy
    from ttrain.flows.deployed import settings_to_run

    mine = ["sft.epochs=2", "notify.command=[bin/tell, me]", "evaluate.suites.sft=mine.yaml", "runtime.loggers=tensorboard"]
    own = load(mine, environment={}).settings
    for change in CODE:
        changed = load([change], environment={}).settings
        assert settings_to_run(tmp_path, "nightly", changed, ()) == changed, "called by a program"
    monkeypatch.setitem(vars(deployment), "id", "as a server tells it")
    monkeypatch.setitem(vars(deployment), "name", "quickstart")
    for deployed in (Settings(), own):
        if deployed is own:
            tree = own.model_dump(mode="json")
            path = deploy.write(tmp_path, Schedule("nightly", "quickstart", None, "UTC", tree))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for change in CODE:
            theirs = load([change, "sft.epochs=3"], environment={}).settings
            run = settings_to_run(tmp_path, "nightly", theirs, ())
            assert run == deployed.replaced({"sft": {"epochs": 3}})
            key = re.escape(change.partition("=")[0])
            with pytest.raises(UsageError, match=rf"^{key} is in the changes.*nightly-quickstart\.json only; leave it"):
                settings_to_run(tmp_path, "nightly", own, [change])
        assert settings_to_run(tmp_path, "nightly", Settings(), ["sft.epochs=3"]).sft.epochs == 3


def test_every_setting_that_holds_a_text_names_code_or_is_known_to_be_harmless() -> None:
    """A new one is to be judged: can it name code, a command, a file with code, or a machine that sends code?"""
    from typing import get_args

    from ttrain.config.loading import leaf_fields

    def holds_text(kind: Any) -> bool:
        return kind in (str, Any) or (any(map(holds_text, get_args(kind))) and get_origin(kind) is not Literal)

    harmless = {
        "name", "tracking.experiment",  # names
        *(f"data.{name}" for name in DATASETS), "reading.text_field",  # data
        "tokenizer.existing", *(f"{name}.start_from" for name in TRAININGS),  # JSON and safetensors alone
        "model.preset", "model.kind", "model.fields",  # of transformers; `fields` takes the architecture's own alone
        *(f"{name}.mask_intervals" for name in TRAININGS), "dpo.targets", "lora.targets",
        "evaluate.documents", "evaluate.chats", "runtime.sample_prompts", "promotion.metric",  # texts
        "nightly.deadline", "nightly.timezone", "runtime.night.start", "runtime.night.end", "runtime.night.timezone",
    }  # fmt: skip
    texts = {key for key, kind in leaf_fields(Settings) if holds_text(kind)}
    naming = {key for key in texts if any(key == name or key.startswith(f"{name}.") for name in NAMES_CODE)}
    assert texts - naming == harmless
    assert {name.split(".")[0] for name in NAMES_CODE} <= set(Settings.model_fields)


def test_a_returned_state_leaves_no_traceback_in_the_log_and_a_bug_does() -> None:
    from prefect.exceptions import CancelledRun

    from ttrain.flows.deployed import is_not_own_state

    def record(error: Exception) -> logging.LogRecord:
        return logging.LogRecord("prefect.flow_runs", 40, "", 0, "said", (), (type(error), error, None))

    assert not is_not_own_state(record(CancelledRun("stopped")))
    assert is_not_own_state(record(ValueError("a bug")))


def test_a_run_names_its_end_in_a_way_that_the_server_expects() -> None:
    """Else the server would take a run that has ended under another name for one that fell silent."""
    from ttrain.flows.flow_runs import FINAL_STATES, NIGHT_STATES, UNFINISHED

    assert {"Completed", "Failed", "Cancelled", "Crashed", UNFINISHED, *NIGHT_STATES.values()} <= set(FINAL_STATES)
    assert set(NIGHT_STATES) == {"promoted", "kept", "nothing-new", "skipped"}


def test_whose_process_is_gone_is_told_from_who_lives_who_is_elsewhere_and_who_begins_again(tmp_path: Path) -> None:
    from ttrain.store.runs import process_started

    me = {flow_runs.LABEL_PID: os.getpid(), flow_runs.LABEL_STARTED: process_started(os.getpid()), flow_runs.LABEL_TRY: 1}
    mine = {**flow_runs.machine_labels(tmp_path), **me}
    dead = {**mine, flow_runs.LABEL_STARTED: 1.0}  # its number has been taken by another
    assert not flow_runs.is_process_gone(mine, 1, tmp_path)
    assert flow_runs.is_process_gone(dead, 1, tmp_path)
    assert not flow_runs.is_process_gone(dead, 2, tmp_path), "a second try has not yet said which process it is"
    assert not flow_runs.is_process_gone({**dead, flow_runs.LABEL_HOST: "another"}, 1, tmp_path)
    assert not flow_runs.is_process_gone(dead, 1, tmp_path / "another")
    assert not flow_runs.is_process_gone({}, 1, tmp_path)


def test_a_run_that_was_taken_and_never_began_is_told_from_one_that_is_just_beginning(tmp_path: Path) -> None:
    from datetime import UTC, datetime, timedelta

    from prefect.states import Pending, Running

    def never_began(state: Any, minutes: float, tag: str, pool: str | None = None) -> bool:
        state.timestamp = datetime.now(UTC) - timedelta(minutes=minutes)
        run: Any = SimpleNamespace(state=state, tags=["ttrain", tag], work_pool_name=pool)
        return flow_runs.never_began(run, tmp_path)

    mine = flow_runs.home_tag(tmp_path)
    assert never_began(Pending(name="Submitting"), 11, mine) and not never_began(Pending(name="Submitting"), 1, mine)
    assert not never_began(Pending(), 11, mine, "ttrain-kubernetes"), "its pod may wait for a node"
    assert not never_began(Running(), 11, mine) and not never_began(Pending(), 11, "home:/elsewhere")


@pytest.mark.long
@pytest.mark.soak
def test_cancelling_in_the_ui_saves_the_state_and_its_retry_continues(deployed: tuple[Cli, Served]) -> None:
    cli, served = deployed
    settings = (LONG, "pretrain.seed=2")
    id_ = start(cli, *settings)
    wait_until(cli.checkpoints, 200, lambda: served.said)
    set_state(cli, id_, "CANCELLING", "Cancelling")
    run = ended(cli, id_, served)
    assert run["state"]["name"] == "Cancelled" and "cancelled in Prefect" in run["state"]["message"]
    assert not [process for process in processes_of(cli.home) if process.name() == PROCESS_NAME]
    assert tasks_of(cli, id_, 1)["pretrain"] == "Cancelled"
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
    tasks = tasks_of(cli, id_, 2)
    assert tasks["tokenizer"] == tasks["shards-pretrain"] == "Cached" and tasks["lora"] == "Completed"
    assert "Traceback" not in served.said
    logs = call(cli.home, "logs/filter", {"logs": {"flow_run_id": {"any_": [id_]}}, "sort": "TIMESTAMP_DESC", "limit": 200})
    said = [line["message"] for line in logs]
    assert any("step 480/480" in line for line in said) and any(line.startswith("✓ pretrain") for line in said)


@pytest.mark.long
@pytest.mark.soak
def test_the_api_changes_one_setting_and_refuses_what_is_none(deployed: tuple[Cli, Served]) -> None:
    cli, served = deployed
    run = ended(cli, start(cli, "lora.optim.lr=2e-3"), served)
    assert run["state"]["name"] == "Completed" and run["name"] == cli.runs()[0]["run"]
    states = tasks_of(cli, run["id"], 1)
    assert {name for name, state in states.items() if state == "Completed"} == {"lora", "evaluate"}
    artifacts = call(cli.home, "artifacts/filter", {"flow_runs": {"id": {"any_": [run["id"]]}}})
    assert {artifact["key"] for artifact in artifacts} == {"plan", "report", "evaluation"}
    run = ended(cli, start(cli, "lora.optim.lrr=1"), served)
    assert run["state"]["name"] == "Failed" and "did you mean 'lora.optim.lr'?" in run["state"]["message"]
    run = ended(cli, start(cli, f"notify.command=[touch, {cli.home / 'theirs'}]", "notify.on=[failed]"), served)
    assert run["state"]["name"] == "Failed" and "notify.command is in the changes" in run["state"]["message"]
    assert not (cli.home / "theirs").exists()
    [deployment] = call(cli.home, "deployments/filter", {})
    asked = {"state": {"type": "SCHEDULED"}, "parameters": {"settings": {"lora": {"rank": "many"}}}}
    with pytest.raises(urllib.error.HTTPError, match="409"):
        call(cli.home, f"deployments/{deployment['id']}/create_flow_run", asked)


@pytest.mark.long
@pytest.mark.soak
def test_the_server_itself_finds_a_run_crashed_within_two_minutes_where_nothing_else_is_left(
    deployed: tuple[Cli, Served],
) -> None:
    cli, served = deployed
    id_ = start(cli, LONG, "pretrain.seed=4")
    wait_until(cli.checkpoints, 200, lambda: served.said)
    served.process.kill()
    os.kill(run_of(cli, id_)["labels"][flow_runs.LABEL_PID], signal.SIGKILL)
    run = wait_until(lambda: run if (run := run_of(cli, id_))["state"]["type"] == "CRASHED" else None, 120)
    assert "no heartbeat" in run["state"]["message"]
    assert not [process for process in processes_of(cli.home) if process.name() == PROCESS_NAME]
    servers.stop(cli.home, "prefect")
