"""Schedules of a home, and the systemd unit of what serves them."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from typer.testing import CliRunner

from ttrain.cli.main import app
from ttrain.config.loading import load
from ttrain.core.files import write_json
from ttrain.engine.provenance import with_absolute_paths
from ttrain.errors import UsageError
from ttrain.flows import deploy
from ttrain.flows.deploy import Schedule
from ttrain.store.runs import this_process

# A directory whose name holds what shells, systemd and cron each take for something else
AWKWARD = "a home $HOME 50% 'of' \"it\" \\n"


@pytest.fixture(autouse=True)
def nothing_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor does anything that is chosen for Prefect outlive the test."""
    before = dict(os.environ)
    monkeypatch.delenv("TZ", raising=False)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


@pytest.fixture
def odd_home(tmp_path: Path) -> Path:
    path = tmp_path / AWKWARD
    path.mkdir()
    return path


def schedule(pool: str | None = None, *overrides: str, **changes: Any) -> Schedule:
    settings = with_absolute_paths(load(overrides, environment={}).settings)
    return Schedule(
        **{
            "kind": "nightly",
            "name": settings.name,
            "cron": "0 2 * * *",
            "timezone": "Europe/Berlin",
            "settings": settings.model_dump(mode="json"),
            "pool": pool,
        }
        | changes
    )


def test_a_schedule_is_read_as_it_was_written_and_a_damaged_file_is_none(odd_home: Path) -> None:
    kept = schedule()
    path = deploy.write(odd_home, kept)
    (path.parent / "nightly-damaged.json").write_text('{"kind": 1')
    (path.parent / "full-of-another-version.json").write_text('{"kind": "full"}')
    assert deploy.read_all(odd_home) == {"nightly/quickstart": kept}
    deploy.remove(odd_home, "nightly/quickstart")
    assert deploy.read_all(odd_home) == {}


def test_a_schedule_is_listed_with_its_next_slot_and_its_last_outcome(
    odd_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deploy.write(odd_home, schedule())
    deploy.write(odd_home, schedule(kind="full", cron=None))
    last = {
        "name": "night-000001",
        "outcome": "Kept",
        "slot": "2020-01-01T01:00:00+00:00",
        "message": "worse",
    }
    write_json(deploy.last_run_file(odd_home, "nightly/quickstart"), last)
    write_json(deploy.folder_of(odd_home) / deploy.SERVING, this_process())
    monkeypatch.setenv("TTRAIN_HOME", str(odd_home))
    full, nightly = listed()
    assert (
        nightly["next"][10:16] == "T02:00"
        and nightly["last"] == last
        and nightly["served_by"] == os.getpid()
    )
    assert full["next"] is None and full["last"] is None and full["cron"] is None
    deploy.pause(odd_home, "nightly", paused=True)
    deploy.remove(odd_home, "full")
    assert [(entry["schedule"], entry["paused"]) for entry in listed()] == [
        ("nightly/quickstart", True)
    ]


def listed() -> Any:
    return json.loads(CliRunner().invoke(app, ["pipeline", "schedule", "list", "--json"]).stdout)


def test_paths_are_kept_in_full_and_what_is_elsewhere_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "base",
        "mine",
        "pretrain",
    ):  # a folder of a stage's name does not stand for the stage
        (tmp_path / name).mkdir()
    given = [
        "data.pretrain=[docs/*.jsonl, 'https://example.org/a.jsonl', {path: more, weight: 2}]",
        "data.sft=~/chats.jsonl",
        "data.lora=hf://owner/name",
        "tokenizer.existing=base",
        "notify.webhook=https://hooks.example/secret",
        "notify.command=[bin/tell, me/too]",
        "sft.start_from=./mine",
        "lora.start_from=sft",
    ]
    kept = with_absolute_paths(load(given, environment={}).settings)
    assert kept.data.paths("pretrain") == (
        f"{tmp_path}/docs/*.jsonl",
        "https://example.org/a.jsonl",
        f"{tmp_path}/more",
    )
    assert kept.data.weights("pretrain") == (1.0, 1.0, 2.0) and kept.data.paths("lora") == (
        "hf://owner/name",
    )
    assert kept.data.paths("sft") == (str(Path.home() / "chats.jsonl"),)
    assert (
        kept.tokenizer.existing == str(tmp_path / "base")
        and kept.notify.webhook == "https://hooks.example/secret"
    )
    assert kept.notify.command == (str(tmp_path / "bin/tell"), "me/too")
    assert kept.sft.start_from == str(tmp_path / "mine") and kept.lora.start_from == "sft"
    assert with_absolute_paths(kept) == kept


def test_a_name_means_the_one_schedule_that_it_fits(odd_home: Path) -> None:
    with pytest.raises(UsageError, match="scheduled"):
        deploy.find(odd_home, None)
    deploy.write(odd_home, schedule())
    assert deploy.find(odd_home, None).full_name == "nightly/quickstart"
    deploy.write(odd_home, schedule(kind="full"))
    assert (
        deploy.find(odd_home, "full").full_name
        == deploy.find(odd_home, "full/quickstart").full_name
        == "full/quickstart"
    )
    with pytest.raises(UsageError, match=r"full/quickstart, nightly"):
        deploy.find(odd_home, None)
    with pytest.raises(UsageError, match=r"'weekly'.*full/quickstart"):
        deploy.find(odd_home, "weekly")


def test_the_machines_own_time_zone_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", ":Asia/Tokyo")
    assert deploy.local_timezone() == "Asia/Tokyo"
    monkeypatch.setenv("TZ", "<-03>3")  # a rule without a name
    ZoneInfo(deploy.local_timezone())


@pytest.mark.parametrize(
    ("cron", "timezone", "rule"),
    [
        ("0 2 * *", "UTC", "five fields"),
        ("0 2 * * mun", "UTC", "not a cron"),
        ("0 0 30 2 *", "UTC", "never fires"),
        ("0 2 * * *", "Mars/Base", "try Europe/Berlin"),
    ],
)
def test_what_never_fires_is_refused_with_rule_and_example(
    cron: str, timezone: str, rule: str
) -> None:
    with pytest.raises(UsageError, match=rule) as error:
        deploy.check_cron(cron, timezone)
    assert "0 2 * * *" in str(error.value) or "Europe/Berlin" in str(error.value)
    deploy.check_cron("*/5 1-3 * * mon,fri", "America/New_York")


def test_a_systemd_unit_starts_the_command_in_any_home(odd_home: Path, tmp_path: Path) -> None:
    path = tmp_path / "ttrain.service"
    path.write_text(text := deploy.unit(odd_home))
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", "--user", path]
        there = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}  # else it judges nothing
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=there)
        assert (done.returncode, "ttrain.service" in done.stderr) == (0, False), done.stderr
    escaped = str(odd_home).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    assert f'Environment="TTRAIN_HOME={escaped}"' in text.splitlines()
    for line in (
        "EnvironmentFile=-%h/.config/ttrain/environment",
        "KillMode=mixed",
        "OOMPolicy=continue",
    ):
        assert line in text
