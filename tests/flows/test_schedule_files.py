"""Schedules of a home, and the systemd unit of what serves them."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ttrain.config.loading import load
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.flows import deploy

# A directory whose name holds what shells, systemd and cron each take for something else
AWKWARD = "a home $HOME 50% 'of' \"it\" \\n"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing that is set for Prefect outlives the test."""
    inherited = dict(os.environ)
    monkeypatch.delenv("TZ", raising=False)
    yield
    for name in set(os.environ) - set(inherited):
        del os.environ[name]


@pytest.fixture
def odd_home(tmp_path: Path) -> Path:
    path = tmp_path / AWKWARD
    path.mkdir()
    return path


def test_paths_become_absolute_and_all_else_stays(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "mine", "sft"):  # a folder with a stage's name is not the stage
        (tmp_path / name).mkdir()
    overrides = [
        "data.pretrain=[docs/*.jsonl, 'https://example.org/a.jsonl', {path: more, weight: 2}]",
        "data.sft=~/chats.jsonl",
        "data.lora=hf://owner/name",
        "tokenizer.existing=base",
        "notify.webhook=https://hooks.example/secret",
        "notify.command=[bin/tell, me/too]",
        "sft.start_from=./mine",
        "lora.start_from=sft",
    ]
    settings = with_absolute_paths(load(overrides, environment={}).settings)
    files = f"{tmp_path}/docs/*.jsonl", "https://example.org/a.jsonl", f"{tmp_path}/more"
    assert settings.data.paths("pretrain") == files
    assert settings.data.weights("pretrain") == (1.0, 1.0, 2.0)
    assert settings.data.paths("sft") == (str(Path.home() / "chats.jsonl"),)
    assert settings.data.paths("lora") == ("hf://owner/name",)
    assert settings.tokenizer.existing == str(tmp_path / "base")
    assert settings.notify.webhook == "https://hooks.example/secret"
    assert settings.notify.command == (str(tmp_path / "bin/tell"), "me/too")
    assert (settings.sft.start_from, settings.lora.start_from) == (str(tmp_path / "mine"), "sft")


@pytest.mark.parametrize(
    ("cron", "timezone", "rule"),
    [
        ("0 2 * *", "UTC", "five fields"),
        ("0 0 30 2 *", "UTC", "never fires"),
        ("0 2 * * *", "Mars/Base", "Mars/Base"),
    ],
)
def test_what_never_fires_is_refused(cron: str, timezone: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rf"(?s){rule}.*(0 2 \* \* \*|Europe/Berlin)"):
        deploy.check_cron(cron, timezone)
    deploy.check_cron("*/5 1-3 * * mon,fri", "America/New_York")


def test_a_systemd_unit_names_any_home(odd_home: Path) -> None:
    escaped = str(odd_home).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    options = {"KillMode=mixed", "EnvironmentFile=-%h/.config/ttrain/environment"}
    lines = {*deploy.unit(odd_home).splitlines()}
    assert options | {f'Environment="TTRAIN_HOME={escaped}"'} <= lines
