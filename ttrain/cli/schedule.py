"""The `ttrain pipeline schedule` commands, and `ttrain pipeline serve`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated, Literal
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
)
from ttrain.cli.pipeline import pipeline_app
from ttrain.core.files import JsonDict, read_object
from ttrain.core.terminal import escaped, outlast_output
from ttrain.core.text import timed_lines
from ttrain.store.layout import home, usable_home

SLOT_FORMAT = "%a %Y-%m-%d %H:%M"
LISTED = ("kind", "name", "cron", "timezone", "pool", "paused")

schedule_app = Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Schedule nights and other runs, and list the schedules.",
    epilog='Example:  ttrain pipeline schedule nightly --cron "0 2 * * *" --timezone '
    "Europe/Berlin -c mine.yaml",
)
pipeline_app.add_typer(schedule_app, name="schedule")

Cron = Annotated[str | None, option("when: minute hour day month weekday")]


ScheduleName = Annotated[
    str | None,
    argument("such as nightly/quickstart; not needed if there is only one", metavar="NAME"),
]


@dataclass(frozen=True)
class SlotOptions:
    timezone: Annotated[
        str | None, option("of the cron, such as Europe/Berlin; else this machine's")
    ] = None
    pool: Annotated[str | None, option("the Prefect work pool whose workers run it")] = None


@command(
    schedule_app,
    'Examples:  ttrain pipeline schedule nightly --cron "0 2 * * *" -c mine.yaml --profile '
    "night\n\n"
    "ttrain pipeline schedule nightly --pool docker-pool data.pretrain=/data/docs",
)
def schedule_nightly(
    settings_options: SettingsOptions, slots: SlotOptions, cron: Cron = "0 2 * * *"
) -> Output:
    """Schedule nightly training on new data for `ttrain pipeline serve`, or change the schedule."""
    return _schedule("nightly", settings_options, slots, cron)


@command(
    schedule_app,
    'Example:  ttrain pipeline schedule full --cron "0 6 * * 6" name=weekly -c mine.yaml',
)
def schedule_full(
    settings_options: SettingsOptions, slots: SlotOptions, cron: Cron = None
) -> Output:
    """Schedule the pipeline `full` by a cron; without one, start it in Prefect's UI."""
    return _schedule("full", settings_options, slots, cron)


@command(schedule_app, "Example:  ttrain pipeline schedule list --json")
def schedule_list() -> Output:
    """List the schedules: next slot, last outcome, whether paused and served."""
    from ttrain.flows import deploy

    pid = deploy.served_by(home())
    values: list[JsonDict] = []
    rows: list[Sequence[str]] = []
    for name, schedule in deploy.read_all(home()).items():
        last = read_object(deploy.last_run_file(home(), name)) or None
        following = next(iter(deploy.next_slots(schedule.cron, schedule.timezone)), None)
        fields = {field: getattr(schedule, field) for field in LISTED}
        slot_times = {"next": following and following.isoformat(), "last": last}
        values.append({"schedule": name, **fields, **slot_times, "served_by": pid})
        when = f"{schedule.cron} ({schedule.timezone})" if schedule.cron else "by hand"
        slot = f"{following:{SLOT_FORMAT}}" if following else "none"
        ended = "none"
        if last:
            began = datetime.fromisoformat(last["slot"]).astimezone(ZoneInfo(schedule.timezone))
            ended = ", ".join(
                filter(None, (f"{began:{SLOT_FORMAT}}: {last['outcome']}", last["message"]))
            )
        rows.append((name, when, "paused" if schedule.paused else slot, ended))
    if not rows:
        return Output(values, ["nothing is scheduled; try `ttrain pipeline schedule nightly`"])
    shown = Table(("schedule", "cron", "next", "last"), rows)
    advice = (
        "no process serves them: keep `ttrain pipeline serve` running, which starts what is due"
    )
    return Output(values, [shown] if pid else [shown, advice])


@command(
    schedule_app,
    "Examples:  ttrain pipeline schedule pause nightly\n\nttrain pipeline schedule pause "
    "nightly --resume",
)
def schedule_pause(
    which: ScheduleName = None, resume: Annotated[bool, option("end the pause", "--resume")] = False
) -> Output:
    """Pause a schedule: its slots are skipped until it is resumed."""
    from ttrain.flows import deploy

    return _state(deploy.pause(home(), which, paused=not resume), "resumed" if resume else "paused")


@command(schedule_app, "Example:  ttrain pipeline schedule remove nightly/quickstart")
def schedule_remove(which: ScheduleName = None) -> Output:
    """Remove a schedule. A night in progress continues; past runs and models stay."""
    from ttrain.flows import deploy

    return _state(deploy.remove(home(), which), "removed")


@command(
    pipeline_app,
    "Examples:  ttrain pipeline serve\n\nttrain pipeline serve --unit systemd > "
    "~/.config/systemd/user/ttrain.service",
    name="serve",
)
def serve(
    unit: Annotated[
        Literal["systemd"] | None, option("print a service unit that keeps it running")
    ] = None,
) -> None:
    """Run what is scheduled until SIGTERM or Ctrl-C; a running night then saves its state."""
    from ttrain.flows import servers

    # Prefect reads them when imported.
    os.environ.update(servers.prefect_environment(usable_home()))
    from ttrain.flows import deploy, serve

    if unit is not None:
        print(deploy.unit(usable_home()), end="")
        return
    outlast_output()
    serve.serve(
        usable_home(), lambda text: print(timed_lines(escaped(text, kept="\n")), flush=True)
    )


def _schedule(
    kind: str, settings_options: SettingsOptions, options: SlotOptions, cron: str | None
) -> Output:
    from ttrain.engine.provenance import with_absolute_paths
    from ttrain.flows import deploy
    from ttrain.flows.night_plan import check

    home = usable_home()
    settings = with_absolute_paths(settings_options.load().settings)
    if kind == "nightly":
        check(settings)
    timezone = options.timezone or deploy.local_timezone()
    deploy.check_cron(cron, timezone)
    if settings.nightly.timezone is None:  # the deadline is by the clock of the schedule
        settings = settings.replaced({"nightly": {"timezone": timezone}})
    schedule = deploy.Schedule(
        kind, settings.name, cron, timezone, settings.model_dump(), options.pool
    )
    before = deploy.read_all(home).get(schedule.full_name)
    schedule = replace(schedule, paused=bool(before and before.paused))
    deploy.write(home, schedule)
    slots = deploy.next_slots(schedule.cron, schedule.timezone, 3)
    verb = "changed" if before else "scheduled"
    name = schedule.full_name
    times = ", ".join(f"{slot:{SLOT_FORMAT}}" for slot in slots)
    pid = deploy.served_by(home)
    lines = [
        f"{verb}: {name}",
        f"next: {times} ({timezone})"
        if slots
        else "no cron: start it in Prefect's UI (`ttrain up`)",
        f"process {pid} serves it"
        if pid
        else "to run what is due, keep this running: ttrain pipeline serve",
    ]
    return Output(
        {"schedule": name, "changed": bool(before), "next": [slot.isoformat() for slot in slots]},
        lines,
    )


def _state(name: str, state: str) -> Output:
    return Output({"schedule": name, "state": state}, [f"{state}: {name}"])
