"""`ttrain track sync`: tells MLflow what ended runs could not, and says what that was and what is left."""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from ttrain.core.files import read_json, read_object
from ttrain.core.redact import without_user
from ttrain.errors import UsageError
from ttrain.tracking import outboxes, records
from ttrain.tracking.calls import first_line, outcome
from ttrain.tracking.database import open_client
from ttrain.tracking.orphaned_outbox import remove_unmade, tell_one
from ttrain.tracking.store import Store

log = logging.getLogger("ttrain")

TRIES: Final = 3  # while the server answers when it is asked for its health


@dataclass(frozen=True)
class Waiting:
    """What one tracked run has yet to tell: how many things of each kind, and why they still wait."""

    run: str  # the pipeline's run
    name: str  # of the tracked run: the same, or its stage's
    tracker: str  # "" is the home's own database
    directory: Path = field(repr=False)
    things: Mapping[str, int] = field(default_factory=dict)
    told: Mapping[str, int] = field(default_factory=dict)  # what arrived now: metrics, params, file, ...
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """What `track sync --json` prints of it."""
        told = {"run": self.run, "name": self.name, "tracker": self.tracker or "the home's own"}
        return told | {"waiting": dict(self.things), "told": dict(self.told), "why": self.why}


def waiting(home: Path, run: str | None = None) -> list[Waiting]:
    """All that waits in this home, the oldest run first. Raises UsageError where nothing is known of `run`."""
    listed = [one for one in map(_look, outboxes.found(home.resolve())) if one is not None]
    if run is None:
        return listed
    chosen = [one for one in listed if run in (one.run, one.name)]
    chosen = chosen or [one for one in listed if one.run.startswith(run)]
    if not chosen and not records.there_are(home, run):
        names = ", ".join(dict.fromkeys(one.run for one in listed))
        raise UsageError(f"no run is called '{run}'; waiting are {names or 'none'}")
    return chosen


def sync(
    home: Path,
    uri_of: Callable[[str], str],
    run: str | None = None,
    told: Callable[[int, int], object] = lambda done, total: None,
) -> list[Waiting]:
    """Tells what waits; what became of each. `uri_of(tracker)`: with the password that no outbox holds.

    `told(bytes done, bytes in all)` is called while files are uploaded.
    """
    home = home.resolve()
    remove_unmade(home)
    found = waiting(home, run)
    done: list[Waiting] = []
    for tracker in dict.fromkeys(one.tracker for one in found):
        of_it = [one for one in found if one.tracker == tracker]
        uri = uri_of(tracker)
        client, error = outcome(lambda: open_client(uri, home))  # noqa: B023
        if client is None:
            done += [_left(one, {}, (error and first_line(error)) or "") for one in of_it]
            continue
        store = Store(client, uri, home, "")
        store.on_upload(told)
        _, silence = store.asking.once(lambda: None)
        done += _all_told(store, of_it, silence, elsewhere=run is not None)
        store.close()
    return done


def _all_told(store: Store, found: list[Waiting], silence: Exception | None, *, elsewhere: bool) -> list[Waiting]:
    """What is small of all of them, then the files, those of a run after those of its stages."""
    done = {}
    for one in found:
        done[one.directory] = _told(store, one, silence, elsewhere=elsewhere, uploads=False)
    for directory in outboxes.children_first(done):
        before = done[directory]
        if before.things and not before.why:
            now = _told(store, before, None, elsewhere=elsewhere, uploads=True)
            done[directory] = replace(now, told={**before.told, **now.told})
    return list(done.values())


def _told(store: Store, one: Waiting, silence: Exception | None, *, elsewhere: bool, uploads: bool) -> Waiting:
    before, result = dict(store.counts), None
    for _ in range(TRIES):
        if silence is None:
            result = tell_one(store, one.directory, elsewhere=elsewhere, uploads=uploads)
        if result is not False or silence is not None:
            break
        _, silence = store.asking.once(lambda: None)
    arrived = {name: number - before.get(name, 0) for name, number in store.counts.items()}
    arrived = {name: number for name, number in arrived.items() if number}
    if result:
        return _left(one, arrived, "")
    if result is None and silence is None:
        host = read_object(one.directory / "run.json").get("host")
        where = "" if host == platform.node() else f" on {host}; name the run to tell it all the same"
        return _left(one, arrived, f"a process has it, which tells it itself{where}")
    why = first_line(silence) if silence else store.asking.last_error
    return _left(one, arrived, f"MLflow at {without_user(store.uri)}: {why}")


def _left(one: Waiting, told: Mapping[str, int], why: str) -> Waiting:
    now = _look(one.directory)
    return Waiting(one.run, one.name, one.tracker, one.directory, now.things if now else {}, told, why)


def _look(directory: Path) -> Waiting | None:
    about = read_json(directory / "run.json")
    if not isinstance(about, dict):
        return None
    things = _counted(entry.what for entry in outboxes.entries_of(directory))
    if not about.get("ended"):
        things["end"] = 1
    run = str(about.get("tags", {}).get("ttrain.run") or about.get("name"))
    return Waiting(run, str(about.get("name")), str(about.get("tracker", "")), directory, things)


def _counted(names: Iterable[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
