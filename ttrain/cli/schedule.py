"""`ttrain pipeline schedule` and `ttrain pipeline serve`: every night, or whenever a cron says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ttrain.cli.nightly import NIGHTLY
from ttrain.cli.options import AsJson, Files, Overrides, Profiles, ServerOverrides, load_settings, server_settings
from ttrain.core.terminal import escaped, print_json, table

EPILOG = "Examples:  ttrain pipeline serve\n\nttrain pipeline serve --unit systemd > ~/.config/systemd/user/ttrain.service"

schedule_app = typer.Typer(
    no_args_is_help=True,
    help="Schedule nights and other runs, and see what is scheduled.",
    epilog='Example:  ttrain pipeline schedule nightly --cron "0 2 * * *" --timezone Europe/Berlin -c mine.yaml',
)

Cron = Annotated[str | None, typer.Option("--cron", help="when: minute hour day month weekday", show_default=False)]
Timezone = Annotated[str | None, typer.Option("--timezone", help="of the cron, such as Europe/Berlin; else this machine's")]
Which = Annotated[
    str | None, typer.Argument(help="such as nightly/quickstart; not needed where there is one", metavar="[NAME]")
]
PrefectYaml = Annotated[
    str | None,
    typer.Option("--prefect-yaml", metavar="POOL", help="print a prefect.yaml for a pool: process, docker or kubernetes"),
]


@schedule_app.command(
    "nightly",
    epilog='Examples:  ttrain pipeline schedule nightly --cron "0 2 * * *" -c mine.yaml --profile night\n\n'
    "ttrain pipeline schedule nightly --prefect-yaml docker data.pretrain=/data/docs > prefect.yaml",
)
def schedule_nightly(
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    cron: Cron = "0 2 * * *",
    timezone: Timezone = None,
    prefect_yaml: PrefectYaml = None,
    as_json: AsJson = False,
) -> None:
    """Train on what is new every night; `ttrain pipeline serve` runs it. The same name again changes it."""
    _schedule("nightly", overrides, config, profile, cron, timezone, prefect_yaml, as_json=as_json)


@schedule_app.command("full", epilog='Example:  ttrain pipeline schedule full --cron "0 6 * * 6" name=weekly -c mine.yaml')
def schedule_full(
    overrides: Overrides = None,
    config: Files = None,
    profile: Profiles = None,
    cron: Cron = None,
    timezone: Timezone = None,
    prefect_yaml: PrefectYaml = None,
    as_json: AsJson = False,
) -> None:
    """Run the pipeline `full` by a cron; without one it waits in Prefect's UI, to be run with other settings."""
    _schedule("full", overrides, config, profile, cron, timezone, prefect_yaml, as_json=as_json)


@schedule_app.command("list", epilog="Example:  ttrain pipeline schedule list --json")
def schedule_list(as_json: AsJson = False) -> None:
    """List what is scheduled: the next slot, what became of the last one, whether it is paused and served."""
    from flows import schedules, serving
    from ttrain.store.layout import home

    found, pid = schedules.listed(home()), serving.served_by(home())
    if as_json:
        print_json([{**one.to_json(), "served_by": pid} for one in found])
        return
    if not found:
        print("nothing is scheduled; try `ttrain pipeline schedule nightly`")
        return
    table(("schedule", "cron", "next", "last"), [one.to_row() for one in found])
    if all(one.on_server is None for one in found):
        print("no Prefect server answers; what became of the last slots stands there")
    if not pid and not all(one.schedule.pool for one in found):
        print("nothing serves them: `ttrain pipeline serve` runs what is due, while it runs")


@schedule_app.command("pause", epilog="Example:  ttrain pipeline schedule pause nightly")
def schedule_pause(which: Which = None, as_json: AsJson = False) -> None:
    """Pause a schedule: its slots pass unused until it is resumed."""
    from flows import schedules
    from ttrain.store.layout import home

    _say(schedules.pause(home(), which, paused=True), "paused", as_json=as_json)


@schedule_app.command("resume", epilog="Example:  ttrain pipeline schedule resume nightly")
def schedule_resume(which: Which = None, as_json: AsJson = False) -> None:
    """Resume a paused schedule."""
    from flows import schedules
    from ttrain.store.layout import home

    _say(schedules.pause(home(), which, paused=False), "resumed", as_json=as_json)


@schedule_app.command("remove", epilog="Example:  ttrain pipeline schedule remove nightly/quickstart")
def schedule_remove(which: Which = None, as_json: AsJson = False) -> None:
    """Remove a schedule. A night in progress goes on; what has run stays, and so do its models."""
    from flows import schedules
    from ttrain.store.layout import home

    _say(schedules.remove(home(), which), "removed", as_json=as_json)


def serve(
    overrides: ServerOverrides = None,
    unit: Annotated[
        str | None, typer.Option("--unit", metavar="KIND", help="print what keeps it up: systemd, launchd or cron")
    ] = None,
    unless_served: Annotated[bool, typer.Option("--unless-served", help="end at once where another process serves")] = False,
) -> None:
    """Run what is scheduled, in the foreground, until SIGTERM or Ctrl-C; a running night then saves its state."""
    from ttrain.store.layout import usable_home

    if unit is not None:
        from flows import service_units

        print(service_units.unit(unit, usable_home()), end="")
        return
    from flows import serving
    from ttrain.core.standard_streams import outlast_output

    outlast_output()
    if unless_served and serving.served_by(usable_home()):
        return
    auth = server_settings(overrides).auth
    serving.serve(usable_home(), lambda line: print(escaped_lines(line), flush=True), auth)


def escaped_lines(text: str) -> str:
    """The text without what a terminal would obey; lines stay."""
    return "\n".join(map(escaped, text.split("\n")))


def _schedule(
    kind: str,
    overrides: list[str] | None,
    config: list[Path] | None,
    profile: list[str] | None,
    cron: str | None,
    timezone: str | None,
    pool: str | None,
    *,
    as_json: bool,
) -> None:
    from flows import schedule_files
    from flows.night_plan import check
    from flows.schedule_files import Schedule
    from ttrain.pipeline.absolute_paths import absolute
    from ttrain.store.layout import usable_home

    home = usable_home()
    settings = absolute(load_settings(overrides, config, profile).settings)
    if kind == NIGHTLY:
        check(settings)
    settings = schedule_files.webhook_in_file(home, kind, settings)
    timezone = timezone or schedule_files.local_timezone()
    settings = schedule_files.with_timezone(settings, timezone)
    schedule = Schedule(kind, settings.name, cron, timezone, settings.model_dump(), pool)
    if pool is not None:
        from flows import work_pools

        print(work_pools.prefect_yaml(home, schedule), end="")
        return
    from flows import schedules, serving

    was_there = schedules.create(home, schedule)
    slots = schedules.firings(cron, schedule.timezone, 3) if cron else []
    if as_json:
        print_json({"schedule": schedule.full_name, "changed": was_there, "next": [slot.isoformat() for slot in slots]})
        return
    print(f"{'changed' if was_there else 'scheduled'}: {schedule.full_name}")
    if slots:
        print(f"next: {', '.join(f'{slot:%a %Y-%m-%d %H:%M}' for slot in slots)} ({schedule.timezone})")
    else:
        print("no cron: start it in Prefect's UI (`ttrain up`)")
    if pid := serving.served_by(home):
        print(f"process {pid} serves it")
    else:
        print(
            "run what is due, while it runs: ttrain pipeline serve\nkeep that up over reboots: ttrain pipeline serve --help"
        )


def _say(name: str, what: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"schedule": name, "state": what})
    else:
        print(f"{what}: {name}")
