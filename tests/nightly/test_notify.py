"""Notifications: sent where the settings say, a failure is a warning, and no address is shown."""

import json
import logging
import socket
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from rich.console import Console
from support.planned_homes import House

from ttrain import api
from ttrain.config import Notify
from ttrain.config.training import BITS_PER_BYTE
from ttrain.errors import StageFailed
from ttrain.flows import engine as flows_engine
from ttrain.nightly.notify import send, send_end_of_run

SECRET = "T0KEN-of-the-hook"
URL = f"http://127.0.0.1:1/{SECRET}"


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The bodies that are posted to the address."""
    posts: list[dict[str, Any]] = []

    def post(address: str, *, content: bytes, **_: Any) -> httpx.Response:
        assert address == URL
        posts.append(json.loads(content))
        return httpx.Response(200)

    monkeypatch.setattr(httpx, "post", post)
    return posts


def test_the_program_gets_the_message_without_a_shell(tmp_path: Path) -> None:
    message = {"name": "mine", "reason": "天 better", "figures": {"a": 1.5}}
    copy = f"import sys; open({str(tmp_path / 'received')!r}, 'w').write(sys.stdin.read())"
    command = (sys.executable, "-c", copy, "; touch $HOME `touch x` > y")
    send(Notify(command=command), "promoted", message)
    received = json.loads((tmp_path / "received").read_text())
    added = {"event": "promoted", "text": "ttrain: promoted", "host": socket.gethostname()}
    assert received.pop("time").endswith("+00:00")
    assert received == {**message, **added}


def test_the_address_gets_the_events_of_the_settings_as_json(posts: Any, tmp_path: Path) -> None:
    (tmp_path / "hook").write_text(f"{URL}\n")
    send(Notify(webhook_file=str(tmp_path / "hook")), "failed", {"text": "bad", "path": Path("/a")})
    expected = {"event": "failed", "text": "bad", "path": "/a"}
    assert posts[0] == {**posts[0], **expected}
    for event in ("failed", "promoted", "kept", "skipped", "unfinished"):
        send(Notify(webhook=URL, on=("kept", "failed")), event, {})
    assert [body["event"] for body in posts[1:]] == ["failed", "kept"]


def test_a_completed_run_sends_its_metric_and_one_that_its_user_stopped_nothing(posts: Any) -> None:
    run = {"run": "full-1", "metrics": {BITS_PER_BYTE.of_run: 1.25}, "seconds": 1.0}
    for outcome in ("interrupted", "completed"):
        send_end_of_run(Notify(webhook=URL), "mine", {**run, "outcome": outcome})
    [body] = posts
    assert body["event"] == "completed" and "1.2500" in body["text"]


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({"command": ("/no/such/program", SECRET)}, "'/no/such/program'"),
        ({"command": (sys.executable, "-c", "exit('no pager')")}, "code 1: no pager"),
        ({"webhook": URL}, "127.0.0.1: [Errno 111]"),
    ],
)
def test_a_failure_is_one_warning_without_a_secret(
    settings: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture
) -> None:
    notify = Notify.model_construct(**{**Notify().model_dump(), **settings})
    send(notify, "failed", {"x": "y" * 100_000})
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert warning in caplog.text and SECRET not in caplog.text


def test_a_run_of_full_sends_why_it_failed(house: House, posts: Any, monkeypatch: Any) -> None:
    fail = Mock(side_effect=StageFailed("the stage sft failed"))
    monkeypatch.setattr(flows_engine.PipelineRun, "run_stages", fail)
    settings = house.settings("tracking.enabled=false", "name=mine", f"notify.webhook={URL}")
    planned = api.plan("full", settings, home=house.store.root)
    with pytest.raises(StageFailed):
        flows_engine.run_pipeline(planned, Console(quiet=True), flows_engine.RunOptions("none"))
    expected = {"event": "failed", "pipeline": "mine", "reason": "the stage sft failed"}
    assert posts == [{**posts[0], **expected}]
