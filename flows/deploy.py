"""The schedules of a home, and what is made of them: a systemd unit, a prefect.yaml.

Each schedule is one file, `schedules/<kind>-<name>.json`; `ttrain pipeline serve` (flows/serve.py)
makes the deployments of a Prefect server from these files. They are the truth, the server's
database is a view, so nothing here needs a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import re
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo, available_timezones

import yaml

from ttrain.core import redact
from ttrain.core.files import (
    PRIVATE_FILE,
    JsonDict,
    private_directory,
    read_json,
    read_object,
    write_json,
)
from ttrain.core.machine import VERSION
from ttrain.errors import UsageError
from ttrain.flows.flow_runs import TAG, home_tag
from ttrain.store.runs import is_alive

if TYPE_CHECKING:
    from ttrain.config import Settings

SERVING = "serving.txt"  # in the folder of schedules: the process that serves
CRON_FIELDS = 5  # Prefect takes six, the last for seconds
EXAMPLE = 'write "minute hour day month weekday", for example "0 2 * * *" for two at night'
INHERITED = ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")
HOME_INSIDE = "/ttrain"  # of a container; a volume of the host or of the cluster
GLOB_OR_FILE = re.compile(r"/[^/]*[*?[].*$|/[^/]*\.\w+$|/$")  # the end of a path below its folder

UNIT = """\
# mkdir -p ~/.config/systemd/user
# ttrain pipeline serve --unit systemd > ~/.config/systemd/user/ttrain.service
# systemctl --user daemon-reload && systemctl --user enable --now ttrain
# loginctl enable-linger    (so that it starts with the machine, before you log in)
[Unit]
Description=ttrain: what is scheduled in {home}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
ExecStart={command}
WorkingDirectory={home}
{variables}
# Passwords, keys and tokens of servers are not written here: NAME=value lines, mode 600
EnvironmentFile=-%h/.config/ttrain/environment
Restart=on-failure
RestartSec=30
# Only `serve` gets SIGTERM, and gives a run 30 s to write a checkpoint
KillMode=mixed
TimeoutStopSec=60
# A stage that runs out of memory fails alone
OOMPolicy=continue

[Install]
WantedBy=default.target
"""
POOL = """\
# prefect work-pool create --type {pool} ttrain-{pool}
# prefect deploy --all --prefect-file prefect.yaml
# prefect worker start --pool ttrain-{pool}
# Workers need ttrain (name an image that has it), the home as one volume, and the data at the
# same paths. Passwords, keys and tokens of servers are not written here; set them there.
"""


@dataclass(frozen=True)
class Schedule:
    """A flow with its settings, and when it runs: `cron` None only when somebody starts it."""

    kind: str
    name: str
    cron: str | None
    timezone: str
    settings: Mapping[str, Any]
    pool: str | None = None  # the kind of the work pool whose workers run it, instead of `serve`
    paused: bool = False

    @property
    def full_name(self) -> str:
        """The deployment's name, as Prefect writes it: "nightly/quickstart"."""
        return f"{self.kind}/{self.name}"

    def next_slots(self, count: int) -> list[datetime]:
        """The next slots, which pass unused where the schedule is paused; none without a cron."""
        return next_slots(self.cron, self.timezone, count) if self.cron else []


def next_slots(cron: str, timezone: str, count: int) -> list[datetime]:
    """The next slots of Prefect's own scheduler; none for an expression that never fires."""
    from prefect.server.schemas.schedules import CronSchedule

    try:
        dates = asyncio.run(CronSchedule(cron=cron, timezone=timezone).get_dates(count))
    except ValueError:
        return []
    return [date.astimezone(ZoneInfo(timezone)) for date in dates]


def folder_of(home: Path) -> Path:
    return home.resolve() / "schedules"


def path_of(home: Path, full_name: str) -> Path:
    return folder_of(home) / f"{full_name.replace('/', '-', 1)}.json"


def write(home: Path, schedule: Schedule) -> Path:
    """Write a schedule to a file that its owner alone can read: it has secrets of sources."""
    path = path_of(home, schedule.full_name)
    private_directory(path.parent)
    write_json(path, asdict(schedule), PRIVATE_FILE)
    return path


def read_all(home: Path) -> dict[str, Schedule]:
    """The schedules of a home by full name; a damaged file is skipped."""
    schedules = {}
    for path in sorted(folder_of(home).glob("*.json")):
        with contextlib.suppress(TypeError, LookupError):
            schedule = Schedule(**read_json(path))
            schedules[schedule.full_name] = schedule
    return schedules


def find(home: Path, which: str | None) -> Schedule:
    """The schedule that "nightly/quickstart", "nightly" or nothing means. Raises UsageError."""
    schedules = read_all(home)
    matches = [s for s in schedules.values() if which in (None, s.full_name, s.kind, s.name)]
    if len(matches) == 1:
        return matches[0]
    if not schedules:
        raise UsageError("nothing is scheduled; try `ttrain pipeline schedule nightly`")
    meaning = f"'{which}' means {len(matches)} schedules" if which else "there are several schedules"
    raise UsageError(f"{meaning}; name one of {', '.join(schedules)}")


def pause(home: Path, which: str | None, *, paused: bool) -> str:
    """Pause or resume a schedule; returns its full name. The slots of a paused one pass unused."""
    schedule = find(home, which)
    if schedule.pool:
        raise UsageError(f"{schedule.full_name} is on a work pool; pause it on Prefect's page")
    write(home, replace(schedule, paused=paused))
    return schedule.full_name


def remove(home: Path, which: str | None) -> str:
    """Remove a schedule; returns its full name. What serves removes its deployment."""
    schedule = find(home, which)
    path_of(home, schedule.full_name).unlink(missing_ok=True)
    return schedule.full_name


def served_by(home: Path) -> int | None:
    """The process that serves this home, if there is one."""
    process = read_object(folder_of(home) / SERVING)
    return int(process["pid"]) if process.get("pid") and is_alive(process) else None


def last_run_file(home: Path, full_name: str) -> Path:
    """Where a flow run of the schedule writes how it ended: name, outcome, slot, message."""
    return path_of(home, full_name).with_suffix(".last")


def last_run(home: Path, schedule: Schedule) -> JsonDict | None:
    """How the last run of the schedule ended."""
    return read_object(last_run_file(home, schedule.full_name)) or None


def check_cron(cron: str | None, timezone: str) -> None:
    """Raise UsageError where the cron is invalid or never fires, or there is no such time zone."""
    if timezone not in available_timezones():
        rule = "which is not a time zone; try Europe/Berlin or UTC"
        raise UsageError(f"--timezone is '{timezone}', {rule}")
    if cron is None:
        return
    if len(cron.split()) != CRON_FIELDS or not next_slots(cron, timezone, 1):
        rule = "which is not a cron expression of five fields, or never fires"
        raise UsageError(f"--cron is '{cron}', {rule}; {EXAMPLE}")


def local_timezone() -> str:
    """The name of this machine's time zone: TZ, else where /etc/localtime points, else UTC."""
    link = os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    names = (os.environ.get("TZ", "").removeprefix(":"), link, "UTC")
    return next(name for name in names if name in available_timezones())


def settings_of(home: Path, schedule: Schedule) -> Settings:
    """The settings of a schedule's file. Raises UsageError for those of another version."""
    from pydantic import ValidationError

    from ttrain.config import Settings

    try:
        return Settings.model_validate(schedule.settings)
    except ValidationError as error:
        wrong = error.errors()[0]
        setting = ".".join(map(str, wrong["loc"]))
        raise UsageError(
            f"{path_of(home, schedule.full_name)} has settings of another version of ttrain "
            f"({setting}: {wrong['msg']}); make it again with "
            f"`ttrain pipeline schedule {schedule.kind}`"
        ) from None


def parameters(settings: Mapping[str, Any]) -> JsonDict:
    """Settings for a server, which shows them to all: no secrets, and none that name code."""
    from ttrain.config import NAMES_CODE

    tree: JsonDict = copy.deepcopy(redact.masked(settings))
    for key in NAMES_CODE:
        *sections, name = key.split(".")
        section = tree
        for section_name in sections:
            section = section.get(section_name) or {}
        section.pop(name, None)
    return tree


def with_secrets(settings: Settings, schedule: Schedule | None) -> Settings:
    """The settings with the secrets of their sources: from the schedule, else the environment."""
    from ttrain.config import Settings
    from ttrain.config.loading import load

    tree = settings.model_dump()
    if schedule:
        tree = redact.restored(tree, schedule.settings)
    if redact.has_hidden(tree):
        tree = redact.restored(tree, load().settings.model_dump())
    return Settings.model_validate(tree)


def unit(home: Path) -> str:
    """The text of a unit of the user's systemd; see systemd.service(5) for the quoting."""
    variables = {"TTRAIN_HOME": str(home.resolve()), **_addresses()}
    lines = [f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()]
    return UNIT.format(
        home=str(home.resolve()).replace("%", "%%"),
        command=" ".join(_quoted(word).replace("$", "$$") for word in command()),
        variables="\n".join(lines),
    )


def command() -> list[str]:
    """The command that serves, in full."""
    return [str(Path(sysconfig.get_path("scripts")) / "ttrain"), "pipeline", "serve"]


def prefect_yaml(home: Path, schedule: Schedule) -> str:
    """The text for one schedule in a pool of the kind `schedule.pool`."""
    place = str(home.resolve())
    inside = place if schedule.pool == "process" else HOME_INSIDE
    variables: JsonDict = {"env": {"TTRAIN_HOME": inside, **_addresses()}}
    if schedule.pool == "process":
        variables |= {"working_dir": place}
    else:
        variables |= {"image": f"ttrain:{VERSION}", "image_pull_policy": "IfNotPresent"}
    if schedule.pool == "docker":
        mounts = [f"{folder}:{folder}:ro" for folder in _data_folders(schedule)]
        variables |= {"volumes": [f"{place}:{HOME_INSIDE}", *mounts], "auto_remove": True}
    slots = [{"cron": schedule.cron, "timezone": schedule.timezone, "active": True}]
    deployment = {
        "name": schedule.name,
        "entrypoint": f"ttrain.flows.serve.{schedule.kind}",
        "tags": [TAG, home_tag(home)],
        "version": VERSION,
        "schedules": slots if schedule.cron else [],
        "parameters": {"settings": parameters(schedule.settings)},
        "work_pool": {"name": f"ttrain-{schedule.pool}", "job_variables": variables},
        "pull": [],
    }
    file = {"name": "ttrain", "build": None, "push": None, "pull": None}
    file["deployments"] = [deployment]
    text = yaml.safe_dump(file, sort_keys=False, allow_unicode=True, width=100)
    return POOL.format(pool=schedule.pool) + text


def _data_folders(schedule: Schedule) -> list[str]:
    """The folders of this machine that hold the data; of a glob its part without wildcards."""
    sources = [source for sources in schedule.settings["data"].values() for source in sources]
    paths = [source["path"] if isinstance(source, dict) else source for source in sources]
    folders = [GLOB_OR_FILE.sub("", path) for path in paths if path.startswith("/")]
    return list(dict.fromkeys(folders))


def _addresses() -> dict[str, str]:
    """The servers that the environment names; without those whose address holds a password."""
    named = {name: os.environ[name] for name in INHERITED if os.environ.get(name)}
    return {name: url for name, url in named.items() if "@" not in urlsplit(url).netloc}


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
