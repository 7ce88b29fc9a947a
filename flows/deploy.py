"""The schedules of a home, and what is made of them: a systemd unit, a prefect.yaml.

Each schedule is one file, `schedules/<kind>-<name>.json`; `ttrain pipeline serve` (flows/serve.py)
makes the deployments of a Prefect server from these files. They are the truth, the server's
database is a view, so nothing here needs a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib import resources
from pathlib import Path
from string import Template
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
SECRETS = (
    "PREFECT_API_KEY", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN",
)  # fmt: skip
HOME_INSIDE = "/ttrain"  # of a container; a volume of the host or of the cluster


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
    note = "Not written here: {}. Put NAME=value lines into ~/.config/ttrain/environment, mode 600."
    return _filled(
        "ttrain.service",
        secrets=_secrets_note(note),
        home=str(home.resolve()).replace("%", "%%"),
        command=" ".join(_quoted(word).replace("$", "$$") for word in command()),
        variables="\n".join(lines),
    )


def command() -> list[str]:
    """The command that serves, in full: the script of this environment, else this Python."""
    script = Path(sys.executable).with_name("ttrain")
    start = [sys.executable, "-P", "-c", "from ttrain.cli.main import main; main()"]
    return [*([str(script)] if script.is_file() else start), "pipeline", "serve"]


def prefect_yaml(home: Path, schedule: Schedule) -> str:
    """The text for one schedule in a pool of the kind `schedule.pool`."""
    inside = str(home.resolve()) if schedule.pool == "process" else HOME_INSIDE
    slots = [{"cron": schedule.cron, "timezone": schedule.timezone, "active": True}]
    mounts = [f"{folder}:{folder}:ro" for folder in _data_folders(schedule)]
    values = {
        "name": schedule.name,
        "tags": [TAG, home_tag(home)],
        "schedules": slots if schedule.cron else [],
        "home": str(home.resolve()),
        "environment": {"TTRAIN_HOME": inside, **_addresses()},
        "volumes": [f"{home.resolve()}:{HOME_INSIDE}", *mounts],
    }
    shown = parameters(schedule.settings)
    settings = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=100)
    return _filled(
        f"prefect-{schedule.pool}.yaml",
        secrets=_secrets_note("Set where the worker runs, not here: {}"),
        flow=schedule.kind,
        version=VERSION,
        settings=textwrap.indent(settings, " " * 6).rstrip(),
        # JSON is YAML, too
        **{name: json.dumps(value, ensure_ascii=False) for name, value in values.items()},
    )


def _data_folders(schedule: Schedule) -> list[str]:
    """The folders of this machine that hold the data; of a glob its part without wildcards."""
    sources = [source for sources in schedule.settings["data"].values() for source in sources]
    paths = [source["path"] if isinstance(source, dict) else source for source in sources]
    here = [path for path in paths if path.startswith("/")]
    fixed = [Path(re.split(r"/[^/]*[*?[]", path)[0]) for path in here]
    folders = [path.parent if path.suffix and not path.is_dir() else path for path in fixed]
    return list(dict.fromkeys(map(str, folders)))


def _filled(template: str, **values: str) -> str:
    """A file of templates/ with its $names filled in."""
    path = resources.files("ttrain.flows").joinpath("templates", template)
    return Template(path.read_text(encoding="utf-8")).substitute(values)


def _addresses() -> dict[str, str]:
    """The servers that the environment names; without those whose address holds a password."""
    named = {name: os.environ[name] for name in INHERITED if os.environ.get(name)}
    return {name: url for name, url in named.items() if "@" not in urlsplit(url).netloc}


def _secrets_note(text: str) -> str:
    """A comment with the names of the variables that are needed there, but must not be shown."""
    given = [name for name in (*SECRETS, *INHERITED) if os.environ.get(name)]
    names = [name for name in given if name not in _addresses()]
    return f"# {text.format(', '.join(names))}\n" if names else ""


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
