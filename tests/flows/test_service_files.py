"""What is scheduled, when it fires, and what keeps it up: files, time zones, units of systemd, launchd and cron, pools."""

from __future__ import annotations

import io
import os
import plistlib
import shlex
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from rich.console import Console

from ttrain.config import Settings
from ttrain.config.loading import load
from ttrain.errors import UsageError
from ttrain.flows import prefect_api, schedule_files, schedule_status, schedules, service_files, slots
from ttrain.flows.schedule_files import Schedule
from ttrain.pipeline.provenance import with_absolute_paths

POOLS = ("process", "docker", "kubernetes")
# A directory whose name holds what shells, systemd and cron each take for something else
AWKWARD = "a home $HOME 50% 'of' \"it\" \\n"


@pytest.fixture(autouse=True)
def nothing_set_by_the_user(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nor does anything that is chosen for Prefect outlive the test."""
    before = dict(os.environ)
    for name in (*service_files.INHERITED, *service_files.SECRETS, "TZ"):
        monkeypatch.delenv(name, raising=False)
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
    return Schedule(**{"kind": "nightly", "name": settings.name, "cron": "0 2 * * *", "timezone": "Europe/Berlin",
                       "settings": settings.model_dump(mode="json"), "pool": pool} | changes)  # fmt: skip


def deployment_of(home: Path, made: Schedule) -> dict[str, Any]:
    """The deployment of a schedule's prefect.yaml."""
    found: dict[str, Any] = yaml.safe_load(service_files.prefect_yaml(home, made))["deployments"][0]
    return found


# What is kept


def test_a_schedule_is_read_as_it_was_written_and_a_damaged_file_is_none(odd_home: Path) -> None:
    kept = schedule()
    path = schedule_files.write(odd_home, kept)
    (path.parent / "nightly-damaged.json").write_text('{"kind": 1')
    (path.parent / "full-of-another-version.json").write_text('{"kind": "full"}')
    assert schedule_files.read_all(odd_home) == {"nightly/quickstart": kept}
    schedule_files.remove(odd_home, "nightly/quickstart")
    assert schedule_files.read_all(odd_home) == {}


def test_a_schedule_is_listed_as_paused_without_a_server_and_stays_so(odd_home: Path) -> None:
    schedule_files.write(odd_home, schedule(paused=True))
    schedule_files.write(odd_home, schedule(kind="full"))

    def paused() -> dict[str, bool]:
        return {entry.schedule.full_name: entry.paused for entry in schedule_status.list_schedules(odd_home)}

    assert paused() == {"full/quickstart": False, "nightly/quickstart": True}
    schedule_files.record_paused(odd_home, {"full/quickstart": True, "full/removed": True})
    assert paused() == {"full/quickstart": True, "nightly/quickstart": True}, "what the server does not know stays"
    service_files.prefect_yaml(odd_home, schedule("docker"))
    assert schedule_files.read_all(odd_home)["nightly/quickstart"].paused


def test_a_schedule_on_a_server_is_listed_by_the_api_without_prefect(
    odd_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = "2999-01-01T02:00:00+01:00"
    schedule_files.write(odd_home, schedule(slots=["2020-01-01T02:00:00+01:00", following]))
    cron = {"cron": "0 2 * * *", "timezone": "Europe/Berlin"}
    deployment = {
        "id": "d",
        "paused": False,
        "tags": [f"home:{odd_home}"],
        "schedules": [{"active": True, "schedule": cron}],
    }
    run = {"name": "night-000001", "expected_start_time": "2020-01-01T01:00:00Z", "state": {"name": "Kept", "message": None}}
    answers = {"/deployments/name/nightly/quickstart": deployment, "/flow_runs/filter": [run]}
    asked = []

    def ask(api_url: str, home: Path, path: str, body: Any = None) -> Any:
        asked.append((path, body))
        return answers[path]

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    monkeypatch.setattr(prefect_api, "status_of", lambda api_url, home: 200)
    monkeypatch.setattr(prefect_api, "ask", ask)
    monkeypatch.setitem(sys.modules, "prefect", None)  # importing it is an error
    [listed] = schedule_status.list_schedules(odd_home)
    assert listed.next_slot == datetime.fromisoformat(following) and listed.on_server and listed.last
    assert (listed.last.name, listed.last.outcome, listed.last.slot.year) == ("night-000001", "Kept", 2020)
    assert asked[1][1]["flow_runs"]["deployment_id"] == {"any_": ["d"]}
    deployment["tags"] = [f"home:{odd_home.parent}"]
    assert not schedule_status.list_schedules(odd_home)[0].on_server, "of another home"


def test_paths_are_kept_in_full_and_what_is_elsewhere_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("base", "mine", "pretrain"):  # a folder of a stage's name does not stand for the stage
        (tmp_path / name).mkdir()
    loaded = load(
        ["data.pretrain=[docs/*.jsonl, 'https://example.org/a.jsonl', {path: more, weight: 2}]", "data.sft=~/chats.jsonl",
         "data.lora=hf://owner/name", "data.tokenizer=/abs/t.jsonl", "tokenizer.existing=base",
         "notify.webhook=https://hooks.example/secret", "notify.command=[bin/tell, me/too]",
         "sft.start_from=./mine", "lora.start_from=sft"],
        environment={},
    ).settings  # fmt: skip
    kept = with_absolute_paths(loaded)
    assert kept.data.paths("pretrain") == (f"{tmp_path}/docs/*.jsonl", "https://example.org/a.jsonl", f"{tmp_path}/more")
    assert kept.data.weights("pretrain") == (1.0, 1.0, 2.0)
    assert kept.data.paths("sft") == (str(Path.home() / "chats.jsonl"),)
    assert kept.data.paths("lora") == ("hf://owner/name",) and kept.data.paths("tokenizer") == ("/abs/t.jsonl",)
    assert kept.tokenizer.existing == str(tmp_path / "base")
    assert kept.notify.command == (str(tmp_path / "bin/tell"), "me/too")
    assert kept.notify.webhook == "https://hooks.example/secret"
    assert kept.sft.start_from == str(tmp_path / "mine") and kept.lora.start_from == "sft"
    assert with_absolute_paths(kept) == kept
    assert with_absolute_paths(Settings()) == Settings()


def test_a_webhook_lies_in_a_file_of_the_user_alone_and_nowhere_else(odd_home: Path) -> None:
    url = "https://user:word@hooks.example/services/T0/secret"
    settings = schedule_files.webhook_in_file(odd_home, "nightly", load([f"notify.webhook={url}"], environment={}).settings)
    kept = schedule(settings=settings.model_dump(mode="json"))
    schedule_files.write(odd_home, kept)
    path = Path(settings.notify.webhook_file or "")
    assert settings.notify.webhook is None and path.read_text().strip() == url
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    others = [one for one in path.parent.iterdir() if one != path]
    assert others and not any("secret" in one.read_text() or "word" in one.read_text() for one in others)
    inside = deployment_of(odd_home, schedule("docker", settings=kept.settings))
    assert "notify" not in inside["parameters"]["settings"], "it is taken from the schedule's file, wherever that lies"
    without = schedule_files.webhook_in_file(odd_home, "nightly", Settings())
    assert without.notify.webhook_file is None and not path.exists(), "a schedule of the same name without one"
    schedule_files.webhook_in_file(odd_home, "nightly", load([f"notify.webhook={url}"], environment={}).settings)
    schedule_files.remove(odd_home, kept.full_name)
    assert not path.exists()


def test_the_deadline_is_by_the_clock_of_the_schedule_unless_it_has_its_own() -> None:
    assert schedule_files.with_timezone(Settings(), "Asia/Tokyo").nightly.timezone == "Asia/Tokyo"
    own = load(["nightly.timezone=UTC"], environment={}).settings
    assert schedule_files.with_timezone(own, "Asia/Tokyo").nightly.timezone == "UTC"


def test_a_name_means_the_one_schedule_that_it_fits(odd_home: Path) -> None:
    with pytest.raises(UsageError, match="nothing is scheduled"):
        schedules.find_schedule(odd_home, None)
    schedule_files.write(odd_home, schedule())
    assert schedules.find_schedule(odd_home, None).full_name == "nightly/quickstart"
    schedule_files.write(odd_home, schedule(kind="full"))
    assert (
        schedules.find_schedule(odd_home, "full").full_name
        == schedules.find_schedule(odd_home, "full/quickstart").full_name
        == "full/quickstart"
    )
    with pytest.raises(UsageError, match=r"there are several schedules.*full/quickstart, nightly/quickstart"):
        schedules.find_schedule(odd_home, None)
    with pytest.raises(UsageError, match="no schedule is called 'weekly'; there are: full/quickstart"):
        schedules.find_schedule(odd_home, "weekly")


@pytest.mark.parametrize(("tz", "expected"), [("Europe/Berlin", "Europe/Berlin"), (":Asia/Tokyo", "Asia/Tokyo")])
def test_the_machines_own_time_zone_has_a_name(tz: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", tz)
    assert schedule_files.local_timezone() == expected
    monkeypatch.setenv("TZ", "<-03>3")  # a rule without a name
    ZoneInfo(schedule_files.local_timezone())


# When it fires


@pytest.mark.parametrize(
    ("cron", "timezone", "rule"),
    [
        ("0 2 * *", "UTC", "five fields"),
        ("0 2 * * * *", "UTC", "five fields"),
        ("@daily", "UTC", "five fields"),
        ("61 2 * * *", "UTC", "not a cron"),
        ("0 2 * * mun", "UTC", "not a cron"),
        ("H 2 * * *", "UTC", "not a cron"),
        ("0 0 30 2 *", "UTC", "does not fire in the next"),
        ("0 2 * * *", "Mars/Base", "try Europe/Berlin"),
        ("0 2 * * *", "../../etc/passwd", "try Europe/Berlin"),
    ],
)
def test_what_never_fires_is_refused_with_rule_and_example(cron: str, timezone: str, rule: str) -> None:
    with pytest.raises(UsageError, match=rule) as error:
        schedules.check(cron, timezone)
    assert "0 2 * * *" in str(error.value) or "Europe/Berlin" in str(error.value)
    schedules.check("*/5 1-3 * * mon,fri", "America/New_York")


DAYS = 3


# From the night before that of the change: 02:30 or 02:00 is skipped, or 02:30 or 01:30 comes twice, or none of them
@pytest.mark.parametrize(
    ("cron", "timezone", "first"),
    [
        ("30 2 * * *", "Europe/Berlin", (2027, 3, 27)),
        ("30 2 * * *", "Europe/Berlin", (2027, 10, 30)),
        ("0 2 * * *", "America/New_York", (2027, 3, 13)),
        ("30 1 * * *", "America/New_York", (2027, 11, 6)),
        ("0 3 * * *", "America/New_York", (2027, 11, 6)),
        # At midnight: left out, or twice, also before midnight
        ("30 0 * * *", "America/Santiago", (2026, 9, 5)),
        ("0 0 * * *", "Africa/Cairo", (2026, 4, 23)),
        ("30 0 * * *", "America/Havana", (2026, 3, 7)),
        ("15 0 * * *", "Asia/Beirut", (2026, 3, 28)),
        ("30 0 * * *", "Atlantic/Azores", (2026, 3, 28)),
        ("30 0 * * *", "America/Havana", (2026, 10, 31)),
        ("30 0 * * *", "Atlantic/Azores", (2026, 10, 24)),
        ("30 23 * * *", "America/Santiago", (2027, 4, 3)),
        ("15 2 * * *", "Australia/Lord_Howe", (2026, 10, 3)),  # by half an hour
        ("45 1 * * *", "Australia/Lord_Howe", (2027, 4, 3)),
    ],
)
def test_a_change_of_the_clock_neither_skips_a_night_nor_doubles_it(
    cron: str, timezone: str, first: tuple[int, int, int]
) -> None:
    """Asked as the scheduler does, again and again from later moments: one slot for each date, the same from all of them."""
    zone = ZoneInfo(timezone)
    begin = datetime(*first, tzinfo=zone).astimezone(UTC)
    following = set()
    dates = [begin.astimezone(zone).date() + timedelta(days=day) for day in range(DAYS)]
    for half_hours in range(DAYS * 48 + 2):
        moment = begin + timedelta(minutes=30 * half_hours)
        if moment.astimezone(zone).hour in (22, 23, 0, 1, 2, 3) or half_hours % 24 == 0:  # often where the clock changes
            following |= set(slots.next_slots(cron, timezone, 1, moment))
    following = {slot for slot in following if slot.astimezone(zone).date() <= dates[-1]}
    assert [slot.astimezone(zone).date() for slot in sorted(following)] == dates
    assert max(following).astimezone(zone).strftime("%-M %-H * * *") == cron, "by the clock of the zone"


@pytest.mark.parametrize(
    ("cron", "expected"),
    [
        ("*/30 * * * *", ["23 23:00", "23 23:30", "24 01:00", "24 01:30"]),  # each once: nothing is moved
        ("0 0,12 * * *", ["24 01:00", "24 12:00", "25 00:00", "25 12:00"]),
        ("0,30 0 * * *", ["24 01:00", "24 01:30", "25 00:00", "25 00:30"]),
        ("0 */2 * * *", ["24 01:00", "24 02:00", "24 04:00", "24 06:00"]),
        ("0 0,1 * * *", ["24 01:00", "25 00:00", "25 01:00", "26 00:00"]),  # the two are one
        ("0 0 * * 5", ["24 01:00", "01 00:00", "08 00:00", "15 00:00"]),
    ],
)
def test_of_a_cron_with_several_times_those_that_midnight_leaves_out_stay_on_their_date(
    cron: str, expected: list[str]
) -> None:
    for minute in (0,) if cron.startswith("*") else (0, 20):
        start = datetime(2026, 4, 23, 21, minute, tzinfo=UTC)  # the hour before midnight in Cairo
        found = slots.next_slots(cron, "Africa/Cairo", 4, start)
        assert [f"{slot:%d %H:%M}" for slot in found] == expected


@pytest.mark.parametrize(("cron", "following"), [("30 2 * * *", "2026-10-26T01:30"), ("* * * * *", "2026-10-25T02:00")])
def test_in_the_hour_that_comes_twice_no_slot_is_listed_that_has_passed(cron: str, following: str) -> None:
    second = datetime(2026, 10, 25, 1, 10, tzinfo=UTC)  # 02:10 in Berlin, as an hour before
    found = slots.next_slots(cron, "Europe/Berlin", 1, second)
    assert [slot.astimezone(UTC).isoformat()[:16] for slot in found] == [following]


def test_a_refusal_is_told_with_its_reason_and_without_the_request(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What prefect's server says of settings that another version of ttrain wrote, and of a server that is gone."""
    import httpx
    from prefect.deployments.runner import DeploymentApplyError, RunnerDeployment
    from prefect.exceptions import PrefectHTTPStatusError

    request = httpx.Request("POST", "http://127.0.0.1/api/deployments/")
    told = {"exception_detail": [{"msg": "Value error, 'bogus' was unexpected", "input": {"settings": "x" * 100_000}}]}
    answer = httpx.Response(422, request=request, json=told)
    causes = [PrefectHTTPStatusError("422", request=request, response=answer), httpx.ConnectError("gone")]

    def apply(deployment: Any) -> None:
        cause = causes.pop(0)
        raise DeploymentApplyError(f"Error while applying deployment: {cause}") from cause

    monkeypatch.setattr(RunnerDeployment, "apply", apply)
    with pytest.raises(schedules.RefusedError, match="refuses nightly/quickstart: Value error, 'bogus' was unexp") as error:
        schedules.apply(odd_home, schedule())
    assert len(str(error.value)) < 300
    with pytest.raises(httpx.ConnectError):
        schedules.apply(odd_home, schedule())


# What keeps it up


def test_a_systemd_unit_starts_the_command_in_any_home(odd_home: Path, tmp_path: Path) -> None:
    text = service_files.unit("systemd", odd_home)
    path = tmp_path / "ttrain.service"
    path.write_text(text)
    if shutil.which("systemd-analyze"):
        command = ["systemd-analyze", "verify", "--user", path]
        there = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}  # else it judges nothing
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=there)
        assert (done.returncode, "ttrain.service" in done.stderr) == (0, False), done.stderr
    [environment] = [line for line in text.splitlines() if line.startswith("Environment=")]
    assert (
        environment
        == 'Environment="TTRAIN_HOME=' + str(odd_home).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'
    )
    assert "KillMode=mixed" in text and "OOMPolicy=continue" in text
    with pytest.raises(UsageError, match="a unit cannot hold"):
        service_files.unit("systemd", tmp_path / "two\nlines")


def test_a_launchd_agent_holds_command_and_home(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    agent = plistlib.loads(service_files.unit("launchd", odd_home).encode())
    assert agent["ProgramArguments"] == service_files.command() and agent["KeepAlive"] == {"SuccessfulExit": False}
    assert agent["EnvironmentVariables"] == {"TTRAIN_HOME": str(odd_home), "PREFECT_API_URL": "http://127.0.0.1:4200/api"}


def started_by_cron(line: str, home: Path) -> str:
    """What the command of a line of crontab prints, as cron starts it."""
    assert line.startswith("*/5 * * * * ") and "%" not in line.replace("\\%", ""), "cron takes it for the end of the line"
    words = line.removeprefix("*/5 * * * * ").replace("\\%", "%")  # as cron does before it asks the shell
    subprocess.run(["/bin/sh", "-c", words], check=True, env={"PATH": os.environ["PATH"]})
    return (home / "schedules" / "serve.log").read_text()


def test_a_cron_line_means_to_a_shell_what_was_meant(odd_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    says = [sys.executable, "-c", "import os, sys; print(os.environ['TTRAIN_HOME'], os.getcwd(), sys.argv[1:])"]
    monkeypatch.setattr(service_files, "command", lambda: says)
    line = service_files.unit("cron", odd_home)
    assert line.count("\n") == 1
    assert started_by_cron(line, odd_home) == f"{odd_home} {odd_home / 'schedules'} ['--unless-served']\n"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Two secrets in the environment; the file of the user that they belong into, which is not there yet."""
    monkeypatch.setenv("PREFECT_API_KEY", "pnu_confidential")
    monkeypatch.setenv("PREFECT_API_URL", "https://prefect.example/api")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:confidential@mlflow.example/")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    path = tmp_path / "me" / service_files.SECRETS_FILE
    path.parent.mkdir(parents=True)
    yield path


@pytest.mark.parametrize("kind", ["systemd", "launchd", "cron", "process", "docker", "kubernetes"])
def test_no_secret_stands_in_what_keeps_it_up_but_where_it_belongs_does(kind: str, odd_home: Path, secret: Path) -> None:
    text = service_files.prefect_yaml(odd_home, schedule(kind)) if kind in POOLS else service_files.unit(kind, odd_home)
    assert "confidential" not in text
    assert "https://prefect.example/api" in text
    said = "PREFECT_API_KEY, MLFLOW_TRACKING_URI"
    assert said in text and (kind in POOLS or f"~/{service_files.SECRETS_FILE}" in text)
    if kind == "systemd":
        assert "\nEnvironmentFile=-%h/.config/ttrain/environment\n" in text


def test_what_cron_and_launchd_start_has_the_secrets_of_that_file(
    odd_home: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = [sys.executable, "-c", "import os; print([os.environ[name] for name in ('PREFECT_API_KEY', 'TTRAIN_HOME')])"]
    monkeypatch.setattr(service_files, "command", lambda: says)
    secret.write_text("PREFECT_API_KEY=of-the-file\n")
    told = f"{['of-the-file', str(odd_home)]}\n"
    comment, line, end = service_files.unit("cron", odd_home).split("\n")
    assert comment.startswith("#") and end == ""
    assert started_by_cron(line, odd_home) == told
    agent = plistlib.loads(service_files.unit("launchd", odd_home).encode())
    env = {"PATH": os.environ["PATH"], **agent["EnvironmentVariables"]}
    assert subprocess.run(agent["ProgramArguments"], check=True, env=env, capture_output=True, text=True).stdout == told


def test_the_command_of_a_unit_opens_its_help() -> None:
    done = subprocess.run([*service_files.command(), "--help"], capture_output=True, text=True, check=True)
    assert "--unit" in done.stdout
    assert shlex.split(shlex.join(service_files.command()))[-2:] == ["pipeline", "serve"]


@pytest.mark.parametrize("pool", POOLS)
def test_prefects_own_loader_takes_the_prefect_yaml_of_a_pool(pool: str, odd_home: Path, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    made = schedule(pool, f"data.pretrain={tmp_path}/docs/*.jsonl")
    path = tmp_path / "prefect.yaml"
    path.write_text(service_files.prefect_yaml(odd_home, made))
    from prefect.cli.deploy._config import _load_deploy_configs_and_actions
    from prefect.flows import load_flow_from_entrypoint

    said = Console(record=True, file=io.StringIO())
    [deployment], actions = _load_deploy_configs_and_actions(path, console=said)
    assert said.export_text() == "" and actions["build"] == actions["push"] == []
    assert deployment["work_pool"]["name"] == f"ttrain-{pool}" and deployment["tags"] == ["ttrain", f"home:{odd_home}"]
    assert [(one["cron"], one["timezone"]) for one in deployment["schedules"]] == [("0 2 * * *", "Europe/Berlin")]
    flow = load_flow_from_entrypoint(deployment["entrypoint"])
    given = flow.validate_parameters(deployment["parameters"])
    assert given["settings"] == Settings.model_validate(made.settings)
    variables = deployment["work_pool"]["job_variables"]
    assert variables["env"]["TTRAIN_HOME"] == (str(odd_home) if pool == "process" else "/ttrain")
    if pool == "docker":
        assert variables["volumes"] == [f"{odd_home}:/ttrain", f"{tmp_path}/docs:{tmp_path}/docs:ro"]


def test_folders_that_only_the_worker_has_are_mounted_and_never_the_whole_disk(odd_home: Path) -> None:
    made = schedule(
        "docker", "data.pretrain=/nowhere/docs", "data.sft=/nowhere/chats/*.jsonl", "data.lora=/nowhere/d/a.jsonl"
    )
    volumes = deployment_of(odd_home, made)["work_pool"]["job_variables"]["volumes"]
    assert volumes[1:] == ["/nowhere/docs:/nowhere/docs:ro", "/nowhere/chats:/nowhere/chats:ro", "/nowhere/d:/nowhere/d:ro"]
    with pytest.raises(UsageError, match="put the data into a folder"):
        service_files.prefect_yaml(odd_home, schedule("docker", "data.pretrain=/docs.jsonl", name="other"))
    assert "nightly/other" not in schedule_files.read_all(odd_home)
