"""Tells MLflow what an ended process left in an outbox, and removes what it left of one that it was making."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Final

from ttrain.core.files import read_json
from ttrain.tracking import outbox, outboxes, published, records
from ttrain.tracking.runs import Run, TrackingStore

UNMADE_SECONDS: Final = 60.0  # an outbox is made in milliseconds; locks of other machines are not to be relied on


def tell_one(store: TrackingStore, directory: Path, *, uploads: bool = True, elsewhere: bool = False) -> bool | None:
    """Tells what an ended process left in one outbox; whether all of it arrived, None where a process has it, or where it is
    for another MLflow.

    Also of another machine's process, where that is asked for.
    """
    if not elsewhere and not outboxes.may_be_taken(directory):
        return None
    about = read_json(directory / "run.json")
    if not isinstance(about, dict) or about.get("tracker") != store.tracker:
        return None  # before it is taken: an outbox without entries is removed when it is let go of
    changed = outboxes.last_change(directory)
    box = outbox.take(directory)
    if box is None:
        return None
    try:
        run = Run(store, box)
        run.is_again = run.is_orphan = True
        if run.id is None:
            box.about["doubtful"] = True
        if not box.about.get("ended"):
            artifact = published.artifact_of(store.home, box.about.get("tags", {}))
            if artifact:  # killed after it was published
                published.log_result(run, artifact)
                if box.about.get("keeps_files"):
                    run.log_directory(artifact.path, artifact.stage)
            box.note(ended=True)
            box.add("end", status=published.FINISHED if artifact else "KILLED", time=int(1000 * changed))
        done = store.deliver(run, again=True)
        return done and (not uploads or store.deliver(run, uploads=True, again=True))
    finally:
        records.note_run_id(store.home, box.about)
        box.close()


def remove_unmade(home: Path) -> None:
    """Removes the directories of outboxes whose processes were killed before these held anything."""
    for directory in outboxes.found(home):
        with contextlib.suppress(OSError):
            age = time.time() - directory.stat().st_mtime
            if age > UNMADE_SECONDS and not (directory / "run.json").exists():
                outbox.remove_unmade(directory)
