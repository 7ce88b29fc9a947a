"""The nightly pipeline in `ttrain pipeline run` and `ttrain pipeline plan`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal
from zoneinfo import ZoneInfo

from typer import Typer

from ttrain.cli.options import (
    CommandGroup,
    Output,
    SettingsOptions,
    Table,
    argument,
    command,
    option,
    server_settings,
)
from ttrain.core import redact
from ttrain.core.terminal import console, escaped_lines, outlast_output, print_escaped
from ttrain.core.text import counted
from ttrain.errors import UsageError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import home, usable_home

if TYPE_CHECKING:
    from ttrain.config.loading import LoadedSettings
    from ttrain.core.files import JsonObject
    from ttrain.engine.labels import Labels
    from ttrain.flows.deploy import Schedule


NIGHTLY = "nightly"


def run(loaded: LoadedSettings, *, engine: str, labels: Labels) -> None:
    """Run one night now."""
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows.nightly import run_night

    usable_home()
    result = run_night(with_absolute_paths(loaded.settings), _store(loaded), console(), engine=engine, labels=labels)
    print_escaped(f"{result.night or 'no night'}: {result.outcome}")
    if result.night:
        print("next:\n  all champions and challengers: ttrain models list")


def plan(loaded: LoadedSettings) -> Output:
    """What a night would do now."""
    from ttrain.config import LEARNT
    from ttrain.engine import planner as plan
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows.night_plan import plan_night

    planned = plan_night(with_absolute_paths(loaded.settings), _store(loaded))
    snapshot = planned.frozen
    frozen_files = snapshot.files.items() if snapshot else ()
    files = {name: [redact.url(file["location"]) for file in entries] for name, entries in frozen_files}
    value = {
        "pipeline": NIGHTLY,
        "reason": planned.reason,
        "champion": snapshot.champion.version if snapshot and snapshot.champion else None,
        "files": files,
        "near_duplicates": {"similarity": planned.near_duplicates, "earlier_sets": planned.earlier_sets},
        "stages": plan.plan_json(NIGHTLY, planned.stages)["stages"],
    }
    if snapshot is None:
        return Output(value, [planned.reason])
    lines = [f"  data.{dataset}: {location}" for dataset in LEARNT for location in files.get(dataset, ())]
    if planned.near_duplicates:
        sets = f" and with {counted(planned.earlier_sets, 'earlier set')} of documents" if planned.earlier_sets else ""
        compared = f"new documents are compared with each other{sets}"
        lines.append(f"  reading.near_duplicates={planned.near_duplicates}: {compared}")
    stages = Table(("stage", "state", "key", "why"), plan.plan_rows(planned.stages))
    return Output(value, [planned.reason, *lines, stages])


def refuse(flags: Sequence[str]) -> None:
    """Raise UsageError if an option that selects stages is given: a night always runs as a whole."""
    if flags:
        raise UsageError(
            f"{', '.join(flags)}: a night chooses what to run by itself; leave it out, or use `ttrain pipeline run full`"
        )


def _store(loaded: LoadedSettings) -> ArtifactStore:
    from ttrain.tracking.artifact_source import store_of

    return store_of(home(), loaded.settings)


EPILOG = "Examples:  ttrain pipeline serve\n\nttrain pipeline serve --unit systemd > ~/.config/systemd/user/ttrain.service"

schedule_app = Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Schedule nights and other runs, and list the schedules.",
    epilog='Example:  ttrain pipeline schedule nightly --cron "0 2 * * *" --timezone Europe/Berlin -c mine.yaml',
)

Cron = Annotated[str | None, option("when: minute hour day month weekday")]


ScheduleName = Annotated[str | None, argument("such as nightly/quickstart; not needed if there is only one", metavar="NAME")]


@dataclass(frozen=True)
class SlotOptions:
    """The options of the commands that schedule, apart from the cron."""

    timezone: Annotated[str | None, option("of the cron, such as Europe/Berlin; else this machine's")] = None
    pool: Annotated[str | None, option("the Prefect work pool whose workers run it")] = None


@command(
    schedule_app,
    'Examples:  ttrain pipeline schedule nightly --cron "0 2 * * *" -c mine.yaml --profile night\n\n'
    "ttrain pipeline schedule nightly --pool docker-pool data.pretrain=/data/docs",
)
def schedule_nightly(settings_options: SettingsOptions, slots: SlotOptions, cron: Cron = "0 2 * * *") -> Output:
    """Schedule nightly training on new data, which `ttrain pipeline serve` runs. An existing schedule is changed."""
    return _schedule("nightly", settings_options, slots, cron)


@command(schedule_app, 'Example:  ttrain pipeline schedule full --cron "0 6 * * 6" name=weekly -c mine.yaml')
def schedule_full(settings_options: SettingsOptions, slots: SlotOptions, cron: Cron = None) -> Output:
    """Schedule the pipeline `full` by a cron; without one, start it in Prefect's UI, with other settings if needed."""
    return _schedule("full", settings_options, slots, cron)


@command(schedule_app, "Example:  ttrain pipeline schedule list --json")
def schedule_list() -> Output:
    """List the schedules: next slot, outcome of the last one, whether each is paused and served."""
    from ttrain.flows import deploy

    listing, pid = list(deploy.read_all(home()).values()), deploy.served_by(home())
    last = {one.full_name: deploy.last_run(home(), one) for one in listing}
    values = [
        {
            "schedule": schedule.full_name, "kind": schedule.kind, "name": schedule.name, "cron": schedule.cron,
            "timezone": schedule.timezone, "pool": schedule.pool, "paused": schedule.paused,
            "next": next((slot.isoformat() for slot in schedule.next_slots(1)), None),
            "last": last[schedule.full_name], "served_by": pid,
        }
        for schedule in listing
    ]  # fmt: skip
    if not listing:
        return Output(values, ["nothing is scheduled; try `ttrain pipeline schedule nightly`"])
    zones = {schedule.timezone for schedule in listing}
    zone = zones.pop() if len(zones) == 1 else deploy.local_timezone()
    rows = [_schedule_row(schedule, last[schedule.full_name], zone) for schedule in listing]
    shown = Table(("schedule", "cron", f"next ({zone})", f"last ({zone})"), rows)
    advice = "no process serves them: keep `ttrain pipeline serve` running, which starts what is due"
    return Output(values, [shown] if pid else [shown, advice])


def _schedule_row(schedule: Schedule, last: JsonObject | None, zone: str) -> tuple[str, str, str, str]:
    """Name, cron, next slot and outcome of the last one, by the clock of a zone."""
    cron = schedule.cron or "by hand"
    if schedule.cron and schedule.timezone != zone:
        cron = f"{schedule.cron} ({schedule.timezone})"
    slots, ended = schedule.next_slots(1), "none"
    following = f"{slots[0].astimezone(ZoneInfo(zone)):%a %Y-%m-%d %H:%M}" if slots else "none"
    if last is not None:
        when = datetime.fromisoformat(last["slot"]).astimezone(ZoneInfo(zone))
        message = f", {last['message']}" if last["message"] else ""
        ended = f"{last['name']}, {when:%Y-%m-%d %H:%M}: {last['outcome']}{message}"
    return schedule.full_name, cron, "paused" if schedule.paused else following, ended


@command(schedule_app, "Example:  ttrain pipeline schedule pause nightly")
def schedule_pause(which: ScheduleName = None) -> Output:
    """Pause a schedule: its slots are skipped until it is resumed."""
    from ttrain.flows import deploy

    return _state(deploy.pause(home(), which, paused=True), "paused")


@command(schedule_app, "Example:  ttrain pipeline schedule resume nightly")
def schedule_resume(which: ScheduleName = None) -> Output:
    """Resume a paused schedule."""
    from ttrain.flows import deploy

    return _state(deploy.pause(home(), which, paused=False), "resumed")


@command(schedule_app, "Example:  ttrain pipeline schedule remove nightly/quickstart")
def schedule_remove(which: ScheduleName = None) -> Output:
    """Remove a schedule. A night in progress continues; past runs and their models stay."""
    from ttrain.flows import deploy

    return _state(deploy.remove(home(), which), "removed")


def serve(
    overrides: Annotated[
        list[str] | None,
        argument("servers.auth=token or servers.auth=off", metavar="KEY=VALUE"),
    ] = None,
    unit: Annotated[Literal["systemd"] | None, option("print a service unit that keeps it running")] = None,
) -> None:
    """Run what is scheduled, in the foreground, until SIGTERM or Ctrl-C; a running night then saves its state."""
    if unit is not None:
        from ttrain.flows import deploy

        print(deploy.unit(usable_home()), end="")
        return
    from ttrain.core.text import timed_lines
    from ttrain.flows import prefect_api

    os.environ.update(prefect_api.prefect_environment(usable_home()))  # which Prefect reads when imported
    from ttrain.flows import serve

    outlast_output()
    auth = server_settings(overrides).auth
    serve.serve(usable_home(), lambda text: print(timed_lines(escaped_lines(text)), flush=True), auth)


def _schedule(kind: str, settings_options: SettingsOptions, options: SlotOptions, cron: str | None) -> Output:
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows import deploy
    from ttrain.flows.night_plan import check

    home = usable_home()
    settings = with_absolute_paths(settings_options.load().settings)
    if kind == NIGHTLY:
        check(settings)
    timezone = options.timezone or deploy.local_timezone()
    deploy.check_cron(cron, timezone)
    if settings.nightly.timezone is None:  # the deadline is by the clock of the schedule
        settings = settings.replaced({"nightly": {"timezone": timezone}})
    schedule = deploy.Schedule(kind, settings.name, cron, timezone, settings.model_dump(), options.pool)
    before = deploy.read_all(home).get(schedule.full_name)
    schedule = replace(schedule, paused=bool(before and before.paused))
    deploy.write(home, schedule)
    slots = schedule.next_slots(3)
    value = {
        "schedule": schedule.full_name,
        "changed": before is not None,
        "next": [slot.isoformat() for slot in slots],
    }
    times = ", ".join(f"{slot:%a %Y-%m-%d %H:%M}" for slot in slots)
    pid = deploy.served_by(home)
    serving = [f"process {pid} serves it"] if pid else [
        "to run what is due, keep this running: ttrain pipeline serve",
        "to start it at boot: ttrain pipeline serve --help",
    ]  # fmt: skip
    lines = [
        f"{'changed' if before else 'scheduled'}: {schedule.full_name}",
        f"next: {times} ({timezone})" if slots else "no cron: start it in Prefect's UI (`ttrain up`)",
    ]
    return Output(value, [*lines, *serving])


def _state(name: str, state: str) -> Output:
    return Output({"schedule": name, "state": state}, [f"{state}: {name}"])
