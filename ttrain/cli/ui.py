"""`ttrain ui`: MLflow's pages in the browser, on the runs of this home."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ttrain.cli.options import AsJson, server_settings
from ttrain.core.parent_process import heeded_signals
from ttrain.core.terminal import escaped, print_json

if TYPE_CHECKING:
    from ttrain.tracking import Addresses, RunView

EPILOG = "Examples:  ttrain ui\n\nttrain ui latest\n\nttrain ui latest:sft\n\nttrain ui full-20261121-160222-1a2b4 latest"
RUN_HELP = (
    "a run, RUN:STAGE, `latest`, an MLflow run id, or a registered NAME@ALIAS; several are compared; none: the table of all"
)
POLL_SECONDS = 1.0


def ui(
    runs: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help=RUN_HELP, show_default=False)] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="print the addresses, and open none")] = False,
    port: Annotated[int, typer.Option(help="of the MLflow server, where none runs yet")] = 5000,
    as_json: AsJson = False,
) -> None:
    """Open MLflow on the runs, with the columns that tell which is better and why.

    The server of `ttrain up` or of MLFLOW_TRACKING_URI is taken where there is one; else one is started on 127.0.0.1, until
    Ctrl-C.
    """
    from ttrain import tracking
    from ttrain.core.redact import without_user
    from ttrain.core.standard_streams import outlast_output
    from ttrain.store.layout import home

    outlast_output()
    root = home()
    tracked = [_tracked_id(root, *_named(root, one)) for one in runs or ()]
    uri = tracking.tracking_uri(root)
    if uri.startswith(("http://", "https://")):
        found = _found(without_user(uri).rstrip("/"), _addresses(root, tracked), tracked)
        _tell(root, found, browser=not no_browser, as_json=as_json, until_stopped=False)
        return
    _refuse_another_database(root, uri)
    pages = _addresses(root, tracked)
    with _server(root, port) as (address, asked):
        _tell(
            root, _found(address, pages, tracked), browser=not no_browser, as_json=as_json, until_stopped=asked is not None
        )
        if asked:
            _wait(root, asked)


def _named(root: Path, text: str) -> tuple[RunView, str | None]:
    """(run, stage) of RUN, of RUN:STAGE, or of a registered model. Raises UsageError."""
    from ttrain import tracking
    from ttrain.errors import UsageError
    from ttrain.tracking.reading import REGISTERED

    name, _, stage = (text, "", "") if REGISTERED.fullmatch(text) else text.partition(":")
    view = tracking.read_run(root, name)
    if stage and stage not in view.stages:
        raise UsageError(f"the run {view.name} has no stage '{stage}'; it has {', '.join(view.stages)}")
    return view, stage or None


def _tracked_id(root: Path, view: RunView, stage: str | None) -> str:
    """Id of the tracked run; a run that found everything cached made none, and stands for the one it equals."""
    from ttrain import tracking
    from ttrain.errors import UsageError

    if view.run_id is None and (equals := view.noted.get("equals")):
        view = tracking.read_run(root, equals)
    found = view.stages[stage].run_id if stage else view.run_id
    if found is None:
        what = f"{view.name}:{stage}" if stage else view.name
        raise UsageError(f"MLflow has no run of {what}: it was not tracked; `ttrain report {view.name}` shows what there is")
    return found


def _addresses(root: Path, tracked: Sequence[str]) -> Addresses:
    """The pages of the runs' experiment, else of the newest run's. Raises UsageError where nothing was tracked yet."""
    from ttrain import tracking
    from ttrain.config import Tracking
    from ttrain.errors import UsageError
    from ttrain.store import runs

    told = (run.get("settings", {}).get("tracking", {}).get("experiment") for run in runs.newest_first(root))
    names = [name for name in (next(told, None), Tracking().experiment) if name]
    found = tracking.addresses(root, names, tracked)
    if found is None:
        raise UsageError(f"nothing is tracked in {root} yet; begin with `ttrain pipeline run full`")
    return found


def _refuse_another_database(root: Path, uri: str) -> None:
    from ttrain import tracking
    from ttrain.core.redact import without_user
    from ttrain.errors import UsageError

    if uri != f"sqlite:///{tracking.database_of(root)}":
        raise UsageError(
            f"MLFLOW_TRACKING_URI is {without_user(uri)}, which is no server; `ttrain ui` opens servers and "
            f"the home's own database. Start `mlflow server --backend-store-uri` on it and name its address, or unset it"
        )


@contextmanager
def _server(root: Path, port: int) -> Iterator[tuple[str, threading.Event | None]]:
    """(address, None) of a server that runs; else of one of our own, which ends with the block, and what asks for that."""
    from flows import server_processes, servers

    if there := server_processes.living(root, "mlflow"):
        yield f"http://{server_processes.HOST}:{there.port}", None
        return
    servers.start(root, {"mlflow": port}, server_settings(None).auth)
    try:
        asked = threading.Event()
        for signum in heeded_signals():
            signal.signal(signum, lambda *_: asked.set())
        started = server_processes.living(root, "mlflow")
        assert started is not None, "it has just answered"
        yield f"http://{server_processes.HOST}:{started.port}", asked
    finally:
        if server_processes.living(root, "prefect"):
            print("the server is left to `ttrain up`, which took it over; `ttrain down` stops it", file=sys.stderr)
        else:
            server_processes.stop(root, "mlflow")


def _found(address: str, pages: Addresses, tracked: Sequence[str]) -> dict[str, str]:
    """What to open, and what else there is."""
    first = pages.compare(tracked) if len(tracked) > 1 else pages.run(tracked[0]) if tracked else pages.table
    named = {"url": first, "table": pages.table, "curves": pages.curves}
    return {**{name: f"{address}/{page}" for name, page in named.items()}, "experiment": pages.experiment}


def _tell(root: Path, found: Mapping[str, str], *, browser: bool, as_json: bool, until_stopped: bool) -> None:
    """Print the addresses and open the first of them."""
    from ttrain.store.server_records import page_with_token

    found = {name: page_with_token(root, text) for name, text in found.items()}
    if as_json:
        print_json({**found, "until_stopped": until_stopped})
    else:
        lines = [found["url"]] if found["url"] != found["table"] else []
        lines += [f"runs    {found['table']}", f"curves  {found['curves']}"]
        lines += ["Ctrl-C ends the server"] if until_stopped else []
        print("\n".join(map(escaped, lines)))
    sys.stdout.flush()
    if browser and not _open(_page_that_leads_to(root, found["url"])):
        print("no browser could be opened here; open the address yourself, or give --no-browser", file=sys.stderr)


def _page_that_leads_to(root: Path, url: str) -> str:
    """A file that only the user can read, in place of an address with a token: a browser gets it as an argument."""
    from ttrain.core.files import PRIVATE_FILE, write_bytes
    from ttrain.store.server_records import make_folder

    if "?token=" not in url:
        return url
    path = make_folder(root) / "open.html"
    where = json.dumps(url).replace("<", "\\u003c")
    page = f'<!doctype html><meta charset="utf-8"><title>ttrain</title><script>location.replace({where})</script>'
    write_bytes(path, page.encode(), PRIVATE_FILE)
    return path.as_uri()


def _open(url: str) -> bool:
    """Whether a browser took the address; one that would take the terminal is not asked."""
    import webbrowser

    if sys.platform == "linux" and not any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")):
        return False
    try:
        return webbrowser.open(url)
    except webbrowser.Error:
        return False


def _wait(root: Path, asked: threading.Event) -> None:
    """Until Ctrl-C, SIGTERM or SIGHUP, or until somebody else ends the server."""
    from flows import server_processes

    while not asked.wait(POLL_SECONDS):
        if server_processes.living(root, "mlflow") is None:
            print("the server has ended", file=sys.stderr)
            return
