"""The schedules of a home, and the systemd unit that serves them.

A schedule is one file, `schedules/<kind>-<name>.json`, with the settings of its runs. `ttrain
pipeline serve` makes deployments of a Prefect server from these files.
"""

import asyncio
import contextlib
import os
import sysconfig
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo, available_timezones

from ttrain.core.files import (
    PRIVATE_FILE,
    JsonObject,
    private_directory,
    read_json,
    read_object,
    write_json,
)
from ttrain.errors import UsageError
from ttrain.store.runs import is_alive

SERVING = "serving.txt"  # in the folder of schedules: the process that serves
CRON_FIELDS = 5  # Prefect takes six, the last for seconds
EXAMPLE = 'write "minute hour day month weekday", for example "0 2 * * *" for two at night'

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
Environment={variable}
# Servers (PREFECT_API_URL, MLFLOW_TRACKING_URI), passwords and keys: NAME=value lines, mode 600
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


@dataclass(frozen=True)
class Schedule:
    """A flow with its settings and its times; without a cron it is started by hand."""

    kind: str
    name: str
    cron: str | None
    timezone: str
    settings: JsonObject
    pool: str | None = None  # the work pool whose workers run it, instead of `serve`
    paused: bool = False

    @property
    def full_name(self) -> str:
        """The deployment's name, as Prefect writes it: "nightly/quickstart"."""
        return f"{self.kind}/{self.name}"


def next_slots(cron: str | None, timezone: str, count: int = 1) -> list[datetime]:
    """The next slots by Prefect's scheduler; none without a cron."""
    from prefect.server.schemas.schedules import CronSchedule

    dates: list[datetime] = []
    with contextlib.suppress(ValueError):
        dates = (
            asyncio.run(CronSchedule(cron=cron, timezone=timezone).get_dates(count)) if cron else []
        )
    return [date.astimezone(ZoneInfo(timezone)) for date in dates]


def folder_of(home: Path) -> Path:
    return home.resolve() / "schedules"


def path_of(home: Path, full_name: str) -> Path:
    return folder_of(home) / f"{full_name.replace('/', '-', 1)}.json"


def write(home: Path, schedule: Schedule) -> Path:
    """Write a schedule, readable by its owner only: it has secrets of sources."""
    path = path_of(home, schedule.full_name)
    private_directory(path.parent)
    write_json(path, asdict(schedule), PRIVATE_FILE)
    return path


def read_all(home: Path) -> dict[str, Schedule]:
    """The schedules of a home by full name."""
    schedules = [Schedule(**read_json(path)) for path in sorted(folder_of(home).glob("*.json"))]
    return {schedule.full_name: schedule for schedule in schedules}


def find(home: Path, which: str | None) -> Schedule:
    """The schedule that "nightly/quickstart", "nightly" or nothing means. Raises UsageError."""
    schedules = read_all(home)
    matches = [s for s in schedules.values() if which in (None, s.full_name, s.kind, s.name)]
    if len(matches) == 1:
        return matches[0]
    if not schedules:
        raise UsageError("nothing is scheduled; try `ttrain pipeline schedule nightly`")
    meaning = (
        f"'{which}' means {len(matches)} schedules" if which else "there are several schedules"
    )
    raise UsageError(f"{meaning}; name one of {', '.join(schedules)}")


def pause(home: Path, which: str | None, *, paused: bool) -> str:
    """Pause or resume a schedule; returns its full name. The slots of a paused one pass unused."""
    schedule = find(home, which)
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
    """The file with the end of the schedule's last flow run: name, outcome, slot, message."""
    return path_of(home, full_name).with_suffix(".last")


def check_cron(cron: str | None, timezone: str) -> None:
    """Raise UsageError for an invalid cron, one that never fires, or an unknown time zone."""
    if timezone not in available_timezones():
        raise UsageError(
            f"--timezone is '{timezone}', which is not a time zone; try Europe/Berlin or UTC"
        )
    if cron is not None and (len(cron.split()) != CRON_FIELDS or not next_slots(cron, timezone)):
        raise UsageError(
            f"--cron is '{cron}', which is not a cron expression of five fields, or never fires; "
            f"{EXAMPLE}"
        )


def local_timezone() -> str:
    """The name of this machine's time zone: TZ, else /etc/localtime, else UTC."""
    names = (
        os.environ.get("TZ", "").removeprefix(":"),
        os.path.realpath("/etc/localtime").partition("/zoneinfo/")[2],
        "UTC",
    )
    return next(name for name in names if name in available_timezones())


def unit(home: Path) -> str:
    """The text of a systemd user unit; systemd.service(5) has the quoting."""
    path = str(home.resolve())
    words = [str(Path(sysconfig.get_path("scripts")) / "ttrain"), "pipeline", "serve"]
    return UNIT.format(
        home=path.replace("%", "%%"),
        variable=_quoted(f"TTRAIN_HOME={path}"),
        command=" ".join(_quoted(word).replace("$", "$$") for word in words),
    )


def _quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'
