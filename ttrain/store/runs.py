"""The history of pipeline runs: one JSON file each, `runs/<run>.json`, readable while the run goes on and after a crash."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import platform
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ttrain.core.files import PRIVATE_FILE, exclusive, parse_json, private_directory, read_json, write_json
from ttrain.store.artifacts import Store

log = logging.getLogger("ttrain")

CLEANING = Path("runs", "cleaning.lock")  # under the home: held while what nobody needs is told and moved away
NEEDED = frozenset({"run", "pipeline", "outcome", "started_unix", "process", "stages"})  # by those who read a record
ELSEWHERE_DAYS = 7  # a run of another machine that noted nothing for so long is taken for ended


class RunRecord:
    """The file of one run, rewritten at each change. A disk that is full then costs the note, not the run.

    It is made under the lock that cleaning holds: what is removed was removed before, and what this run may need stays.
    """

    def __init__(
        self,
        home: Path,
        pipeline: str,
        stages: list[str],
        settings: Mapping[str, Any],
        *,
        labels: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._lock, self._warned = threading.Lock(), False
        self._began = time.monotonic()
        pending = [{"name": name, "outcome": "pending"} for name in stages]
        private_directory(home / "runs")
        with exclusive(home / CLEANING, mode=PRIVATE_FILE):
            self._data = _create(home, {**_new(pipeline, pending, settings), **labels})
        self.run = str(self._data["run"])
        self.path = home / "runs" / f"{self.run}.json"

    def stage(self, name: str, **values: Any) -> None:
        """Note something about a stage: outcome, seconds, key, path, log, metric, error."""
        with self._lock:
            entry = next(stage for stage in self._data["stages"] if stage["name"] == name)
            entry.update(values)
            self._write()

    def note(self, **values: Any) -> None:
        """Note something about the run."""
        with self._lock:
            self._data.update(values)
            self._write()

    def as_it_is(self) -> dict[str, Any]:
        """All that is on record now."""
        with self._lock:
            return copy.deepcopy(self._data)

    def finish(self, outcome: str, metrics: Mapping[str, float]) -> None:
        """The end of the run."""
        self.note(outcome=outcome, seconds=round(time.monotonic() - self._began, 2), metrics=dict(metrics))

    def _write(self) -> None:
        try:
            write_json(self.path, self._data, PRIVATE_FILE)
        except OSError as error:
            if not self._warned:
                log.warning("the run's record %s cannot be written, the pipeline goes on: %s", self.path, error.strerror)
            self._warned = True


def _new(pipeline: str, stages: Sequence[Mapping[str, Any]], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What is on record of a run that begins."""
    pid, now = os.getpid(), datetime.now(UTC)
    return {
        "pipeline": pipeline,
        "outcome": "running",
        "started": now.isoformat(timespec="seconds"),
        "started_unix": now.timestamp(),
        "seconds": None,
        "process": {"pid": pid, "started": process_started(pid), "host": platform.node()},
        "stages": stages,
        "metrics": {},
        "settings": settings,
    }


def _create(home: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Write a new record, under a name that no other run has, also where the clock shows an hour for the second time."""
    directory = private_directory(home / "runs")
    began = datetime.fromtimestamp(data["started_unix"], UTC)
    while True:
        thousandths = began.microsecond // 1000  # so that names of one second sort by time
        data["run"] = f"{data['pipeline']}-{began:%Y%m%d-%H%M%S}-{thousandths:03x}{secrets.token_hex(1)}"
        with contextlib.suppress(FileExistsError):
            (directory / f"{data['run']}.json").touch(PRIVATE_FILE, exist_ok=False)
            write_json(directory / f"{data['run']}.json", data, PRIVATE_FILE)
            return data


def history(home: Path) -> list[dict[str, Any]]:
    """All runs, newest first; one that says it is running, but whose process is gone, has crashed."""
    return sorted(newest_first(home), key=lambda run: float(run["started_unix"]), reverse=True)


def in_progress(home: Path) -> list[dict[str, Any]]:
    """The runs whose processes are at work, newest first."""
    return [run for run in _as_they_are(home, ['"running"']) if run["outcome"] == "running"]


def newest_first(home: Path) -> Iterator[dict[str, Any]]:
    """The runs by the time in their names, read one by one: for those who need the newest few of many."""
    return _as_they_are(home, ())


def _mentioning(home: Path, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The records that contain all of the words, as they were written, by the time in their names, newest first.

    Looking for words costs a tenth of reading JSON, which counts where there are thousands of runs.
    """
    paths = [Path(entry.path) for entry in _entries(home / "runs") if entry.name.endswith(".json")]
    for path in sorted(paths, key=_time_in_name, reverse=True):
        with contextlib.suppress(OSError, ValueError):
            data = path.read_bytes()
            if not all(word.encode() in data for word in words):
                continue
            run = parse_json(data)
            if isinstance(run, dict) and run.keys() >= NEEDED:  # else of another version
                yield run


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(directory) as found:
        return list(found)
    return []


def _time_in_name(path: Path) -> tuple[str, ...]:
    """("20261121", "160222", "1a2b4") of "full-20261121-160222-1a2b4"."""
    return tuple(path.stem.rsplit("-", 3)[1:])


def read(home: Path, name: str) -> dict[str, Any] | None:
    """The record of the run with this name, as `history` lists it; None where there is none."""
    run = read_json(home / "runs" / f"{name}.json")
    return _as_it_is(home, run) if isinstance(run, dict) else None


def _as_they_are(home: Path, words: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The records that contain the words; those whose process is gone say what that means."""
    return (_as_it_is(home, run) for run in _mentioning(home, words))


def _as_it_is(home: Path, run: dict[str, Any]) -> dict[str, Any]:
    if run["outcome"] == "running" and not _seems_alive(home, run):
        run["outcome"] = "crashed"
        for stage in run["stages"]:
            if stage["outcome"] == "running":
                stage["outcome"] = "crashed"
    return run


def _seems_alive(home: Path, run: Mapping[str, Any]) -> bool:
    """Whether its process runs; that of another machine, which shares this home, is believed for some days."""
    if run["process"].get("host", platform.node()) == platform.node():
        return is_alive(run["process"])
    noted = (home / "runs" / f"{run['run']}.json").stat().st_mtime
    return time.time() - noted < ELSEWHERE_DAYS * 86400


def equal_run(home: Path, keys: Mapping[str, str | None]) -> str | None:
    """The newest run that made these very artifacts. A cached run says which it equals, so that few records are read."""
    for run in _mentioning(home, [key for key in keys.values() if key][-1:]):
        if {stage["name"]: stage.get("key") for stage in run["stages"]} != keys:
            continue
        if run["outcome"] == "completed":
            return str(run["run"])
        if run["outcome"] == "cached" and run.get("equals"):
            return str(run["equals"])
    return None


def cut_short(home: Path, keys: Mapping[str, str | None]) -> str | None:
    """The newest run of these very artifacts, where it did not come to its own end: its models may not be registered."""
    for run in _as_they_are(home, [key for key in keys.values() if key][-1:]):
        if {stage["name"]: stage.get("key") for stage in run["stages"]} == keys:
            return None if run["outcome"] in ("completed", "cached", "running") else str(run["run"])
    return None


def record_cached(
    home: Path,
    pipeline: str,
    stages: Sequence[Any],
    settings: Mapping[str, Any],
    metrics: Mapping[str, float],
    equals: str | None,
    labels: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Note a run that found everything cached; it is listed, but not tracked. A home that cannot be written goes without."""
    found = [
        {"name": planned.stage.name, "outcome": "cached", "key": planned.key, "path": str(planned.artifact.path)}
        for planned in stages
    ]
    with contextlib.suppress(OSError):
        _create(
            home,
            {**_new(pipeline, found, settings), **labels, "outcome": "cached", "equals": equals, "metrics": dict(metrics)},
        )


def builder(store: Store, stage: str, key: str) -> str:
    """Who has the lock of a key, in words: the run, its process, and the machine where that is another."""
    held = store.holder(stage, key)
    for _ in range(10):  # who has just taken it says so in the next moment
        if held is not None:
            break
        time.sleep(0.02)
        held = store.holder(stage, key)
    if held is None:
        return "another run"
    pid, host = held
    here = host == platform.node()
    where = f"process {pid}" if here else f"process {pid} on {host}"
    for words in ([key], []):  # a process may have several runs: the one that has noted the key builds it
        for run in _mentioning(store.root, ['"running"', f'"pid": {pid},', *words]):
            if run["outcome"] == "running" and run["process"]["pid"] == pid and (not here or is_alive(run["process"])):
                return f"the run {run['run']} ({where})"
    return where


def is_alive(process: Mapping[str, Any]) -> bool:
    """Whether this very process of this machine still runs; a recycled number does not count."""
    started = process_started(process["pid"])
    return started is not None and bool(started == process["started"])


def process_started(pid: int) -> float | None:
    """When the process began: on Linux in ticks since the machine did, which no change of the clock moves, elsewhere in
    seconds since the epoch; None where there is no such process."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else float(fields[18])  # a zombie has ended
    import psutil

    try:
        return round(float(psutil.Process(pid).create_time()), 1)
    except psutil.Error:
        return None
