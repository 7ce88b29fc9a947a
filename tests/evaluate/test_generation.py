"""Answers in a model's own words: which number they give, what ends them, and that no batch changes them."""

import json
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support.evaluated_models import quiet, subject_of
from support.tiny_trainers import tiny_model

from ttrain.config.evaluate import GenerationTask
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.evaluate import generation
from ttrain.evaluate.generation import answer_in
from ttrain.evaluate.items import SuiteFiles
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference.loading import LoadedModel, with_encoder

RESULTS: dict[str, str | None] = {
    "He has 5 - 2 = 3 left.\n#### 3": "3",
    "#### 1,234.50 dollars, 7 in all": "2469/2",
    "#### none, so 8": "8",
    "first #### 1 then #### 2": "2",
    "12 apples and 5 pears": "5",
    "-3": "-3",
    "5-3": "3",
    "x = -3.": "-3",
    "$-5": "-5",
    "-$5": "-5",
    "−7 °C": "-7",
    "$1,000": "1000",
    "1,23": "23",
    "2,000,000.00": "2000000",
    "10.": "10",
    ".5": "1/2",
    "50%": "50",
    "3/4": "3/4",
    "-½": "-1/2",
    "3/0": "0",
    "１，２３４．５": "2469/2",
    "答案是12，一般": "12",
    "no number": None,
    "": None,
    "####": None,
}


@pytest.fixture(scope="module")
def subject(encoder: Encoder) -> LoadedModel:
    return subject_of(tiny_model(vocab=len(encoder), init_std=0.4, tie_embeddings=False), encoder)


def asked(tmp_path: Path, rows: Sequence[Any], subject: LoadedModel, **settings: Any) -> TaskResult:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = GenerationTask(file="a.jsonl", **{"new_tokens": 20, **settings})
    return generation.run(generation.read("sums", spec, SuiteFiles(tmp_path)), subject, quiet)


def saying(subject: LoadedModel, *texts: str) -> LoadedModel:
    """Answers the prompts, from the longest to the shortest, with these texts."""

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        encoded = subject.encoder.encode(texts[: len(prompts)])
        return [(ids[:count], len(ids) <= count) for ids in encoded]

    return subject_of(subject.model, subject.encoder, said=generate, max_length=None)


def watching(
    subject: LoadedModel, answer: list[int], **changes: Any
) -> tuple[LoadedModel, list[list[int]]]:
    """(the model, answering each prompt so; the prompts that it gets)."""
    given: list[list[int]] = []

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        given.extend(map(list, prompts))
        assert count == 20
        return [(answer, True)] * len(prompts)

    return subject_of(subject.model, subject.encoder, said=generate, **changes), given


def test_the_result_of_a_text() -> None:
    results = {text: result and Fraction(result) for text, result in RESULTS.items()}
    assert {text: answer_in(text) for text in RESULTS} == results


def test_exact_answers() -> None:
    right = [
        ("Paris", "paris."),
        ("  The   Louvre!\nand more", "the louvre"),
        ("it is\n#### Paris", "Paris"),
        ("\n\nParis\nor Rome", "Paris"),
        ("「北京」。", "北京"),
        ("北京。", "北京"),
        ("ＡＢ", "ab"),
        ("one\ntwo", "one\ntwo"),
        ("〈静夜思〉", "静夜思"),
        ("**-5**.", "-5"),
        ("`C++`", "C++"),
    ]
    wrong = [
        ("Paris or Rome", "Paris"),
        ("", "Paris"),
        ("『北京』市", "北京市"),
        ("one", "one\ntwo"),
    ]
    assert [
        pair for pair in (*right, *wrong) if generation.judge_answer(*pair, "exact")[1]
    ] == right


@pytest.mark.parametrize(
    ("last", "match"), [("one and two\n#### 3", "numeric"), ("3 apples", "exact")]
)
def test_auto_compares_numbers_where_every_right_answer_of_the_file_is_one(
    tmp_path: Path, subject: LoadedModel, last: str, match: str
) -> None:
    rows = [
        {"question": "longest question?", "answer": "#### 1,000"},
        {"question": "question?", "answer": 2},
        {"question": "why?", "answer": "..."},
        {"question": "q?", "answer": last},
    ]
    outcome = asked(tmp_path, rows, saying(subject, "so 1000", "2", "3 apples"))
    assert outcome.primary.name == f"accuracy_{match}"
    assert [row["right"] for row in outcome.rows] == [match == "numeric", True, True]
    assert len(outcome.items.left_out) == 1
    few = GenerationTask(file="a.jsonl", limit=1, seed=3)  # the sample decides nothing
    assert generation.read("sums", few, SuiteFiles(tmp_path)).spec.match == match


def test_a_text_ends_an_answer_and_what_follows_is_not_computed(
    tmp_path: Path, subject: LoadedModel
) -> None:
    rows = [{"question": "first one?", "answer": "1"}, {"question": "another?", "answer": "2"}]
    real = with_encoder("real", subject.model, subject.encoder, subject.begin_ids, can_chat=True)
    free = [row["answer"] for row in asked(tmp_path, rows, real, stop=(), new_tokens=40).rows]
    passes: list[int] = []
    embedding: Any = real.model.get_input_embeddings()
    handle = embedding.register_forward_hook(lambda module, inputs, out: passes.append(1))
    stops = tuple(text[6:9] for text in free)
    outcome = asked(tmp_path, rows, real, stop=("", *stops), new_tokens=40)
    handle.remove()
    ends = [min(text.find(stop) for stop in stops if stop in text) for text in free]
    assert [row["answer"] for row in outcome.rows] == [
        text[:end] for text, end in zip(free, ends, strict=True)
    ]
    assert all(row["ended"] for row in outcome.rows) and len(passes) < 20


def test_prompts_that_are_too_long_lose_their_oldest_examples_first(
    tmp_path: Path, subject: LoadedModel
) -> None:
    rows = [{"question": f"{number} {'word ' * 5}?", "answer": str(number)} for number in range(6)]
    watched, given = watching(subject, [])
    outcome = asked(tmp_path, rows, watched, shots=5)
    assert all(len(ids) <= 128 - 20 and ids[0] == subject.begin_ids[0] for ids in given)
    assert all(subject.encoder.decode(ids).startswith("Question: ") for ids in given), (
        "no example is cut in two"
    )
    assert outcome.figures[-1].name == "cut"
    assert asked(tmp_path, rows, watched).figures[-1].name == "ended", "no prompt is cut"
    assert all(subject.encoder.decode(ids).endswith("?\nAnswer:") for ids in given)


def test_a_chat_is_asked_through_the_template(tmp_path: Path, subject: LoadedModel) -> None:
    rows = [{"question": "first?", "answer": "1"}, {"question": "second?", "answer": "2"}]
    watched, given = watching(subject, subject.encoder.encode(["2"])[0])
    outcome = asked(tmp_path, rows, watched, shots=1, chat=True)
    turns = (Message("user", "second?"), Message("assistant", "2"), Message("user", "first?"))
    assert prompt_ids(subject.encoder, turns) in given
    assert [row["right"] for row in outcome.rows] == [False, True]
    with pytest.raises(
        UsageError,
        match=r"tasks.sums.chat is true, but the tokenizer of 'tiny' has no chat template",
    ):
        asked(tmp_path, rows, subject_of(subject.model, subject.encoder, can_chat=False), chat=True)
