"""List a home's outboxes, which of them may be taken and what they hold, and deliver those that an ended process left."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from ttrain.config import flatten
from ttrain.core.files import read_object, write_json
from ttrain.store import runs
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.tracking import outbox
from ttrain.tracking.datasets import data_of
from ttrain.tracking.outbox import FOLDER, ID, Entry
from ttrain.tracking.runs import AnyRun, TrackedRun, TrackingStore

IDLE_DAYS: Final = 7  # an outbox of another machine that shares this home is left alone for this long


def list_outboxes(home: Path) -> list[Path]:
    """The directories of all outboxes, the oldest run first."""
    with contextlib.suppress(OSError):
        return sorted((path for path in (home / FOLDER).iterdir() if ID.fullmatch(path.name)), key=_start_time)
    return []


def may_be_taken(directory: Path) -> bool:
    """Whether its process may have ended: locks of other machines are unreliable, so theirs are left for a week."""
    run_info = read_object(directory / "run.json")
    is_idle = run_info.get("host") == platform.node() or time.time() - last_change(directory) > 86400 * IDLE_DAYS
    return bool(run_info) and is_idle


def last_change(directory: Path) -> float:
    """Time of the last change in an outbox, in seconds since 1970."""
    with contextlib.suppress(OSError):
        changes = (path.stat().st_mtime for path in directory.iterdir() if path.name != "lock")
        return max(changes, default=time.time())
    return time.time()


def children_first(directories: Iterable[Path]) -> list[Path]:
    """Sort outboxes, each run after its children: its models are registered from the children's runs, not once more."""
    run_infos = {path: read_object(path / "run.json") for path in directories}
    starts = {str(info.get("id")): float(info.get("started", 0)) for info in run_infos.values() if not info.get("parent")}

    def sort_key(path: Path) -> tuple[float, bool]:
        run_info, parent = run_infos[path], run_infos[path].get("parent")
        return starts.get(str(parent or run_info.get("id")), float(run_info.get("started", 0))), not parent

    return sorted(run_infos, key=sort_key)


def entries_of(directory: Path) -> list[Entry]:
    """The undelivered entries, even if a process holds the outbox."""
    return list(outbox.read_journal(directory).values())


def undelivered_keys(home: Path) -> frozenset[str]:
    """Keys of the artifacts whose files are still to be sent."""
    paths = [entry.data.get("path") for box in list_outboxes(home) for entry in entries_of(box)]
    path_parts = [Path(path).parts for path in paths if path]
    return frozenset(segments[2] for segments in path_parts if len(segments) > 2 and segments[0] == "store")


def _start_time(directory: Path) -> float:
    return float(read_object(directory / "run.json").get("started", 0))


UNMADE_SECONDS: Final = 60.0  # an outbox is made in milliseconds; locks of other machines are unreliable


def deliver_orphaned_outbox(
    store: TrackingStore, directory: Path, *, uploads: bool = True, elsewhere: bool = False
) -> bool | None:
    """Deliver an outbox that an ended process left; return whether all of it arrived, None if a process still has it or if
    it is for another MLflow.

    With `elsewhere`, also that of a process of another machine.
    """
    if not elsewhere and not may_be_taken(directory):
        return None
    if read_object(directory / "run.json").get("tracker") != store.tracker:
        return None  # before it is taken: an outbox without entries is removed when it is released
    changed = last_change(directory)
    box = outbox.take(directory)
    if box is None:
        return None
    try:
        run = TrackedRun(store, box)
        run.is_again = run.is_orphan = True
        if run.id is None:
            box.run_info["doubtful"] = True
        if not box.run_info.get("ended"):
            artifact = artifact_of(store.home, box.run_info.get("tags", {}))
            if artifact:  # killed after it was published
                log_result(run, artifact)
                if box.run_info.get("keeps_files"):
                    run.log_directory(artifact.path, artifact.stage)
            box.update_run_info(ended=True)
            box.add("end", status=FINISHED if artifact else "KILLED", time=int(1000 * changed))
        done = store.deliver(run, again=True)
        return done and (not uploads or store.deliver(run, uploads=True, again=True))
    finally:
        note_run_id(store.home, box.run_info)
        box.close()


def remove_unmade(home: Path) -> None:
    """Remove outbox directories whose process was killed before it wrote `run.json`."""
    for directory in list_outboxes(home):
        with contextlib.suppress(OSError):
            age = time.time() - directory.stat().st_mtime
            if age > UNMADE_SECONDS and not (directory / "run.json").exists():
                outbox.remove_unmade(directory)


def note_run_id(home: Path, run_info: Mapping[str, Any]) -> None:
    """Write the MLflow id that an ended run got later into its record. `run_info`: from its outbox."""
    path = home / "runs" / f"{_plain(str(run_info.get('name')))}.json"
    record = read_object(path) if run_info.get("run_id") else {}
    if record and (record.get("tracking") or {}).get("identity") == run_info.get("id"):
        with contextlib.suppress(OSError):
            write_json(path, {**record, "tracking": {**record["tracking"], "run_id": run_info["run_id"]}})


def _plain(name: str) -> str:
    """The name of a run as a file name: never a path, never a pattern."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).lstrip(".") or "_"


RUN, STAGE, KEY = "ttrain.run", "ttrain.stage", "ttrain.key"  # tags of a stage's run
FINISHED: Final = "FINISHED"


def status_of(outcome: str) -> str:
    """MLflow's status of a run or a stage that ended with this outcome."""
    return FINISHED if outcome in (*runs.BUILT, runs.NOTHING_NEW) else "FAILED" if outcome == "failed" else "KILLED"


FIT: Final = ("bytes_per_token", "unk_rate")  # metrics of a tokenizer, by which tokenizers are compared


def log_result(run: AnyRun, artifact: Artifact) -> None:
    """Log the figures of a finished stage, and its data sets."""
    run.log_params({**group_params(artifact.result), **_figures(artifact.result)})
    fit = {f"tok/{name}": float(artifact.result[name]) for name in FIT if name in artifact.result}
    run.log_summary(fit)
    run.log_inputs(data_of(artifact))


def artifact_of(home: Path, tags: Mapping[str, str]) -> Artifact | None:
    """The whole artifact that the run with these tags published; None if another run made it, or there is none."""
    stage, key, name = (str(tags.get(tag, "")) for tag in (STAGE, KEY, RUN))
    artifact = ArtifactStore(home).find(stage, key) if stage and key else None
    made_by = artifact.provenance.get("run") if artifact else None
    return artifact if name and made_by == name else None


def group_params(result: Mapping[str, Any]) -> dict[str, object]:
    """What each optimizer group holds, as parameters: {"optim.groups.0.weight_decay": 0.1}."""
    groups = enumerate(result.get("optimizer_groups", ()))
    return {f"optim.groups.{number}.{name}": value for number, group in groups for name, value in group.items()}


def _figures(result: Mapping[str, Any]) -> dict[str, object]:
    """The figures of a result as parameters: {"result.rows.fill": 0.98}. As metrics each would be a chart of one point, and
    MLflow would show these charts before the curves."""
    return {
        f"result.{name}": value
        for name, value in flatten({key: value for key, value in result.items() if key != "samples"})
        if isinstance(value, int | float)
    }
