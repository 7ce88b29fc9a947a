"""Deployments with a cron: made, listed, paused, resumed and removed, on the Prefect server that a run would use.

Prefect's scheduler sets the slots; `flows/serving.py` runs those that are due. Functions import Prefect, after its
environment is chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo, available_timezones

from ttrain.errors import UsageError
from ttrain.flows import flow_runs, prefect_run, schedule_files, servers
from ttrain.flows.flow_runs import TAG, home_tag
from ttrain.flows.schedule_files import Schedule
from ttrain.store import server_records

EXAMPLE = 'write "minute hour day month weekday", for example "0 2 * * *" for two at night'
FIELDS = 5
CLOCK_CHANGE = timedelta(hours=3)  # more than any zone's clock is set forward at a time
YEARS = 5  # a cron that has not fired by then never does; 29 February may take eight, but is not worth waiting for


class RefusedError(UsageError):
    """The server refuses the deployment."""


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


def check(cron: str, timezone: str) -> None:
    """Raise UsageError where the cron is invalid or never fires, or the time zone does not exist."""
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    _check_form(cron, timezone)
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError:
        raise UsageError(f"--cron is '{cron}', which is not a cron expression; {EXAMPLE}") from None
    if not next_slots(cron, timezone, 1):
        raise UsageError(f"--cron is '{cron}', which does not fire in the next {YEARS} years; {EXAMPLE}")


def _check_form(cron: str | None, timezone: str) -> None:
    """Check what can be checked without Prefect, before a server is started."""
    if timezone not in available_timezones():
        raise UsageError(f"--timezone is '{timezone}', which is not a time zone; try Europe/Berlin or UTC")
    if cron is not None and len(cron.split()) != FIELDS:
        raise UsageError(f"--cron is '{cron}' but must have five fields; {EXAMPLE}")


def next_slots(cron: str, timezone: str, count: int, start: datetime | None = None) -> list[datetime]:
    """The next slots, with their time zone: those of Prefect's own scheduler, each on its date."""
    from prefect.server.schemas.schedules import CronSchedule

    begin = start or datetime.now(UTC)
    schedule = CronSchedule(cron=cron, timezone=timezone)
    end = begin + timedelta(days=366 * YEARS)

    async def dates() -> list[datetime]:
        soon = begin + timedelta(hours=2)
        # Also the slots of the last hours, which may be moved past `begin`
        found = await schedule.get_dates(start=begin - CLOCK_CHANGE, end=soon)
        # In the second of two equal hours Prefect begins with the slots of the first, up to 60
        found += await schedule.get_dates(count + 60, start=soon, end=end)
        return [await on_its_date(date, cron, timezone) for date in found]

    try:
        slots = asyncio.run(dates())
    except ValueError:  # croniter raises it where no date fits
        return []
    return sorted({slot for slot in slots if slot >= begin})[:count]


async def on_its_date(slot: datetime, cron: str, timezone: str) -> datetime:
    """The slot in its time zone, on the date that the cron means.

    Prefect runs a time that the clock leaves out an hour earlier. At midnight that is the date
    before, which would have two nights and the next date none. Such a slot moves to the end of
    the change: 00:30 is 01:30 of its date.
    """
    from prefect.server.schemas.schedules import CronSchedule

    zone = ZoneInfo(timezone)
    local = slot.astimezone(zone)
    skipped = _utc_offset(slot + CLOCK_CHANGE, zone) - _utc_offset(slot, zone)
    moved = (slot + skipped).astimezone(zone)
    if skipped <= timedelta(0) or moved.date() == local.date():
        return local
    shown = local.replace(tzinfo=UTC)  # in UTC no time is left out: it is one of the cron or not
    is_own_time = shown in await CronSchedule(cron=cron, timezone="UTC").get_dates(1, start=shown)
    return local if is_own_time else moved


def _utc_offset(moment: datetime, zone: ZoneInfo) -> timedelta:
    return moment.astimezone(zone).utcoffset() or timedelta(0)


def create(home: Path, schedule: Schedule) -> bool:
    """Create or change the deployment; returns whether it existed. A paused one stays paused.

    Raises UsageError for an invalid cron or time zone, or where another home has a deployment of that name on the server.
    """
    _check_form(schedule.cron, schedule.timezone)
    with prefect_client(home) as client:
        if schedule.cron:
            check(schedule.cron, schedule.timezone)
        with schedule_files.changing(home):
            deployment = _deployment(client, schedule.full_name)
            if deployment and not _is_ours(deployment, home):
                raise UsageError(
                    f"the deployment {schedule.full_name} on {os.environ['PREFECT_API_URL']} belongs to "
                    f"{_home_of(deployment)}; set another name=..., or remove that one"
                )
            earlier = deployment or schedule_files.read_all(home).get(schedule.full_name)
            schedule = replace(schedule, paused=bool(earlier and earlier.paused))
            apply(home, schedule)
            schedule_files.write(home, schedule)
        flow_runs.create_automation()
    return deployment is not None


def make_missing(home: Path, full_name: str) -> None:
    """Create the deployment of a schedule on a server that lacks it, unless the schedule changed meanwhile."""
    with prefect_client(home) as client, schedule_files.changing(home):
        schedule = schedule_files.read_all(home).get(full_name)
        deployment = _deployment(client, full_name)
        if schedule and (not deployment or (_is_ours(deployment, home) and _home_of(deployment) != str(home.resolve()))):
            apply(home, schedule)


def apply(home: Path, schedule: Schedule) -> None:
    """Create or change the deployment on the server that the environment names. Raises RefusedError where it refuses."""
    from prefect.deployments.runner import DeploymentApplyError
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.schedules import Cron
    from prefect.types.entrypoint import EntrypointType

    from ttrain.core.machine import VERSION
    from ttrain.flows import deployments

    flow = getattr(deployments, schedule.kind)
    slots = Cron(schedule.cron, timezone=schedule.timezone, slug="cron") if schedule.cron else None
    deployment = flow.to_deployment(
        name=schedule.name,
        schedule=slots,
        paused=schedule.paused,
        parameters={"settings": schedule_files.parameters(schedule)},
        description=f"{flow.description}\n\nIts home is `{home.resolve()}`.",
        tags=[TAG, home_tag(home)],
        version=VERSION,
        entrypoint_type=EntrypointType.MODULE_PATH,
    )
    if not slots:
        deployment.schedules = []  # removes an earlier cron
    try:
        deployment.apply()
    except DeploymentApplyError as error:
        cause = error.__cause__
        if isinstance(cause, PrefectHTTPStatusError) and cause.response.is_client_error:
            raise RefusedError(
                f"the Prefect server refuses {schedule.full_name}: {_reason(cause.response)}; where its settings are of "
                f"another version of ttrain, make it again with `ttrain pipeline schedule {schedule.kind}`, or remove it"
            ) from None
        raise cause or error from None  # the server did not answer, or answered with an error


def _reason(response: Any) -> str:
    """Why a server refused a request, without the request, which it repeats: some 100 kB of settings."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        body = response.json()
        return str(body.get("detail") or "; ".join(error["msg"] for error in body["exception_detail"]))
    return f"HTTP {response.status_code}"


def list_schedules(home: Path) -> list[ScheduleStatus]:
    """The schedules of this home, with their state on the server where one answers; none is started for it."""
    schedules = schedule_files.read_all(home)
    if not schedules:
        return []
    url, living = os.environ.get("PREFECT_API_URL"), server_records.live_server(home, "prefect")
    if not living and not (url and servers.status_of(url, home)):
        os.environ.update(servers.prefect_environment(home))
        return [_unknown_status(schedule, None) for schedule in schedules.values()]
    with prefect_client(home) as client:
        return [_status_of(client, home, schedule) for schedule in schedules.values()]


def pause(home: Path, which: str | None, *, paused: bool) -> str:
    """Pause or resume a schedule; returns its full name. A paused one's slots pass unused."""
    schedule = find_schedule(home, which)
    with prefect_client(home) as client, schedule_files.changing(home):
        deployment = _deployment(client, schedule.full_name)
        if schedule.pool and not deployment:
            raise UsageError(
                f"{schedule.full_name} is not on the server yet; run `prefect deploy --all` with its prefect.yaml"
            )
        if not deployment or not _is_ours(deployment, home):
            apply(home, replace(schedule, paused=paused))
        elif paused:
            client.pause_deployment(deployment.id)
        else:
            client.resume_deployment(deployment.id)
        schedule_files.write(home, replace(schedule, paused=paused))
    return schedule.full_name


def remove(home: Path, which: str | None) -> str:
    """Remove a schedule, its deployment and its slots to come; what ran stays in Prefect. Returns its full name."""
    schedule = find_schedule(home, which)
    with prefect_client(home) as client, schedule_files.changing(home):
        deployment = _deployment(client, schedule.full_name)
        if deployment and _is_ours(deployment, home):
            client.delete_deployment(deployment.id)
        schedule_files.remove(home, schedule.full_name)
    return schedule.full_name


def find_schedule(home: Path, which: str | None) -> Schedule:
    """The schedule that "nightly/quickstart", "nightly" or nothing means. Raises UsageError where it is none or several."""
    schedules = schedule_files.read_all(home)
    matches = [schedule for name, schedule in schedules.items() if which in (None, name, schedule.kind, schedule.name)]
    if len(matches) == 1:
        return matches[0]
    if not schedules:
        raise UsageError("nothing is scheduled; try `ttrain pipeline schedule nightly`")
    names = ", ".join(schedules)
    if not matches:
        raise UsageError(f"no schedule is called '{which}'; there are: {names}")
    raise UsageError(f"{f'{chr(39)}{which}{chr(39)} means' if which else 'there are'} several schedules; name one: {names}")


@contextlib.contextmanager
def prefect_client(home: Path) -> Iterator[Any]:
    """A client of the server that PREFECT_API_URL names, that `up` or `serve` runs, or that is started for this alone."""
    wait = prefect_run.begin(home)
    unopened = flow_runs.sync_client()  # imports Prefect while the server starts
    wait()
    with unopened as client:
        yield client


def home_filter(home: Path) -> Any:
    """A filter of the deployments of this home."""
    from prefect.client.schemas.filters import DeploymentFilter

    return DeploymentFilter.model_validate({"tags": {"all_": [TAG, home_tag(home)]}})


def _deployment(client: Any, full_name: str) -> Any:
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _is_ours(deployment: Any, home: Path) -> bool:
    """A home that was moved, with the database of its server in it, takes its deployments along."""
    theirs = _home_of(deployment)
    has_moved = theirs is not None and not Path(theirs).exists() and server_records.live_server(home, "prefect") is not None
    return theirs == str(home.resolve()) or has_moved


def _home_of(deployment: Any) -> str | None:
    return next((tag.removeprefix("home:") for tag in deployment.tags if tag.startswith("home:")), None)


def _next_slot(cron: str | None, timezone: str) -> datetime | None:
    return next(iter(next_slots(cron, timezone, 1)), None) if cron else None


def _unknown_status(schedule: Schedule, on_server: bool | None) -> ScheduleStatus:
    """The status of a schedule as its file has it."""
    return ScheduleStatus(schedule, on_server, schedule.paused, _next_slot(schedule.cron, schedule.timezone))


def _status_of(client: Any, home: Path, schedule: Schedule) -> ScheduleStatus:
    from prefect.client.schemas.objects import TERMINAL_STATES
    from prefect.client.schemas.sorting import FlowRunSort

    deployment = _deployment(client, schedule.full_name)
    if not deployment or not _is_ours(deployment, home):
        return _unknown_status(schedule, False)
    crons = [entry.schedule for entry in deployment.schedules if entry.active and hasattr(entry.schedule, "cron")]
    slots = [slot for entry in crons if (slot := _next_slot(entry.cron, entry.timezone or "UTC"))]
    ended = client.read_flow_runs(
        flow_run_filter=flow_runs.flow_runs_where(
            deployment_id={"any_": [deployment.id]}, state={"type": {"any_": [*TERMINAL_STATES]}}
        ),
        sort=FlowRunSort.END_TIME_DESC,
        limit=1,
    )
    last = next((EndedRun(run.name, run.state.name, run.expected_start_time, run.state.message) for run in ended), None)
    return ScheduleStatus(schedule, True, bool(deployment.paused), min(slots, default=None), last)
