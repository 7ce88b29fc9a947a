"""Held-out pairs: the chosen answer is preferred if its whole log-probability is higher, as the model itself gives it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.doubles import CPU, make_tokenizer, tiny_model

from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import Preference
from ttrain.evaluate import perplexity
from ttrain.evaluate.perplexity import Score

QUESTION = Message("user", "How many?")


def pair(chosen: str, rejected: str) -> Preference:
    return Preference((QUESTION,), (Message("assistant", chosen),), (Message("assistant", rejected),))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_the_margin_is_that_of_the_log_probabilities_of_both_answers(encoder: Encoder) -> None:
    """By hand: the logits of each conversation, summed over the answer's tokens and its end, not divided by them."""
    pairs = [pair("one", "two or three of them"), pair("你好，世界", "x")]
    model = tiny_model(vocab=len(encoder), init_std=0.5).eval()
    sequences = perplexity.pair_sequences(encoder, pairs)
    scores = perplexity.score_each(model, sequences, length=64, stride=32, device=CPU, progress=lambda done, total: None)
    for compared, expected in zip(perplexity.compare_pairs(scores), pairs, strict=True):
        log_probabilities = []
        for answer in (expected.chosen, expected.rejected):
            ids, live = encode_chat(encoder, (QUESTION, *answer))
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
            log_probabilities.append(sum(float(logits[n - 1, ids[n]]) for n in range(1, len(ids)) if live[n]))
        margin = log_probabilities[0] - log_probabilities[1]
        assert compared.margin == pytest.approx(margin, abs=1e-3)
        assert compared.preferred == (margin > 0)


@pytest.mark.parametrize(("chosen", "rejected", "preferred"), [(1.0, 2.0, 1.0), (2.0, 1.0, 0.0), (1.0, 1.0, 0.5)])
def test_the_likelier_answer_is_preferred_and_equal_ones_count_half(
    chosen: float, rejected: float, preferred: float
) -> None:
    assert perplexity.compare_pairs([Score(chosen, 3), Score(rejected, 1)]) == [(preferred, rejected - chosen)]


def test_swapped_pairs_mirror(encoder: Encoder) -> None:
    model = tiny_model(vocab=len(encoder), init_std=0.5).eval()
    margins = []
    for pairs in ([pair("a b", "c")], [pair("c", "a b")]):
        sequences = perplexity.pair_sequences(encoder, pairs)
        scores = perplexity.score_each(model, sequences, length=64, stride=32, device=CPU, progress=lambda done, total: None)
        margins.append(perplexity.compare_pairs(scores)[0])
    assert margins[0].margin == -margins[1].margin
    assert margins[0].preferred == 1 - margins[1].preferred


def test_rated_answers_are_no_pairs_and_the_limit_counts_pairs(tmp_path: Path) -> None:
    rated = Preference((QUESTION,), (Message("assistant", "good"),), ())
    records = [rated.to_json(), *(pair(f"answer {n}", "other").to_json() for n in range(5))]
    assert perplexity.read_pairs(records, 3) == [pair(f"answer {n}", "other") for n in range(3)]
    assert perplexity.pair_sequences(Encoder.__new__(Encoder), []) == []
