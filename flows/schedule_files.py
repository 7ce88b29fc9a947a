"""The schedules of a home: one file each, `schedules/<kind>-<name>.json`, beside the deployment on Prefect's server.

The server decides when. The deployment is made again from the file where the server's database is another or a new one, and
schedules are listed from the files where no server answers. Does not import Prefect.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from ttrain.core import redact
from ttrain.core.files import (
    PRIVATE_FILE,
    JsonDict,
    Taken,
    exclusive,
    private_directory,
    read_json,
    read_object,
    refuse,
    write_bytes,
    write_json,
)

if TYPE_CHECKING:
    from ttrain.config import Settings

KINDS = ("nightly", "full")
SERVING = "serving.txt"  # in the folder of schedules: the process that serves


@dataclass(frozen=True)
class Schedule:
    """A flow with its settings, and when it runs: `cron` None only when somebody starts it."""

    kind: str
    name: str
    cron: str | None
    timezone: str
    settings: Mapping[str, Any]
    pool: str | None = None  # the work pool whose workers run it, in place of `ttrain pipeline serve`
    paused: bool = False  # as far as the server is known; it counts where a deployment is made anew or no server answers
    slots: list[str] = field(default_factory=list)  # the next ones when it was made, with their time zone

    @property
    def full_name(self) -> str:
        """The deployment's name, as Prefect writes it: "nightly/quickstart"."""
        return f"{self.kind}/{self.name}"


def folder_of(home: Path) -> Path:
    return home.resolve() / "schedules"


def changing(home: Path) -> contextlib.AbstractContextManager[None]:
    """Lock for changes of schedules here and on the server: two processes that make one deployment give it two crons."""
    return exclusive(private_directory(folder_of(home)) / "change.lock")


def write(home: Path, schedule: Schedule) -> Path:
    """Write a schedule to a file that only its owner can read: it has secrets of sources, and settings that name code."""
    path = _path(home, schedule.full_name)
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


def record_paused(home: Path, paused: Mapping[str, bool]) -> None:
    """Record which deployments, by full name, are paused on the server, where its UI pauses and resumes them too."""
    if all(paused.get(name, schedule.paused) == schedule.paused for name, schedule in read_all(home).items()):
        return
    with changing(home):
        for name, schedule in read_all(home).items():
            write(home, replace(schedule, paused=paused.get(name, schedule.paused)))


def served_by(home: Path) -> int | None:
    """The process that serves this home, if there is one."""
    folder = folder_of(home)
    if not folder.exists():
        return None
    with contextlib.suppress(Taken), exclusive(folder / "serve.lock", refuse):
        return None
    pid = read_object(folder / SERVING).get("pid")
    return int(pid) if pid else None


def parameters(schedule: Schedule) -> JsonDict:
    """The settings of a schedule for a server, which shows them to all: no secrets, and none that name code."""
    from ttrain.config import NAMES_CODE

    tree: JsonDict = copy.deepcopy(redact.masked(schedule.settings))
    for key in NAMES_CODE:
        *sections, name = key.split(".")
        section = tree
        for section_name in sections:
            section = section.get(section_name) or {}
        section.pop(name, None)
    return tree


def with_secrets(settings: Settings, schedule: Schedule | None) -> Settings:
    """The settings of a flow run with the secrets of its sources: from its schedule, else the environment."""
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


def remove(home: Path, full_name: str) -> None:
    for path in (_path(home, full_name), _path(home, full_name).with_suffix(".webhook")):
        path.unlink(missing_ok=True)


def webhook_file(home: Path, kind: str, name: str) -> Path:
    """The file of a schedule's webhook."""
    return folder_of(home) / f"{kind}-{name}.webhook"


def webhook_in_file(home: Path, kind: str, settings: Settings) -> Settings:
    """The same settings with the webhook in a file that only the user can read: a server shows parameters to all."""
    path = webhook_file(home, kind, settings.name)
    if not settings.notify.webhook:
        if settings.notify.webhook_file != str(path):
            path.unlink(missing_ok=True)  # the file of an earlier schedule of this name
        return settings
    private_directory(path.parent)
    write_bytes(path, f"{settings.notify.webhook}\n".encode(), PRIVATE_FILE)
    return settings.replaced({"notify": {"webhook": None, "webhook_file": str(path)}})


def with_timezone(settings: Settings, timezone: str) -> Settings:
    """The same settings, whose deadline is by the clock of the schedule unless another one is set."""
    if settings.nightly.timezone is not None or timezone not in available_timezones():
        return settings
    return settings.replaced({"nightly": {"timezone": timezone}})


def local_timezone() -> str:
    """The name of this machine's time zone: TZ, else where /etc/localtime points, else UTC."""
    link = os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2]
    for name in (os.environ.get("TZ", "").removeprefix(":"), link):
        with contextlib.suppress(ZoneInfoNotFoundError, ValueError, OSError):
            if name and not name.startswith("/"):
                return ZoneInfo(name).key
    return "UTC"


def _path(home: Path, full_name: str) -> Path:
    return folder_of(home) / f"{full_name.replace('/', '-', 1)}.json"
