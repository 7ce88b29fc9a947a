"""Stage `heldout`: the held-out documents of all nights, as one set, and which night brought which."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from ttrain.config import HeldoutConfig
from ttrain.core.files import read_json, write_json
from ttrain.data import contamination, shards
from ttrain.errors import ArtifactError
from ttrain.evaluate.task_result import record_name
from ttrain.stages import EARLIER_HELDOUT
from ttrain.stages.job import StageContext
from ttrain.stages.shards import heldout_records, scored_documents

NIGHT_SHARE = 10  # nights whose text has `evaluate.max_bytes` together
RECORDS = "records.jsonl"
NIGHTS = Path("heldout", "nights.json")  # a list for each night, the oldest first: what identifies its records in scores


def run(config: HeldoutConfig, job: StageContext) -> dict[str, Any]:
    """Write each held-out text of both inputs once, ordered by its digest; returns the counts.

    A night reads new documents alone, but a model must not forget the old ones. Each night brings a tenth of
    `evaluate.max_bytes` at most, which stays as it is whatever comes later: figures of different nights are over the same
    text. Text only: each model has its own tokenizer.
    """
    earlier, new = (_by_name(heldout_records(job.inputs[name])) for name in (EARLIER_HELDOUT, "documents"))
    documents, brought = {**new, **earlier}, [name for name in new if name not in earlier]
    most = config.evaluate.max_bytes // NIGHT_SHARE
    nights = []
    for names in (*(read_nights(job.inputs[EARLIER_HELDOUT]) or [[*earlier]]), brought):
        of_night = [documents[name] for name in sorted(names) if name in documents]
        nights.append([record_name(document["text"]) for document in scored_documents(of_night, most)])
    chosen = sorted(name for names in nights for name in names)
    lines = [orjson.dumps(documents[name], option=orjson.OPT_SORT_KEYS) for name in chosen]
    directory = job.output / "heldout"
    directory.mkdir(parents=True, exist_ok=True)
    shards.write_files([(directory / RECORDS, b"".join(line + b"\n" for line in lines))])
    write_json(job.output / NIGHTS, nights)
    inputs = [contamination.read_item_shares(job.inputs[name]) for name in (EARLIER_HELDOUT, "documents")]
    # A model of many nights has learnt from all of them.
    contamination.write_item_shares(job.output, {**inputs[0], **inputs[1]})
    none = dict.fromkeys(shards.COUNTED, 0)  # no tokens of any tokenizer
    entry = {**none, "file": "", "records": RECORDS, "sha256": "", "group": 0}
    shards.write_index(directory, kind="documents", vocab_size=0, tokenizer="", shards=[entry])
    counts = {"records": len(lines), "new": len(nights[-1]), "unscored": len(brought) - len(nights[-1])}
    return {**counts, "nights": [len(night) for night in nights]}


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


def _by_name(documents: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Documents by what identifies them among the scores: other fields, such as the source, do not make another record."""
    return {record_name(document["text"]): document for document in documents}
