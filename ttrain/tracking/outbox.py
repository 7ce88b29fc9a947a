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
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, final

from ttrain.core.files import PRIVATE_DIRECTORY, private_directory, read_json
from ttrain.tracking import journal
from ttrain.tracking.journal import Entry

log = logging.getLogger("ttrain")

FOLDER: Final = "tracking"  # in the home
ID: Final = re.compile(r"[0-9a-f]{32}")
TURN_SECONDS: Final = 5.0  # until another process lets go of a directory that it removes, which takes milliseconds


@final
class Outbox:
    """The outbox of one run, held by this process; safe to use from several threads."""

    def __init__(self, directory: Path | None, about: Mapping[str, Any], entries: Iterable[Entry] = ()) -> None:
        """`directory`: None for one that is in memory alone. Use `create` and `take`."""
        self.directory, self.about = directory, dict(about)
        self.entries: list[Entry] = list(entries)  # still to be told
        self._next = 1 + max((entry.number for entry in self.entries), default=0)
        self._lock, self._held, self._warned = threading.RLock(), contextlib.ExitStack(), False
        self._is_kept = directory is not None

    @property
    def id(self) -> str:
        return str(self.about["id"])

    @property
    def is_kept(self) -> bool:
        """Whether all of it is on disk, and so outlives this process."""
        return self._is_kept

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
            self.directory = None
            self._held.close()

    def _recall(self) -> None:
        """What the process before this one left to tell."""
        assert self.directory is not None, "an outbox on disk"
        read = journal.read(self.directory)
        self.entries, self._next = list(read.values()), 1 + max(read, default=0)

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
        if self.directory is None:
            return
        try:
            journal.append(self.directory, row)
        except OSError as error:
            self._warn(error)

    def _remove(self, kept: str | None) -> None:
        if kept and self.directory is not None:
            with contextlib.suppress(OSError):
                (self.directory / "files" / kept).unlink(missing_ok=True)

    def _warn(self, error: OSError) -> None:
        self._is_kept = False
        if not self._warned:
            log.warning("what MLflow has yet to be told cannot be kept in %s: %s", self.directory, error.strerror)
        self._warned = True


def create(home: Path | None, **about: Any) -> Outbox:
    """A new outbox; in memory where the home takes none. `id`: that of one that is gone, or was never whole.

    A directory of that id that has no `run.json` is taken over: a process was killed while it made it. Where another
    process has made it whole meanwhile, the new outbox has an id of its own.
    """
    about = {"started": time.time(), **about, "id": about.get("id") or secrets.token_hex(16), "host": platform.node()}
    if home is None:
        return Outbox(None, about)
    directory = home / FOLDER / str(about["id"])
    for _ in range(2):  # once more where another was removing it
        try:
            private_directory(directory.parent)
            directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        except OSError as error:
            log.warning("what MLflow has yet to be told cannot be kept in %s: %s", directory, error.strerror)
            return Outbox(None, about)
        box = Outbox(directory, about)
        if box._lock_or_none(TURN_SECONDS):
            break
    else:
        return Outbox(None, about)
    if (directory / "run.json").exists():
        box.directory = None
        box.close()
        return create(home, **{**about, "id": None})
    box._recall()
    box.note()
    return box


def remove_unmade(directory: Path) -> None:
    """Removes a directory without `run.json`, where nobody holds it: a process was killed while it made it."""
    box = Outbox(directory, {})
    if box._lock_or_none(0.0):
        box._recall()
        if (directory / "run.json").exists():
            box.directory = None
        box.close()


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
    box.about = about
    box._recall()
    return box
