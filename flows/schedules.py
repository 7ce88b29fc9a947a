"""The schedules of a home: one file each, `schedules/<kind>-<name>.json`.

`ttrain pipeline serve` (flows/serve.py) makes the deployments of a Prefect server from these files
(flows/deploy.py), at its start and where one changes: they are the truth, the server's database
is a view. Nothing here needs a server, and listing does not import Prefect, which takes 1 s.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from ttrain.core import redact
from ttrain.core.files import (
    PRIVATE_FILE,
    JsonDict,
    private_directory,
    read_json,
    read_object,
    write_json,
)
from ttrain.errors import UsageError
from ttrain.flows.slots import YEARS, next_slots
from ttrain.store.runs import is_alive

if TYPE_CHECKING:
    from ttrain.config import Settings

KINDS = ("nightly", "full")
SERVING = "serving.txt"  # in the folder of schedules: the process that serves
LAST = "last.txt"  # there, too: how the last run of each schedule ended, by full name

CRON_FIELDS = 5
KEPT_SLOTS = 100  # in a schedule's file, so that listing it need not import Prefect
EXAMPLE = 'write "minute hour day month weekday", for example "0 2 * * *" for two at night'


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
    slots: list[str] = field(default_factory=list)  # the next ones when it was written

    @property
    def full_name(self) -> str:
        """The deployment's name, as Prefect writes it: "nightly/quickstart"."""
        return f"{self.kind}/{self.name}"

    def next_slot(self) -> datetime | None:
        """The next slot, which passes unused where the schedule is paused; None without a cron."""
        if not self.cron:
            return None
        kept = map(datetime.fromisoformat, self.slots)
        slots = [slot for slot in kept if slot >= datetime.now(UTC)]
        return next(iter(slots or next_slots(self.cron, self.timezone, 1)), None)


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
    names = ", ".join(schedules)
    if not matches:
        raise UsageError(f"no schedule is called '{which}'; there are: {names}")
    meaning = f"'{which}' means" if which else "there are"
    raise UsageError(f"{meaning} several schedules; name one: {names}")


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


def last_runs(home: Path) -> JsonDict:
    """How the last run of each schedule ended, by full name: its name, outcome, slot, message."""
    return read_object(folder_of(home) / LAST)


def check_cron(cron: str | None, timezone: str) -> None:
    """Raise UsageError where the cron is invalid or never fires, or there is no such time zone."""
    from prefect.client.schemas.schedules import CronSchedule

    if timezone not in available_timezones():
        rule = "which is not a time zone; try Europe/Berlin or UTC"
        raise UsageError(f"--timezone is '{timezone}', {rule}")
    if cron is None:
        return
    if len(cron.split()) != CRON_FIELDS:
        raise UsageError(f"--cron is '{cron}' but must have five fields; {EXAMPLE}")
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValueError:
        raise UsageError(f"--cron is '{cron}', which is not a cron expression; {EXAMPLE}") from None
    if not next_slots(cron, timezone, 1):
        rule = f"which does not fire in the next {YEARS} years"
        raise UsageError(f"--cron is '{cron}', {rule}; {EXAMPLE}")


def with_slots(schedule: Schedule) -> Schedule:
    """The schedule with its next slots."""
    if not schedule.cron:
        return schedule
    slots = next_slots(schedule.cron, schedule.timezone, KEPT_SLOTS)
    return replace(schedule, slots=[slot.isoformat() for slot in slots])


def local_timezone() -> str:
    """The name of this machine's time zone: TZ, else where /etc/localtime points, else UTC."""
    link = os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    for name in (os.environ.get("TZ", "").removeprefix(":"), link):
        with contextlib.suppress(ZoneInfoNotFoundError, ValueError, OSError):
            if name and not name.startswith("/"):
                return ZoneInfo(name).key
    return "UTC"


def settings_of(home: Path, schedule: Schedule) -> Settings:
    """The settings of a schedule's file. Raises UsageError for those of another version."""
    from pydantic import ValidationError

    from ttrain.config import Settings

    try:
        return Settings.model_validate(schedule.settings)
    except ValidationError as error:
        wrong = error.errors()[0]
        place, rule = ".".join(map(str, wrong["loc"])), wrong["msg"]
        path = path_of(home, schedule.full_name)
        raise UsageError(
            f"{path} has settings of another version of ttrain ({place}: {rule}); "
            f"make it again with `ttrain pipeline schedule {schedule.kind}`"
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
    if not redact.has_hidden(tree):
        return settings
    if schedule:
        tree = redact.restored(tree, schedule.settings)
    if redact.has_hidden(tree):
        tree = redact.restored(tree, load().settings.model_dump())
    return Settings.model_validate(tree)
