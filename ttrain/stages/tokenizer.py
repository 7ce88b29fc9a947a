"""Stage `tokenizer`: a byte-level BPE from the training part of the documents."""

from __future__ import annotations

from typing import Any

from ttrain.config import TokenizerConfig
from ttrain.data import sources
from ttrain.data import tokenizer as tokenizers
from ttrain.data.jsonl import Tally
from ttrain.errors import DataError
from ttrain.job import Job

MEASURED_DOCUMENTS = 500


def run(config: TokenizerConfig, job: Job) -> dict[str, Any]:
    """Write a Hugging Face tokenizer directory; returns vocabulary size, text read, and bytes per token on a sample."""
    reading, tally = config.reading, Tally()
    text_field, fraction, paths = reading.text_field, reading.heldout_fraction, job.files.get("train")
    if paths is None:  # the source has set its held-out part aside already
        text_field, fraction, paths = "text", 0.0, [str(job.inputs["source"] / "pretrain.jsonl")]
    parse = sources.document_parser(text_field)
    rows = sources.split(sources.read(paths, parse, tally, reading.max_line_bytes), fraction)
    documents = tokenizers.sample(_counted(rows, job), config.tokenizer.max_bytes)
    wanted = sources.DOCUMENT_FIELDS.format(text_field)
    tally.check("data.pretrain (or data.tokenizer, where that is set)", reading.rejected_fraction, wanted)
    texts = [document.text for document in documents]
    tokenizers.save(tokenizers.train(texts, config.tokenizer.vocab_size), job.output)
    encoder = tokenizers.Encoder(job.output)
    measured = texts[:: max(1, len(texts) // MEASURED_DOCUMENTS)]
    encoded = encoder.encode(measured)
    _check_round_trip(encoder, measured, encoded)
    size = sum(len(text.encode()) for text in measured)
    return {
        "vocab_size": len(encoder),
        "documents": len(texts),
        "bytes": sum(len(text.encode()) for text in texts),
        "bytes_per_token": size / max(1, sum(map(len, encoded))),
        "rows": tally.to_json(),
    }


def _counted(rows: Any, job: Job) -> Any:
    for number, (heldout, record) in enumerate(rows, start=1):
        job.progress.update(number, 0, "documents")
        if not heldout:
            yield record


def _check_round_trip(encoder: tokenizers.Encoder, texts: list[str], encoded: list[list[int]]) -> None:
    for text, ids in zip(texts, encoded, strict=True):
        if encoder.decode(ids) != text:
            raise DataError(f"the tokenizer does not give back the text {text[:80]!r}")
