"""Stage `heldout`: the held-out documents of all nights, as one set with their nights."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import orjson

from ttrain.config import Settings
from ttrain.core.files import JsonDict, read_json, write_json
from ttrain.data import contamination, shards
from ttrain.evaluate.task_result import record_name
from ttrain.tasks import EARLIER_HELDOUT
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.shards import heldout_records, scored_documents

NIGHT_SHARE = 10  # nights whose text has `evaluate.max_bytes` together
RECORDS = "records.jsonl"
UNSCORED = Path(
    "heldout", "unscored.json"
)  # names of records beyond the share of the night that brought them
NIGHTS = Path(
    "heldout", "nights.json"
)  # a list for each night, the oldest first: what identifies its records in scores


def run(settings: Settings, job: StageContext) -> Figures:
    """Write the scored held-out texts of both inputs, each once, in the order of their digests.

    Each night adds at most a tenth of `evaluate.max_bytes`, which later nights keep, so that their
    metrics are over the same text. Text only: models have their own tokenizers.
    """
    earlier = job.inputs[EARLIER_HELDOUT]
    earlier_documents, documents = (
        _by_name(heldout_records(directory)) for directory in (earlier, job.inputs["documents"])
    )
    passed = {*(read_json(earlier / UNSCORED) or ()), *earlier_documents}
    brought = documents.keys() - passed
    by_name = {**documents, **earlier_documents}

    def scored(names: Iterable[str]) -> list[str]:
        """Those of a night's records that are scored."""
        ordered = [by_name[name] for name in sorted(names)]
        share = settings.evaluate.max_bytes // NIGHT_SHARE
        return [record_name(document["text"]) for document in scored_documents(ordered, share)]

    nights = read_nights(earlier) or [
        scored(earlier_documents)
    ]  # a set of one night alone has no list
    nights.append(scored(brought))
    kept = sorted({*itertools.chain.from_iterable(nights)})
    lines = [orjson.dumps(by_name[name], option=orjson.OPT_SORT_KEYS) for name in kept]
    directory = job.output / "heldout"
    shards.write_files([(directory / RECORDS, b"".join(line + b"\n" for line in lines))])
    write_json(job.output / NIGHTS, nights)
    write_json(job.output / UNSCORED, sorted({*passed, *documents}.difference(kept)))
    inputs = [
        contamination.read_item_shares(job.inputs[name]) for name in (EARLIER_HELDOUT, "documents")
    ]
    # A model of many nights has learnt from all of them.
    contamination.write_item_shares(job.output, {**inputs[0], **inputs[1]})
    # No tokens of any tokenizer.
    entry = {
        **dict.fromkeys(shards.COUNTED, 0),
        "file": "",
        "records": RECORDS,
        "sha256": "",
        "group": 0,
    }
    shards.write_index(directory, kind="documents", vocab_size=0, tokenizer="", shards=[entry])
    return {
        "records": len(lines),
        "new": len(nights[-1]),
        "unscored": len(brought) - len(nights[-1]),
        "nights": [len(night) for night in nights],
    }


def read_nights(directory: Path) -> list[list[str]]:
    """Names of the held-out records of each night, oldest first; [] for a set of one night."""
    return list(read_json(directory / NIGHTS) or ())


def _by_name(documents: Iterable[JsonDict]) -> dict[str, JsonDict]:
    # Other fields, such as the source, do not make another record.
    return {record_name(document["text"]): document for document in documents}
