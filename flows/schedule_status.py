"""The state of a home's schedules: next slot, last outcome, paused; from their files and a running Prefect server.

Asks the server by its REST API and does not import Prefect, which takes 1 s of CPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote
from zoneinfo import ZoneInfo

from ttrain.flows import prefect_api, schedule_files, slots
from ttrain.flows.schedule_files import Schedule
from ttrain.store import server_records

TERMINAL_STATES = ("COMPLETED", "FAILED", "CANCELLED", "CRASHED")  # of Prefect


@dataclass(frozen=True)
class EndedRun:
    """The newest run of a schedule that ended: its name (a night's is that of its record), state, slot and message."""

    name: str
    outcome: str
    slot: datetime
    message: str | None


@dataclass(frozen=True)
class ScheduleStatus:
    """A schedule and its state on the server; `on_server` is None where no server could be asked."""

    schedule: Schedule
    on_server: bool | None
    paused: bool
    next_slot: datetime | None
    last: EndedRun | None = None

    def to_row(self, timezone: str) -> tuple[str, str, str, str]:
        """Name, cron, next slot and outcome of the last one, for a table whose times are of one zone."""
        schedule, zone = self.schedule, ZoneInfo(timezone)
        cron = "by hand"
        if schedule.cron:
            cron = schedule.cron if schedule.timezone == timezone else f"{schedule.cron} ({schedule.timezone})"
        following = "none" if self.next_slot is None else f"{self.next_slot.astimezone(zone):%a %Y-%m-%d %H:%M}"
        following = "paused" if self.paused else following
        if self.on_server is False:
            following = f"{following} (not on the server yet)"
        if self.last is None:
            return schedule.full_name, cron, following, "none"
        ended = f"{self.last.name}, {self.last.slot.astimezone(zone):%Y-%m-%d %H:%M}: {self.last.outcome}"
        return schedule.full_name, cron, following, f"{ended}, {self.last.message}" if self.last.message else ended

    def to_json(self) -> dict[str, Any]:
        """The same as JSON, for scripts."""
        schedule, last = self.schedule, None
        if self.last is not None:
            last = {**asdict(self.last), "slot": self.last.slot.isoformat()}
        return {
            "schedule": schedule.full_name,
            **{name: getattr(schedule, name) for name in ("kind", "name", "cron", "timezone", "pool")},
            "on_server": self.on_server,
            "paused": self.paused,
            "next": self.next_slot.isoformat() if self.next_slot else None,
            "last": last,
        }


def common_timezone(listing: Sequence[ScheduleStatus]) -> str:
    """The time zone of a table: that of the schedules if they have the same one, else this machine's."""
    zones = {entry.schedule.timezone for entry in listing}
    return zones.pop() if len(zones) == 1 else schedule_files.local_timezone()


def list_schedules(home: Path) -> list[ScheduleStatus]:
    """The schedules of this home, with their state on the server where one answers; none is started for it."""
    schedules = schedule_files.read_all(home)
    if not schedules:
        return []
    os.environ.update(prefect_api.prefect_environment(home))
    url = os.environ.get("PREFECT_API_URL")
    if not url or not (server_records.live_server(home, "prefect") or prefect_api.status_of(url, home)):
        return [_unknown_status(schedule, None) for schedule in schedules.values()]
    prefect_api.check_prefect_server(home)
    return [_status_of(url, home, schedule) for schedule in schedules.values()]


def is_of_home(tags: Iterable[str], home: Path) -> bool:
    """Whether a deployment with these tags is of this home. A home that was moved, with the database of its server in it,
    takes its deployments along."""
    theirs = home_of(tags)
    has_moved = theirs is not None and not Path(theirs).exists() and server_records.live_server(home, "prefect") is not None
    return theirs == str(home.resolve()) or has_moved


def home_of(tags: Iterable[str]) -> str | None:
    """The home of a deployment with these tags."""
    return next((tag.removeprefix("home:") for tag in tags if tag.startswith("home:")), None)


def _next_slot(schedule: Schedule, cron: str | None, timezone: str) -> datetime | None:
    """The next slot of a cron: from the schedule's file if it is the same cron and the file has one left."""
    if not cron:
        return None
    now = datetime.now(UTC)
    if (cron, timezone) == (schedule.cron, schedule.timezone):
        for slot in map(datetime.fromisoformat, schedule.slots):
            if slot >= now:
                return slot
    return next(iter(slots.next_slots(cron, timezone, 1, now)), None)


def _unknown_status(schedule: Schedule, on_server: bool | None) -> ScheduleStatus:
    """The status of a schedule as its file has it."""
    next_slot = _next_slot(schedule, schedule.cron, schedule.timezone)
    return ScheduleStatus(schedule, on_server, schedule.paused, next_slot)


def _status_of(api_url: str, home: Path, schedule: Schedule) -> ScheduleStatus:
    deployment = prefect_api.ask(api_url, home, f"/deployments/name/{quote(schedule.full_name)}")
    if not deployment or not is_of_home(deployment["tags"], home):
        return _unknown_status(schedule, False)
    crons = [entry["schedule"] for entry in deployment["schedules"] if entry["active"]]
    following = [
        slot for entry in crons if (slot := _next_slot(schedule, entry.get("cron"), entry.get("timezone") or "UTC"))
    ]
    ended_runs = {
        "flow_runs": {
            "deployment_id": {"any_": [deployment["id"]]},
            "state": {"type": {"any_": TERMINAL_STATES}},
        },
        "sort": "END_TIME_DESC",
        "limit": 1,
    }
    runs = prefect_api.ask(api_url, home, "/flow_runs/filter", ended_runs)
    last = _ended_run(runs[0]) if runs else None
    return ScheduleStatus(schedule, True, bool(deployment["paused"]), min(following, default=None), last)


def _ended_run(run: dict[str, Any]) -> EndedRun:
    state, slot = run["state"], datetime.fromisoformat(run["expected_start_time"])
    return EndedRun(run["name"], state["name"], slot, state["message"])
