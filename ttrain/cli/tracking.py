"""The `ttrain track` commands: deliver pending data to MLflow, and repair its database."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Exit

from ttrain.cli.options import AsJson, argument, command, command_group, option
from ttrain.core.files import PRIVATE_FILE, write_bytes
from ttrain.core.terminal import console, print_escaped, print_json, print_plain, table
from ttrain.core.text import counted
from ttrain.errors import UsageError
from ttrain.store import references, runs
from ttrain.store.layout import home, usable_home

if TYPE_CHECKING:
    from ttrain.tracking import Addresses


track_app = command_group(
    "track",
    "Servers",
    help="Send MLflow the data that runs could not deliver while its server was unreachable.",
    epilog="Example:  ttrain track sync",
)


@command(
    track_app,
    "Examples:  ttrain track sync\n\nttrain track sync --dry-run\n\nttrain track sync full-20261121-160222-1a2b4 --json",
)
def track_sync(
    run: Annotated[str | None, argument("a run, as `ttrain pipeline status` lists it; default: all", metavar="RUN")] = None,
    dry_run: Annotated[bool, option("only list what is waiting", "--dry-run")] = False,
    as_json: AsJson = False,
) -> None:
    """Deliver metrics, parameters, states, files and registered models that an unreachable server or a kill held up.

    Delivered data is not sent again. Exit code 1 if something is still waiting. The next run does the same by itself,
    beside its own work.
    """
    from ttrain import tracking

    if dry_run:
        deliveries = tracking.undelivered_runs(home(), run)
    else:
        with _bar() as show_progress:
            deliveries = tracking.sync(home(), run, show_progress) if tracking.undelivered_runs(home(), run) else []
    if as_json:
        print_json([delivery.to_json() for delivery in deliveries])
    elif not deliveries:
        print("nothing waits: everything is in MLflow")
    else:
        rows = [
            (delivery.run, delivery.name, _counts_text(delivery.delivered), _counts_text(delivery.things), delivery.why)
            for delivery in deliveries
        ]
        table(("run", "tracked as", "delivered", "waiting", "why"), rows)
        incomplete_count = sum(bool(delivery.things) for delivery in deliveries)
        print_escaped(
            f"{incomplete_count} of {len(deliveries)} tracked runs still have undelivered data"
            if incomplete_count
            else "everything was delivered"
        )
    raise Exit(int(not dry_run and any(delivery.things for delivery in deliveries)))


@command(track_app, "Example:  ttrain track repair")
def track_repair(as_json: AsJson = False) -> None:
    """Set a damaged MLflow database of this home aside, and log all runs of the home to a new one.

    Runs, stages, parameters, metrics, curves, files and registered models come from records, manifests and logs. A
    database that is intact and complete is not changed.
    """
    from ttrain.pipeline import track_repair
    from ttrain.store import server_records

    root = usable_home()
    if server_records.live_server(root, "mlflow"):
        raise UsageError("the MLflow server of `ttrain up` has the database open; stop it first: ttrain down")
    done = track_repair.repair(root, lambda line: print_plain(console(stderr=True), line))
    if as_json:
        print_json(done)
    elif not (done.runs or done.unreadable or done.aside):
        print("the database is intact and has every run of this home")
    else:
        print(f"logged again: {counted(len(done.runs), 'run')}")
        if done.without_files:
            print_escaped(f"without files, because their artifacts were removed: {', '.join(done.without_files)}")
        if done.unreadable:
            print_escaped(f"not logged, because their records cannot be read: {', '.join(done.unreadable)}")
        if done.by_servers:
            listed = ", ".join(done.by_servers)
            print_escaped(f"not logged again, because a server that may have used this database has them: {listed}")
        print(f"data that this home has no record of is lost: {track_repair.NOT_RESTORED}")
    raise Exit(int(bool(done.waiting or done.unreadable)))


def _counts_text(things: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(things.items()))


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[int, int], None]]:
    """Show upload progress on a terminal's standard error; yields a function of (bytes done, bytes in all)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    screen = console(stderr=True)
    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bars:
        task = bars.add_task("uploading", total=None, visible=False)
        yield lambda done, total: bars.update(task, completed=done, total=total, visible=True)


def links_of(root: Path, address: str, runs: Sequence[str]) -> dict[str, str]:
    """The pages of runs on the MLflow server at this address, with its token; without runs, those of the table of all."""
    from ttrain.store.server_records import page_with_token

    tracked = [_tracked_id(root, reference) for reference in runs]
    pages = _addresses(root, tracked)
    first = pages.compare(tracked) if len(tracked) > 1 else pages.run(tracked[0]) if tracked else pages.table
    links = {"url": first, "table": pages.table, "curves": pages.curves}
    return {
        **{name: page_with_token(root, f"{address.rstrip('/')}/{page}") for name, page in links.items()},
        "experiment": pages.experiment,
    }


def open_in_browser(root: Path, url: str) -> None:
    """Open a page; says so on standard error where no browser can be opened."""
    import webbrowser

    has_screen = sys.platform != "linux" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))
    with contextlib.suppress(webbrowser.Error):
        if has_screen and webbrowser.open(redirect_page(root, url)):  # else the browser would take over the terminal
            return
    print("no browser could be opened here; open the address yourself", file=sys.stderr)


def _tracked_id(root: Path, text: str) -> str:
    """Id of the tracked run of the reference RUN, RUN:STAGE, or a registered model; for a run that was all cached, that of
    the run it equals. Raises UsageError."""
    from ttrain import tracking

    name, stage = references.run_and_stage(text)
    view = tracking.read_run(root, name, tracked=bool(stage))
    if stage:
        references.need_stage(stage, view.stages, f"the run {view.name}")
    if view.run_id is None and (equals := view.record.get("equals")):
        view = tracking.read_run(root, equals, tracked=bool(stage))
    run_id = view.stages[stage].run_id if stage else view.run_id
    if run_id is None:
        label = f"{view.name}:{stage}" if stage else view.name
        raise UsageError(
            f"MLflow has no run of {label}: it was not tracked; `ttrain report {view.name}` shows what there is"
        )
    return run_id


def _addresses(root: Path, tracked: Sequence[str]) -> Addresses:
    """The pages of the runs' experiment, else of the newest run's. Raises UsageError if nothing was tracked yet."""
    from ttrain import tracking
    from ttrain.config import Tracking

    experiments = (run.get("settings", {}).get("tracking", {}).get("experiment") for run in runs.newest_first(root))
    names = [name for name in (next(experiments, None), Tracking().experiment) if name]
    addresses = tracking.addresses(root, names, tracked)
    if addresses is None:
        raise UsageError(f"nothing is tracked in {root} yet; begin with `ttrain pipeline run full`")
    return addresses


def redirect_page(root: Path, url: str) -> str:
    """A private file that redirects to an address with a token: a browser's arguments are visible to other users."""
    from ttrain.store.server_records import make_folder

    if "?token=" not in url:
        return url
    path = make_folder(root) / "open.html"
    target = json.dumps(url).replace("<", "\\u003c")
    page = f'<!doctype html><meta charset="utf-8"><title>ttrain</title><script>location.replace({target})</script>'
    write_bytes(path, page.encode(), PRIVATE_FILE)
    return path.as_uri()
