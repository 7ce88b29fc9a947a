"""Held-out pairs: the chosen answer is preferred if its whole log-probability is higher, as the model itself gives it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import subject_of
from support.tiny_trainers import tiny_model

from ttrain.config.evaluate import PairsTask
from ttrain.data.chat import encode_chat
from ttrain.data.encoder import Encoder
from ttrain.evaluate import chats
from ttrain.evaluate.items import SuiteFiles


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Any:
    return tiny_model(vocab=len(encoder), init_std=0.5).eval()


ROWS: list[dict[str, Any]] = [
    {"prompt": "How many?", "chosen": "one", "rejected": "two or three", "lang": "en"},
    {
        "prompt": [{"role": "user", "content": "你好"}],
        "chosen": "你好！",
        "rejected": "走开",
        "lang": "zh",
    },
    {"prompt": "Equal?", "chosen": "yes", "rejected": "yes"},
    {"prompt": "Rated?", "completion": "yes", "label": True},
]


def asked(directory: Path, **settings: Any) -> tuple[PairsTask, SuiteFiles]:
    (directory / "pairs.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8"
    )
    return PairsTask(file="pairs.jsonl", **settings), SuiteFiles(directory)


def test_the_margin_is_that_of_the_log_probabilities_of_both_answers(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    """By hand: the logits of each conversation, summed over the answer's tokens and its end, not divided by them."""
    items = chats.read_pairs("mine", *asked(tmp_path, by="lang"))
    result = chats.run_pairs(items, subject_of(model, encoder), lambda done, total: None)
    accuracy, *_, margin = result.figures
    for number, pair in enumerate(items.items):
        log_probabilities = []
        for answer in (pair.chosen, pair.rejected):
            ids, live = encode_chat(encoder, (*pair.prompt, *answer))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            log_probabilities.append(
                sum(float(logits[n - 1, ids[n]]) for n in range(1, len(ids)) if live[n])
            )
        by_hand = log_probabilities[0] - log_probabilities[1]
        assert (
            margin.sums[number] == result.rows[number]["margin"] == pytest.approx(by_hand, abs=1e-3)
        )
        assert accuracy.sums[number] == result.rows[number]["preferred"] == (by_hand > 0)
    assert (accuracy.name, margin.name) == ("accuracy", "margin") and accuracy.higher_is_better
    assert result.items.groups == {"lang=en": (0,), "lang=zh": (1,)}
    places = {f"{Path(row['file']).name}:{row['line']}": row["reason"] for row in items.left_out}
    assert set(places) == {"pairs.jsonl:3", "pairs.jsonl:4"}
    assert "equal" in places["pairs.jsonl:3"] and places["pairs.jsonl:4"] == chats.RATED
