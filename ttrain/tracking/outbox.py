"""The outbox of a run: all data for its tracker, on disk until delivered, in `tracking/<id>/` of the home.

    run.json        what the run is, and its id in MLflow once it has one
    journal.jsonl   {"number", "what", ...} for each entry, {"told": number} when it was delivered

One process at a time holds an outbox, by a lock that ends with it: what a killed one leaves is delivered by the next command
that opens the tracker, or by `ttrain track sync`. An outbox appears whole and, with nothing left to deliver, is removed. If
the disk cannot be written, it is in memory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.core.files import (
    PRIVATE_DIRECTORY,
    JsonDict,
    JsonObject,
    parse_json,
    private_directory,
    read_object,
    write_bytes,
)

log = logging.getLogger("ttrain")

FOLDER = "tracking"  # in the home

ID = re.compile(r"[0-9a-f]{32}")

RUN, JOURNAL = "run.json", "journal.jsonl"

COMPACT_BYTES = 1 << 24  # of the journal: then it is written again, without what was delivered

IDLE_DAYS = 7  # an outbox of another machine that shares this home is left alone for this long

UNFINISHED_SECONDS = 3600.0  # an outbox is made and removed in milliseconds: older ones are removed


@dataclass(eq=False)
class Entry:
    """One thing to deliver; `parts` are those of its files that have arrived, `answer` is MLflow's answer."""

    number: int
    kind: str
    data: JsonObject
    parts: set[str] = field(default_factory=set)
    answer: str | None = None

    def lines(self) -> str:
        """The entry as the journal has it."""
        parts = ({"number": self.number, "part": part} for part in self.parts)
        rows = [{"number": self.number, "what": self.kind, **self.data}, *parts]
        return "".join(f"{json.dumps(row)}\n" for row in rows)


class Outbox:
    """The outbox of one run, held by this process; safe to use from several threads."""

    def __init__(self, directory: Path | None, run_info: JsonObject) -> None:
        """`directory`: None for an outbox in memory. Use `create` and `take`."""
        self.directory, self.run_info = directory, dict(run_info)
        self.entries: list[Entry] = []  # not delivered yet
        self._next = 1
        self._lock, self._file_lock, self._warned = threading.RLock(), contextlib.ExitStack(), False
        self._written = 0  # bytes, to the journal
        self.is_kept = directory is not None  # whether all of it is on disk, and so outlives this process

    @property
    def id(self) -> str:
        return str(self.run_info["id"])

    def update_run_info(self, **values: Any) -> None:
        """Update `run.json` with these values."""
        with self._lock:
            self.run_info |= values
            self._write(RUN, json.dumps(self.run_info))

    def add(self, kind: str, **data: Any) -> Entry:
        """Append an entry to deliver."""
        with self._lock:
            entry = Entry(self._next, kind, data)
            self._next += 1
            self.entries.append(entry)
            self._append(entry.lines())
            return entry

    def mark_delivered(self, entry: Entry) -> None:
        """Mark the entry as delivered, or as no longer needed."""
        with self._lock, contextlib.suppress(ValueError):
            self.entries.remove(entry)
            self._append(f"{json.dumps({'told': entry.number})}\n")
            if self._written > COMPACT_BYTES:
                self._write(JOURNAL, "".join(waiting.lines() for waiting in self.entries))
                self._written = 0

    def mark_part_delivered(self, entry: Entry, part: str) -> None:
        """Mark a part of an entry, such as one of its files, as delivered."""
        with self._lock:
            entry.parts.add(part)
            self._append(f"{json.dumps({'number': entry.number, 'part': part})}\n")

    def close(self) -> None:
        """Release the outbox; remove its directory if everything is delivered."""
        with self._lock:
            if self.directory is not None and not self.entries:
                with contextlib.suppress(OSError):
                    shutil.rmtree(self.directory.rename(_hidden(self.directory)))  # renamed first: it goes as a whole
            self.directory = None
            self._file_lock.close()

    def acquire(self, seconds: float) -> bool:
        """Lock the directory; False if another process, or this one, holds it."""
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

    def _write(self, name: str, text: str) -> None:
        """Write a file atomically."""
        if self.directory is not None:
            try:
                write_bytes(self.directory / name, text.encode(), durable=False)
            except OSError as error:
                self._warn(error)

    def _append(self, lines: str) -> None:
        """Append lines in one write, so that a kill leaves whole ones; after a torn one of a machine crash on a new line.

        A disk that has room for a part of them gets none: a part would be lost, and take the last of its space.
        """
        if self.directory is None:
            return
        try:
            descriptor = os.open(self.directory / JOURNAL, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                size = os.fstat(descriptor).st_size
                torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
                data = (b"\n" if torn else b"") + lines.encode()
                written = os.write(descriptor, data)
                if written < len(data):
                    os.ftruncate(descriptor, size)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._written += written
            finally:
                os.close(descriptor)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        self.is_kept = False
        if not self._warned:
            log.warning("data for MLflow cannot be saved in the outbox %s: %s", self.directory, error.strerror)
        self._warned = True


def create(home: Path, **run_info: Any) -> Outbox:
    """Create an outbox; in memory if the home cannot be written. `id`: of an outbox that is gone.

    It is made beside its place and renamed, so that a kill leaves all of it or nothing. If there is one of that id, the new
    one gets another id.
    """
    identity = run_info.get("id") or secrets.token_hex(16)
    box = Outbox(None, {"started": time.time(), **run_info, "id": identity, "host": platform.node()})
    box.directory = folder = home / FOLDER
    try:
        private_directory(folder)
        box.directory = _hidden(folder / identity)
        box.directory.mkdir(mode=PRIVATE_DIRECTORY)
    except OSError as error:
        box._warn(error)
        box.directory = None
        return box
    box.is_kept = box.acquire(0.0)
    for free_id in (identity, secrets.token_hex(16)):
        box.update_run_info(id=free_id)
        if box.is_kept:
            with contextlib.suppress(OSError):
                box.directory = box.directory.rename(folder / free_id)
                return box
    box.directory, box.is_kept = None, False
    return box


def _hidden(directory: Path) -> Path:
    """Another name for an outbox, which nobody reads, while it is made or removed."""
    return directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")


def take(directory: Path, seconds: float = 0.0) -> Outbox | None:
    """Lock and open the outbox in a directory; None if there is none, or if another process, or this one, holds it."""
    if not (directory / RUN).exists() or not (box := Outbox(directory, {})).acquire(seconds):
        return None
    run_info = read_object(directory / RUN)
    if run_info.get("id") != directory.name:  # delivered and removed while we waited
        box.directory = None
        box.close()
        return None
    box.run_info, read = run_info, read_journal(directory)
    box.entries, box._next = list(read.values()), 1 + max(read, default=0)
    return box


def read_journal(directory: Path) -> dict[int, Entry]:
    """Undelivered entries by number, in order, even if a process holds the outbox; torn lines are skipped."""
    entries: dict[int, Entry] = {}
    for row in _lines(directory / JOURNAL):
        number = row.get("number")
        if "told" in row:
            entries.pop(row["told"], None)
        elif "what" in row and isinstance(number, int):
            data = {key: value for key, value in row.items() if key not in ("number", "what")}
            entries[number] = Entry(number, row["what"], data)
        elif "part" in row and number in entries:
            entries[number].parts.add(row["part"])
    return entries


def _lines(journal: Path) -> Iterator[JsonDict]:
    with contextlib.suppress(OSError):
        for line in journal.read_bytes().splitlines():
            with contextlib.suppress(ValueError):
                row = parse_json(line)
                if isinstance(row, dict):
                    yield row


def list_outboxes(home: Path) -> list[Path]:
    """The directories of all outboxes, the oldest run first."""
    with contextlib.suppress(OSError):
        outboxes = (path for path in (home / FOLDER).iterdir() if ID.fullmatch(path.name) and (path / RUN).exists())
        return sorted(outboxes, key=lambda path: float(read_object(path / RUN).get("started", 0)))
    return []


def remove_unfinished(home: Path) -> None:
    """Remove what processes left that were killed while they made or removed an outbox (`_hidden`)."""
    with contextlib.suppress(OSError):
        for path in (home / FOLDER).glob(".*"):
            if time.time() - path.stat().st_mtime > UNFINISHED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def may_be_taken(directory: Path) -> bool:
    """Whether its process may have ended: locks of other machines are unreliable, so theirs are left for a week."""
    run_info = read_object(directory / RUN)
    is_idle = run_info.get("host") == platform.node() or time.time() - last_change(directory) > 86400 * IDLE_DAYS
    return bool(run_info) and is_idle


def last_change(directory: Path) -> float:
    """Time of the last change in an outbox, in seconds since 1970."""
    with contextlib.suppress(OSError):
        changes = (path.stat().st_mtime for path in directory.iterdir() if path.name != "lock")
        return max(changes, default=time.time())
    return time.time()


def delivery_order(directories: Iterable[Path]) -> list[tuple[Path, bool]]:
    """Outboxes in the order of their delivery, with whether their uploads are delivered: first what is small of all.

    The files of a run come after those of its children: its models are registered from these, not once more.
    """
    run_infos = {path: read_object(path / RUN) for path in directories}
    starts = {str(info.get("id")): float(info.get("started", 0)) for info in run_infos.values() if not info.get("parent")}

    def sort_key(path: Path) -> tuple[float, bool]:
        run_info, parent = run_infos[path], run_infos[path].get("parent")
        return starts.get(str(parent or run_info.get("id")), float(run_info.get("started", 0))), not parent

    return [*((path, False) for path in run_infos), *((path, True) for path in sorted(run_infos, key=sort_key))]


def undelivered_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts whose files are still to be sent."""
    paths = [entry.data.get("path") for box in list_outboxes(home) for entry in read_journal(box).values()]
    path_parts = [Path(path).parts for path in paths if path]
    return frozenset(segments[2] for segments in path_parts if len(segments) > 2 and segments[0] == "store")
