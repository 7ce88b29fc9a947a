"""`ttrain track`: what MLflow has yet to be told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import typer

from ttrain.cli.options import AsJson
from ttrain.core.terminal import console, escaped, print_json, table

track_app = typer.Typer(
    no_args_is_help=True,
    help="Tell MLflow what runs could not tell it while its server was away.",
    epilog="Example:  ttrain track sync",
)


@track_app.command(
    "sync",
    epilog="Examples:  ttrain track sync\n\nttrain track sync --dry-run\n\n"
    "ttrain track sync full-20261121-160222-1a2b4 --json",
)
def sync(
    run: Annotated[str | None, typer.Argument(help="a run, as `ttrain pipeline status` lists it; default: all")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="only say what waits")] = False,
    as_json: AsJson = False,
) -> None:
    """Deliver metrics, parameters, states, files and registered models that a silent server or a kill held up.

    What arrived before is not sent again. Exit code 1 where something still waits. The next run does the same by itself,
    beside its own work.
    """
    from ttrain import tracking
    from ttrain.store.layout import home

    if dry_run:
        found = tracking.waiting(home(), run)
    else:
        with _bar() as told:
            found = tracking.sync(home(), run, told) if tracking.waiting(home(), run) else []
    if as_json:
        print_json([one.to_json() for one in found])
    elif not found:
        print("nothing waits: MLflow was told everything")
    else:
        rows = [(one.run, one.name, _words(one.told), _words(one.things), one.why) for one in found]
        table(("run", "tracked as", "delivered", "waiting", "why"), rows)
        left = sum(bool(one.things) for one in found)
        print(escaped(f"{left} of {len(found)} tracked runs have something left to tell" if left else "everything arrived"))
    raise typer.Exit(int(not dry_run and any(one.things for one in found)))


@track_app.command("repair", epilog="Example:  ttrain track repair")
def repair(as_json: AsJson = False) -> None:
    """Set a damaged MLflow database of this home aside, and tell a new one of all runs that the home knows.

    Runs, stages, parameters, metrics, curves, files and registered models come from records, manifests and logs. Nothing
    happens to a database that is whole and has all of them.
    """
    from flows import server_processes
    from ttrain.errors import UsageError
    from ttrain.pipeline import track_repair
    from ttrain.store.layout import usable_home

    root = usable_home()
    if server_processes.living(root, "mlflow"):
        raise UsageError("the MLflow server of `ttrain up` has the database open; stop it first: ttrain down")
    done = track_repair.repair(root, lambda line: console(stderr=True).print(escaped(line), highlight=False, soft_wrap=True))
    if as_json:
        print_json(done.to_json())
    elif not (done.runs or done.unreadable or done.aside):
        print("the database is whole, and has every run of this home")
    else:
        print(f"told again: {len(done.runs)} {'run' if len(done.runs) == 1 else 'runs'}")
        if done.without_files:
            print(escaped(f"without files, since their artifacts were removed: {', '.join(done.without_files)}"))
        if done.unreadable:
            print(escaped(f"not told, since their records cannot be read: {', '.join(done.unreadable)}"))
        if done.by_servers:
            listed = ", ".join(done.by_servers)
            print(escaped(f"not told again, since a server had them, whose database this may have been: {listed}"))
        print(f"what the home does not know is lost: {track_repair.LOST}")
    raise typer.Exit(int(bool(done.waiting or done.unreadable)))


def _words(things: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(things.items()))


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Megabytes on their way, on a terminal's standard error; `told(bytes done, bytes in all)` moves it."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    screen = console(stderr=True)
    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        task = bars.add_task("uploading", total=None, visible=False)
        yield lambda done, total: bars.update(task, completed=done, total=total, visible=True)
