"""Stage `tokenizer`: a byte-level BPE from the training part of the documents, or a tokenizer that exists."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ttrain.config import Reading, Settings, Tokenizer
from ttrain.data import existing, locations, records
from ttrain.data import tokenizer as tokenizers
from ttrain.data.encoder import Encoder
from ttrain.data.records import Tally
from ttrain.data.tokenizer import Reservoir, sample
from ttrain.errors import DataError
from ttrain.tasks.common.job import Figures, StageContext

MEASURED_DOCUMENTS, MEASURED_BYTES = 200, 1_000_000  # of each file at most, to say how well the tokenizer fits it
MEASURED_BYTES_OF_ALL = 200_000_000  # these samples are in memory until the tokenizer is trained
MAX_READ_DOCUMENTS = 2000  # documents of each file that are read at all, where none is needed to learn from
SETTING = "data.pretrain (or data.tokenizer, where that is set)"


def run(settings: Settings, job: StageContext) -> Figures:
    """Write a Hugging Face tokenizer directory; returns vocabulary size, text read, and bytes per token."""
    reading, paths = settings.reading, job.files.get("train")
    if paths is None and "source" in job.inputs:  # it has set its held-out part aside already
        reading = reading.model_copy(update={"text_field": "text", "heldout_fraction": 0.0})
        paths = [str(job.inputs["source"] / "pretrain.jsonl")]
    return train_directory(
        paths or [],
        job.output,
        settings.tokenizer,
        reading,
        existing_files=[Path(path) for path in job.files.get("existing", ())],
        progress=lambda done: job.progress.update(done, 0, "documents"),
    )


def train_directory(
    paths: Sequence[str],
    output: Path,
    config: Tokenizer,
    reading: Reading,
    *,
    existing_files: Sequence[Path] = (),
    progress: Callable[[int], None] = lambda done: None,
    setting: str = SETTING,
) -> Figures:
    """Train on the files and write the tokenizer under `output`, or copy `config.existing` (its `existing_files`, if known).

    An existing one needs no files, which only measure it. Returns the figures of the manifest. Raises DataError where too
    many rows are bad (`setting` is named), and UsageError where an existing tokenizer cannot be used.
    """
    tally = Tally()
    reading = records.with_heldout_share(reading, paths, records.document_parser(reading.text_field))
    most = min(MEASURED_BYTES, MEASURED_BYTES_OF_ALL // max(1, len(paths)))
    measured = {path: Reservoir(most, MEASURED_DOCUMENTS, config.seed) for path in paths}
    documents = _documents(paths, reading, tally, measured, MAX_READ_DOCUMENTS if config.existing else None)
    training = (record.text for heldout, record in records.split(documents, float(reading.heldout_fraction))
                if not heldout and isinstance(record, records.TextDocument))  # fmt: skip
    counted = _counted(training, progress)
    if config.existing:
        for _ in counted:
            pass
    else:
        chosen = sample(counted, config)
    if paths:
        tally.check(setting, reading.rejected_fraction, records.document_fields(reading.text_field))
    figures: dict[str, Any] = {}
    if config.existing:
        existing.install(existing_files or existing.tokenizer_files(config.existing), output, config.template)
    else:
        if not chosen.texts:
            raise DataError(f"{setting}: all {tally.kept} documents went to the held-out part; bring more documents")
        tokenizers.save(tokenizers.train(chosen.texts, config.vocab_size, config.template), output, config.template)
        figures = {"documents": len(chosen.texts), "documents_seen": chosen.documents_seen, "bytes": chosen.bytes}
    encoder = Encoder(output)
    for path in paths:
        if not measured[path].documents_seen:  # "head" had enough before
            for _ in _documents([path], reading, Tally(), measured, MAX_READ_DOCUMENTS):
                pass
    texts = {path: reservoir.sample().texts for path, reservoir in measured.items()}
    whole = tokenizers.measure(encoder, list(itertools.chain.from_iterable(texts.values())))
    if whole["changed_texts"] and not config.existing:
        raise DataError(f"the tokenizer does not reproduce {whole['changed_texts']} of {whole['documents']} texts")
    return {
        "vocab_size": len(encoder),
        "encoder": encoder.kind,
        **figures,
        **{name: whole[name] for name in ("bytes_per_token", "unk_rate", "changed_texts") if paths},
        "files": [{"name": locations.name(path), **tokenizers.measure(encoder, texts[path])} for path in paths],
        "rows": tally.to_json(),
    }


def _documents(
    paths: Sequence[str], reading: Reading, tally: Tally, measured: dict[str, Reservoir], limit: int | None
) -> Iterator[records.Record]:
    """The documents of all files, at most `limit` of each; a sample of each file stays in `measured`."""
    parse = records.document_parser(reading.text_field)
    for path in paths:
        for record in itertools.islice(
            records.read([path], parse, tally, reading.max_line_bytes, reading.text_field), limit
        ):
            if isinstance(record, records.TextDocument):
                measured[path].add(record.text)
            yield record


def _counted(texts: Iterator[str], progress: Callable[[int], None]) -> Iterator[str]:
    for number, text in enumerate(texts, start=1):
        progress(number)
        yield text
