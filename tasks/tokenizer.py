"""Stage `tokenizer`: train a byte-level BPE on the training documents, or use an existing one."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ttrain.config import Reading, Settings, Tokenizer
from ttrain.data import existing, json_rows, locations, records
from ttrain.data import tokenizer as tokenizers
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError
from ttrain.tasks.common.job import Figures, StageContext

MEASURED_DOCUMENTS = 200  # of each file, to say how well the tokenizer fits it
MEASURED_BYTES = 1_000_000
SETTING = "data.pretrain (or data.tokenizer, where that is set)"


def run(settings: Settings, job: StageContext) -> Figures:
    """Write a Hugging Face tokenizer directory; returns vocabulary size, text read, and bytes per
    token.
    """
    reading = settings.reading
    paths = job.files.get("train")
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
) -> Figures:
    """Train on the files and write under `output`, or copy `config.existing`; returns the metrics.

    The files only measure an existing tokenizer. Raises DataError and UsageError.
    """
    tally = json_rows.Tally()
    figures: dict[str, int] = {}
    if config.existing:
        existing.install(
            existing_files or existing.tokenizer_files(config.existing), output, config.template
        )
    else:
        share = records.with_heldout_share(
            reading, paths, records.document_parser(reading.text_field)
        ).heldout_fraction
        training = (
            record.text
            for heldout, record in records.split(_documents(paths, reading, tally), float(share))
            if not heldout and isinstance(record, records.TextDocument)
        )
        texts, figures = tokenizers.sample(training, config, progress)
        tally.check(SETTING, reading.rejected_fraction, records.document_fields(reading.text_field))
        if not texts:
            raise DataError(
                f"{SETTING}: all {tally.kept} documents went to the held-out part; bring more "
                f"documents"
            )
        tokenizers.save(
            tokenizers.train(texts, config.vocab_size, config.template), output, config.template
        )
    encoder = Encoder(output)
    measured = tally if config.existing else json_rows.Tally()
    files = [
        {
            "name": locations.name(path),
            **tokenizers.measure(encoder, _beginning(_documents([path], reading, measured))),
        }
        for path in paths
    ]
    if config.existing and paths:
        tally.check(SETTING, reading.rejected_fraction, records.document_fields(reading.text_field))
    tokens = max(1, sum(file["tokens"] for file in files))
    changed = sum(file["changed_texts"] for file in files)
    if changed and not config.existing:
        raise DataError(f"the tokenizer does not reproduce {changed} texts")
    fit = {
        "bytes_per_token": sum(file["bytes"] for file in files) / tokens,
        "unk_rate": sum(file["unk_rate"] * file["tokens"] for file in files) / tokens,
        "changed_texts": changed,
    }
    return {
        "vocab_size": len(encoder),
        "encoder": encoder.kind,
        **figures,
        **(fit if paths else {}),
        "files": files,
        "rows": tally.to_json(),
    }


def _documents(
    paths: Sequence[str], reading: Reading, tally: json_rows.Tally
) -> Iterator[records.Record]:
    return records.read(
        paths,
        records.document_parser(reading.text_field),
        tally,
        reading.max_line_bytes,
        reading.text_field,
    )


def _beginning(documents: Iterator[records.Record]) -> list[str]:
    texts: list[str] = []
    for record in itertools.islice(documents, MEASURED_DOCUMENTS):
        if isinstance(record, records.TextDocument) and sum(map(len, texts)) < MEASURED_BYTES:
            texts.append(record.text)
    return texts
