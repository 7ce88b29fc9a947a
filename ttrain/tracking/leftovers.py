"""Tells MLflow what an ended process left in an outbox."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.tracking import outbox, outboxes, records
from ttrain.tracking.runs import Run

if TYPE_CHECKING:
    from ttrain.tracking.store import Store


def tell_one(store: Store, directory: Path, *, uploads: bool = True, elsewhere: bool = False) -> bool | None:
    """Tells what an ended process left in one outbox; whether all of it arrived, None where a process has it.

    Also of another machine's process, where that is asked for.
    """
    if not elsewhere and not outboxes.may_be_taken(directory):
        return None
    changed = outboxes.last_change(directory)
    box = outbox.take(directory)
    if box is None:
        return None
    try:
        if box.about.get("tracker") != store.tracker:
            return True
        run = Run(store, box)
        run.is_again = run.is_orphan = True
        if run.id is None:
            box.about["doubtful"] = True
        if not box.about.get("ended"):
            box.note(ended=True)
            box.add("end", status="KILLED", time=int(1000 * changed))
        done = store.deliver(run, again=True)
        return done and (not uploads or store.deliver(run, uploads=True, again=True))
    finally:
        records.note_run_id(store.home, box.about)
        box.close()
