"""Stage `heldout`: the held-out documents of all nights, as one set."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from ttrain.config import HeldoutConfig
from ttrain.data import contamination, shards
from ttrain.stages.job import StageContext
from ttrain.stages.shards import heldout_records

RECORDS = "records.jsonl"


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
    inputs = [contamination.read_item_shares(job.inputs[name]) for name in ("earlier", "documents")]
    # A model of many nights has learnt from all of them.
    contamination.write_item_shares(job.output, {**inputs[0], **inputs[1]})
    none = dict.fromkeys(shards.COUNTED, 0)  # no tokens of any tokenizer
    entry = {**none, "file": "", "records": RECORDS, "sha256": "", "group": 0}
    shards.write_index(directory, kind="documents", vocab_size=0, tokenizer="", shards=[entry])
    return {"records": len(lines), "new": len(new.keys() - earlier.keys())}


def _by_digest(records: Iterable[Mapping[str, Any]]) -> dict[bytes, bytes]:
    """Lines by the digest of their text: other fields, such as the source, do not make it another record."""
    return {
        hashlib.sha256(orjson.dumps({"text": record["text"]})).digest(): orjson.dumps(record, option=orjson.OPT_SORT_KEYS)
        for record in records
    }
