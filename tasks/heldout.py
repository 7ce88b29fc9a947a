"""Stage `heldout`: the held-out documents of all nights, as one set, and which night brought which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from ttrain.config import Settings
from ttrain.core.files import JsonDict, read_json, write_json
from ttrain.data import contamination, shards
from ttrain.errors import ArtifactError
from ttrain.evaluate.task_result import record_name
from ttrain.tasks import EARLIER_HELDOUT
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.shards import heldout_records, scored_documents

NIGHT_SHARE = 10  # nights whose text has `evaluate.max_bytes` together
RECORDS = "records.jsonl"
UNSCORED = Path("heldout", "unscored.json")  # names of records beyond the share of the night that brought them
NIGHTS = Path("heldout", "nights.json")  # a list for each night, the oldest first: what identifies its records in scores


def run(settings: Settings, job: StageContext) -> Figures:
    """Write the held-out texts of both inputs that are scored, each once, ordered by their digests; returns the counts.

    A night reads new documents alone, but a model must not forget the old ones. Each night brings a tenth of
    `evaluate.max_bytes` at most, which stays as it is whatever comes later: figures of different nights are over the same
    text. Text only: each model has its own tokenizer.
    """
    earlier = job.inputs[EARLIER_HELDOUT]
    earlier_documents, documents = (_by_name(heldout_records(directory)) for directory in (earlier, job.inputs["documents"]))
    unscored = set(_read(earlier / UNSCORED))
    of_nights = _scored(earlier_documents, read_nights(earlier), settings.evaluate.max_bytes)
    passed = {*unscored, *earlier_documents}
    brought = [document for name, document in sorted(documents.items()) if name not in passed]
    of_nights.append(scored_documents(brought, settings.evaluate.max_bytes // NIGHT_SHARE))
    nights = [[record_name(document["text"]) for document in of_night] for of_night in of_nights]
    by_name = _by_name(document for of_night in of_nights for document in of_night)
    lines = [orjson.dumps(document, option=orjson.OPT_SORT_KEYS) for _, document in sorted(by_name.items())]
    directory = job.output / "heldout"
    shards.write_files([(directory / RECORDS, b"".join(line + b"\n" for line in lines))])
    write_json(job.output / NIGHTS, nights)
    write_json(job.output / UNSCORED, sorted({*passed, *documents} - by_name.keys()))
    inputs = [contamination.read_item_shares(job.inputs[name]) for name in (EARLIER_HELDOUT, "documents")]
    # A model of many nights has learnt from all of them.
    contamination.write_item_shares(job.output, {**inputs[0], **inputs[1]})
    none = dict.fromkeys(shards.COUNTED, 0)  # no tokens of any tokenizer
    entry = {**none, "file": "", "records": RECORDS, "sha256": "", "group": 0}
    shards.write_index(directory, kind="documents", vocab_size=0, tokenizer="", shards=[entry])
    counts = {"records": len(lines), "new": len(nights[-1]), "unscored": len(brought) - len(nights[-1])}
    return {**counts, "nights": [len(night) for night in nights]}


def scored_by_night(directory: Path, max_bytes: int) -> list[list[JsonDict]]:
    """The documents of a set that are scored, by the night that brought them: of each a tenth of `max_bytes` at most.

    The same choice again from what was chosen; a set of an earlier build has all documents.
    """
    return _scored(_by_name(heldout_records(directory)), read_nights(directory), max_bytes)


def _scored(documents: Mapping[str, JsonDict], nights: Sequence[Sequence[str]], max_bytes: int) -> list[list[JsonDict]]:
    return [
        scored_documents((documents[name] for name in sorted(names) if name in documents), max_bytes // NIGHT_SHARE)
        for names in nights or [[*documents]]
    ]


def read_nights(directory: Path) -> list[list[str]]:
    """The names of the held-out records of each night, the oldest first; [] where a set is of one night alone.

    Raises ArtifactError if the file is damaged.
    """
    nights: list[list[str]] = _read(directory / NIGHTS)
    if not all(isinstance(night, list) for night in nights):
        raise ArtifactError(
            f"{directory / NIGHTS} is damaged: it is not a list of lists; restore it from a copy of the home"
        )
    return nights


def _read(path: Path) -> list[Any]:
    """A list that the stage wrote; [] if it wrote none."""
    values = read_json(path) if path.exists() else []
    if not isinstance(values, list):
        raise ArtifactError(f"{path} is damaged: it is not a list; restore it from a copy of the home")
    return values


def _by_name(documents: Iterable[JsonDict]) -> dict[str, JsonDict]:
    """Documents by what identifies them among the scores: other fields, such as the source, do not make another record."""
    return {record_name(document["text"]): document for document in documents}
