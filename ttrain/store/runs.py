"""The history of pipeline runs: a record of each, `runs/<run>.json`, folded from its events.

The events are an append-only file next to the record. A line is {"time": seconds since 1970,
"stage": ..., "values": {...}}; `values` update the record, or the entry of the stage.
"""

import contextlib
import copy
import logging
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

import orjson

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
from ttrain.core.terminal import escaped
from ttrain.store.artifacts import ArtifactStore

log = logging.getLogger("ttrain")

RecordedRun = JsonObject  # the record of a run
MetricRow = JsonObject  # "step", "metrics", "time" and others

# Under the home: held while what is no longer needed is listed and removed
CLEANING = Path("runs", "cleaning.lock")

# What every record has; one that lacks any of them is of another version.
REQUIRED = {"run", "pipeline", "outcome", "started_unix", "process", "stages"}

BUILT = ("completed", "equal", "different")  # outcomes of a stage that a run built

NIGHTLY = "nightly"  # the pipeline of nights
NOTHING_NEW = "nothing-new"  # outcome of a run, and of its stage, that found nothing to learn

NAME_TIME = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{5}$")  # in the name of a run

# In the record of a run that its user named: the beginning of its name, instead of the pipeline
SHORT_NAME = "run_name"

ELSEWHERE_DAYS = 7  # a run of another machine that noted nothing for so long is taken for ended

LOG_POLL_SECONDS = 0.3

# How a line of a stage's log begins
GUARD = re.compile(r" (guard [\w-]+: .*)")  # what a training's guard logs
TIMED = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? ")


def guard_warning(line: str) -> str:
    """The warning of a training's guard in a line of its log; "" where there is none."""
    warning = GUARD.search(line)
    return warning[1] if warning else ""


class RunRecord:
    """What one run writes about itself: its events, its record, its log.

    The record is written at the beginning, to claim the name, and at the end. One process writes,
    others read (`read`, `log_lines`). A full disk costs the note, not the run. The record is made
    under the lock that cleaning holds, so cleaning removes nothing that this run may need.
    """

    def __init__(
        self,
        home: Path,
        pipeline: str,
        stages: list[str],
        settings: JsonObject,
        facts: JsonObject = MappingProxyType({}),
    ) -> None:
        """`facts`: further values of the record, such as the user's labels."""
        self._lock = threading.Lock()
        self._warned = False
        self._began = time.monotonic()
        pending = [{"name": name, "outcome": "pending"} for name in stages]
        private_directory(home / "runs")
        with exclusive(home / CLEANING):
            self._data = _create(home, {**_new(pipeline, pending, settings), **facts})
        self.run = str(self._data["run"])
        self.path = home / "runs" / f"{self.run}.json"

    def stage(self, name: str, **values: Any) -> None:
        """Record what happened to a stage: outcome, seconds, key, path, log, metric, error,
        progress.
        """
        self._append(values, name)

    def log(self, stage: str, line: str) -> None:
        """Append a line of a stage to the log, with the time at its beginning or the current one.

        Control characters are escaped, so that it stays one line.
        """
        if not line.strip():
            return
        timed = TIMED.match(line)
        when = timed[1] if timed else f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        text = line[timed.end() :] if timed else line
        plain = "\t".join(map(escaped, text.split("\t")))
        with self._lock:
            self._attempt(
                lambda: _append_to(
                    self.path.with_suffix(".log"), f"{when} {stage}: {plain}\n".encode()
                )
            )

    def note(self, **values: Any) -> None:
        """Record values about the run, also after its end."""
        self._append(values)
        if self._data["outcome"] != "running":
            self._attempt(lambda: write_json(self.path, self.snapshot(), PRIVATE_FILE))

    def snapshot(self) -> JsonDict:
        with self._lock:
            return copy.deepcopy(self._data)

    def finish(self, outcome: str, metrics: Mapping[str, float]) -> None:
        self.note(
            outcome=outcome,
            seconds=round(time.monotonic() - self._began, 2),
            metrics=dict(metrics),
        )

    def _append(self, values: JsonObject, stage: str | None = None) -> None:
        with self._lock:
            _apply(self._data, values, stage)
            line = {"time": time.time(), **({"stage": stage} if stage else {}), "values": values}
            data = orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS, default=str) + b"\n"
            self._attempt(lambda: _append_to(events_of(self.path), data))

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except OSError as error:
            if not self._warned:
                log.warning(
                    "the run's record %s cannot be written, the pipeline goes on: %s",
                    self.path,
                    error.strerror,
                )
            self._warned = True


def _append_to(path: Path, data: bytes) -> None:
    with open(path, "ab", buffering=0, opener=private_opener) as file:
        file.write(data)


def _new(pipeline: str, stages: Sequence[JsonObject], settings: JsonObject) -> JsonDict:
    now = datetime.now(UTC)
    return {
        "pipeline": pipeline,
        "outcome": "running",
        "started": now.isoformat(timespec="seconds"),
        "started_unix": now.timestamp(),
        "seconds": None,
        "process": this_process(),
        "stages": stages,
        "metrics": {},
        "settings": settings,
    }


def _create(home: Path, data: JsonDict) -> JsonDict:
    directory = private_directory(home / "runs")
    while True:
        data["run"] = new_name(str(data.get(SHORT_NAME) or data["pipeline"]))
        with contextlib.suppress(FileExistsError):
            path = directory / f"{data['run']}.json"
            path.touch(PRIVATE_FILE, exist_ok=False)
            try:
                write_json(path, data, PRIVATE_FILE)
            except OSError:
                path.unlink(missing_ok=True)  # as on a full disk: an empty record is that of no run
                raise
            return data


def new_name(prefix: str) -> str:
    """A name such as "full-20261121-160222-1a2b4": time, and microseconds in hex."""
    moment = datetime.now(UTC)
    return f"{prefix}-{moment:%Y%m%d-%H%M%S}-{moment.microsecond:05x}"


def history(home: Path) -> list[JsonDict]:
    """All runs, newest first; a running one whose process is gone has crashed."""
    return list(newest_first(home))


def newest_first(home: Path) -> Iterator[JsonDict]:
    """The runs by the time in their names, read one by one."""
    return filter(None, (read(home, name) for name in names(home)))


def names(home: Path) -> list[str]:
    """The names of all runs, newest first, without the empty records that a kill may leave."""
    stems = [path.stem for path in (home / "runs").glob("*.json") if path.stat().st_size]
    return sorted(stems, key=time_in_name, reverse=True)


def short_name(name: str) -> str:
    """The part of a run's name before the time: the pipeline, or the name that its user gave."""
    return NAME_TIME.sub("", name)


def is_generated(short: str) -> bool:
    """Whether unnamed runs have this short name."""
    return short in ("full", NIGHTLY) or short.startswith("stage-")


def time_in_name(name: str) -> tuple[str, ...]:
    """("20261121", "160222", "1a2b4") of the run "full-20261121-160222-1a2b4"."""
    return tuple(name.rsplit("-", 3)[1:])


def read(home: Path, name: str) -> JsonDict | None:
    """The record of the run with this name, as `history` lists it; None if there is none."""
    path = home / "runs" / f"{name}.json"
    with contextlib.suppress(OSError):
        run = read_object(path)
        if run.keys() >= REQUIRED:  # else it is one of another version
            if run["outcome"] == "running":
                _fold(run, events_of(path))
            return _as_it_is_now(home, run)
    return None


def events_of(record: Path) -> Path:
    return record.with_suffix(".events.jsonl")


def _apply(record: JsonDict, values: JsonObject, stage: str | None) -> None:
    if stage is None:
        record.update(values)
        return
    entry = next(entry for entry in record["stages"] if entry["name"] == stage)
    if "outcome" in values:
        entry.pop("progress", None)
    entry.update(values)


def _fold(record: JsonDict, events: Path) -> None:
    with contextlib.suppress(FileNotFoundError), events.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(
                orjson.JSONDecodeError
            ):  # a line that a kill or a full disk cut
                event = orjson.loads(line)
                _apply(record, event["values"], event.get("stage"))


def _as_it_is_now(home: Path, run: JsonDict) -> JsonDict:
    for stage in run["stages"]:
        for name in ("path", "log"):
            prefix, store, artifact = str(stage.get(name) or "").rpartition("/store/")
            if store and prefix != str(home):
                stage[name] = f"{home}{store}{artifact}"
    if run["outcome"] == "running" and not _seems_alive(home, run):
        run["outcome"] = "crashed"
        for stage in run["stages"]:
            if stage["outcome"] == "running":
                stage["outcome"] = "crashed"
    return run


def _seems_alive(home: Path, run: RecordedRun) -> bool:
    if run["process"].get("host", platform.node()) == platform.node():
        return is_alive(run["process"])
    path = home / "runs" / f"{run['run']}.json"
    last_written = max(each.stat().st_mtime for each in (path, events_of(path)) if each.exists())
    return time.time() - last_written < ELSEWHERE_DAYS * 86400


def keys_of(run: RecordedRun) -> dict[str, str | None]:
    return {stage["name"]: stage.get("key") for stage in run["stages"]}


def equal_runs(home: Path, keys: Mapping[str, str | None]) -> Iterator[JsonDict]:
    return (run for run in newest_first(home) if keys_of(run) == keys)


def newest_finished(home: Path, name: str) -> JsonDict | None:
    """The newest finished run of the user's whole pipeline with this setting `name`."""
    finished = (
        run
        for run in newest_first(home)
        if is_own(run) and not run["pipeline"].startswith("stage-") and is_finished(run)
    )
    return next((run for run in finished if run["settings"].get("name") == name), None)


def is_own(run: RecordedRun) -> bool:
    """Whether a user chose its settings: neither a night nor a trial of a sweep."""
    return run["pipeline"] != NIGHTLY and "sweep" not in run


def is_finished(run: RecordedRun) -> bool:
    """Whether all its stages have their artifacts."""
    return run["outcome"] in ("completed", "cached")


def is_cut_short(run: RecordedRun) -> bool:
    """Whether it ended before it was finished: its models may not be registered."""
    return not is_finished(run) and run["outcome"] != "running"


def made_by(run: RecordedRun) -> str | None:
    """The run that made the artifacts of this one: itself, or another if all were cached."""
    return str(run["run"]) if run["outcome"] == "completed" else run.get("equals")


def record_cached(
    home: Path,
    pipeline: str,
    stages: Sequence[Any],
    settings: JsonObject,
    facts: JsonObject,
) -> JsonDict:
    """Record a run that found everything cached; returns the record.

    It has no name if the home is read-only. `facts`: its metrics, the run that it equals, its
    labels.
    """
    stage_entries = [
        {
            "name": planned.stage.name,
            "outcome": "cached",
            "key": planned.key,
            "path": str(planned.artifact.path),
        }
        for planned in stages
    ]
    record = {**_new(pipeline, stage_entries, settings), **facts, "outcome": "cached"}
    try:
        return _create(home, record)
    except OSError:
        return {"run": "", **record}


def builder(store: ArtifactStore, stage: str, key: str) -> str:
    """The process that holds the lock of a key, for those who wait."""
    holder = store.holder(
        stage, key
    )  # who has just taken the lock writes its file in the next moment
    return f"process {holder[0]} on {holder[1]}" if holder else "another run"


def this_process() -> JsonDict:
    return {"pid": os.getpid(), "started": process_started(os.getpid()), "host": platform.node()}


def is_alive(process: JsonObject) -> bool:
    """Whether this very process of this machine still runs; a recycled pid does not count."""
    started = process_started(process["pid"])
    return started is not None and bool(started == process["started"])


def is_gone(process: JsonObject) -> bool:
    """Whether this very process was one of this machine, and has ended."""
    return process["host"] == platform.node() and not is_alive(process)


def process_started(pid: int) -> float | None:
    """When the process began; None if there is no such process.

    On Linux in ticks since boot, which no change of the clock moves, elsewhere in seconds since
    1970.
    """
    with contextlib.suppress(OSError, IndexError, ValueError):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if state == "Z" else float(fields[18])  # a zombie has ended
    import psutil

    try:
        return round(float(psutil.Process(pid).create_time()), 1)
    except psutil.Error:
        return None


def log_lines(home: Path, name: str, *, follow: bool = False) -> Iterator[str]:
    """The lines of a run's log; `follow` waits for more of them until the run has ended."""
    path = home / "runs" / f"{name}.log"
    unfinished = b""
    position = 0
    while True:
        has_ended = (
            not follow or (read(home, name) or {}).get("outcome") != "running"
        )  # before the last look at the file
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(position)
            lines = (unfinished + file.read()).splitlines(keepends=True)
            position = file.tell()
            unfinished = (
                lines.pop() if lines and not has_ended and not lines[-1].endswith(b"\n") else b""
            )
            yield from (line.rstrip(b"\r\n").decode("utf-8", "replace") for line in lines)
        if has_ended:
            return
        time.sleep(LOG_POLL_SECONDS)


def read_rows(path: Path) -> Iterator[MetricRow]:
    """The valid rows of a `metrics.jsonl`."""
    with path.open("rb") as lines:
        yield from filter(None, map(parse_row, lines))


def parse_row(line: bytes) -> MetricRow | None:
    """The row of a line; None for an invalid line, which a crash of the machine can leave."""
    try:
        row: MetricRow = orjson.loads(line)  # a long training has a hundred thousand of them
    except ValueError:
        return None
    return row
