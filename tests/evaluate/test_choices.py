"""Multiple choice and last words: shared rows score as rows apart do, bad rows never count, no item is its own example."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import quiet, subject_of
from support.tiny_data import LINES
from support.tiny_trainers import tiny_model
from torch import Tensor, nn

from ttrain.config.evaluate import ChoicesTask, LastWordTask
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError
from ttrain.evaluate import choices
from ttrain.evaluate.items import BadRow, SuiteFiles
from ttrain.evaluate.log_likelihood import encode_pairs, fit, log_likelihoods
from ttrain.inference.loading import LoadedModel

PASSAGE = "A list is a sequence of items; a tuple is one that cannot change. " * 2
TEXTS = [
    (context, f" {line[:length]}")
    for context in (
        "",
        "Return the number",
        f"{PASSAGE}What is a list?",
        f"{PASSAGE}What is a tuple? ",
        PASSAGE,
        "a",
    )
    for length, line in enumerate(LINES[:4], 4)
]


def model_of(encoder: Encoder, **more: Any) -> Any:
    return tiny_model(vocab=len(encoder), init_std=0.4, tie_embeddings=False, **more)


@pytest.fixture(scope="module")
def subject(encoder: Encoder) -> LoadedModel:
    return subject_of(model_of(encoder), encoder)


def naive(
    subject: LoadedModel, context: Sequence[int], continuation: Sequence[int]
) -> tuple[float, bool]:
    ids = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        logits = (
            subject.model(input_ids=ids[:, :-1])
            .logits[0]
            .double()
            .log_softmax(-1)[-len(continuation) :]
        )
    targets = ids[0, -len(continuation) :]
    return -float(logits.gather(1, targets[:, None]).sum()), bool(
        (logits.argmax(-1) == targets).all()
    )


class Watched(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.shapes: list[tuple[int, int]] = []
        model.get_decoder().register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, given: Any, named: dict[str, Tensor]) -> None:
        rows, width = named["input_ids"].shape
        self.shapes.append((rows, width))


def check(subject: LoadedModel) -> None:
    pairs = encode_pairs(subject, TEXTS)
    wanted = [naive(subject, *pair) for pair in pairs]
    found = log_likelihoods(subject, TEXTS, quiet)
    assert [one.nats for one in found] == pytest.approx([nats for nats, _ in wanted], abs=1e-4)
    assert [one.greedy for one in found] == [greedy for _, greedy in wanted]
    assert [one.tokens for one in found] == [len(continuation) for _, continuation in pairs]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kind": "moyun"},
        {"kind": "mistral", "fields": {"sliding_window": 8}},
        {"kind": "bloom"},
    ],
    ids=str,
)
def test_what_is_shared_scores_as_rows_of_their_own(
    encoder: Encoder, options: dict[str, Any]
) -> None:
    check(subject_of(model_of(encoder, **options), encoder, max_length=128))


def test_contexts_and_what_they_begin_with_are_computed_once(encoder: Encoder) -> None:
    texts = [
        (f"{PASSAGE}What is {number}?", choice)
        for number in range(30)
        for choice in (" a", " list", " or", " items")
    ]
    model = model_of(encoder)
    watched, subject = Watched(model), subject_of(model, encoder)
    log_likelihoods(subject, texts, quiet)
    alone = sum(
        len(context) + len(continuation) - 1
        for context, continuation in encode_pairs(subject, texts)
    )
    computed = sum(rows * width for rows, width in watched.shapes)
    assert computed < 0.2 * alone  # 0.3 where questions are computed once, but not their passage


@pytest.mark.parametrize("batch_tokens", [1, 100])
def test_a_score_does_not_depend_on_its_batch_which_has_a_limit(
    encoder: Encoder, batch_tokens: int
) -> None:
    model = model_of(encoder)
    watched, subject = Watched(model), subject_of(model, encoder, batch_tokens=batch_tokens)
    check(subject)
    log_likelihoods(subject, [(f"{number} items", " a") for number in range(30)], quiet)
    assert all(rows == 1 or rows * width <= batch_tokens for rows, width in watched.shapes)
    assert (
        max(rows * width for rows, width in watched.shapes if rows > 1 or batch_tokens == 1)
        > 0.7 * batch_tokens
    )


def test_tokens_at_the_border_are_those_of_the_whole_text(subject: LoadedModel) -> None:
    encoder, begin = subject.encoder, subject.begin_ids
    ((context, continuation),) = encode_pairs(subject, [("Return the ", "number")])
    assert context == (*begin, *encoder.encode(["Return the"])[0])
    assert (*context, *continuation) == (*begin, *encoder.encode(["Return the number"])[0])
    (whole,), (one, other) = (
        encoder.encode(["th"]),
        encoder.encode(["t", "h"]),
    )  # a continuation melts into its context
    assert len(whole) == 1 and encode_pairs(subject, [("t", "h")]) == [
        ((*begin, *one), tuple(other))
    ]
    with pytest.raises(
        DataError, match="the continuation '' has no token in the tokenizer of tiny"
    ):
        log_likelihoods(subject, [("a", "")], quiet)


def test_a_text_without_a_context_stands_after_what_the_model_knows(encoder: Encoder) -> None:
    # A tokenizer without bos gets one from ttrain, for which the model has no row.
    model = model_of(encoder)
    begins = {
        (): (encoder.eos_id,),
        (encoder.bos_id,): (encoder.bos_id,),
        (len(encoder),): (encoder.eos_id,),
    }
    for given_ids, expected in begins.items():
        subject = subject_of(model, encoder, begin_ids=given_ids)
        assert subject.beginning() == expected
    for empty in ("", "  "):
        ((context, continuation),) = encode_pairs(
            subject_of(model, encoder, begin_ids=()), [(empty, "number")]
        )
        assert context == (encoder.eos_id,)
        assert continuation == tuple(encoder.encode([empty + "number"])[0])


def test_what_is_too_long_loses_its_context_first_and_then_its_end() -> None:
    before, after = tuple(range(10)), tuple(range(100, 106))
    assert fit(before, after, None) == fit(before, after, 15) == (before, after)
    assert fit(before, after, 8) == (before[-3:], after)
    assert fit(before, after, 4) == (before[-1:], after[:4])


def write(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )
    return path


def question(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "question": f"Question {number}?",
        "choices": ["yes", "no", f"{number}"],
        "answer": number % 3,
        **changes,
    }


def quiz(directory: Path, **settings: Any) -> Any:
    return choices.read("quiz", ChoicesTask(file="a.jsonl", **settings), SuiteFiles(directory))


BAD = {
    "question is empty": question(0, question=" \n"),
    "choices is not a list of strings": question(0, choices="yes"),
    "choices are not two or more different texts": question(0, choices=["yes", "yes "]),
    "no answer": question(0, answer=None),
    "answer is no choice": question(0, answer=True),
    "answer is the letter of one choice and the text of another": question(
        0, choices=["B", "A"], answer="A"
    ),
    "not a JSON object but a list": [1],
}


def test_bad_rows_are_told_with_their_place_and_never_count(
    tmp_path: Path, subject: LoadedModel
) -> None:
    path = write(tmp_path / "a.jsonl", [question(0), *BAD.values(), "{broken\n", question(1)])
    items = quiz(tmp_path)
    assert [one.choice.answer for one in items.items] == [0, 1]
    assert [row["reason"] for row in items.left_out[: len(BAD)]] == list(BAD)
    assert [(row["file"], row["line"]) for row in items.left_out] == [
        (str(path), line) for line in range(2, len(BAD) + 3)
    ]
    outcome = choices.score_choices(items, subject, quiet)
    assert all(len(figure.sizes) == 2 and all(figure.sizes) for figure in outcome.figures)


def test_an_answer_is_a_whole_number_a_letter_or_a_text() -> None:
    for answer in (1, 1.0, "no", " no ", "B", "b"):
        assert choices.parse_choice(question(0, answer=answer)).answer == 1
    for wrong in (1.5, 3, -1, "z", float("inf"), float("nan"), [1]):
        with pytest.raises(BadRow, match="answer is no choice"):
            choices.parse_choice(question(0, answer=wrong))


def test_figures_are_those_of_a_naive_loop(tmp_path: Path, subject: LoadedModel) -> None:
    rows = [question(number, source="odd" if number % 2 else "even") for number in range(12)]
    write(tmp_path / "a.jsonl", rows)
    items = quiz(tmp_path, normalise="bytes", by=("source",))
    outcome = choices.score_choices(items, subject, quiet)
    right, by_byte, losses = [], [], []
    for row in rows:
        texts = [(row["question"], f" {choice}") for choice in row["choices"]]
        scores = [-naive(subject, *pair)[0] for pair in encode_pairs(subject, texts)]
        right.append(float(scores.index(max(scores)) == row["answer"]))
        shares = [score / len(choice) for score, choice in zip(scores, row["choices"], strict=True)]
        by_byte.append(float(shares.index(max(shares)) == row["answer"]))
        losses.append(-scores[row["answer"]] + math.log(sum(map(math.exp, scores))))
    found = {figure.name + figure.suffix: figure for figure in outcome.figures}
    assert outcome.primary.name == "accuracy_bytes"
    assert found["accuracy"].sums == tuple(right)
    assert found["accuracy_bytes"].sums == tuple(by_byte)
    assert found["choice_loss"].sums == pytest.approx(losses, abs=1e-4)
    assert outcome.items.groups == {
        "source=even": (0, 2, 4, 6, 8, 10),
        "source=odd": (1, 3, 5, 7, 9, 11),
    }
    assert [row["right"] for row in outcome.rows] == [bool(one) for one in by_byte]


def test_no_item_is_its_own_example(tmp_path: Path) -> None:
    rows = [question(number) for number in range(5)]
    write(tmp_path / "a.jsonl", [rows[0], *rows])  # the first one twice
    items = quiz(tmp_path, shots=2)
    for one in items.items:
        *examples, asked = one.context.split("\n\n")
        assert asked == one.choice.question
        assert len(examples) == 2
        assert not any(example.startswith(one.choice.question) for example in examples)
    assert items.items[0].context == "Question 1? no\n\nQuestion 2? 2\n\nQuestion 0?"
    assert items.items[5].context == "Question 0? yes\n\nQuestion 0? yes\n\nQuestion 4?"


def test_examples_of_another_file_and_its_bad_rows(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [question(number) for number in range(3)])
    write(tmp_path / "b.jsonl", [BAD["no answer"], question(0), question(7)])
    spec = ChoicesTask(
        file="a.jsonl",
        shots=1,
        shots_file="b.jsonl",
        template="Q: {question}\nA:",
        shots_separator="\n",
    )
    items = choices.read("quiz", spec, SuiteFiles(tmp_path))
    assert [one.context for one in items.items] == [
        "Q: Question 7?\nA: no\nQ: Question 0?\nA:",
        "Q: Question 0?\nA: yes\nQ: Question 1?\nA:",
        "Q: Question 0?\nA: yes\nQ: Question 2?\nA:",
    ]
    assert items.reasons == {"as an example: no answer": 1}
    with pytest.raises(
        DataError, match=r"tasks.quiz.shots is 2, but b.jsonl has 1 row besides the item itself"
    ):
        choices.read("quiz", spec.model_copy(update={"shots": 2}), SuiteFiles(tmp_path))


def test_last_words_are_those_that_the_model_would_say(
    tmp_path: Path, subject: LoadedModel
) -> None:
    contexts = [line.rsplit(" ", 1)[0] for line in LINES[:3]]
    said = [
        subject.generate([[*subject.begin_ids, *subject.encoder.encode([text])[0]]], 1)[0].ids
        for text in contexts
    ]
    rows = [
        {"context": text, "target": subject.encoder.decode(ids)}
        for text, ids in zip(contexts, said, strict=True)
    ]
    rows += [
        {"context": contexts[0], "target": "fox"},
        {"context": "", "target": "fox"},
        {"context": "a", "target": 5},
    ]
    write(tmp_path / "a.jsonl", rows)
    items = choices.read("words", LastWordTask(file="a.jsonl"), SuiteFiles(tmp_path))
    assert items.reasons == {"context is empty": 1, "target is not a string": 1}
    outcome = choices.score_passages(items, subject, quiet)
    pairs = encode_pairs(subject, choices.choice_texts(items.items))
    wanted = [naive(subject, *pair) for pair in pairs]
    assert outcome.primary.sums == tuple(float(greedy) for _, greedy in wanted)
    perplexity = math.exp(sum(nats for nats, _ in wanted) / len(wanted))
    assert outcome.figures[1].value == pytest.approx(perplexity, rel=1e-4)
