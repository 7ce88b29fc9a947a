"""Nights of a pipeline: what each of them reads, what became of it, which slot is whose. Files and JSON only, no Prefect.

`nightly/NAME/night-000012.json` is one night. It is written whole, with its frozen list of inputs and settings, before its
first stage starts, and stays open until it was decided what becomes of its models: whatever ended the process in between,
the next slot finds it open and goes on with the same list, so that all keys, and with them all finished stages and
checkpoints, are the same.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from ttrain.config import Nightly
from ttrain.core import redact
from ttrain.core.files import PRIVATE_FILE, private_directory, read_json, write_json
from ttrain.data import locations
from ttrain.errors import TTrainError

COMPLETED = ("promoted", "kept")  # nights whose models were compared with the champion's
MOST_CRASHES = 10  # a list that ends its process each time, by memory, must not stand before all that is new for ever
FAILED, REFUSED = "failed", "refused"  # by itself; by a wrong setting, which is no failed try
UNDECIDED = (FAILED, REFUSED, "unfinished", "crashed")


class StillRunning(TTrainError):
    """Another process is in the middle of a night of the same pipeline."""


@dataclass(frozen=True)
class Champion:
    """The models that a night starts from: the version of the set, and the artifact's key for each stage."""

    version: str
    keys: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {"version": self.version, "keys": dict(self.keys)}


@dataclass(frozen=True)
class Frozen:
    """All that a night reads: {"pretrain": [{"location": ..., "sha256": ...}], ...}, the user's settings, the champion."""

    files: Mapping[str, list[dict[str, Any]]]
    settings: Mapping[str, Any]
    champion: Champion | None = None
    heldout: str | None = None  # key of the held-out documents of the nights before
    learnt: tuple[str, ...] = ()  # digests of files that the champion has learnt, and no night has read

    def to_json(self) -> dict[str, Any]:
        """As a record holds it."""
        return {
            "files": {name: [_without_secrets(file) for file in files] for name, files in self.files.items()},
            "settings": dict(self.settings),
            "champion": self.champion.to_json() if self.champion else None,
            "heldout": self.heldout,
            "learnt": list(self.learnt),
        }


def _without_secrets(file: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of a list of files as a record holds it; the settings of the next night know where the file lies."""
    return {**file, "location": redact.url(file["location"])}


class Night:
    """The record of one night, rewritten at each change."""

    def __init__(self, path: Path, data: dict[str, Any]) -> None:
        self.path, self.data = path, data

    @property
    def name(self) -> str:
        """Such as night-000012."""
        return self.path.stem

    @property
    def is_open(self) -> bool:
        """Whether it is still to be decided what becomes of its models."""
        return bool(self.data["state"] == "open")

    @property
    def outcome(self) -> str:
        """promoted, kept, nothing-new, failed, refused, unfinished, crashed, running; failed, refused, closed: given up."""
        return str(self.data["outcome"])

    @property
    def frozen(self) -> Frozen:
        """What it reads."""
        given = self.data["frozen"]
        champion = Champion(**given["champion"]) if given["champion"] else None
        return Frozen(given["files"], given["settings"], champion, given.get("heldout"), tuple(given.get("learnt", ())))

    @property
    def last_try(self) -> Mapping[str, Any]:
        """{"began": seconds since the epoch, "slot": the same or None, "outcome": ..., "run": ..., "process": ...}."""
        found: Mapping[str, Any] = self.data["tries"][-1]
        return found

    @property
    def ended(self) -> Mapping[str, Any] | None:
        """The last try that came to an end; None where none did."""
        return next((one for one in reversed(self.data["tries"]) if one["outcome"] != "running"), None)

    @property
    def failures(self) -> int:
        """How often it failed by itself; being killed or stopped, or refused for a wrong setting, is no failure."""
        return sum(one["outcome"] == FAILED for one in self.data["tries"])

    @property
    def crashes_in_a_row(self) -> int:
        """How often it was killed since anything else became of it; the try in progress does not count."""
        outcomes = [one["outcome"] for one in self.data["tries"] if one["outcome"] != "running"]
        return next((n for n, outcome in enumerate(reversed(outcomes)) if outcome != "crashed"), len(outcomes))

    def digests(self) -> set[str]:
        """Of the files that it reads."""
        return {file["sha256"] for files in self.data["frozen"]["files"].values() for file in files}

    def begin_try(self, slot: datetime | None) -> None:
        """Note that this process goes about it now."""
        self.add_try(slot)
        self.note(outcome="running")

    def add_try(self, slot: datetime | None) -> None:
        """The same, to be written with what follows."""
        self.data["tries"].append({
            "began": time.time(),
            "slot": slot.timestamp() if slot else None,
            "outcome": "running",
            "process": {"pid": os.getpid(), "host": platform.node()},
        })  # fmt: skip

    def freeze(self, frozen: Frozen) -> None:
        """Change what it reads, where what it read is there no more."""
        self.note(frozen=frozen.to_json())

    def end_try(self, outcome: str, reason: str, *, closed: bool, event: str | None = None) -> None:
        """Note what became of it; a night that is not closed goes on at the next slot. `event`: what is to be told of it."""
        self.data["tries"][-1] |= {"outcome": outcome, "reason": reason, "ended": time.time()}
        self.note(outcome=outcome, reason=reason, state="closed" if closed else "open", untold=event)

    def note(self, **values: Any) -> None:
        """Note something about it."""
        self.data.update(values)
        write_json(self.path, self.data, PRIVATE_FILE)

    def note_try(self, **values: Any) -> None:
        """Note something about the try in progress, such as its run."""
        self.data["tries"][-1] |= values
        write_json(self.path, self.data, PRIVATE_FILE)


class Nights:
    """The nights of the pipeline `name` under a home."""

    def __init__(self, home: Path, name: str) -> None:
        self.directory = home / "nightly" / name

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """One night at a time; the system releases it when the process dies. Raises StillRunning where another has it."""
        import filelock

        self._make_directory()
        lock = filelock.FileLock(self.directory / "lock", timeout=0, mode=PRIVATE_FILE)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise StillRunning(self._who()) from None
        try:
            yield
        finally:
            lock.release()

    def _make_directory(self) -> None:
        private_directory(self.directory.parent)
        private_directory(self.directory)

    def _who(self) -> str:
        """Who has the lock."""
        newest = self.newest()
        if newest is None or newest.outcome != "running":
            return "another night is just beginning or ending"
        began, process = newest.last_try["began"], newest.last_try["process"]
        return f"{newest.name} is still running, since {shown(began)} (process {process['pid']} on {process['host']})"

    def all(self) -> list[Night]:
        """All nights, newest first: by their numbers, which no change of the clock moves."""
        found = [
            Night(path, data) for path in self.directory.glob("night-*.json") if isinstance(data := read_json(path), dict)
        ]
        return sorted(found, key=lambda night: night.name, reverse=True)

    def newest(self) -> Night | None:
        """The last night that began."""
        found = self.all()
        return found[0] if found else None

    def settle(self) -> Night | None:
        """The newest night, with a try that nobody ended written down as crashed. Call it with the lock held: whoever began
        that try, on this machine or another, would have it."""
        newest = self.newest()
        if newest and newest.outcome == "running":
            reason = "its process was killed, or the machine went down"
            gives_up = newest.crashes_in_a_row + 1 >= MOST_CRASHES
            if gives_up:
                reason += f", {MOST_CRASHES} times in a row; its list is given up, the next night makes a new one"
            outcome = FAILED if gives_up else "crashed"
            newest.end_try(outcome, reason, closed=gives_up, event="failed")  # by memory, each night, and nobody would know
        return newest

    def covered(self, slot: datetime | None, zone: str | None, now: float) -> str | None:
        """Why a slot needs no night of its own; None where it does, and for one that nobody scheduled.

        After a downtime all missed slots come at once: the first of them runs, and the others lie before its beginning.
        Where the clock is set back, the same time of day comes twice. A retry of a slot that came to nothing runs.
        """
        newest = self.newest()
        if slot is None or newest is None or (last := newest.last_try)["began"] > now:  # the clock was wrong then
            return None
        if last["slot"] == slot.timestamp() and newest.outcome in UNDECIDED:
            return None
        if slot.timestamp() <= last["began"]:
            return (
                f"the slot of {shown(slot.timestamp())} is covered by {newest.name}, which began at {shown(last['began'])}"
            )
        if last["slot"] is not None and _local(last["slot"], zone) == _local(slot.timestamp(), zone):
            return f"the clock was set back: {newest.name} had the slot of the same time of day"
        return None

    def begin(self, frozen: Frozen, slot: datetime | None) -> Night:
        """A new night: from here on it is open, and its list is what it reads."""
        night = self._next(frozen)
        night.begin_try(slot)
        return night

    def _next(self, frozen: Frozen) -> Night:
        """A record that is not written yet."""
        newest = self.newest()
        number = int(newest.name.removeprefix("night-")) + 1 if newest else 1
        data = {"state": "open", "outcome": "running", "reason": "", "frozen": frozen.to_json(), "tries": []}
        return Night(self.directory / f"night-{number:06}.json", data)

    def without_list(self, outcome: str, slot: datetime | None, reason: str, event: str | None = None) -> Night:
        """Note a night that read nothing: no file was new, or looking failed. Several of them in a row are one record."""
        newest = self.newest()
        if newest is None or newest.outcome != outcome or newest.data["frozen"]["files"]:
            newest = self._next(Frozen({}, {}))
        newest.data |= {"state": "closed", "tries": []}
        newest.add_try(slot)  # one write: killed between two, it would go on as a night without list and settings
        newest.end_try(outcome, reason, closed=True, event=event)
        return newest

    def skipped(self, slot: datetime | None, reason: str) -> None:
        """Note a slot that had no night: a line of `skipped.jsonl`, since whoever has the lock may be another process."""
        self._make_directory()
        line = json.dumps({"slot": slot.timestamp() if slot else None, "at": time.time(), "reason": reason})
        path = self.directory / "skipped.jsonl"
        with open(path, "a", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, PRIVATE_FILE)) as file:
            file.write(line + "\n")

    def read(self) -> set[str]:
        """Digests of the files that a completed night has read, or that its champion had learnt before there were nights."""
        completed = [night for night in self.all() if night.outcome in COMPLETED]
        return {digest for night in completed for digest in (*night.digests(), *night.frozen.learnt)}

    def learnt(self, champion: Champion | None) -> set[str]:
        """Digests of the files that made the champion: those of its night, of the night whose champion that one began
        with, and so on. A night that was not promoted, by its figures or by hand, or was rolled back, is not among them."""
        made = {night.data.get("version"): night for night in self.all() if night.outcome in COMPLETED}
        found: set[str] = set()
        version = champion.version if champion else None
        while version in made:
            night = made.pop(version)
            found |= night.digests() | set(night.frozen.learnt)
            before = night.frozen.champion
            version = before.version if before else None
        return found


def needed(home: Path) -> set[str]:
    """Keys of the artifacts that nights will read: the champions of open ones, and the newest held-out documents of each
    pipeline, which the next night's are added to."""
    found: set[str] = set()
    for directory in (home / "nightly").glob("*"):
        for night in Nights(home, directory.name).all():
            frozen = night.frozen
            if night.is_open:
                found |= set(frozen.champion.keys.values() if frozen.champion else ())
                found.add((frozen.heldout or "").partition("/")[2])
            if night.outcome in COMPLETED and night.data.get("heldout"):
                found.add(night.data["heldout"].partition("/")[2])
                break
    return found - {""}


def stop_at(settings: Nightly, began: float) -> float | None:
    """When a night that began then (seconds since the epoch) saves its state and stops; None: never.

    An hour of the clock is the next one to come; where a change of the clock leaves it out, the hour after the change.
    """
    if settings.deadline_hours is not None:
        return began + 3600 * settings.deadline_hours
    if settings.deadline is None:
        return None
    hour, minute = map(int, settings.deadline.split(":"))
    zone = ZoneInfo(settings.timezone) if settings.timezone else None
    local = datetime.fromtimestamp(began, zone).replace(tzinfo=None)
    for days in range(3):  # a day may be gone through by a change of the clock
        wall = local.replace(hour=hour, minute=minute, second=0, microsecond=0) + timedelta(days=days)
        when = wall.replace(tzinfo=zone).timestamp()
        if when > began:
            return when
    raise AssertionError("one of three days has such an hour to come")


def shown(seconds: float) -> str:
    """A moment as people read it, in the machine's own time zone."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(sep=" ", timespec="seconds")


def _local(seconds: float, zone: str | None) -> datetime:
    """What a clock on the wall showed, without its offset."""
    return datetime.fromtimestamp(seconds, ZoneInfo(zone) if zone else None).replace(tzinfo=None)


def names(files: Iterable[str], most: int = 5) -> str:
    """Some names of files, for a message."""
    found = [locations.name(file) for file in files]
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")
