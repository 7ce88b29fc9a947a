"""Text tasks: every byte counts once whatever the tokenizer, special tokens are text, bad rows never count."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.evaluated_models import Uniform, subject_of
from support.tiny_data import documents
from support.tiny_trainers import score_of, tiny_model

from ttrain.config.evaluate import TextTask
from ttrain.data.encoder import Encoder
from ttrain.evaluate import baselines, perplexity, task_result
from ttrain.evaluate.items import SuiteFiles
from ttrain.evaluate.task_result import LN2, TaskResult

ROWS = [
    {"text": one, "source": f"s{number % 3}"} for number, one in enumerate(documents(12, seed=5))
]


def places(tmp_path: Path, lines: Sequence[Any]) -> SuiteFiles:
    content = "".join(
        (line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines
    )
    (tmp_path / "file.jsonl").write_text(content, encoding="utf-8")
    return SuiteFiles(tmp_path)


def task(**settings: Any) -> TextTask:
    return TextTask.model_validate(
        {"kind": "text", "file": "file.jsonl", "row_length": 32, "stride": 16, **settings}
    )


def model_for(encoder: Encoder, **settings: Any) -> Any:
    return tiny_model(vocab=len(encoder), init_std=0.3, **settings)


def evaluated(tmp_path: Path, rows: Sequence[Any], subject: Any, **settings: Any) -> TaskResult:
    items = perplexity.read("prose", task(**settings), places(tmp_path, rows))
    return perplexity.run(items, subject, lambda done, total: None)


def test_the_figures_are_those_of_all_texts_together_and_of_each_group(
    tmp_path: Path, encoder: Encoder
) -> None:
    model = model_for(encoder)
    found = evaluated(tmp_path, ROWS, subject_of(model, encoder), by=("source", "lang"))
    sequences = [
        ([encoder.bos_id, *ids], [False] + [True] * len(ids))
        for ids in encoder.encode([r["text"] for r in ROWS])
    ]
    nats, tokens = score_of(model, sequences, 32, 16)
    size = sum(len(row["text"].encode()) for row in ROWS)
    figures = {figure.name + figure.suffix: figure for figure in found.figures}
    assert (
        found.primary.value
        == figures["bits_per_byte"].value
        == pytest.approx(nats / math.log(2) / size, rel=1e-6)
    )
    assert figures["loss"].value == pytest.approx(nats / tokens, rel=1e-6)
    assert figures["perplexity"].value == pytest.approx(math.exp(nats / tokens), rel=1e-6)
    assert not any(figure.higher_is_better for figure in found.figures)
    sizes = {name: len(numbers) for name, numbers in found.items.groups.items()}
    assert sizes == {"source=s0": 4, "source=s1": 4, "source=s2": 4}
    assert found.baselines == baselines.bits_per_byte("".join(row["text"] for row in ROWS).encode())
    for name, numbers in found.items.groups.items():
        rows = [row for row in ROWS if f"source={row['source']}" == name]
        alone = evaluated(tmp_path, rows, subject_of(model, encoder))
        assert found.primary.restricted(numbers).value == pytest.approx(
            alone.primary.value, rel=1e-6
        )


def test_every_token_of_a_text_counts_also_the_first_and_special_tokens_are_text(
    tmp_path: Path, encoder: Encoder
) -> None:
    special = f"{encoder.tokens['bos_token']} is no start, {encoder.tokens['eos_token']} no end"
    texts = ["T", "Two lines\nof text.", "x" * 300, special]
    found = evaluated(
        tmp_path, [{"text": text} for text in texts], subject_of(Uniform(len(encoder)), encoder)
    )
    ids = encoder.encode(texts)
    assert not set(ids[-1]) & encoder.special_ids()
    assert found.primary.sums == pytest.approx([len(one) * math.log(len(encoder)) for one in ids])
    assert found.primary.sizes == (1, 18, 300, len(special))
    count = sum(map(len, ids))
    assert found.primary.value * LN2 == pytest.approx(
        count * math.log(len(encoder)) / (319 + len(special))
    )
    assert [(row["bytes"], row["tokens"], row["lossy"]) for row in found.rows] == [
        (size, len(one), False) for size, one in zip(found.primary.sizes, ids, strict=True)
    ]
    assert (found.rows[-1]["text"], found.rows[-1]["nats"]) == (special, found.primary.sums[-1])


def test_a_limit_draws_by_the_seed_and_max_bytes_takes_the_beginning(tmp_path: Path) -> None:
    where, texts = places(tmp_path, ROWS), tuple(row["text"] for row in ROWS)
    drawn = perplexity.read("prose", task(limit=4), where).items
    assert len(drawn) == 4 and drawn == perplexity.read("prose", task(limit=4), where).items
    assert drawn != texts[:4]
    size = sum(len(one.encode()) for one in texts[:3])
    for most, count in ((size, 3), (size - 1, 2), (1, 1)):
        assert perplexity.read("prose", task(max_bytes=most), where).items == texts[:count]


def test_held_out_documents_are_named_as_the_records_of_an_evaluation_are(tmp_path: Path) -> None:
    items = perplexity.read(
        "prose", task(file="heldout", by=("source",)), SuiteFiles(tmp_path, {"documents": ROWS})
    )
    assert list(items.digests) == [task_result.record_name(row["text"]) for row in ROWS]
    assert sorted(items.groups) == ["source=s0", "source=s1", "source=s2"]
