"""`ttrain track push`, and the addresses of MLflow's pages."""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from ttrain.cli.options import Output, argument, command, command_group, option
from ttrain.core.files import PRIVATE_FILE, write_bytes
from ttrain.core.terminal import console, print_plain
from ttrain.core.text import counted
from ttrain.errors import UsageError
from ttrain.store import runs
from ttrain.store.layout import usable_home

track_app = command_group(
    "track",
    "Servers",
    help="Bring MLflow up to date with this home, which has everything.",
    epilog="Example:  ttrain track push",
)


@command(
    track_app,
    "Examples:  ttrain track push\n\nttrain track push --all\n\nttrain track push "
    "full-20261121-160222-1a2b4 --json",
)
def track_push(
    run: Annotated[
        str | None, argument("a run, as `ttrain pipeline status` lists it", metavar="RUN")
    ] = None,
    everything: Annotated[
        bool, option("also the runs that have not changed since their last push", "--all")
    ] = False,
) -> Output:
    """Push runs to MLflow: without RUN, all that changed since their last push.

    Use it after an outage, or for a damaged database. Exit code 1 if a push failed.
    """
    from ttrain.store import run_views
    from ttrain.tracking import pusher
    from ttrain.tracking.sweeps import tracked_names
    from ttrain.tracking.tracked_runs import is_tracked

    root = usable_home()
    names = None if run is None else [run_views.need_run(root, run)["run"]]
    if everything:
        tracked = filter(is_tracked, reversed(runs.history(root)))
        names = [*tracked_names(root), *(record["run"] for record in tracked)]
    screen = console(stderr=True)
    pushed = pusher.push(root, names, lambda name: print_plain(screen, name))
    failed = [f"{one.run}: {one.why}" for one in pushed if one.why]
    failures = f", {len(failed)} failed" if failed else ""
    total = (
        f"pushed: {counted(len(pushed) - len(failed), 'run')}{failures}"
        if pushed
        else "MLflow is up to date: no run has changed since its last push"
    )
    values = [{**asdict(one), "pushed": not one.why} for one in pushed]
    return Output(values, [*failed, total], code=int(bool(failed)))


def links_of(root: Path, address: str, chosen: Sequence[tuple[str, str | None]]) -> dict[str, str]:
    """MLflow's pages with the token, and the table and curves of all runs of the name.

    `chosen`: runs, or stages of them, with a page of their own. Raises UsageError where MLflow has
    none.
    """
    from ttrain.store.server_records import page_with_token
    from ttrain.tracking import pusher
    from ttrain.tracking.views import addresses_of

    if not runs.names(root):
        return {}
    failed = [one.why for one in pusher.push(root) if one.why]
    if failed:
        raise UsageError(failed[0])
    links = addresses_of(root, chosen)
    experiment = links.pop("experiment")
    shown = {
        name: page_with_token(root, f"{address.rstrip('/')}/{page}") for name, page in links.items()
    }
    return {**shown, "experiment": experiment}


def open_in_browser(root: Path, url: str) -> None:
    """Open a page, or print on standard error that no browser can."""
    import webbrowser

    has_screen = sys.platform != "linux" or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )
    with contextlib.suppress(webbrowser.Error):
        # Without a screen a text browser would take over the terminal.
        if has_screen and webbrowser.open(redirect_page(root, url)):
            return
    print("no browser could be opened here; open the address yourself", file=sys.stderr)


def redirect_page(root: Path, url: str) -> str:
    """Write a private page that redirects to an address with a token; return its URI.

    A browser's arguments are visible to other users.
    """
    from ttrain.store.server_records import make_folder

    if "?token=" not in url:
        return url
    path = make_folder(root) / "open.html"
    target = json.dumps(url).replace("<", "\\u003c")
    page = (
        "<!doctype html><meta "
        f'charset="utf-8"><title>ttrain</title><script>location.replace({target})</script>'
    )
    write_bytes(path, page.encode(), PRIVATE_FILE)
    return path.as_uri()
