"""The outbox of a run: all data for its tracker, on disk until delivered, in `tracking/<id>/` of the home.

    run.json        what the run is, and its id in MLflow once it has one
    journal.jsonl   {"number", "what", ...} for each entry, {"told": number} when it was delivered
    flight.json     the batch of metrics that is being sent: sent again unchanged, it gives the same points
    files/          texts and curves that exist nowhere else

One process at a time holds an outbox, by a lock that ends with it: what a killed one leaves is delivered by the next command
that opens the tracker, or by `ttrain track sync`. A directory with nothing left to deliver is removed. If the disk cannot
be written, the outbox is in memory.
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

from ttrain.core.files import PRIVATE_DIRECTORY, parse_json, private_directory, read_json

log = logging.getLogger("ttrain")

FOLDER: Final = "tracking"  # in the home

ID: Final = re.compile(r"[0-9a-f]{32}")

TURN_SECONDS: Final = 5.0  # to wait for another process that removes the directory, which takes milliseconds


@final
class Outbox:
    """The outbox of one run, held by this process; safe to use from several threads."""

    def __init__(self, directory: Path | None, run_info: Mapping[str, Any], entries: Iterable[Entry] = ()) -> None:
        """`directory`: None for an outbox in memory. Use `create` and `take`."""
        self.directory, self.run_info = directory, dict(run_info)
        self.entries: list[Entry] = list(entries)  # not delivered yet
        self._next = 1 + max((entry.number for entry in self.entries), default=0)
        self._lock, self._file_lock, self._warned = threading.RLock(), contextlib.ExitStack(), False
        self._is_kept = directory is not None

    @property
    def id(self) -> str:
        return str(self.run_info["id"])

    @property
    def is_kept(self) -> bool:
        """Whether the whole outbox is on disk, and so outlives this process."""
        return self._is_kept

    def update_run_info(self, **values: Any) -> None:
        """Update `run.json` with these values."""
        with self._lock:
            self.run_info |= values
            self._write("run.json", self.run_info)

    def add(self, kind: str, **data: Any) -> Entry:
        """Append an entry to deliver."""
        with self._lock:
            entry = Entry(self._next, kind, data)
            self._next += 1
            self.entries.append(entry)
            self._append({"number": entry.number, "what": kind, **data})
            return entry

    def mark_delivered(self, entry: Entry) -> None:
        """Mark the entry as delivered, or as no longer needed."""
        with self._lock, contextlib.suppress(ValueError):
            self.entries.remove(entry)
            self._append({"told": entry.number})
            self._remove(entry.data.get("kept"))

    def mark_part_delivered(self, entry: Entry, file: str) -> None:
        """Mark one file of an entry as delivered."""
        with self._lock:
            entry.parts.add(file)
            self._append({"number": entry.number, "part": file})

    def save_file(self, name: str, content: Iterable[bytes]) -> str | None:
        """Save bytes until their entry is delivered; return the name for its field `kept`, None if they cannot be saved."""
        if self.directory is None:
            return None
        file_name = f"{secrets.token_hex(4)}-{name}"
        try:
            (self.directory / "files").mkdir(exist_ok=True)
            with (self.directory / "files" / file_name).open("wb") as file:
                file.writelines(content)
        except OSError as error:
            self._warn(error)
            self._remove(file_name)
            return None
        return file_name

    def saved_path(self, name: str) -> Path:
        """The path of a file that `save_file` has saved."""
        assert self.directory is not None, "an outbox in memory has no files"
        return self.directory / "files" / name

    def save_batch(self, batch: list[Any]) -> None:
        """Save the batch that is being sent."""
        self._write("flight.json", batch)

    def last_batch(self) -> list[Any]:
        """The batch that the previous process was sending when it ended, or had just sent."""
        batch = read_json(self.directory / "flight.json") if self.directory else None
        return batch if isinstance(batch, list) else []

    def close(self) -> None:
        """Release the outbox; remove its directory if everything is delivered."""
        with self._lock:
            if self.directory is not None and not self.entries:
                removed = self.directory.with_name(f".{self.directory.name}.gone")
                with contextlib.suppress(OSError):
                    self.directory.replace(
                        removed
                    )  # under the lock: a process that has opened the lock file finds no run there
                    shutil.rmtree(removed)
            self.directory = None
            self._file_lock.close()

    def _recall(self) -> None:
        """Load the entries that the previous process left undelivered."""
        assert self.directory is not None, "an outbox on disk"
        read = read_journal(self.directory)
        self.entries, self._next = list(read.values()), 1 + max(read, default=0)

    def _lock_or_none(self, seconds: float) -> bool:
        import filelock

        assert self.directory is not None, "an outbox on disk"
        # Acquired in one thread, released in another
        lock = filelock.FileLock(self.directory / "lock", thread_local=False)
        try:
            lock.acquire(timeout=seconds)
        except (filelock.Timeout, OSError):
            return False
        self._file_lock.callback(lock.release)
        return True

    def _write(self, name: str, value: object) -> None:
        """Write a JSON file atomically; without a flush, which takes 5 ms and more."""
        if self.directory is not None:
            temporary = self.directory / f".{name}.part"
            try:
                temporary.write_text(json.dumps(value), encoding="utf-8")
                temporary.replace(self.directory / name)
            except OSError as error:
                self._warn(error)

    def _append(self, row: Mapping[str, Any]) -> None:
        if self.directory is None:
            return
        try:
            append(self.directory, row)
        except OSError as error:
            self._warn(error)

    def _remove(self, file_name: str | None) -> None:
        if file_name and self.directory is not None:
            with contextlib.suppress(OSError):
                (self.directory / "files" / file_name).unlink(missing_ok=True)

    def _warn(self, error: OSError) -> None:
        self._is_kept = False
        if not self._warned:
            log.warning("data for MLflow cannot be saved in the outbox %s: %s", self.directory, error.strerror)
        self._warned = True


def create(home: Path | None, **run_info: Any) -> Outbox:
    """Create an outbox; in memory if the home cannot be written. `id`: of an outbox that is gone, or was never completed.

    A directory of that id without `run.json` is taken over: a process was killed while it made it. If another process has
    completed it meanwhile, the new outbox gets another id.
    """
    run_info = {
        "started": time.time(),
        **run_info,
        "id": run_info.get("id") or secrets.token_hex(16),
        "host": platform.node(),
    }
    if home is None:
        return Outbox(None, run_info)
    directory = home / FOLDER / str(run_info["id"])
    for _ in range(2):  # once more if another process was removing it
        try:
            private_directory(directory.parent)
            directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        except OSError as error:
            log.warning("data for MLflow cannot be saved in the outbox %s: %s", directory, error.strerror)
            return Outbox(None, run_info)
        box = Outbox(directory, run_info)
        if box._lock_or_none(TURN_SECONDS):
            break
    else:
        return Outbox(None, run_info)
    if (directory / "run.json").exists():
        box.directory = None
        box.close()
        return create(home, **{**run_info, "id": None})
    box._recall()
    box.update_run_info()
    return box


def remove_unmade(directory: Path) -> None:
    """Remove an unlocked directory without `run.json`: a process was killed while it made it."""
    box = Outbox(directory, {})
    if box._lock_or_none(0.0):
        box._recall()
        if (directory / "run.json").exists():
            box.directory = None
        box.close()


def take(directory: Path, seconds: float = 0.0) -> Outbox | None:
    """Lock and open the outbox in a directory; None if there is none, or if another process, or this one, holds it."""
    if not (directory / "run.json").exists():
        return None
    box = Outbox(directory, {})
    if not box._lock_or_none(seconds):
        return None
    run_info = read_json(directory / "run.json")
    if not isinstance(run_info, dict) or run_info.get("id") != directory.name:  # delivered and removed while we waited
        box.directory = None
        box.close()
        return None
    box.run_info = run_info
    box._recall()
    return box


NAME: Final = "journal.jsonl"


@dataclass(eq=False)
class Entry:
    """One thing to deliver; `parts` are those of its files that have arrived, `answer` is MLflow's answer."""

    number: int
    kind: str
    data: Mapping[str, Any]
    parts: set[str] = field(default_factory=set)
    answer: Any = None


def append(directory: Path, row: Mapping[str, Any]) -> None:
    """Append a line in one write, so that a kill leaves whole lines; after a torn line of a machine crash, start a new one.

    Raises OSError.
    """
    descriptor = os.open(directory / NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, (b"\n" if torn else b"") + json.dumps(dict(row)).encode() + b"\n")
    finally:
        os.close(descriptor)


def read_journal(directory: Path) -> dict[int, Entry]:
    """Undelivered entries by number, in order; a torn line of a machine crash is skipped."""
    entries: dict[int, Entry] = {}
    for row in _rows(directory / NAME):
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
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row
