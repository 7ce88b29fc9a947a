"""The events of a run: one append-only file beside its record, with one writer, the pipeline's process.

A line is {"time": seconds since 1970, "event": ..., "stage": ..., "values": {...}}. A fold over the lines gives the record:
`values` update the record itself, or the entry of the stage. Whoever shows a run while it goes on reads this file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import orjson

from ttrain.core.files import JsonDict, JsonObject, private_opener

BEGAN, PROGRESSED, NOTED, ENDED = "began", "progressed", "noted", "ended"  # of the run; `PROGRESSED` of a stage
STAGE_EVENTS = {"running": "stage began", "cached": "stage cached", "failed": "stage failed"}  # by outcome
STAGE_FINISHED = "stage finished"


def path_of(record: Path) -> Path:
    """The events beside the record of a run: `full-20261121-160222-1a2b4.events.jsonl`."""
    return record.with_suffix(".events.jsonl")


def kind_of(values: JsonObject) -> str:
    """The event of a stage that notes these values."""
    return STAGE_EVENTS.get(values.get("outcome", ""), STAGE_FINISHED)


def append(path: Path, event: str, values: JsonObject, stage: str | None = None) -> None:
    """Append one event. Raises OSError."""
    line = {"time": time.time(), "event": event, **({"stage": stage} if stage else {}), "values": values}
    data = orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS, default=str) + b"\n"
    with open(path, "ab", buffering=0, opener=private_opener) as file:
        file.write(data)


def read(path: Path) -> Iterator[JsonDict]:
    """The events; none where there is no file. A line that a kill or a full disk cut is left out."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(orjson.JSONDecodeError):
                yield orjson.loads(line)


def apply(record: JsonDict, values: JsonObject, stage: str | None) -> None:
    """Update the record, or the entry of its stage."""
    if stage is None:
        record.update(values)
        return
    entry = next(entry for entry in record["stages"] if entry["name"] == stage)
    if "outcome" in values:
        entry.pop("progress", None)
    entry.update(values)


def fold(path: Path, record: JsonDict) -> JsonDict:
    """The record as its events leave it; `record`: as it was written at the beginning."""
    for event in read(path):
        if event["event"] != BEGAN:
            apply(record, event["values"], event.get("stage"))
    return record
