"""Deployments with a cron: made, listed, paused, resumed and removed, on the Prefect server that a run would talk to.

Prefect's scheduler says when; `flows/serving.py` runs what is due. Prefect is imported inside functions, after its
environment is chosen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from zoneinfo import ZoneInfo, available_timezones

from flows import flow_runs, orchestrate, schedule_files, server_processes, servers
from flows.flow_runs import TAG, home_tag
from flows.schedule_files import Schedule
from ttrain.errors import UsageError

EXAMPLE: Final = 'write "minute hour day month weekday", for example "0 2 * * *" for two at night'
FIELDS: Final = 5
YEARS: Final = 5  # a cron that has not fired by then never does; 29 February comes within eight, but who means that


class RefusedError(UsageError):
    """The server takes no such deployment."""


@dataclass(frozen=True)
class Listed:
    """A schedule as it stands on the server; `on_server` None where no server could be asked."""

    schedule: Schedule
    on_server: bool | None
    paused: bool
    next_slot: datetime | None
    last_outcome: str | None = None
    last_slot: datetime | None = None
    last_message: str | None = None

    def to_row(self) -> tuple[str, str, str, str]:
        """Name, cron, next slot and what became of the last one, for a table."""
        schedule = self.schedule
        cron = f"{schedule.cron} ({schedule.timezone})" if schedule.cron else "by hand"
        following = "paused" if self.paused else f"{self.next_slot:%a %Y-%m-%d %H:%M %Z}" if self.next_slot else "none"
        if self.on_server is False:
            following = f"{following} (not on the server yet)"
        last = "none"
        if self.last_outcome and self.last_slot:
            said = f": {self.last_message}" if self.last_message else ""
            last = f"{self.last_outcome}, {self.last_slot:%Y-%m-%d %H:%M %Z}{said}"
        return schedule.full_name, cron, following, last

    def to_json(self) -> dict[str, Any]:
        """The same for scripts."""
        schedule, last = self.schedule, None
        if self.last_outcome and self.last_slot:
            last = {"outcome": self.last_outcome, "slot": self.last_slot.isoformat(), "message": self.last_message}
        return {
            "schedule": schedule.full_name,
            "kind": schedule.kind,
            "name": schedule.name,
            "cron": schedule.cron,
            "timezone": schedule.timezone,
            "pool": schedule.pool,
            "on_server": self.on_server,
            "paused": self.paused,
            "next": self.next_slot.isoformat() if self.next_slot else None,
            "last": last,
        }


def check(cron: str, timezone: str) -> None:
    """Raises UsageError where the cron is none that fires, or no time zone has that name."""
    from prefect.client.schemas.schedules import CronSchedule
    from pydantic import ValidationError

    _check_form(cron, timezone)
    try:
        CronSchedule(cron=cron, timezone=timezone)
    except ValidationError:
        raise UsageError(f"--cron is '{cron}', which is no cron; {EXAMPLE}") from None
    if not firings(cron, timezone, 1):
        raise UsageError(f"--cron is '{cron}', which no day of the next {YEARS} years fits; {EXAMPLE}")


def _check_form(cron: str | None, timezone: str) -> None:
    """What can be told without Prefect, before a server is started."""
    if timezone not in available_timezones():
        raise UsageError(f"--timezone is '{timezone}', which no time zone has as its name; try Europe/Berlin or UTC")
    if cron is not None and len(cron.split()) != FIELDS:
        raise UsageError(f"--cron is '{cron}' but must have five fields; {EXAMPLE}")


def firings(cron: str, timezone: str, count: int, start: datetime | None = None) -> list[datetime]:
    """The next slots, with their time zone, as Prefect's own scheduler finds them."""
    from prefect.server.schemas.schedules import CronSchedule

    start = start or datetime.now(UTC)
    schedule = CronSchedule(cron=cron, timezone=timezone)
    end = start + timedelta(days=366 * YEARS)
    try:
        found = asyncio.run(schedule.get_dates(count, start=start, end=end))
    except ValueError:  # as croniter says that no date fits
        return []
    return [date.astimezone(ZoneInfo(timezone)) for date in found]


def create(home: Path, schedule: Schedule) -> bool:
    """Make the deployment, or change the one of that name; whether it was there. A paused one stays paused.

    Raises UsageError where the cron or the time zone is none, or another home has a deployment of that name on the server.
    """
    _check_form(schedule.cron, schedule.timezone)
    with server_of(home) as client:
        if schedule.cron:
            check(schedule.cron, schedule.timezone)
        with schedule_files.changing(home):
            found = _deployment(client, schedule.full_name)
            if found and not _is_ours(found, home):
                raise UsageError(
                    f"the deployment {schedule.full_name} on {os.environ['PREFECT_API_URL']} belongs to {_home_of(found)}; "
                    f"set another name=..., or remove that one"
                )
            apply(home, schedule, paused=bool(found and found.paused))
            schedule_files.write(home, schedule)
        flow_runs.create_automation()
    return found is not None


def make_missing(home: Path, full_name: str) -> None:
    """Make the deployment of a kept schedule on a server that does not know it, unless that changed meanwhile."""
    with server_of(home) as client, schedule_files.changing(home):
        schedule = schedule_files.read_all(home).get(full_name)
        found = _deployment(client, full_name)
        if schedule and (not found or (_is_ours(found, home) and _home_of(found) != str(home.resolve()))):
            apply(home, schedule)


def apply(home: Path, schedule: Schedule, *, paused: bool = False) -> None:
    """Make or change the deployment on the server that the environment names. Raises RefusedError where it takes none."""
    from prefect.deployments.runner import DeploymentApplyError
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.schedules import Cron

    from flows import deployments
    from ttrain import __version__

    flow = getattr(deployments, schedule.kind)
    slots = Cron(schedule.cron, timezone=schedule.timezone, slug="cron") if schedule.cron else None
    deployment = flow.to_deployment(
        name=schedule.name,
        schedule=slots,
        paused=paused,
        parameters={"settings": schedule_files.parameters(schedule)},
        description=f"{flow.description}\n\nIts home is `{home.resolve()}`.",
        tags=[TAG, home_tag(home)],
        version=__version__,
        entrypoint_type=_module_path(),
    )
    if not slots:
        deployment.schedules = []  # an earlier cron goes
    try:
        deployment.apply()
    except DeploymentApplyError as error:
        cause = error.__cause__
        if isinstance(cause, PrefectHTTPStatusError) and cause.response.is_client_error:
            raise RefusedError(
                f"the Prefect server refuses {schedule.full_name}: {_reason(cause.response)}; where its settings are of "
                f"another version of ttrain, make it again with `ttrain pipeline schedule {schedule.kind}`, or remove it"
            ) from None
        raise cause or error from None  # it did not answer, or not as it should


def _reason(response: Any) -> str:
    """Why a server refused a request, without the request, which it repeats: some 100 kB of settings."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        told = response.json()
        return str(told.get("detail") or "; ".join(one["msg"] for one in told["exception_detail"]))
    return f"HTTP {response.status_code}"


def listed(home: Path) -> list[Listed]:
    """What is scheduled from this home, with what the server says where one answers; none is started for it."""
    schedules = schedule_files.read_all(home)
    if not schedules:
        return []
    url, living = os.environ.get("PREFECT_API_URL"), server_processes.living(home, "prefect")
    if not living and not (url and servers.answers(url)):
        os.environ.update(servers.prefect_environment(home))
        paused = frozenset[str]() if url else _paused(home)
        return [Listed(one, None, name in paused, _next(one.cron, one.timezone)) for name, one in schedules.items()]
    with server_of(home) as client:
        return [_listed(client, home, schedule) for schedule in schedules.values()]


def _paused(home: Path) -> frozenset[str]:
    """Full names of the deployments that are paused in the home's own database, where no server runs that could be asked."""
    database = home.resolve() / "prefect" / "prefect.db"
    question = "SELECT flow.name || '/' || d.name FROM deployment d JOIN flow ON flow.id = d.flow_id WHERE d.paused"
    with (
        contextlib.suppress(sqlite3.Error),
        contextlib.closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as db,
    ):
        return frozenset(name for (name,) in db.execute(question))
    return frozenset()


def pause(home: Path, which: str | None, *, paused: bool) -> str:
    """Pause or resume a schedule; returns its full name. A paused one's slots pass unused."""
    schedule = named(home, which)
    with server_of(home) as client, schedule_files.changing(home):
        found = _deployment(client, schedule.full_name)
        if schedule.pool and not found:
            raise UsageError(
                f"{schedule.full_name} is not on the server yet; run `prefect deploy --all` with its prefect.yaml"
            )
        if not found or not _is_ours(found, home):
            apply(home, schedule, paused=paused)
        elif paused:
            client.pause_deployment(found.id)
        else:
            client.resume_deployment(found.id)
    return schedule.full_name


def remove(home: Path, which: str | None) -> str:
    """Remove a schedule, its deployment and its slots to come; what ran stays in Prefect. Returns its full name."""
    schedule = named(home, which)
    with server_of(home) as client, schedule_files.changing(home):
        found = _deployment(client, schedule.full_name)
        if found and _is_ours(found, home):
            client.delete_deployment(found.id)
        schedule_files.remove(home, schedule.full_name)
    return schedule.full_name


def named(home: Path, which: str | None) -> Schedule:
    """The schedule that "nightly/quickstart", "nightly" or nothing means. Raises UsageError where it is none or several."""
    schedules = schedule_files.read_all(home)
    fitting = [one for name, one in schedules.items() if which in (None, name, one.kind, one.name)]
    if len(fitting) == 1:
        return fitting[0]
    if not schedules:
        raise UsageError("nothing is scheduled; try `ttrain pipeline schedule nightly`")
    there = ", ".join(schedules)
    if not fitting:
        raise UsageError(f"no schedule is called '{which}'; there are: {there}")
    raise UsageError(f"{f'{chr(39)}{which}{chr(39)} means' if which else 'there are'} several schedules; name one: {there}")


@contextlib.contextmanager
def server_of(home: Path) -> Iterator[Any]:
    """A client of the server that PREFECT_API_URL names, that `up` or `serve` runs, or that is started for this alone."""
    wait = orchestrate.begin(home)
    from prefect.client.orchestration import get_client

    wait()
    with get_client(sync_client=True) as client:
        yield client


def ours(home: Path) -> Any:
    """A filter of the deployments of this home."""
    from prefect.client.schemas.filters import DeploymentFilter, DeploymentFilterTags

    return DeploymentFilter(tags=DeploymentFilterTags(all_=[TAG, home_tag(home)]))


def _module_path() -> Any:
    from prefect.types.entrypoint import EntrypointType

    return EntrypointType.MODULE_PATH


def _deployment(client: Any, full_name: str) -> Any:
    from prefect.exceptions import ObjectNotFound

    try:
        return client.read_deployment_by_name(full_name)
    except ObjectNotFound:
        return None


def _is_ours(deployment: Any, home: Path) -> bool:
    """A home that was moved, with the database of its server in it, takes its deployments along."""
    theirs = _home_of(deployment)
    has_moved = theirs is not None and not Path(theirs).exists() and server_processes.living(home, "prefect") is not None
    return theirs == str(home.resolve()) or has_moved


def _home_of(deployment: Any) -> str | None:
    found = [tag.removeprefix("home:") for tag in deployment.tags if tag.startswith("home:")]
    return found[0] if found else None


def _next(cron: str | None, timezone: str) -> datetime | None:
    return next(iter(firings(cron, timezone, 1)), None) if cron else None


def _listed(client: Any, home: Path, schedule: Schedule) -> Listed:
    from prefect.client.schemas.filters import (
        DeploymentFilter,
        DeploymentFilterId,
        FlowRunFilter,
        FlowRunFilterState,
        FlowRunFilterStateType,
    )
    from prefect.client.schemas.objects import TERMINAL_STATES
    from prefect.client.schemas.sorting import FlowRunSort

    found = _deployment(client, schedule.full_name)
    if not found or not _is_ours(found, home):
        return Listed(schedule, False, False, _next(schedule.cron, schedule.timezone))
    crons = [one.schedule for one in found.schedules if one.active and hasattr(one.schedule, "cron")]
    slots = [slot for one in crons if (slot := _next(one.cron, one.timezone or "UTC"))]
    ended = client.read_flow_runs(
        deployment_filter=DeploymentFilter(id=DeploymentFilterId(any_=[found.id])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=list(TERMINAL_STATES)))),
        sort=FlowRunSort.END_TIME_DESC,
        limit=1,
    )
    last = ended[0] if ended else None
    return Listed(
        schedule,
        True,
        bool(found.paused),
        min(slots, default=None),
        last_outcome=last.state.name if last else None,
        last_slot=last.expected_start_time if last else None,
        last_message=last.state.message if last else None,
    )
