"""What a gate learns from: records of any kind, and the loss of each expert on each of them. R records, E experts."""

from __future__ import annotations

import hashlib
import heapq
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ttrain.config import Expert, Gate
from ttrain.core.files import read_json, write_json
from ttrain.core.hashing import digest_of
from ttrain.data import chat, sources, validate
from ttrain.data.jsonl import Tally
from ttrain.data.sources import Conversation, Document, Record
from ttrain.errors import DataError, Interrupted, UsageError
from ttrain.evaluate import perplexity
from ttrain.evaluate.log_likelihood import beginning
from ttrain.evaluate.routing import Flags, Floats, Ints
from ttrain.inference import gate_files, loading
from ttrain.inference.evaluated_model import subject_of
from ttrain.inference.loading import Speaker
from ttrain.stages.job import Job
from ttrain.train import precision

LOSSES = "losses"  # under run/: those of one expert a file
MAX_LINE_BYTES = 32 << 20
log = logging.getLogger("ttrain")


# --- the records --------------------------------------------------------------------------------------------------------


def read(locations: Sequence[str], settings: Gate) -> list[Record]:
    """The distinct records of the files, each file by its own kind, in an order of their own that no file decides.

    Raises DataError where too many rows are bad or none is left, as sharding does.
    """
    kept = heapq.nsmallest(
        settings.limit or 2**62, _distinct(locations, settings), key=lambda record: _place(record, settings)
    )
    log.info("%d records of %d files", len(kept), len(locations))
    return kept


def text_of(record: Record) -> str:
    """What the router sees: of a document its beginning, of a chat what the user says before the first answer."""
    if isinstance(record, Document):
        return record.text
    asked = []
    for message in record.messages:
        if message.role == "assistant":
            break
        if message.role == "user":
            asked.append(message.content)
    return "\n".join(asked)


def bytes_of(record: Record) -> int:
    """UTF-8 bytes of what is scored: a document's text, or a chat's answers."""
    if isinstance(record, Document):
        return len(record.text.encode("utf-8"))
    return sum(len(message.content.encode("utf-8")) for message in record.messages if message.role == "assistant")


def heldout(records: Sequence[Record], settings: Gate) -> Flags:
    """Whether each is held out, by its content, of shape [R]. Raises DataError where none is left to learn from."""
    contents = {record.content() for out, record in sources.split(iter(records), settings.heldout_fraction) if out}
    found = np.array([record.content() in contents for record in records])
    if found.all():
        raise DataError(f"all {len(records)} records went to the held-out part; bring more, or lower heldout_fraction")
    return found


def content_digest(records: Sequence[Record]) -> str:
    """Identifies the records, wherever they stand."""
    return digest_of([sources.content_hash(record).hex() for record in records])


def _distinct(locations: Sequence[str], settings: Gate) -> Iterator[Record]:
    tally, seen = Tally(), set[bytes]()
    for location in locations:
        kind = validate.kind_of(location, MAX_LINE_BYTES)
        parse = sources.parse_conversation if kind == "chats" else sources.document_parser(settings.text_field)
        for record in sources.read([location], parse, tally, MAX_LINE_BYTES, settings.text_field):
            key = sources.content_hash(record)
            if key not in seen:
                seen.add(key)
                yield record
    wanted = f"{sources.document_fields(settings.text_field, prefix='')}, or a chat"
    tally.check("--data", settings.rejected_fraction, wanted, prefix="")


def _place(record: Record, settings: Gate) -> bytes:
    """Where it falls among all: by another hash than the one that holds records out."""
    key = settings.seed.to_bytes(8, "big")
    return hashlib.blake2b(sources.content_hash(record), digest_size=16, key=key).digest()


# --- the experts' losses ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Losses:
    """Summed negative log-likelihood in nats, and scored tokens, both of shape [R, E]."""

    nats_RE: Floats
    tokens_RE: Ints


def score(experts: Sequence[Expert], records: Sequence[Record], settings: Gate, job: Job, device: torch.device) -> Losses:
    """The losses of all experts, one loaded after the other; those that an earlier try left are taken.

    Raises Interrupted where a stop was asked for; what finished experts lost is saved.
    """
    directory = job.run_directory / LOSSES
    directory.mkdir(exist_ok=True)
    content = content_digest(records)
    found: list[dict[str, Any]] = []
    for number, expert in enumerate(experts):

        def told(part: float, scored: int = number) -> None:
            job.progress.update(scored + part, len(experts), "experts")
            if job.stop_requested():
                raise Interrupted(f"stopped while the experts were scored, {scored} of {len(experts)} are")

        key = digest_of([gate_files.digest(expert), content, settings.row_length, settings.stride])[:16]
        path = directory / f"{key}.json"
        known = read_json(path)
        if known is None:
            log.info("scoring %s", expert.reference)
            known = _scored(expert, records, settings, device, told)
            write_json(path, known)
        found.append(known)
    return Losses(
        np.array([one["nats"] for one in found], np.float64).T, np.array([one["tokens"] for one in found], np.int64).T
    )


def _scored(
    expert: Expert, records: Sequence[Record], settings: Gate, device: torch.device, told: Callable[[float], None]
) -> dict[str, Any]:
    speaker = loading.load(gate_files.reference_of(expert), device=device.type)
    if not speaker.can_chat and any(isinstance(record, Conversation) for record in records):
        raise UsageError(f"--data holds chats, but the tokenizer of the expert {expert.reference} has no chat template")
    scores = perplexity.score_each(
        speaker.model,
        _sequences(speaker, records),
        length=settings.row_length,
        stride=settings.stride,
        autocast=precision.resolve("fp32", device).autocast,
        device=device,
        progress=lambda done, total: told(done / total),
    )
    return {"nats": [score.nats for score in scores], "tokens": [score.tokens for score in scores]}


def _sequences(speaker: Speaker, records: Sequence[Record]) -> list[perplexity.Tokens]:
    """(ids, live) of each record: all tokens of a document's text, the answers of a chat."""
    encoder = speaker.encoder
    texts = [record.text for record in records if isinstance(record, Document)]
    talks = [record.messages for record in records if isinstance(record, Conversation)]
    begins = beginning(subject_of(speaker)) if texts else ()
    documents = iter(encoder.encode(texts))
    chats = iter(chat.encode_chats(encoder, talks) if talks else ())  # not every tokenizer has a template
    found: list[perplexity.Tokens] = []
    for record in records:
        if isinstance(record, Document):
            ids = next(documents)
            found.append(([*begins, *ids], [False] * len(begins) + [True] * len(ids)))
        else:
            chat_ids, live = next(chats)
            found.append((chat_ids.tolist(), live.tolist()))
    return found
