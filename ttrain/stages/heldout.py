"""Stage `heldout`: the held-out documents of all nights, as one set, and which night brought which."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from ttrain.config import HeldoutConfig
from ttrain.core.files import read_json, write_json
from ttrain.data import contamination, shards
from ttrain.errors import ArtifactError
from ttrain.evaluate.task_result import record_name
from ttrain.stages.job import StageContext
from ttrain.stages.shards import heldout_records

RECORDS = "records.jsonl"
NIGHTS = Path("heldout", "nights.json")  # a list for each night, the oldest first: what identifies its records in scores


def run(config: HeldoutConfig, job: StageContext) -> dict[str, Any]:
    """Write each held-out text of both inputs once, ordered by its digest; returns the counts.

    A night reads new documents alone, but a model must not forget the old ones. In this order the beginning, which is what
    an evaluation of limited length scores, is an even sample of old and new. Text only: each model has its own tokenizer.
    """
    earlier, new = (_by_digest(heldout_records(job.inputs[name])) for name in ("earlier", "documents"))
    lines = [line for _, line in sorted({**earlier, **new}.items())]
    directory = job.output / "heldout"
    directory.mkdir(parents=True, exist_ok=True)
    shards.write_files([(directory / RECORDS, b"".join(line + b"\n" for line in lines))])
    nights = read_nights(job.inputs["earlier"]) or [_names(earlier.values())]
    recorded = {name for night in nights for name in night}
    nights.append([name for name in _names(new.values()) if name not in recorded])
    write_json(job.output / NIGHTS, nights)
    inputs = [contamination.read_item_shares(job.inputs[name]) for name in ("earlier", "documents")]
    # A model of many nights has learnt from all of them.
    contamination.write_item_shares(job.output, {**inputs[0], **inputs[1]})
    none = dict.fromkeys(shards.COUNTED, 0)  # no tokens of any tokenizer
    entry = {**none, "file": "", "records": RECORDS, "sha256": "", "group": 0}
    shards.write_index(directory, kind="documents", vocab_size=0, tokenizer="", shards=[entry])
    return {"records": len(lines), "new": len(new.keys() - earlier.keys()), "nights": [len(night) for night in nights]}


def read_nights(directory: Path) -> list[list[str]]:
    """The names of the held-out records of each night, the oldest first; [] where a set is of one night alone.

    Raises ArtifactError if the file is damaged.
    """
    path = directory / NIGHTS
    if not path.exists():
        return []
    nights = read_json(path)
    if not isinstance(nights, list) or not all(isinstance(night, list) for night in nights):
        raise ArtifactError(f"{path} is damaged: it is not a list of lists; restore it from a copy of the home")
    return [[str(name) for name in night] for night in nights]


def _names(lines: Iterable[bytes]) -> list[str]:
    """What identifies records among the scores, sorted."""
    return sorted(record_name(orjson.loads(line)["text"]) for line in lines)


def _by_digest(records: Iterable[Mapping[str, Any]]) -> dict[bytes, bytes]:
    """Lines by the digest of their text: other fields, such as the source, do not make it another record."""
    return {
        hashlib.sha256(orjson.dumps({"text": record["text"]})).digest(): orjson.dumps(record, option=orjson.OPT_SORT_KEYS)
        for record in records
    }
