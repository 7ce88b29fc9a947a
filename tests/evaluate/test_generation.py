"""Answers in a model's own words: their result, where they end, their prompts; and samples."""

import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from support.evaluated_models import quiet, subject_of
from support.tiny_trainers import tiny_model

from ttrain.config.evaluate import GenerationTask
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.evaluate import generation, samples
from ttrain.evaluate.items import SuiteFiles
from ttrain.evaluate.samples import SamplePrompt
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference.loading import LoadedModel, with_encoder

RESULTS: dict[str, str | None] = {
    "#### 1,234.50 dollars, 7 in all": "2469/2",
    "#### none, so 8, not 9": "8",
    "5-3": "3",
    "x = -3.": "-3",
    "-$5": "-5",
    "−7 °C": "-7",
    "1,23": "23",
    ".5": "1/2",
    "3/4": "3/4",
    "-½": "-1/2",
    "3/0": "0",
    "１，２３４．５": "2469/2",
    "答案是12，一般": "12",
    "####": None,
}
EXACT = [
    ("Paris", "paris."),
    ("\n  The   Louvre!\nand more", "the louvre"),
    ("it is\n#### Paris", "Paris"),
    ("「北京」。", "北京"),
    ("ＡＢ", "ab"),
    ("**-5**.", "-5"),
]
NOT_EXACT = [("Paris or Rome", "Paris"), ("", "Paris"), ("one", "one\ntwo")]
TWO_ROWS = [{"question": "first?", "answer": "1"}, {"question": "second?", "answer": "2"}]


@pytest.fixture(scope="module")
def subject(encoder: Encoder) -> LoadedModel:
    return subject_of(tiny_model(vocab=len(encoder), init_std=0.4, tie_embeddings=False), encoder)


def evaluated(
    tmp_path: Path, rows: Sequence[Any], subject: LoadedModel, **settings: Any
) -> TaskResult:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = GenerationTask(file="a.jsonl", **{"new_tokens": 20, **settings})
    return generation.run(generation.read("sums", spec, SuiteFiles(tmp_path)), subject, quiet)


def answering(
    subject: LoadedModel, *texts: str, **changes: Any
) -> tuple[LoadedModel, list[list[int]]]:
    """(a model with these answers, from the longest prompt on; the prompts that it gets)."""
    prompts: list[list[int]] = []

    def generate(batch: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        assert count == 20
        prompts.extend(map(list, batch))
        return [(ids, True) for ids in subject.encoder.encode(texts)[: len(batch)]]

    return subject_of(subject.model, subject.encoder, said=generate, **changes), prompts


def test_the_result_of_a_text_and_exact_answers() -> None:
    for text, result in RESULTS.items():
        assert generation.answer_in(text) == (result and Fraction(result)), text

    exact = [pair for pair in (*EXACT, *NOT_EXACT) if generation.judge_answer(*pair, "exact")[1]]
    assert exact == EXACT


@pytest.mark.parametrize(("last", "match"), [("2\n#### 3", "numeric"), ("3 apples", "exact")])
def test_auto_compares_numbers(tmp_path: Path, subject: LoadedModel, last: str, match: str) -> None:
    answers = {"longest question?": "#### 1,000", "question?": 2, "why?": "...", "q?": last}
    rows = [{"question": question, "answer": answer} for question, answer in answers.items()]
    answered, _ = answering(subject, "so 1000", "2", "3 apples", max_length=None)
    result = evaluated(tmp_path, rows, answered)
    assert result.primary.name == f"accuracy_{match}"
    assert [row["right"] for row in result.rows] == [match == "numeric", True, True]
    assert len(result.items.left_out) == 1
    spec = GenerationTask(file="a.jsonl", limit=1, seed=3)  # the sample decides nothing
    assert generation.read("sums", spec, SuiteFiles(tmp_path)).spec.match == match


def test_a_stop_text_ends_an_answer(tmp_path: Path, subject: LoadedModel) -> None:
    real = with_encoder("real", subject.model, subject.encoder, subject.begin_ids, can_chat=True)
    unlimited = evaluated(tmp_path, TWO_ROWS[:1], real, stop=(), new_tokens=40)
    text = unlimited.rows[0]["answer"]
    (row,) = evaluated(tmp_path, TWO_ROWS[:1], real, stop=("", text[6:9]), new_tokens=40).rows
    assert (row["answer"], row["ended"]) == (text[: text.find(text[6:9])], True)


def test_a_long_prompt_loses_its_oldest_examples(tmp_path: Path, subject: LoadedModel) -> None:
    rows = [{"question": f"{number} {'word ' * 5}?", "answer": str(number)} for number in range(6)]
    answered, prompts = answering(subject, *[""] * 6)
    cut = evaluated(tmp_path, rows, answered, shots=5)
    assert all(len(ids) <= 128 - 20 and ids[0] == subject.begin_ids[0] for ids in prompts)
    texts = [subject.encoder.decode(ids) for ids in prompts]
    for text in texts:
        assert text.startswith("Question: ") and text.endswith("?\nAnswer:"), "no example is cut"
    assert cut.figures[-1].name == "cut"


def test_a_chat_is_asked_through_the_template(tmp_path: Path, subject: LoadedModel) -> None:
    answered, prompts = answering(subject, "2", "2")
    result = evaluated(tmp_path, TWO_ROWS, answered, shots=1, chat=True)
    turns = (Message("user", "second?"), Message("assistant", "2"), Message("user", "first?"))
    assert prompt_ids(subject.encoder, turns) in prompts
    assert [row["right"] for row in result.rows] == [False, True]
    without = subject_of(subject.model, subject.encoder, can_chat=False)
    with pytest.raises(UsageError, match=r"tasks.sums.chat"):
        evaluated(tmp_path, TWO_ROWS, without, chat=True)


CHINESE = "山海经\n南山经之首曰鹊山其首曰招摇之山临于西海之上多桂多金玉有草焉其状如韭" * 5
ENGLISH = "The quick brown fox jumps over the lazy dog, and then it returns to where it began. " * 4


def documents_of(encoder: Encoder, *texts: str) -> list[SamplePrompt]:
    return samples.of_documents(texts, encoder, new_tokens=48, room=200)


@pytest.mark.parametrize("text", [ENGLISH, CHINESE])
def test_a_document_is_cut_into_its_beginning_and_what_follows(encoder: Encoder, text: str) -> None:
    (prompt,) = documents_of(encoder, text)
    assert prompt.reference and text.startswith(prompt.text + prompt.reference)
    assert 0 < len(prompt.text.encode()) <= samples.BEGINNING_BYTES
    assert len(encoder.encode([prompt.reference])[0]) <= 48 + 1
    if text is ENGLISH:
        assert text[len(prompt.text)] == " ", "no word is cut"


def test_a_question_has_the_turns_before_it_and_its_own_answer(encoder: Encoder) -> None:
    def turns(question: str, answer: str, *before: Message) -> Messages:
        asked = Message("user", question)
        return (*before, asked, Message("assistant", answer), Message("user", "And?"))

    with_system = turns("What is it?", "It is this.", Message("system", "Be kind."))
    unanswered = (Message("user", "Nobody answers?"),)
    chats = [with_system, turns("你好吗？", "很好。"), unanswered, turns("too long " * 300, "")]
    chosen = samples.of_chats(chats, encoder, new_tokens=48, room=200)
    samples_of = {(prompt.turns[0].role, prompt.text, prompt.reference) for prompt in chosen}
    assert samples_of == {("system", "What is it?", "It is this."), ("user", "你好吗？", "很好。")}


def test_a_sample_has_the_answer_of_the_model_beside_that_of_the_data(encoder: Encoder) -> None:
    prompts = [SamplePrompt("The fox"), samples.question("Why?"), *documents_of(encoder, ENGLISH)]
    model = tiny_model(vocab=len(encoder))
    loaded = with_encoder("model", model, encoder, (encoder.bos_id,), can_chat=True)
    written = samples.continuations(loaded, prompts, new_tokens=3)
    answers = [sample.pop("answer") for sample in written]
    assert any(answers)
    of_document = {"prompt": prompts[2].text, "reference": prompts[2].reference}
    assert written == [{"prompt": "The fox"}, {"prompt": "Why?"}, of_document]
    model.get_input_embeddings().weight.data.fill_(math.nan)
    written = samples.continuations(loaded, prompts[:1], new_tokens=3)
    assert written == [{"prompt": "The fox", "answer": ""}], "a model that has diverged"
