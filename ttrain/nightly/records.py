"""Records of a pipeline's nights: inputs, outcome and slot of each. Files and JSON only.

`nightly/NAME/night-000012.json` is written with the night's inputs and settings before its first
stage, and stays open until its models are promoted or not. If the process is killed in between, the
next slot continues with the same inputs, so that all keys, finished stages and checkpoints are the
same.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

from pydantic import TypeAdapter

from ttrain.config import Nightly, Settings
from ttrain.core import redact
from ttrain.core.files import (
    PRIVATE_FILE,
    JsonDict,
    JsonObject,
    exclusive,
    private_directory,
    private_opener,
    read_object,
    write_json,
)
from ttrain.core.hashing import digest_of
from ttrain.core.text import first_of, format_time
from ttrain.data import locations
from ttrain.errors import TTrainError
from ttrain.store.runs import NOTHING_NEW, is_gone, this_process

COMPLETED = ("promoted", "kept")  # nights whose models were compared with the champion's
# A list that kills its process each time, by memory, must not block new data for ever
MOST_CRASHES = 10
FAILED = "failed"  # by itself
REFUSED = "refused"  # by a wrong setting, which does not count as a failed try
UNDECIDED = (FAILED, REFUSED, "unfinished", "crashed")
# By stage: the fields of a night that name what its model is trained on
LEARNT = {"pretrain": "documents", "sft": "chats"}
KILLED = "its process was killed, or the machine went down"


# A data file: its location and sha256, and of a damaged one why it is left out
FileEntry = JsonDict
FilesByDataset = Mapping[str, list[FileEntry]]


class StillRunning(TTrainError):
    """Another process is running a night of the same pipeline."""


@dataclass(frozen=True)
class Champion:
    """The models that a night starts from: version of the set, and artifact key of each stage."""

    version: str
    keys: Mapping[str, str]


@dataclass(frozen=True)
class InputSnapshot:
    """All inputs of a night: files by data set, the user's settings, the champion."""

    files: FilesByDataset
    settings: JsonObject
    champion: Champion | None = None
    heldout: str | None = None  # "stage/key" of the held-out documents of earlier nights
    # Digests of files that the champion was trained on but no night has read
    learnt: tuple[str, ...] = ()
    # "stage/key" of all documents that the champion was trained on, oldest first
    documents: tuple[str, ...] = ()
    # "stage/key" of all chats that the champion was trained on, if SFT trains on new chats only
    chats: tuple[str, ...] = ()
    heldout_nights: tuple[str, ...] = ()  # names of the nights that brought `heldout`, oldest first

    def to_json(self) -> JsonDict:
        files = {name: [*map(_without_secrets, listed)] for name, listed in self.files.items()}
        return {**asdict(self), "files": files}


_snapshot_type = TypeAdapter(InputSnapshot)


def _reading_digest(settings: Settings) -> str:
    return digest_of(settings.reading.model_dump(mode="json"))


def _without_secrets(file: FileEntry) -> FileEntry:
    return {**file, "location": redact.url(file["location"])}


@dataclass(eq=False)
class NightRecord:
    """The record of one night, rewritten at each change."""

    path: Path
    data: JsonDict

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def is_open(self) -> bool:
        """Whether it is not yet decided if its models are promoted."""
        return bool(self.data["state"] == "open")

    @property
    def outcome(self) -> str:
        """promoted, kept, nothing-new, failed, refused, unfinished, crashed or running."""
        return str(self.data["outcome"])

    @property
    def frozen(self) -> InputSnapshot:
        return _snapshot_type.validate_python(self.data["inputs"])

    @property
    def left_out(self) -> list[FileEntry]:
        """Damaged files: location, sha256, reading (digest of the settings) and reason."""
        return list(self.data.get("left_out", []))

    @property
    def unread(self) -> list[FileEntry]:
        """The files of `left_out` that the night does not read."""
        return [file for file in self.left_out if file["sha256"] not in self.digests()]

    @property
    def heldout(self) -> str | None:
        """Reference ("stage/key") of the held-out documents of this and all earlier nights.

        None before the decision, and if the user named others, which say nothing of earlier nights.
        """
        is_named = self.frozen.settings.get("data", {}).get("pretrain_heldout")
        return None if is_named or self.outcome not in COMPLETED else self.data.get("heldout")

    def made(self, champion: Champion) -> bool:
        """Whether the night completed and its set is this champion.

        By the keys of its models if they are recorded: a new registry counts from 1 again.
        """
        if self.outcome not in COMPLETED:
            return False
        if keys := self.data.get("keys"):
            return bool(keys.items() <= champion.keys.items())
        return self.data.get("version") == champion.version

    def learnt_shards(self, stage: str) -> tuple[str, ...]:
        """All shards ("stage/key") that this night's model was trained on, oldest first."""
        kind = LEARNT[stage]
        return (*getattr(self.frozen, kind), *filter(None, [self.data.get(kind)]))

    @property
    def last_try(self) -> JsonObject:
        """The last try: began, slot (seconds since 1970, or None), outcome, run, process."""
        return dict(self.data["attempts"][-1])

    @property
    def ended(self) -> JsonObject | None:
        """The last try that ended, except those killed before their run began; None if there is
        none.
        """
        tries = (
            one
            for one in reversed(self.data["attempts"])
            if one["outcome"] != "running" and (one["outcome"] != "crashed" or one.get("run"))
        )
        return next(tries, None)

    @property
    def failures(self) -> int:
        """How often it failed by itself: not killed, stopped, or refused for a wrong setting."""
        return sum(attempt["outcome"] == FAILED for attempt in self.data["attempts"])

    @property
    def crashes_in_a_row(self) -> int:
        """How often it was killed since its last other outcome."""
        outcomes = [
            attempt["outcome"]
            for attempt in self.data["attempts"]
            if attempt["outcome"] != "running"
        ]
        return next(
            (n for n, outcome in enumerate(reversed(outcomes)) if outcome != "crashed"),
            len(outcomes),
        )

    def as_it_is_now(self) -> NightRecord:
        """The night, crashed if it is recorded as running and its process here is gone."""
        if self.outcome != "running" or not is_gone(self.last_try["process"]):
            return self
        return NightRecord(self.path, {**self.data, "outcome": "crashed", "reason": KILLED})

    def digests(self) -> set[str]:
        return {file["sha256"] for files in self.data["inputs"]["files"].values() for file in files}

    def begin_try(self, slot: datetime | None) -> None:
        self.data["attempts"].append(_new_try(slot))
        self.note(outcome="running")

    def leave_out(self, files: Iterable[FileEntry], reason: str, settings: Settings) -> None:
        """Record files that the stages found damaged under these settings."""
        reading = _reading_digest(settings)
        entries = [
            {**_without_secrets(file), "reading": reading, "reason": reason} for file in files
        ]
        self.note(left_out=[*self.left_out, *entries])

    def end_try(self, outcome: str, reason: str, *, closed: bool) -> None:
        """Record the try's outcome; a night that is not closed continues at the next slot."""
        self.data["attempts"][-1] |= {"outcome": outcome, "reason": reason, "ended": time.time()}
        self.note(outcome=outcome, reason=reason, state="closed" if closed else "open")

    def note(self, **values: Any) -> None:
        self.data.update(values)
        write_json(self.path, self.data, PRIVATE_FILE)

    def note_try(self, **values: Any) -> None:
        """Set fields of the try in progress, such as its run, and write the record."""
        self.data["attempts"][-1] |= values
        self.note()


def _new_try(slot: datetime | None) -> JsonDict:
    return {
        "began": time.time(),
        "slot": slot.timestamp() if slot else None,
        "outcome": "running",
        "process": this_process(),
    }


class Nights:
    """The nights of the pipeline `name` under a home."""

    def __init__(self, home: Path, name: str) -> None:
        self.directory = home / "nightly" / name

    def lock(self) -> contextlib.AbstractContextManager[None]:
        """Lock for one night at a time, released when its process dies. Raises StillRunning."""
        self._make_directory()
        return exclusive(self.directory / "lock", self._refuse)

    def _make_directory(self) -> None:
        private_directory(self.directory.parent)
        private_directory(self.directory)

    def _refuse(self) -> NoReturn:
        newest = self.newest()
        if newest is None or newest.outcome != "running":
            raise StillRunning("another night is just beginning or ending")
        began = format_time(newest.last_try["began"])
        process = newest.last_try["process"]
        raise StillRunning(
            f"{newest.name} is still running, since {began} "
            f"(process {process['pid']} on {process['host']})"
        )

    def newest_first(self) -> Iterator[NightRecord]:
        """The nights by their numbers, which do not depend on the clock, read one by one."""
        for path in sorted(self.directory.glob("night-*.json"), reverse=True):
            if data := read_object(path):
                yield NightRecord(path, data)

    def newest(self) -> NightRecord | None:
        return next(self.newest_first(), None)

    def settle(self) -> NightRecord | None:
        """Mark the newest night as crashed if it is unfinished; returns it then. Needs the lock."""
        newest = self.newest()
        if newest is None or newest.outcome != "running":
            return None
        if newest.crashes_in_a_row + 1 >= MOST_CRASHES:
            reason = (
                f"{KILLED}, {MOST_CRASHES} times in a row; its list is given up, "
                "the next night makes a new one"
            )
            newest.end_try(FAILED, reason, closed=True)
        else:
            newest.end_try("crashed", KILLED, closed=False)
        return newest

    def covered(self, slot: datetime | None) -> str | None:
        """Why a slot needs no night of its own; None if it needs one, and for an unscheduled night.

        Of missed slots, which come at once after a downtime, the first runs and covers the others.
        A retry of a slot whose night is undecided runs.
        """
        newest = self.newest()
        if slot is None or newest is None:
            return None
        last = newest.last_try
        is_retry = last["slot"] == slot.timestamp() and newest.outcome in UNDECIDED
        if is_retry or slot.timestamp() > last["began"]:
            return None
        return (
            f"the slot of {format_time(slot.timestamp())} is covered by {newest.name}, "
            f"which began at {format_time(last['began'])}"
        )

    def begin(self, frozen: InputSnapshot, slot: datetime | None) -> NightRecord:
        night = self._next(frozen)
        night.begin_try(slot)
        return night

    def _next(self, frozen: InputSnapshot) -> NightRecord:
        used = [path.stem.removeprefix("night-") for path in self.directory.glob("night-*.json")]
        number = max((int(text) for text in used if text.isdecimal()), default=0) + 1
        return NightRecord(
            self.directory / f"night-{number:06}.json",
            {
                "state": "open",
                "outcome": "running",
                "reason": "",
                "inputs": frozen.to_json(),
                "attempts": [],
            },
        )

    def add_empty(self, outcome: str, slot: datetime | None, reason: str) -> NightRecord:
        """Record a night without inputs: no file was new, or listing failed. Several share one
        record.
        """
        newest = self.newest()
        if newest is None or newest.outcome != outcome or newest.data["inputs"]["files"]:
            newest = self._next(InputSnapshot({}, {}))
        newest.data["attempts"] = [_new_try(slot)]
        newest.end_try(
            outcome, reason, closed=True
        )  # one write: a kill leaves no night without a list
        return newest

    def skipped(self, slot: datetime | None, reason: str) -> None:
        """Record a slot without a night in `skipped.jsonl`: another process may have the lock."""
        self._make_directory()
        line = json.dumps(
            {"slot": slot.timestamp() if slot else None, "at": time.time(), "reason": reason}
        )
        with open(
            self.directory / "skipped.jsonl", "a", encoding="utf-8", opener=private_opener
        ) as file:
            file.write(line + "\n")

    def read(self) -> set[str]:
        """Digests of the files that completed nights, or their champions before them, have read."""
        completed = (
            night for night in self.newest_first() if night.outcome in (*COMPLETED, NOTHING_NEW)
        )
        return {
            digest for night in completed for digest in (*night.digests(), *night.frozen.learnt)
        }

    def damaged(self, settings: Settings) -> set[str]:
        """Digests of the files that a night found damaged under the same settings of `reading`."""
        reading = _reading_digest(settings)
        return {
            file["sha256"]
            for night in self.newest_first()
            for file in night.left_out
            if file["reading"] == reading
        }

    def learnt(self, champion: Champion | None) -> set[str]:
        """Digests of the files that the champion was trained on, by its night and its
        predecessors'.

        Nights that were not promoted, or were rolled back, are excluded.
        """
        digests: set[str] = set()
        for night in (
            self.newest_first()
        ):  # the night that made a champion is older than all that start from it
            if champion and night.made(champion):
                digests |= {*night.digests(), *night.frozen.learnt}
                champion = night.frozen.champion
        return digests


def needed_keys(home: Path) -> set[str]:
    """Keys of the artifacts that nights will read.

    The champions of open nights, the newest held-out documents, and all training data, as any
    night's set may be promoted later.
    """
    keys = set[str]()
    references = set[str]()
    for directory in (home / "nightly").glob("*"):
        newest_heldout = None
        for night in Nights(home, directory.name).newest_first():
            newest_heldout = newest_heldout or night.heldout
            references.update(*map(night.learnt_shards, LEARNT), [newest_heldout or ""])
            if night.is_open:
                frozen = night.frozen
                keys.update(frozen.champion.keys.values() if frozen.champion else ())
                references.add(frozen.heldout or "")
    return (keys | {reference.partition("/")[2] for reference in references}) - {""}


def stop_at(settings: Nightly, began: float) -> float | None:
    """When a night that began then (seconds since 1970) stops; None: never.

    A time of day means its next occurrence.
    """
    if settings.deadline_hours is not None:
        return began + 3600 * settings.deadline_hours
    if settings.deadline is None:
        return None
    zone = ZoneInfo(settings.timezone) if settings.timezone else None
    hour, minute = map(int, settings.deadline.split(":"))
    local = datetime.fromtimestamp(began, zone)
    when = local.replace(hour=hour, minute=minute, second=0, microsecond=0)
    if when <= local:
        when += timedelta(days=1)  # the same time of day, whatever the clock does meanwhile
    return when.timestamp()


def shortened_names(files: Iterable[str]) -> str:
    """The first names of files, and how many more, for a message."""
    return first_of(map(locations.name, files), 5)
