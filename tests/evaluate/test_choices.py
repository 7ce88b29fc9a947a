"""Multiple choice and last words: shared rows score as separate rows do, bad rows never count."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import quiet, subject_of
from support.shard_sets import write_lines
from support.tiny_data import LINES
from support.tiny_trainers import tiny_model

from ttrain.config.evaluate import ChoicesTask, LastWordTask
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError
from ttrain.evaluate import choices
from ttrain.evaluate.items import BadRow, SuiteFiles
from ttrain.evaluate.log_likelihood import encode_pairs, fit, log_likelihoods
from ttrain.inference.loading import LoadedModel

BAD: dict[str, dict[str, Any]] = {  # by the reason for which they are left out
    "question is empty": {"question": " \n"},
    "choices is not a list of strings": {"choices": "yes"},
    "choices are not two or more different texts": {"choices": ["yes", "yes "]},
    "no answer": {"answer": None},
    "answer is no choice": {"answer": True},
    "answer is the letter of one choice and the text of another": {
        "choices": ["B", "A"],
        "answer": "A",
    },
}
PASSAGE = "A list is a sequence of items; a tuple is one that cannot change. " * 2
QUESTIONS = (f"{PASSAGE}What is a list?", f"{PASSAGE}What is a tuple? ")
CONTEXTS = ("", "Return the number", *QUESTIONS, PASSAGE, "a")
TEXTS = [
    (context, f" {line[:length]}")
    for context in CONTEXTS
    for length, line in enumerate(LINES[:4], 4)
]


def model_of(encoder: Encoder, **settings: Any) -> Any:
    return tiny_model(vocab=len(encoder), init_std=0.4, tie_embeddings=False, **settings)


@pytest.fixture(scope="module")
def subject(encoder: Encoder) -> LoadedModel:
    return subject_of(model_of(encoder), encoder)


def naive(
    subject: LoadedModel, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    """(nats, whether the continuation is greedy), by the logits of the complete row."""
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = subject.model(input_ids=ids[:, :-1]).logits[0].double()
    log_probabilities = logits.log_softmax(-1)[-len(continuation) :]
    targets = ids[0, -len(continuation) :]
    nats = -float(log_probabilities.gather(1, targets[:, None]).sum())
    return nats, bool((log_probabilities.argmax(-1) == targets).all())


def check(subject: LoadedModel) -> None:
    pairs = encode_pairs(subject, TEXTS)
    nats, greedy = zip(*(naive(subject, *pair) for pair in pairs), strict=True)
    scores = log_likelihoods(subject, TEXTS, quiet)
    assert [score.nats for score in scores] == pytest.approx(nats, abs=1e-4)
    assert [score.greedy for score in scores] == list(greedy)
    assert [score.tokens for score in scores] == [len(continuation) for _, continuation in pairs]


WINDOW = {"kind": "mistral", "fields": {"sliding_window": 8}}


@pytest.mark.parametrize("options", [{}, {"kind": "moyun"}, WINDOW, {"kind": "bloom"}], ids=str)
def test_shared_contexts_score_as_rows(encoder: Encoder, options: dict[str, Any]) -> None:
    check(subject_of(model_of(encoder, **options), encoder))


@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_a_score_does_not_depend_on_its_batch(encoder: Encoder, batch_tokens: int) -> None:
    check(subject_of(model_of(encoder), encoder, batch_tokens=batch_tokens))


def test_tokens_at_the_border_are_those_of_the_complete_text(subject: LoadedModel) -> None:
    encoder = subject.encoder
    begin = tuple(subject.begin_ids)
    ((context, continuation),) = encode_pairs(subject, [("Return the ", "number")])
    assert context == (*begin, *encoder.encode(["Return the"])[0])
    assert (*context, *continuation) == (*begin, *encoder.encode(["Return the number"])[0])
    t, h, th = map(tuple, encoder.encode(["t", "h", "th"]))
    assert len(th) == 1, "the continuation melts into its context"
    assert encode_pairs(subject, [("t", "h")]) == [((*begin, *t), h)]
    with pytest.raises(DataError, match="continuation ''"):
        log_likelihoods(subject, [("a", "")], quiet)


def test_a_text_without_a_context_stands_after_an_id_that_the_model_has(encoder: Encoder) -> None:
    # A tokenizer without bos gets one from ttrain, for which the model has no row.
    model = model_of(encoder)
    eos, bos = encoder.eos_id, encoder.bos_id
    for begin_ids, beginning in (((), eos), ((bos,), bos), ((len(encoder),), eos)):
        assert subject_of(model, encoder, begin_ids=begin_ids).beginning() == (beginning,)
    subject = subject_of(model, encoder, begin_ids=())
    assert encode_pairs(subject, [("", "number")]) == [
        ((eos,), tuple(encoder.encode(["number"])[0]))
    ]


def test_a_row_that_is_too_long_loses_its_context_first_and_then_its_end() -> None:
    before = tuple(range(10))
    after = tuple(range(100, 106))
    assert fit(before, after, None) == fit(before, after, 15) == (before, after)
    assert fit(before, after, 8) == (before[-3:], after)
    assert fit(before, after, 4) == (before[-1:], after[:4])


def question(number: int, **changes: Any) -> dict[str, Any]:
    row = {"question": f"Question {number}?", "choices": ["yes", "no", f"{number}"]}
    return {**row, "answer": number % 3, **changes}


def quiz(directory: Path, **settings: Any) -> Any:
    return choices.read("quiz", ChoicesTask(file="a.jsonl", **settings), SuiteFiles(directory))


def test_bad_rows_are_named_and_never_count(tmp_path: Path, subject: LoadedModel) -> None:
    bad = [question(0, **changes) for changes in BAD.values()]
    path = tmp_path / "a.jsonl"
    write_lines(path, [question(0), *bad, [1], question(1)])
    items = quiz(tmp_path)
    assert [item.choice.answer for item in items.items] == [0, 1]
    assert [row["reason"] for row in items.left_out] == [*BAD, "not a JSON object but a list"]
    places = [(row["file"], row["line"]) for row in items.left_out]
    assert places == [(str(path), line) for line in range(2, len(BAD) + 3)]
    result = choices.score_choices(items, subject, quiet)
    assert all(len(metric.sizes) == 2 and all(metric.sizes) for metric in result.figures)


def test_an_answer_is_an_integer_a_letter_or_a_text() -> None:
    for answer in (1, 1.0, "no", " no ", "B", "b"):
        assert choices.parse_choice(question(0, answer=answer)).answer == 1
    for wrong in (1.5, 3, -1, "z", float("inf"), float("nan"), [1]):
        with pytest.raises(BadRow):
            choices.parse_choice(question(0, answer=wrong))


def test_metrics_are_those_of_a_naive_loop(tmp_path: Path, subject: LoadedModel) -> None:
    rows = [question(number, source="odd" if number % 2 else "even") for number in range(12)]
    write_lines(tmp_path / "a.jsonl", rows)
    items = quiz(tmp_path, normalise="bytes", by=("source",))
    result = choices.score_choices(items, subject, quiet)
    right, by_byte, losses = [], [], []
    for row in rows:
        texts = [(row["question"], f" {choice}") for choice in row["choices"]]
        scores = [-naive(subject, *pair)[0] for pair in encode_pairs(subject, texts)]
        right.append(float(scores.index(max(scores)) == row["answer"]))
        rates = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        by_byte.append(float(rates.index(max(rates)) == row["answer"]))
        losses.append(-scores[row["answer"]] + math.log(sum(map(math.exp, scores))))
    metrics = {metric.name + metric.suffix: metric.sums for metric in result.figures}
    assert result.primary.name == "accuracy_bytes"
    assert (metrics["accuracy"], metrics["accuracy_bytes"]) == (tuple(right), tuple(by_byte))
    assert metrics["choice_loss"] == pytest.approx(losses, abs=1e-4)
    groups = {"source=even": tuple(range(0, 12, 2)), "source=odd": tuple(range(1, 12, 2))}
    assert result.items.groups == groups
    assert [float(row["right"]) for row in result.rows] == by_byte


def test_no_item_is_its_own_example(tmp_path: Path) -> None:
    rows = [question(number) for number in range(5)]
    write_lines(tmp_path / "a.jsonl", [rows[0], *rows])  # the first one twice
    of_the_first = "Question 1? no\n\nQuestion 2? 2\n\nQuestion 0?"
    twice = "Question 0? yes\n\nQuestion 0? yes\n\nQuestion"
    expected = [of_the_first, of_the_first, *(f"{twice} {number}?" for number in range(1, 5))]
    assert [item.context for item in quiz(tmp_path, shots=2).items] == expected


def test_examples_of_another_file_and_its_bad_rows(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [question(0), question(1)])
    write_lines(tmp_path / "b.jsonl", [question(1, answer=None), question(0), question(7)])
    settings = {"shots_file": "b.jsonl", "template": "Q: {question}\nA:", "shots_separator": "\n"}
    items = quiz(tmp_path, shots=1, **settings)
    assert [item.context for item in items.items] == [
        "Q: Question 7?\nA: no\nQ: Question 0?\nA:",
        "Q: Question 0?\nA: yes\nQ: Question 1?\nA:",
    ]
    assert items.reasons == {"as an example: no answer": 1}
    with pytest.raises(DataError, match=r"tasks.quiz.shots"):
        quiz(tmp_path, shots=2, **settings)


def test_last_words(tmp_path: Path, subject: LoadedModel) -> None:
    contexts = [line.rsplit(" ", 1)[0] for line in LINES[:3]]
    prompts = [[*subject.begin_ids, *ids] for ids in subject.encoder.encode(contexts)]
    logits = [subject.model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in prompts]
    words = [subject.encoder.decode([int(row.argmax())]) for row in logits]
    pairs = [*zip(contexts, words, strict=True), (contexts[0], "fox"), ("", "fox"), ("a", 5)]
    write_lines(tmp_path / "a.jsonl", [{"context": text, "target": word} for text, word in pairs])
    items = choices.read("words", LastWordTask(file="a.jsonl"), SuiteFiles(tmp_path))
    assert items.reasons == {"context is empty": 1, "target is not a string": 1}
    result = choices.score_passages(items, subject, quiet)
    encoded = encode_pairs(subject, choices.choice_texts(items.items))
    nats, greedy = zip(*(naive(subject, *pair) for pair in encoded), strict=True)
    assert result.primary.sums == tuple(map(float, greedy))
    assert result.figures[1].value == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-4)
