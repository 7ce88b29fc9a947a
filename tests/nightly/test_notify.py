"""Notifications: whom the settings name is told, nobody else; their trouble is not the night's, and no address is shown."""

import contextlib
import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console
from support.planned_homes import House
from support.waiting import stopwatch

from ttrain import api
from ttrain.config import Notify, Settings, flatten
from ttrain.config.loading import load
from ttrain.config.training import BITS_PER_BYTE
from ttrain.errors import StageFailed
from ttrain.flows import engine as flows_engine
from ttrain.nightly.notify import send, send_end_of_run

SECRET = "T0KEN-of-the-hook"


class Hook:
    """What is posted, instead of posting it; `status` is the answer."""

    def __init__(self) -> None:
        self.url, self.status = f"http://127.0.0.1:1/{SECRET}", 200
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def post(self, address: str, *, content: bytes, **_: Any) -> httpx.Response:
        self.paths.append(httpx.URL(address).path)
        self.bodies.append(json.loads(content))
        return httpx.Response(self.status)


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    hook = Hook()
    monkeypatch.setattr(httpx, "post", hook.post)
    return hook


def writer(path: Path) -> tuple[str, ...]:
    """A program that keeps its standard input, and says where it was started."""
    return (sys.executable, "-c", f"import sys; open({str(path)!r}, 'w').write(sys.stdin.read())")


def test_the_program_gets_the_message_on_its_standard_input_and_no_shell_its_arguments(
    tmp_path: Path,
) -> None:
    message = {"name": "mine", "reason": "天 better", "figures": {"a": 1.5}}
    send(
        Notify(command=(*writer(tmp_path / "got"), "; touch $HOME `touch x` > y")),
        "promoted",
        message,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["got"]
    got = json.loads((tmp_path / "got").read_text())
    assert (got["event"], got["name"], got["reason"], got["figures"]) == (
        "promoted",
        "mine",
        "天 better",
        {"a": 1.5},
    )
    assert (got["text"], got["host"]) == ("ttrain: promoted", socket.gethostname()) and got[
        "time"
    ].endswith("+00:00")


def test_the_address_gets_the_message_once_as_json_also_where_it_stands_in_a_file(
    hook: Hook, tmp_path: Path
) -> None:
    (tmp_path / "hook").write_text(f"{hook.url}\n")
    send(Notify(webhook=hook.url), "failed", {"text": "night 3 failed", "path": Path("/a")})
    send(Notify(webhook_file=str(tmp_path / "hook")), "failed", {})
    body, _ = hook.bodies
    assert (body["event"], body["text"], body["path"]) == ("failed", "night 3 failed", "/a")
    assert hook.paths == [f"/{SECRET}"] * 2


def test_an_address_that_refuses_is_a_warning_without_its_path(
    hook: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    hook.status = 500
    send(Notify(webhook=hook.url), "failed", {})
    assert "127.0.0.1: it answered with HTTP 500" in caplog.text and SECRET not in caplog.text


def test_only_the_events_that_were_asked_for_are_told(hook: Hook) -> None:
    for event in ("failed", "promoted", "kept", "skipped", "unfinished"):
        send(Notify(webhook=hook.url, on=("kept", "failed")), event, {})
    send(Settings().notify, "failed", {})  # which name nobody
    assert [body["event"] for body in hook.bodies] == ["failed", "kept"]


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        (
            {"command": ("/no/such/program", SECRET)},
            "No such file or directory: '/no/such/program'",
        ),
        (
            {"command": (sys.executable, "-c", "import sys; sys.exit('no pager')")},
            "ended with exit code 1: no pager",
        ),
        ({"command": ("/bin/sleep", "60"), "timeout_seconds": 0.1}, "did not end within 0.1 s"),
        ({"webhook": f"http://127.0.0.1:1/{SECRET}"}, "127.0.0.1: [Errno 111] Connection refused"),
    ],
)
def test_trouble_is_one_warning_that_shows_no_secret(
    settings: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    waited = stopwatch()
    notify = Notify.model_construct(**{**Notify().model_dump(), "timeout_seconds": 9.0, **settings})
    send(notify, "failed", {"x": "y" * 100_000})
    assert waited() < 10
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert warning in caplog.text and SECRET not in caplog.text


def test_a_file_of_the_address_that_holds_none_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "hook"
    file.write_text(f"hooks.example.com/{SECRET}")
    send(Notify(webhook_file=str(file)), "failed", {})
    assert (
        f"notify.webhook_file is {file}, which must hold one http or https address" in caplog.text
    )
    assert SECRET not in caplog.text


def test_the_address_is_used_whole_and_shown_without_its_path() -> None:
    """A run's settings can be loaded again: then nobody is told, rather than some page of that host."""
    settings = load(
        [f"notify.webhook=https://user:{SECRET}@hooks.example.com:8443/{SECRET}?t={SECRET}"]
    ).settings
    assert settings.notify.webhook is not None and settings.notify.webhook.endswith(SECRET)
    record = settings.model_dump(mode="json")
    assert dict(flatten(record))["notify.webhook"] == "https://hooks.example.com/***"
    assert SECRET not in json.dumps(record, default=str)
    assert Settings.model_validate(record).notify.webhook is None


def test_a_run_of_full_says_why_it_failed(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_stages(*_: object) -> None:
        raise StageFailed("the stage sft failed")

    monkeypatch.setattr(flows_engine.PipelineRun, "run_stages", run_stages)
    settings = house.settings("tracking.enabled=false", "name=mine")
    settings = settings.replaced({"notify": {"command": writer(tmp_path / "kept.json")}})
    planned = api.plan("full", settings, home=house.store.root)
    with contextlib.suppress(StageFailed):
        flows_engine.run_pipeline(planned, Console(quiet=True), flows_engine.RunOptions("none"))
    message = json.loads((tmp_path / "kept.json").read_text())
    assert (message["event"], message["pipeline"], message["reason"]) == (
        "failed",
        "mine",
        "the stage sft failed",
    )


def test_a_run_that_completed_sends_its_metric_and_one_that_its_user_stopped_nothing(
    hook: Hook,
) -> None:
    metrics = {BITS_PER_BYTE.of_run: 1.25}
    for outcome in ("interrupted", "completed"):
        run = {"run": "full-1", "outcome": outcome, "metrics": metrics, "seconds": 1.0}
        send_end_of_run(Notify(webhook=hook.url), "mine", run)
    [body] = hook.bodies
    assert (
        body["event"] == "completed"
        and body["reason"].startswith("took ")
        and "1.2500" in body["text"]
    )
