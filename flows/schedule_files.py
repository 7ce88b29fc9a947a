"""What is scheduled from a home: one file each, `schedules/<kind>-<name>.json`, beside the deployment on Prefect's server.

The server decides when. The file makes the deployment again where the server's database is another or a new one, and says
what is scheduled where no server answers. Imports no Prefect.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from ttrain.config import Settings
from ttrain.store import read_json, write_json

KINDS: Final = ("nightly", "full")


@dataclass(frozen=True)
class Schedule:
    """A flow with its settings, and when it runs: `cron` None only when somebody starts it."""

    kind: str
    name: str
    cron: str | None
    timezone: str
    settings: Mapping[str, Any]
    pool: str | None = None  # the work pool whose workers run it, in place of `ttrain pipeline serve`

    @property
    def full_name(self) -> str:
        """The deployment's, as Prefect writes it: "nightly/quickstart"."""
        return f"{self.kind}/{self.name}"


def folder_of(home: Path) -> Path:
    return home.resolve() / "schedules"


@contextlib.contextmanager
def changing(home: Path) -> Iterator[None]:
    """Held while a schedule is changed here and on the server: two that make the same deployment give it two crons."""
    from filelock import FileLock

    folder = folder_of(home)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "change.lock", thread_local=False):
        yield


def write(home: Path, schedule: Schedule) -> Path:
    """Keep a schedule."""
    path = _path(home, schedule.full_name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(schedule))
    return path


def read_all(home: Path) -> dict[str, Schedule]:
    """The schedules of a home by full name; a damaged file is none."""
    found = {}
    for path in sorted(folder_of(home).glob("*.json")):
        with contextlib.suppress(TypeError, LookupError):
            schedule = Schedule(**read_json(path))
            found[schedule.full_name] = schedule
    return found


def remove(home: Path, full_name: str) -> None:
    for path in (_path(home, full_name), _path(home, full_name).with_suffix(".webhook")):
        path.unlink(missing_ok=True)


def webhook_in_file(home: Path, kind: str, settings: Settings) -> Settings:
    """The same settings with the webhook in a file that only the user can read: a server shows parameters to all."""
    path = folder_of(home) / f"{kind}-{settings.name}.webhook"
    if not settings.notify.webhook:
        if settings.notify.webhook_file != str(path):
            path.unlink(missing_ok=True)  # of an earlier schedule of the name
        return settings
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # a new file: whoever may read an old one reads on
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(settings.notify.webhook + "\n")
    aside.replace(path)
    notify = settings.notify.model_copy(update={"webhook": None, "webhook_file": str(path)})
    return settings.model_copy(update={"notify": notify})


def with_timezone(settings: Settings, timezone: str) -> Settings:
    """The same settings, whose deadline is by the clock of the schedule unless another one is set."""
    if settings.nightly.timezone is not None or timezone not in available_timezones():
        return settings
    return settings.model_copy(update={"nightly": settings.nightly.model_copy(update={"timezone": timezone})})


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
