"""Held-out pairs: the chosen answer is preferred if its whole log-probability is higher, as the model itself gives it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import subject_of
from support.tiny_trainers import CPU, tiny_model

from ttrain.config.evaluate import PairsTask
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import Preference
from ttrain.evaluate import chats
from ttrain.evaluate.items import SuiteFiles

QUESTION = Message("user", "How many?")


def pair(chosen: str, rejected: str) -> Preference:
    return Preference((QUESTION,), (Message("assistant", chosen),), (Message("assistant", rejected),))


def scored(model: Any, encoder: Encoder, pairs: Sequence[Preference]) -> list[preferences.Comparison]:
    """The comparisons of these pairs."""
    sequences = [encode_chat(encoder, turns) for turns in preferences.conversations(pairs)]
    scores = perplexity.score_each(model, sequences, length=64, stride=32, device=CPU, progress=lambda done, total: None)
    return preferences.compare(scores)


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Any:
    return tiny_model(vocab=len(encoder), init_std=0.5).eval()


def test_the_margin_is_that_of_the_log_probabilities_of_both_answers(encoder: Encoder, model: Any) -> None:
    """By hand: the logits of each conversation, summed over the answer's tokens and its end, not divided by them."""
    pairs = [pair("one", "two or three of them"), pair("你好，世界", "x")]
    found = scored(model, encoder, pairs)
    for compared, expected in zip(found, pairs, strict=True):
        log_probabilities = []
        for answer in (expected.chosen, expected.rejected):
            ids, live = encode_chat(encoder, (QUESTION, *answer))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            log_probabilities.append(sum(float(logits[n - 1, ids[n]]) for n in range(1, len(ids)) if live[n]))
        margin = log_probabilities[0] - log_probabilities[1]
        assert compared.margin == pytest.approx(margin, abs=1e-3)
        assert compared.preferred == (margin > 0)
    (swapped,) = scored(model, encoder, [pair("two or three of them", "one")])
    assert (swapped.margin, swapped.preferred) == (pytest.approx(-found[0].margin), 1 - found[0].preferred)


ROWS: list[dict[str, Any]] = [
    {"prompt": "How many?", "chosen": "one", "rejected": "two or three", "lang": "en"},
    {"prompt": [{"role": "user", "content": "你好"}], "chosen": "你好！", "rejected": "走开", "lang": "zh"},
    {"prompt": "Equal?", "chosen": "yes", "rejected": "yes"},
    {"prompt": "Rated?", "completion": "yes", "label": True},
]


def asked(directory: Path, **settings: Any) -> tuple[PairsTask, SuiteFiles]:
    (directory / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")
    return PairsTask(file="pairs.jsonl", **settings), SuiteFiles(directory)


def test_pairs_of_a_file_are_scored_one_by_one(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    items = chats.read_pairs("mine", *asked(tmp_path, by="lang"))
    result = chats.run_pairs(items, subject_of(model, encoder), lambda done, total: None)
    expected = scored(model, encoder, items.items)
    accuracy, *_, margin = result.figures
    assert (accuracy.name, margin.name) == ("accuracy", "margin") and accuracy.higher_is_better
    assert accuracy.value == sum(pair.preferred for pair in expected) / 2
    assert margin.sums == pytest.approx([pair.margin for pair in expected], abs=1e-4)
    assert [row["preferred"] for row in result.rows] == [pair.preferred for pair in expected]
    assert result.items.groups == {"lang=en": (0,), "lang=zh": (1,)}
    places = {f"{Path(row['file']).name}:{row['line']}": row["reason"] for row in items.left_out}
    assert set(places) == {"pairs.jsonl:3", "pairs.jsonl:4"}
    assert "equal" in places["pairs.jsonl:3"] and places["pairs.jsonl:4"] == chats.RATED
