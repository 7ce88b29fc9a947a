"""Held-out pairs: the chosen answer is preferred if its whole log-probability is higher."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import quiet, subject_of
from support.tiny_trainers import tiny_model

from ttrain.config.evaluate import PairsTask
from ttrain.data.chat import encode_chat
from ttrain.data.encoder import Encoder
from ttrain.evaluate import chats
from ttrain.evaluate.items import SuiteFiles

CHINESE = {"prompt": [{"role": "user", "content": "你好"}], "chosen": "你好！", "rejected": "走开"}
ROWS: list[dict[str, Any]] = [
    {"prompt": "How many?", "chosen": "one", "rejected": "two or three", "lang": "en"},
    {**CHINESE, "lang": "zh"},
    {"prompt": "Equal?", "chosen": "yes", "rejected": "yes"},
    {"prompt": "Rated?", "completion": "yes", "label": True},
]


def test_the_margin_is_that_of_the_log_probabilities_of_both_answers(
    encoder: Encoder, tmp_path: Path
) -> None:
    """By hand: the logits of each conversation, summed over the answer's tokens and its end."""
    model = tiny_model(vocab=len(encoder), init_std=0.5).eval()
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    spec = PairsTask(file=path.name, by=("lang",))
    items = chats.read_pairs("mine", spec, SuiteFiles(tmp_path))
    result = chats.run_pairs(items, subject_of(model, encoder), quiet)
    margins = []
    for pair in items.items:
        log_probabilities = []
        for answer in (pair.chosen, pair.rejected):
            ids, live = encode_chat(encoder, (*pair.prompt, *answer))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scored = [n for n in range(1, len(ids)) if live[n]]
            log_probabilities.append(sum(float(logits[n - 1, ids[n]]) for n in scored))
        margins.append(log_probabilities[0] - log_probabilities[1])
    accuracy, *_, margin = result.figures
    assert (accuracy.name, margin.name, accuracy.higher_is_better) == ("accuracy", "margin", True)
    assert margin.sums == pytest.approx(margins, abs=1e-3)
    assert accuracy.sums == tuple(float(value > 0) for value in margins)
    rows = [(row["margin"], row["preferred"]) for row in result.rows]
    assert rows == list(zip(margin.sums, accuracy.sums, strict=True))
    assert result.items.groups == {"lang=en": (0,), "lang=zh": (1,)}
    reasons = {row["line"]: row["reason"] for row in items.left_out}
    assert "equal" in reasons.pop(3)
    assert reasons == {4: chats.RATED}
