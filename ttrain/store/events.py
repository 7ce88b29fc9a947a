"""The events of a run: one append-only file beside its record, with one writer, the pipeline's process.

A line is {"time": seconds since 1970, "stage": ..., "values": {...}}. A fold over the lines gives the record:
`values` update the record itself, or the entry of the stage. Whoever shows a run while it goes on reads this file.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import orjson

from ttrain.core.files import JsonDict, JsonObject, private_opener


def path_of(record: Path) -> Path:
    """The events beside the record of a run: `full-20261121-160222-1a2b4.events.jsonl`."""
    return record.with_suffix(".events.jsonl")


def append(path: Path, values: JsonObject, stage: str | None) -> None:
    """Append one event. Raises OSError."""
    line = {"time": time.time(), **({"stage": stage} if stage else {}), "values": values}
    data = orjson.dumps(line, option=orjson.OPT_NON_STR_KEYS, default=str) + b"\n"
    with open(path, "ab", buffering=0, opener=private_opener) as file:
        file.write(data)


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
    with contextlib.suppress(FileNotFoundError), path.open("rb") as lines:
        for line in lines:
            with contextlib.suppress(orjson.JSONDecodeError):  # a line that a kill or a full disk cut
                event = orjson.loads(line)
                apply(record, event["values"], event.get("stage"))
    return record
