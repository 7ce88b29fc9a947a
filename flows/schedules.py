"""Deployments with a cron: made, paused, resumed and removed, on the Prefect server that a run would use.

Prefect's scheduler sets the slots; `flows/serving.py` runs those that are due; `flows/schedule_status.py` lists them.
Functions import Prefect, after its
environment is chosen.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import available_timezones

from ttrain.errors import UsageError
from ttrain.flows import flow_runs, prefect_run, schedule_files
from ttrain.flows.flow_runs import TAG, home_tag
from ttrain.flows.schedule_files import Schedule
from ttrain.flows.schedule_status import home_of, is_of_home
from ttrain.flows.slots import YEARS, next_slots

EXAMPLE = 'write "minute hour day month weekday", for example "0 2 * * *" for two at night'
FIELDS = 5
KEPT_SLOTS = 100  # in a schedule's file, so that listing it need not import Prefect: three months of nights


class RefusedError(UsageError):
    """The server refuses the deployment."""


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
            if deployment and not is_of_home(deployment.tags, home):
                raise UsageError(
                    f"the deployment {schedule.full_name} on {os.environ['PREFECT_API_URL']} belongs to "
                    f"{home_of(deployment.tags)}; set another name=..., or remove that one"
                )
            earlier = deployment or schedule_files.read_all(home).get(schedule.full_name)
            schedule = replace(schedule, paused=bool(earlier and earlier.paused))
            apply(home, schedule)
            schedule_files.write(home, with_slots(schedule))
        flow_runs.create_automation()
    return deployment is not None


def with_slots(schedule: Schedule) -> Schedule:
    """The same schedule with its next slots."""
    if not schedule.cron:
        return schedule
    following = next_slots(schedule.cron, schedule.timezone, KEPT_SLOTS)
    return replace(schedule, slots=[slot.isoformat() for slot in following])


def make_missing(home: Path, full_name: str) -> None:
    """Create the deployment of a schedule on a server that lacks it, unless the schedule changed meanwhile."""
    with prefect_client(home) as client, schedule_files.changing(home):
        schedule = schedule_files.read_all(home).get(full_name)
        deployment = _deployment(client, full_name)
        if not schedule:
            return
        has_moved = deployment and is_of_home(deployment.tags, home) and home_of(deployment.tags) != str(home.resolve())
        if not deployment or has_moved:
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


def pause(home: Path, which: str | None, *, paused: bool) -> str:
    """Pause or resume a schedule; returns its full name. A paused one's slots pass unused."""
    schedule = find_schedule(home, which)
    with prefect_client(home) as client, schedule_files.changing(home):
        deployment = _deployment(client, schedule.full_name)
        if schedule.pool and not deployment:
            raise UsageError(
                f"{schedule.full_name} is not on the server yet; run `prefect deploy --all` with its prefect.yaml"
            )
        if not deployment or not is_of_home(deployment.tags, home):
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
        if deployment and is_of_home(deployment.tags, home):
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
