"""Stages `shards-*`: documents or chats to Arrow shards of token ids, training and held-out part apart."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from ttrain.config import ShardsConfig
from ttrain.data import sources
from ttrain.data.chat import encode_chat
from ttrain.data.jsonl import Tally
from ttrain.data.shards import ShardWriter
from ttrain.data.tokenizer import Encoder
from ttrain.errors import DataError
from ttrain.job import Job

RECORDS_PER_CALL = 512  # the encoder works on many texts at once


def run(config: ShardsConfig, job: Job) -> dict[str, Any]:
    """Write `train/` and `heldout/` (with the records as text beside, for the evaluation); returns the counts."""
    encoder = Encoder(job.inputs["tokenizer"])
    kind = job.arguments["kind"]
    tallies = {"train": Tally(), "heldout": Tally()}
    with (job.run_directory / "rejected.jsonl").open("w", encoding="utf-8") as quarantine:
        for tally in tallies.values():
            tally.quarantine = quarantine
        with _Parts(config, job, encoder, kind) as parts:
            for heldout, records in _grouped(_records(config, job, tallies)):
                parts.add(heldout, records)
    wanted = sources.CHAT_FIELDS if kind == "chats" else sources.DOCUMENT_FIELDS.format(config.reading.text_field)
    name = f"data.{job.arguments['dataset']}"
    tallies["train"].check(name, config.reading.rejected_fraction, wanted)
    if tallies["heldout"].rows:
        tallies["heldout"].check(f"{name}_heldout", config.reading.rejected_fraction, wanted)
    if not parts.counts["train"]["rows"]:
        raise DataError(f"{name}: all {tallies['train'].kept} rows went to the held-out part; bring more rows")
    return {**parts.counts, "rows": {part: tally.to_json() for part, tally in tallies.items()}}


def _records(config: ShardsConfig, job: Job, tallies: dict[str, Tally]) -> Iterator[tuple[bool, sources.Record]]:
    reading, dataset = config.reading, job.arguments["dataset"]
    files, text_field = job.files, reading.text_field
    if not files:
        source, text_field = job.inputs["source"], "text"
        files = {"train": [str(source / f"{dataset}.jsonl")], "heldout": [str(source / f"{dataset}_heldout.jsonl")]}
    parse = sources.document_parser(text_field) if job.arguments["kind"] == "documents" else sources.parse_conversation

    def read(part: str) -> Iterator[sources.Record]:
        return sources.read(files[part], parse, tallies[part], reading.max_line_bytes)

    if "heldout" not in files:
        yield from sources.split(read("train"), reading.heldout_fraction)
        return
    kept_back = set()
    for record in read("heldout"):
        kept_back.add(sources.position(record))
        yield True, record
    for record in read("train"):
        if sources.position(record) in kept_back:  # what is scored is never learnt
            tallies["train"].kept -= 1
            tallies["train"].skipped["stands in the held-out part"] += 1
        else:
            yield False, record


def _grouped(rows: Iterable[tuple[bool, sources.Record]]) -> Iterator[tuple[bool, list[sources.Record]]]:
    for heldout, group in itertools.groupby(rows, key=lambda row: row[0]):
        for chunk in _batched(group):
            yield heldout, [record for _, record in chunk]


def _batched(rows: Iterator[Any]) -> Iterator[list[Any]]:
    while chunk := list(itertools.islice(rows, RECORDS_PER_CALL)):  # itertools.batched came with Python 3.12
        yield chunk


class _Parts:
    """The two sets of shards in the making."""

    def __init__(self, config: ShardsConfig, job: Job, encoder: Encoder, kind: str) -> None:
        self._encoder, self._kind, self._job = encoder, kind, job
        self._writers: dict[str, ShardWriter] = {}
        for part in ("train", "heldout"):
            self._writers[part] = ShardWriter(
                job.output / part,
                kind=kind,
                vocab_size=len(encoder),
                tokenizer=encoder.digest,
                tokens_per_shard=config.shards.tokens_per_shard,
            )
        self._text: IO[bytes] = (job.output / "heldout" / "records.jsonl").open("wb")
        self.counts: dict[str, dict[str, Any]] = {}
        self._done = 0

    def __enter__(self) -> _Parts:
        return self

    def __exit__(self, *error: object) -> None:
        self._text.close()
        self.counts = {part: _without_files(writer.close()) for part, writer in self._writers.items()}

    def add(self, heldout: bool, records: list[sources.Record]) -> None:
        """Encode the records and append them to their part."""
        writer = self._writers["heldout" if heldout else "train"]
        if self._kind == "documents":
            ids = self._encoder.encode([record.text for record in records if isinstance(record, sources.Document)])
            for record, tokens in zip(records, ids, strict=True):
                writer.add(self._encoder.document(tokens), text_bytes=len(record.content()))
        else:
            for record in records:
                assert isinstance(record, sources.Conversation)
                tokens, live = encode_chat(self._encoder, record.messages)
                writer.add(tokens, live, text_bytes=sum(len(m.content.encode()) for m in record.messages))
        if heldout:
            self._text.writelines(orjson.dumps(record.to_json()) + b"\n" for record in records)
        self._done += len(records)
        self._job.progress.update(self._done, 0, "records")


def _without_files(index: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in index.items() if name not in ("shards", "tokenizer")}


def heldout_records(directory: Path) -> list[dict[str, Any]]:
    """The held-out records of a set of shards, as text."""
    return [orjson.loads(line) for line in (directory / "heldout" / "records.jsonl").read_bytes().splitlines()]
