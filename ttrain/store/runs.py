"""The history of pipeline runs: a record each, `runs/<run>.json`, and the events that it is made of.

The events are one append-only file beside the record, with one writer, the pipeline's process. A line is {"time": seconds
since 1970, "stage": ..., "values": {...}}. A fold over the lines gives the record: `values` update the record itself, or the
entry of the stage. Whoever shows a run while it goes on reads this file.
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

CLEANING = Path(
    "runs", "cleaning.lock"
)  # under the home: held while what is no longer needed is listed and moved away

# What every record has; one that lacks any of them is of another version.
REQUIRED = {"run", "pipeline", "outcome", "started_unix", "process", "stages"}

BUILT = ("completed", "equal", "different")  # outcomes of a stage that a run built

NIGHTLY = "nightly"  # the pipeline of nights
NOTHING_NEW = "nothing-new"  # outcome of a run, and of its stage, that found nothing to learn

NAME_TIME = re.compile(r"-\d{8}-\d{6}-[0-9a-f]{5}$")  # in the name of a run

SHORT_NAME = "run_name"  # in the record of a run that its user named: what its name begins with, instead of the pipeline

ELSEWHERE_DAYS = 7  # a run of another machine that noted nothing for so long is taken for ended


TIMED = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:,\d+)? "
)  # how a line of a stage's log begins


class RunRecord:
    """What one run writes about itself: `events.jsonl`, to which each event is appended, its record, which is what a fold
    over the events gives, and its log. The record is a file of its own only at the beginning, to claim the name, and at the
    end.

    One process writes, from several threads, others read (`read`, `log_lines`). A disk that is full costs the note or the
    line, not the run. The record is made under the lock that cleaning holds, so that cleaning removes nothing which this run
    may need.
    """

    def __init__(
        self,
        home: Path,
        pipeline: str,
        stages: list[str],
        settings: JsonObject,
        facts: JsonObject = MappingProxyType({}),
    ) -> None:
        """`facts`: what else the record has from the beginning, such as the user's labels."""
        self._lock, self._warned = threading.Lock(), False
        self._began = time.monotonic()
        pending = [{"name": name, "outcome": "pending"} for name in stages]
        private_directory(home / "runs")
        with exclusive(home / CLEANING):
            self._data = _create(home, {**_new(pipeline, pending, settings), **facts})
        self.run = str(self._data["run"])
        self.path = home / "runs" / f"{self.run}.json"

    def stage(self, name: str, **values: Any) -> None:
        """Note what happened to a stage: outcome, seconds, key, path, log, metric, error, progress."""
        self._append(values, name)

    def log(self, stage: str, line: str) -> None:
        """Append a line of a stage to the log, with the time that it begins with, or else the current one.

        Control characters in it are shown as Python would, so that it stays one line; a line without text is left out.
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
        """Note something about the run, also after its end: where it is tracked, what a night decided about it."""
        self._append(values)
        if self._data["outcome"] != "running":
            self._attempt(lambda: write_json(self.path, self.snapshot(), PRIVATE_FILE))

    def snapshot(self) -> JsonDict:
        """A copy of the record as it is now."""
        with self._lock:
            return copy.deepcopy(self._data)

    def finish(self, outcome: str, metrics: Mapping[str, float]) -> None:
        """Note the end of the run, and write its record."""
        seconds = round(time.monotonic() - self._began, 2)
        self.note(outcome=outcome, seconds=seconds, metrics=dict(metrics))

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
    """The record of a run that begins."""
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
    """Write a new record, under a name that no other run has."""
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
    """A name such as "full-20261121-160222-1a2b4": with the time, the last part of it in microseconds."""
    moment = datetime.now(UTC)
    return f"{prefix}-{moment:%Y%m%d-%H%M%S}-{moment.microsecond:05x}"


def history(home: Path) -> list[JsonDict]:
    """All runs, newest first; one that says it is running, but whose process is gone, has crashed."""
    return list(newest_first(home))


def newest_first(home: Path) -> Iterator[JsonDict]:
    """The runs by the time in their names, read one by one: for those who need the newest few of many."""
    return filter(None, (read(home, name) for name in names(home)))


def names(home: Path) -> list[str]:
    """The names of all runs of a home, newest first; an empty record, which a kill may leave, is that of no run."""
    stems = [path.stem for path in (home / "runs").glob("*.json") if path.stat().st_size]
    return sorted(stems, key=time_in_name, reverse=True)


def short_name(name: str) -> str:
    """What comes before the time in the name of a run: the pipeline, or what its user called it."""
    return NAME_TIME.sub("", name)


def is_generated(short: str) -> bool:
    """Whether runs that nobody named have this short name: that of a pipeline, or of a stage that ran alone."""
    return short in ("full", NIGHTLY) or short.startswith("stage-")


def time_in_name(name: str) -> tuple[str, ...]:
    """("20261121", "160222", "1a2b4") of the run "full-20261121-160222-1a2b4"."""
    return tuple(name.rsplit("-", 3)[1:])


def read(home: Path, name: str) -> JsonDict | None:
    """The record of the run with this name, as `history` lists it; None where there is none."""
    path = home / "runs" / f"{name}.json"
    with contextlib.suppress(OSError):
        run = read_object(path)
        if run.keys() >= REQUIRED:  # else it is one of another version
            if run["outcome"] == "running":
                _fold(run, events_of(path))
            return _as_it_is_now(home, run)
    return None


def events_of(record: Path) -> Path:
    """The events beside the record of a run: `full-20261121-160222-1a2b4.events.jsonl`."""
    return record.with_suffix(".events.jsonl")


def _apply(record: JsonDict, values: JsonObject, stage: str | None) -> None:
    """Update the record, or the entry of its stage."""
    if stage is None:
        record.update(values)
        return
    entry = next(entry for entry in record["stages"] if entry["name"] == stage)
    if "outcome" in values:
        entry.pop("progress", None)
    entry.update(values)


def _fold(record: JsonDict, events: Path) -> None:
    """Update the record, as it was written at the beginning, by its events."""
    with contextlib.suppress(FileNotFoundError), events.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(
                orjson.JSONDecodeError
            ):  # a line that a kill or a full disk cut
                event = orjson.loads(line)
                _apply(record, event["values"], event.get("stage"))


def _as_it_is_now(home: Path, run: JsonDict) -> JsonDict:
    """The record as it is now: a run whose process is gone has crashed, and a copied home has its artifacts here."""
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
    """Whether a run's process runs; one of another machine, which shares this home, is assumed to for some days."""
    if run["process"].get("host", platform.node()) == platform.node():
        return is_alive(run["process"])
    path = home / "runs" / f"{run['run']}.json"
    last_written = max(each.stat().st_mtime for each in (path, events_of(path)) if each.exists())
    return time.time() - last_written < ELSEWHERE_DAYS * 86400


def keys_of(run: RecordedRun) -> dict[str, str | None]:
    """The artifact key of each stage of a recorded run; None of one that had none yet."""
    return {stage["name"]: stage.get("key") for stage in run["stages"]}


def equal_runs(home: Path, keys: Mapping[str, str | None]) -> Iterator[JsonDict]:
    """The runs of exactly these artifacts, newest first."""
    return (run for run in newest_first(home) if keys_of(run) == keys)


def newest_finished(home: Path, name: str) -> JsonDict | None:
    """The newest finished run of a whole pipeline whose setting `name` is this: with it a user compares."""
    for run in newest_first(home):
        is_whole = is_own(run) and not run["pipeline"].startswith("stage-")
        if is_whole and is_finished(run) and run["settings"].get("name") == name:
            return run
    return None


def is_own(run: RecordedRun) -> bool:
    """Whether a user typed its settings: it is no night and no trial of a sweep."""
    return run["pipeline"] != NIGHTLY and "sweep" not in run


def is_finished(run: RecordedRun) -> bool:
    """Whether all its stages have their artifacts."""
    return run["outcome"] in ("completed", "cached")


def is_cut_short(run: RecordedRun) -> bool:
    """Whether it ended before it was finished: its models may not be registered."""
    return not is_finished(run) and run["outcome"] != "running"


def made_by(run: RecordedRun) -> str | None:
    """The run that made the artifacts of this one, which it is itself, or names where all were cached."""
    return str(run["run"]) if run["outcome"] == "completed" else run.get("equals")


def record_cached(
    home: Path,
    pipeline: str,
    stages: Sequence[Any],
    settings: JsonObject,
    facts: JsonObject,
) -> JsonDict:
    """Record a run that found everything cached; it is listed, but not tracked. Returns the record, which has no name if the
    home is read-only. `facts`: its metrics, the run that it equals, its labels."""
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
    """The identity of this process, for `is_alive`."""
    return {"pid": os.getpid(), "started": process_started(os.getpid()), "host": platform.node()}


def is_alive(process: JsonObject) -> bool:
    """Whether this very process of this machine still runs; a recycled number does not count."""
    started = process_started(process["pid"])
    return started is not None and bool(started == process["started"])


def is_gone(process: JsonObject) -> bool:
    """Whether this very process was one of this machine, and has ended."""
    return process["host"] == platform.node() and not is_alive(process)


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


LOG_POLL_SECONDS = 0.3


def log_lines(home: Path, name: str, *, follow: bool = False) -> Iterator[str]:
    """The lines of a run's log; `follow` waits for more of them until the run has ended."""
    path, unfinished, position = home / "runs" / f"{name}.log", b"", 0
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


MetricRow = JsonObject  # "step", "metrics", "time" and others


def read_rows(path: Path) -> Iterator[MetricRow]:
    """The rows of a `metrics.jsonl`, without invalid lines."""
    with path.open("rb") as lines:
        yield from filter(None, map(parse_row, lines))


def parse_row(line: bytes) -> MetricRow | None:
    """The row of a line; None for an invalid line, which a crash of the machine can leave."""
    try:
        row: MetricRow = orjson.loads(line)  # a long training has a hundred thousand of them
    except ValueError:
        return None
    return row
