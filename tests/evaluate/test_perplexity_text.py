"""Text tasks: every byte counts once whatever the tokenizer, and special tokens are text."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.evaluated_models import Uniform, quiet, subject_of
from support.tiny_data import documents
from support.tiny_trainers import score_of, tiny_model

from ttrain.config.evaluate import TextTask
from ttrain.data.encoder import Encoder
from ttrain.evaluate import baselines, perplexity
from ttrain.evaluate.items import Items, SuiteFiles
from ttrain.evaluate.task_result import LN2, TaskResult

TEXTS = documents(12, seed=5)
ROWS = [{"text": text, "source": f"s{number % 3}"} for number, text in enumerate(TEXTS)]


def read(tmp_path: Path, rows: list[Any], **settings: Any) -> Items[str]:
    (tmp_path / "file.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = TextTask(**{"file": "file.jsonl", "row_length": 32, "stride": 16, **settings})
    return perplexity.read("prose", spec, SuiteFiles(tmp_path, {"documents": rows}))


def evaluated(tmp_path: Path, rows: list[Any], subject: Any, **settings: Any) -> TaskResult:
    return perplexity.run(read(tmp_path, rows, **settings), subject, quiet)


def test_metrics_of_all_texts_and_groups(tmp_path: Path, encoder: Encoder) -> None:
    model = tiny_model(vocab=len(encoder), init_std=0.3)
    subject = subject_of(model, encoder)
    result = evaluated(tmp_path, ROWS, subject, by=("source", "lang"))
    sequences = [
        ([encoder.bos_id, *ids], [False] + [True] * len(ids)) for ids in encoder.encode(TEXTS)
    ]
    nats, tokens = score_of(model, sequences, 32, 16)
    text = "".join(TEXTS).encode()
    bits = nats / LN2 / len(text)
    expected = [bits, nats / tokens, math.exp(nats / tokens)]
    metrics = {metric.name: metric.value for metric in result.figures if not metric.group}
    assert list(metrics) == ["bits_per_byte", "loss", "perplexity"]
    assert [*metrics.values()] == pytest.approx(expected, rel=1e-6)
    assert not any(metric.higher_is_better for metric in result.figures)
    assert result.baselines == baselines.bits_per_byte(text)
    groups = {f"source=s{n}": tuple(range(n, 12, 3)) for n in range(3)}
    assert result.items.groups == groups
    for numbers in groups.values():
        separate = evaluated(tmp_path, [ROWS[number] for number in numbers], subject).primary
        assert result.primary.restricted(numbers).value == pytest.approx(separate.value, rel=1e-6)


def test_every_token_of_a_text_counts(tmp_path: Path, encoder: Encoder) -> None:
    special = f"{encoder.tokens['bos_token']} is no start, {encoder.tokens['eos_token']} no end"
    texts = ["T", "Two lines\nof text.", "x" * 300, special]
    subject = subject_of(Uniform(len(encoder)), encoder)
    result = evaluated(tmp_path, [{"text": text} for text in texts], subject)
    ids = encoder.encode(texts)
    assert not set(ids[-1]) & encoder.special_ids()
    counts = [len(text_ids) for text_ids in ids]
    assert result.primary.sums == pytest.approx([n * math.log(len(encoder)) for n in counts])
    assert result.primary.sizes == (1, 18, 300, len(special))
    assert [row["tokens"] for row in result.rows] == counts
    assert not any(row["lossy"] for row in result.rows)


def test_a_limit_draws_by_the_seed_and_max_bytes_takes_the_beginning(tmp_path: Path) -> None:
    drawn = read(tmp_path, ROWS, limit=4).items
    assert len(drawn) == 4
    assert drawn == read(tmp_path, ROWS, limit=4).items != tuple(TEXTS[:4])
    size = sum(len(text.encode()) for text in TEXTS[:3])
    for most, count in ((size, 3), (size - 1, 2), (1, 1)):
        assert read(tmp_path, ROWS, max_bytes=most).items == tuple(TEXTS[:count])


# Bits by the definition, counted byte by byte: each length of context falls back on the one that is
# shorter by a byte.
ABRACADABRA = b"abracadabra abracadabra"
HIGH_BYTES = bytes([0, 255, 254] * 3)


@pytest.mark.parametrize(
    ("data", "order", "bits"),
    [
        (b"", 3, 0.0),
        (b"a", 3, 8.0),
        (ABRACADABRA, 0, 100.69614171694842),
        (ABRACADABRA, 1, 82.58042983332157),
        (ABRACADABRA, 3, 75.15172952778714),
        (HIGH_BYTES, 3, 30.042571650207282),
    ],
)
def test_baselines_follow_their_definition(data: bytes, order: int, bits: float) -> None:
    assert baselines.adaptive_bits(data, order).sum() == pytest.approx(bits, rel=1e-12)
