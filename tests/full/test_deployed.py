"""Runs of a served deployment: the form of their settings, changes, cancelling, a retry, a kill."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from support.pipeline_home import Cli
from support.served import call, ended, processes_of, run_of, serving, start
from support.waiting import wait_until

from ttrain.config import DATASETS, NAMES_CODE, TRAININGS, Settings
from ttrain.config.loading import load, types_by_name
from ttrain.engine.stage_worker import PROCESS_NAME
from ttrain.errors import UsageError
from ttrain.flows.deploy import Schedule

CODE = {
    "notify.command": "[touch, /tmp/theirs]",
    "notify.webhook": "https://theirs.example/hook",
    "notify.webhook_file": "/theirs",
    "notify.on": "[kept]",
    "runtime.loggers": "wandb",
    "runtime.dask_address": "tcp://theirs:8786",
    "runtime.rendezvous": "theirs:1",
    "runtime.eval_suite": "/theirs.yaml",
    "evaluate.suites": "/theirs.yaml",
    "shards.decontaminate": "/theirs.yaml",
}
HARMLESS = {  # settings that hold a text
    *("name", "tracking.experiment"),
    *(f"data.{name}" for name in DATASETS),
    "reading.text_field",
    # These read JSON and safetensors alone
    *("tokenizer.existing", *(f"{name}.start_from" for name in TRAININGS)),
    # Of transformers; `fields` takes the architecture's own alone
    *("model.preset", "model.kind", "model.fields"),
    *(f"{name}.mask_intervals" for name in TRAININGS),
    *("dpo.targets", "lora.targets", "evaluate.documents", "evaluate.chats"),
    *("runtime.sample_prompts", "promotion.metric", "nightly.deadline", "nightly.timezone"),
    *(f"runtime.night.{name}" for name in ("start", "end", "timezone")),
}


def set_state(cli: Cli, id_: str, type_: str, name: str) -> None:
    answer = call(cli.home, f"flow_runs/{id_}/set_state", {"state": {"type": type_, "name": name}})
    assert answer["status"] == "ACCEPT", answer


def test_changes_are_of_one_setting_and_leave_the_others(tmp_path: Path) -> None:
    from ttrain.flows import deploy
    from ttrain.flows.serve import settings_to_run

    overrides = [
        "data.sft=[{path: a.jsonl, weight: 3}]",
        "notify.webhook=https://host/token",
        "pretrain.epochs=2",
        "runtime.night={start: '23:00'}",
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
    for name, value in CODE.items():
        pattern = rf"{name}|notify.*nightly-mine\.json"
        refused.append(("nightly/mine", [f"{name}={value}"], pattern))
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
