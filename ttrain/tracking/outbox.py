"""What a run has to tell its tracker, on disk until it was told: `tracking/<id>/` in the home.

    run.json        what the run is, and its id in MLflow once it has one
    journal.jsonl   {"number", "what", ...} for each thing to tell, {"told": number} when it was told
    flight.json     the batch of metrics that is being sent: sent again as it is, it is the same points
    files/          texts and curves that exist nowhere else

One process at a time has an outbox, by a lock that dies with it: what a killed one leaves is told by the next command that
opens the tracker, or by `ttrain track sync`. A directory with nothing more to tell is removed. Where the disk takes
nothing, all of it happens in memory.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from ttrain.store import read_json

log = logging.getLogger("ttrain")

FOLDER: Final = "tracking"  # in the home
ID: Final = re.compile(r"[0-9a-f]{32}")
IDLE_DAYS: Final = 7  # an outbox of another machine, which shares this home, is left alone for so long


@dataclass(eq=False)
class Entry:
    """One thing to tell; `parts` are the files of it that have arrived, `answer` what MLflow said."""

    number: int
    what: str
    data: Mapping[str, Any]
    parts: set[str] = field(default_factory=set)
    answer: Any = None


@final
class Outbox:
    """The outbox of one run, held by this process; safe to use from several threads."""

    def __init__(self, directory: Path | None, about: Mapping[str, Any], entries: Iterable[Entry] = ()) -> None:
        """`directory`: None for one that is in memory alone. Use `create` and `take`."""
        self.directory, self.about = directory, dict(about)
        self.entries: list[Entry] = list(entries)  # still to be told
        self._next = 1 + max((entry.number for entry in self.entries), default=0)
        self._lock, self._held, self._warned = threading.RLock(), contextlib.ExitStack(), False

    @property
    def id(self) -> str:
        return str(self.about["id"])

    def note(self, **values: Any) -> None:
        """Say more about the run."""
        with self._lock:
            self.about |= values
            self._write("run.json", self.about)

    def add(self, what: str, **data: Any) -> Entry:
        """Something to tell, at the end of what is there."""
        with self._lock:
            entry = Entry(self._next, what, data)
            self._next += 1
            self.entries.append(entry)
            self._append({"number": entry.number, "what": what, **data})
            return entry

    def told(self, entry: Entry) -> None:
        """It arrived, or nobody wants it."""
        with self._lock, contextlib.suppress(ValueError):
            self.entries.remove(entry)
            self._append({"told": entry.number})
            self._remove(entry.data.get("kept"))

    def arrived(self, entry: Entry, part: str) -> None:
        """One file of several."""
        with self._lock:
            entry.parts.add(part)
            self._append({"number": entry.number, "part": part})

    def keep(self, name: str, content: Iterable[bytes]) -> str | None:
        """Keep bytes until their entry is told; the name to give with it as `kept`, None where they cannot be kept."""
        if self.directory is None:
            return None
        kept = f"{secrets.token_hex(4)}-{name}"
        try:
            (self.directory / "files").mkdir(exist_ok=True)
            with (self.directory / "files" / kept).open("wb") as file:
                file.writelines(content)
        except OSError as error:
            self._warn(error)
            self._remove(kept)
            return None
        return kept

    def kept(self, name: str) -> Path:
        """Where that is."""
        assert self.directory is not None, "nothing is kept in memory"
        return self.directory / "files" / name

    def sending(self, batch: list[Any]) -> None:
        """Note what is being sent."""
        self._write("flight.json", batch)

    def sent_last(self) -> list[Any]:
        """What the process before this one was sending when it ended, or had just sent."""
        found = read_json(self.directory / "flight.json") if self.directory else None
        return found if isinstance(found, list) else []

    def close(self) -> None:
        """Let go of it: removed where everything is told, else left for another."""
        with self._lock:
            if self.directory is not None and not self.entries:
                gone = self.directory.with_name(f".{self.directory.name}.gone")
                with contextlib.suppress(OSError):
                    self.directory.replace(gone)  # under the lock: who has opened the lock's file finds no run in it
                    shutil.rmtree(gone)
                    self.directory.parent.rmdir()
            self.directory = None
            self._held.close()

    def _lock_or_none(self, seconds: float) -> bool:
        import filelock

        assert self.directory is not None, "an outbox on disk"
        # Taken in one thread, let go in another
        lock = filelock.FileLock(self.directory / "lock", thread_local=False)
        try:
            lock.acquire(timeout=seconds)
        except (filelock.Timeout, OSError):
            return False
        self._held.callback(lock.release)
        return True

    def _write(self, name: str, value: object) -> None:
        """The old file or the new one, also after a kill; without a flush, which takes 5 ms and more."""
        if self.directory is not None:
            part = self.directory / f".{name}.part"
            try:
                part.write_text(json.dumps(value), encoding="utf-8")
                part.replace(self.directory / name)
            except OSError as error:
                self._warn(error)

    def _append(self, row: Mapping[str, Any]) -> None:
        """One write a line, so that a kill leaves whole lines; a newline before, where a crash of the machine did not."""
        if self.directory is None:
            return
        try:
            number = os.open(self.directory / "journal.jsonl", os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                size = os.fstat(number).st_size
                torn = size and os.pread(number, 1, size - 1) != b"\n"
                os.write(number, (b"\n" if torn else b"") + json.dumps(dict(row)).encode() + b"\n")
            finally:
                os.close(number)
        except OSError as error:
            self._warn(error)

    def _remove(self, kept: str | None) -> None:
        if kept and self.directory is not None:
            with contextlib.suppress(OSError):
                (self.directory / "files" / kept).unlink(missing_ok=True)

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            log.warning("what MLflow has yet to be told cannot be kept in %s: %s", self.directory, error.strerror)
        self._warned = True


def create(home: Path | None, **about: Any) -> Outbox:
    """A new outbox; in memory where the home takes none."""
    about = {"started": time.time(), **about, "id": about.get("id") or secrets.token_hex(16), "host": platform.node()}
    if home is None:
        return Outbox(None, about)
    directory = home / FOLDER / str(about["id"])
    try:
        directory.mkdir(parents=True, mode=0o700)
    except OSError as error:
        log.warning("what MLflow has yet to be told cannot be kept in %s: %s", directory, error.strerror)
        return Outbox(None, about)
    box = Outbox(directory, about)
    if not box._lock_or_none(0):
        return Outbox(None, about)
    box.note()
    return box


def take(directory: Path, seconds: float = 0.0) -> Outbox | None:
    """The outbox in a directory; None where there is none, or where another process, or this one, has it."""
    if not (directory / "run.json").exists():
        return None
    box = Outbox(directory, {})
    if not box._lock_or_none(seconds):
        return None
    about = read_json(directory / "run.json")
    if not isinstance(about, dict) or about.get("id") != directory.name:  # told and removed while we waited
        box.directory = None
        box.close()
        return None
    read = _read(directory / "journal.jsonl")
    box.about, box.entries = about, list(read.values())
    box._next = 1 + max(read, default=0)
    return box


def found(home: Path) -> list[Path]:
    """The directories of all outboxes, the oldest run first."""
    with contextlib.suppress(OSError):
        return sorted((path for path in (home / FOLDER).iterdir() if ID.fullmatch(path.name)), key=_began)
    return []


def may_be_taken(directory: Path) -> bool:
    """Whether its process may be gone: locks of other machines are not to be relied on, so those are left a week."""
    about = read_json(directory / "run.json")
    if not isinstance(about, dict):
        return False
    return about.get("host") == platform.node() or time.time() - last_change(directory) > 86400 * IDLE_DAYS


def last_change(directory: Path) -> float:
    """Seconds since 1970."""
    with contextlib.suppress(OSError):
        return max(path.stat().st_mtime for path in directory.iterdir() if path.name != "lock")
    return time.time()


def children_first(directories: Iterable[Path]) -> list[Path]:
    """The same, each run after those that are parts of it: its models are registered from their runs, not once more."""
    known = {path: read_json(path / "run.json") for path in directories}
    about = {path: told for path, told in known.items() if isinstance(told, dict)}
    roots = {str(told.get("id")): float(told.get("started", 0)) for told in about.values() if not told.get("parent")}

    def place(path: Path) -> tuple[float, bool]:
        told = about.get(path, {})
        return roots.get(str(told.get("parent") or told.get("id")), float(told.get("started", 0))), not told.get("parent")

    return sorted(known, key=place)


def entries_of(directory: Path) -> list[Entry]:
    """What is still to be told, also where a process has the outbox."""
    return list(_read(directory / "journal.jsonl").values())


def waiting_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts whose files are still to be sent."""
    paths = [entry.data.get("path") for box in found(home) for entry in entries_of(box)]
    parts = [Path(path).parts for path in paths if path]
    return frozenset(part[2] for part in parts if len(part) > 2 and part[0] == "store")


def _began(directory: Path) -> float:
    about = read_json(directory / "run.json")
    return float(about.get("started", 0)) if isinstance(about, dict) else 0.0


def _read(journal: Path) -> dict[int, Entry]:
    """What is still to be told, by number, in its order; a torn line, of a crash of the machine, is passed over."""
    entries: dict[int, Entry] = {}
    for row in _rows(journal):
        number = row.get("number")
        if "told" in row:
            entries.pop(row["told"], None)
        elif "what" in row and isinstance(number, int):
            data = {key: value for key, value in row.items() if key not in ("number", "what")}
            entries[number] = Entry(number, row["what"], data)
        elif "part" in row and number in entries:
            entries[number].parts.add(row["part"])
    return entries


def _rows(journal: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(OSError):
        for line in journal.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                if isinstance(row, dict):
                    yield row
