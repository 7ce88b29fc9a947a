"""Answers in a model's own words: which number they give, what ends them, and that no batch changes them."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from support.evaluated_models import subject_of
from support.tiny_trainers import tiny_model

from ttrain.config.evaluate import GenerationTask
from ttrain.data.chat import prompt_ids
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.evaluate import generation
from ttrain.evaluate.evaluated_model import EvaluatedModel
from ttrain.evaluate.generation import answer_in, is_number, numbers
from ttrain.evaluate.items import BadRow, SuiteFiles
from ttrain.evaluate.task_result import TaskResult

RESULTS: dict[str, str | None] = {
    "He has 5 - 2 = 3 left.\n#### 3": "3", "#### 1,234.50 dollars, 7 in all": "2469/2", "#### none, so 8": "8",
    "first #### 1 then #### 2": "2", r"so \boxed{\frac{3}{4}} of 12": "3/4", "12 apples and 5 pears": "5",
    "-3": "-3", "5-3": "3", "x = -3.": "-3", "$-5": "-5", "-$5": "-5", "−7 °C": "-7", "$1,000": "1000", "£ 20": "20",
    "1,23": "23", "2,000,000.00": "2000000", "10.": "10", ".5": "1/2", "1e3": "1000", "3e": "3", "50%": "50", "3/4": "3/4",
    "2 1/2 cups": "5/2", "2½": "5/2", "½": "1/2", "3/0": "0", "１，２３４．５": "2469/2", "－２": "-2",
    "答案是12，一般": "12", "三百二十": "320", "一百零五个": "105", "十二": "12",
    "一万二千": "12000", "一亿三千万": "130000000", "二〇二四": "2024",
    "负二点五": "-5/2", "三分之二": "2/3", "百分之五十": "50", "壹佰": "100", "3万": "30000", "1.5亿": "150000000",
    "25 cm²": "25", "25 m^2": "25", "25 m^{2}.": "25", "25 m3": "25", "9 ft²": "9", "10³": "1000", "2^{10}": "1024",
    "3×10^5": "300000", r"5 \times 10^{-3}": "1/200", "1{,}000": "1000", r"12\,000": "12000", r"\frac34": "3/4",
    r"2\frac{1}{2}": "5/2", r"-\frac{1}{2}": "-1/2", r"\dfrac{ 3 }{ 4 }": "3/4", "2.5^2": "2",
    "3千克": "3", "5 千米": "5", "3千": "3000", "3千人": "3000", "5萬": "50000", "1.5億": "150000000", "负5": "-5",
    "零下负 5 度": "-5",
    "no number": None, "": None, "####": None,
}  # fmt: skip
SIGNS: dict[str, str | None] = {
    "答案是-5": "-5", "等于－５": "-5", "温度为−5度": "-5", "气温-5℃": "-5", "x=-5": "-5", "解是3或-3": "-3",
    "从5到-5": "-5",
    "零下五度": "-5", "零下5度": "-5", "零下 5 度": "-5",
    "40%-60%": "60", "3-5": "5", "2020-11": "11", "5年-10年": "10", "20万-30万": "300000", "3千克-5千克": "5",
    "5%-10%": "10", "5°-10°": "10",
    "周三-5": "5", "a-5": "5",
    r"x\approx-6": "-6", r"x \leq −6": "-6", r"\to -6.5": "-13/2", r"\pi-6": "6", "–5": "-5", "3–5": "5", "x = - 5": "-5",
    "- 5": "-5", "− 3/4": "-3/4", "- 5 kg\n- 6 kg": "6", "‑5": "-5", r"-\$5": "-5", "-US$5": "-5", r"\geqslant-6": "-6",
    "**-5**": "-5", "_-5_": "-5", "-½": "-1/2", "-€5": "-5", "+5": "5",
}  # fmt: skip
GROUPS: dict[str, str | None] = {
    "12 000": "12000", "1 000": "1000", "1 234 567 in all": "1234567", "100 000": "100000", "12 000.5": "24001/2",
    "1\u2009234\u2009567": "1234567", "123\u202f456": "123456", "1\u00a0234": "1234",
    "3 12 000": "0", "100 200": "200", "100 200 300": "300", "2010 500": "500", "A1 100": "100", "2 1/2": "5/2",
    "5 100 1/2": "201/2",
    "1 0000": "0", "10 000-20 000": "20000", "+1 800-224-7835": "7835", "GPT-3 175B": "175",
    "12 200-kilobyte videos": "200",
}  # fmt: skip
COUNTRIES: dict[str, str | None] = {
    "1,00,000": "100000", "Rs.12,34,567.": "1234567", "₹1,23,45,678.50": "24691357/2", "-₹1,00,000": "-100000",
    "100,00,00,000": "1000000000", "１，００，０００": "100000", "1,234,567": "1234567", "12,34": "34", "1,00,000,5": "5",
    "1.234.567,89": "123456789/100", "€ 1.234,50": "2469/2", "1.234.567": "1234567", "1.234": "617/500", "3,5": "5",
    "1 234 567,5": "2469135/2", "1\u202f234,5": "2469/2", "0.125,0.25": "1/4", "0.125,3": "3", "1.234,5.5": "11/2",
    "1'234'567": "1234567", "1’234.50": "2469/2", "1_000_000": "1000000", "Rs.500": "500", "No.5": "5",
}  # fmt: skip
EXPONENTS: dict[str, str | None] = {
    "It is 4.4e5.": "440000", "7.8e-1.": "39/50", "2e3, or more": "2000", "9.6e3cm": "9600", "1e-3m": "1/1000",
    "6.02e23mol": "602000000000000000000000", "1.5e3 m/s": "1500", "１．５ｅ３": "1500", "3e5.5": "11/2", "5eV": "5",
    "3·10^5": "300000", "3 × 10⁵.": "300000", "3×10^{-2}m": "3/100", "10^{-3}": "1/1000", "10⁻³": "1/1000", "2^-3": "1/8",
    "1.e3": "1000", "1.5 × 10 ^ 3": "1500", "0^2": "0", "0^-1": "-1", "1.5M": "3/2", "5k": "5", "12km/h": "12",
}  # fmt: skip
WORDS: dict[str, str | None] = {
    "2.5 million": "2500000", "$3 Billion.": "3000000000", "2 thousand": "2000", "5 million美元": "5000000",
    "5 millions": "5000000",
    "4 trillion": "4000000000000", "1.2万": "12000", "3 thousandths": "3", "two million": None,
    "1万2千": "12000", "1万2千5百": "12500", "-1万2千": "-12000", "3亿5000万": "350000000", "1万2500": "12500",
    "3千500": "3500",
    "1万2": "12000", "1万500": "500", "1万 2": "2", "3千2万": "20000", "3万2.5": "5/2",
    "一万二": "12000", "两百五": "250", "一百二": "120", "三千五": "3500", "一千二百五": "1250", "一百零二": "102",
    "十二": "12",
    "一百二点五": "205/2", "花了一万二买车": "12000", "詩三百三首": "303", "二百九人": "209", "五千两": "5000", "三两": "3",
    "五千两百": "5200",
}  # fmt: skip
UNITS: dict[str, str | None] = {
    "十千克": "10", "二千米": "2", "三千克": "3", "五百千克": "500", "一万三千米": "13000", "一亿三千米": "100003000",
    "三千人": "3000",
    "千克": None, "负千克": None,
    "3百米": "300", "3百帕": "3", "5千字": "5000", "5千字节": "5", "3千瓦": "3",
    "百分之50": "50", "百分之百": "100", "千分之五": "1/200", "3分之2": "2/3",
    "3又1/2": "7/2", "3 又 1/2": "7/2", "3又2分之1": "7/2", "三又二分之一": "7/2", "负三又二分之一": "-7/2",
    "他又买了3个": "3", "密度是1000 kg·m⁻³": "1000", "9.8 m·s⁻²": "9.8", "9.8 m s^{-2}": "9.8", "5×10⁻³ m": "1/200",
    "面积是50㎡的房间": "50",
}  # fmt: skip


@pytest.fixture(scope="module")
def subject(encoder: Encoder) -> EvaluatedModel:
    return subject_of(tiny_model(vocab=len(encoder), init_std=0.4, tie_embeddings=False), encoder)


def quiet(done: int, total: int) -> None:
    pass


def asked(tmp_path: Path, rows: Sequence[Any], subject: EvaluatedModel, **settings: Any) -> TaskResult:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    spec = GenerationTask(file="a.jsonl", **{"new_tokens": 20, **settings})
    return generation.run(generation.read("sums", spec, SuiteFiles(tmp_path)), subject, quiet)


def saying(subject: EvaluatedModel, *texts: str) -> EvaluatedModel:
    """Answers the prompts, from the longest to the shortest, with these texts, a piece at a time."""
    told: dict[tuple[int, ...], list[int]] = {}
    left = list(texts)

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        found = []
        for prompt in map(tuple, prompts):
            ids = told[prompt] if prompt in told else subject.encoder.encode([left.pop(0)])[0]
            told[*prompt, *ids[:count]] = ids[count:]
            found.append((ids[:count], len(ids) <= count))
        return found

    return subject_of(subject.model, subject.encoder, generate=generate, max_length=None)


def watching(subject: EvaluatedModel, answer: list[int], **changes: Any) -> tuple[EvaluatedModel, list[list[int]]]:
    """(the model, answering each prompt so; the prompts that it gets)."""
    given: list[list[int]] = []

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        given.extend(map(list, prompts))
        assert count == 20
        return [(answer, True)] * len(prompts)

    return subject_of(subject.model, subject.encoder, generate=generate, **changes), given


@pytest.mark.parametrize("table", [RESULTS, SIGNS, GROUPS, COUNTRIES, EXPONENTS, WORDS, UNITS])
def test_the_result_of_a_text(table: dict[str, str | None]) -> None:
    assert {text: answer_in(text) for text in table} == {text: result and Fraction(result) for text, result in table.items()}


NUMBERS = (
    "5", "-5", " $5\n", "5%", "50\\%", "5.", "1,234", "１２", "三百二十", "12 000", "2.5 million", "3/4", "1万2千", "3又1/2",
    "5 €", "+5", "1,00,000", "4.4e5.", "₹1'000",
)  # fmt: skip
MORE = (
    "5 apples", "3千克", "A1", "2-3", "1:30", "2020-11", "1.2.3", "3/0", "x=5", "第一", "十分", "five", "", "9" * 500, "1 2",
)  # fmt: skip


def test_a_number_and_nothing_else() -> None:
    assert [text for text in (*NUMBERS, *MORE) if is_number(text)] == [*NUMBERS]


# Texts on which a pattern that goes back takes for ever, and how often they are repeated.
AWKWARD = (
    (r"\frac{", " ", 1000), ("", "9^99", 100), ("", "9", 1000), ("", "1,", 700), ("", r"\boxed{", 100), ("", "十", 1000),
    ("", "1/", 700), ("", "- $", 700), ("1e999999", "", 1), ("x", "100 000 ", 130), ("", "1 0", 330), ("", "十又", 500),
    ("", "三又十分之", 200), ("", "1万2", 330), ("", "1又", 500), ("", "1分之", 330), ("", "零下", 500), ("", "气-", 500),
    ("", "1,00", 700), ("", "1'000", 700), ("", "1.000", 700), ("", "1 000,", 400), ("", "= - ", 500),
)  # fmt: skip


def test_a_digit_for_ever_is_no_result_and_takes_no_time() -> None:
    seconds = []
    for length in (0.4, 4):
        began = time.process_time()
        for start, text, times in AWKWARD:
            answer_in(start + text * int(times * length) + start)
        seconds.append(time.process_time() - began)
    assert seconds[1] < 30 * seconds[0], "where a pattern is not linear, ten times the text takes 100 times as long"
    assert numbers("9" * 5000) == []
    assert answer_in("9" * 5000 + " so 4") == 4


def test_exact_answers() -> None:
    right = [
        ("Paris", "paris."), ("  The   Louvre!\nand more", "the louvre"), ("it is\n#### Paris", "Paris"),
        ("\n\nParis\nor Rome", "Paris"), ("「北京」。", "北京"), ("北京。", "北京"), ("ＡＢ", "ab"),
        ("one\ntwo", "one\ntwo"), ("〈静夜思〉", "静夜思"), ("·李白〔唐〕", "李白〔唐"), ("\ufeff李白\u200b――", "李白"),
    ]  # fmt: skip
    wrong = [("Paris or Rome", "Paris"), ("", "Paris"), ("『北京』市", "北京市"), ("one", "one\ntwo")]
    assert [pair for pair in (*right, *wrong) if generation.judge_answer(*pair, "exact")[1]] == right


SIGNS_APART = (
    "5", "-5", "+5", "~5", "<5", ">5", "#5", "$5", "€5", "5%", "5‰", "5°", "5!", "5'", '5"', ".5", ",5", "5*", "c", "c++",
    "c#", "a+", "a-", "a*", "f", "f'", "f''", "x", "!x", "net", ".net", "/etc", "etc", "10³", "103", "2½", "21/2",
    "(0, 1)", "[0, 1)", "(0, 1]", "[0, 1]",
)  # fmt: skip
AROUND = {
    "-5": ["−5", "－5", "–5", "- 5", "**-5**", "(-5)", "-5.", "`-5`", "$-5$", "= -5"], "<0": ["＜0", "< 0", "“<0”"],
    "C++": ["`C++`", "Ｃ＋＋。", "C++!", "*C++*", "“C++.”"], "A*": ["**A***", "a*.", '"A*"'],
    "A-": ["A−", "A－", "A–", "(A-)"],
    "f'": ["f′", "f’", "'f''", "$f'$"], '5"': ["5″", "5''", "5”"], ".5": ["**.5**", "(.5)", ".５."],
    "Paris": ["“Paris!”", "**Paris**.", "- Paris", "* Paris", "## Paris", "> Paris", "_Paris_", "¡Paris!", "Paris?!",
              "...Paris", "---\nParis", "```\nParis\n```", "«Paris»", "‘Paris’,", "„Paris“", "[Paris]"],
    "[0, 1)": ["[0, 1).", "**[0, 1)**"], "10^3": ["10³"], "m2": ["m²"], "+": ["`+`", "+."],
}  # fmt: skip


def test_a_sign_that_is_part_of_an_answer_tells_answers_apart() -> None:
    equal = [pair for pair in permutations(SIGNS_APART, 2) if generation.judge_answer(*pair, "exact")[1]]
    assert equal == []
    assert all(generation.judge_answer(text, text, "exact")[1] for text in SIGNS_APART)


def test_what_stands_around_an_answer_does_not_count() -> None:
    pairs = [(answer, final) for final, answers in AROUND.items() for answer in answers]
    assert [pair for pair in pairs if not generation.judge_answer(*pair, "exact")[1]] == []


def test_gsm8k_rows(tmp_path: Path, subject: EvaluatedModel) -> None:
    rows = [
        {"question": "longest question?", "answer": "1 + 1 = 2\n#### 2", "final": "2"},
        {"question": "long question?", "answer": "some 9s\n#### 1,000"},
        {"question": "question?", "answer": 0.5},
        {"question": "why?", "answer": "because"}, {"question": "why?"}, {"question": "why?", "answer": [1]},
        {"question": " ", "answer": 1},
    ]  # fmt: skip
    outcome = asked(tmp_path, rows, saying(subject, "It is 2.0", "10 times 100 is 1000", "one"), match="numeric")
    assert [row["right"] for row in outcome.rows] == [True, True, False]
    assert [row["found"] for row in outcome.rows] == ["2", "1000", None]
    assert outcome.primary.value == pytest.approx(2 / 3)
    assert outcome.left_out == {
        "no number in the answer": 1, "no answer": 1, "answer is neither text nor a number": 1, "question is empty": 1,
    }  # fmt: skip


@pytest.mark.parametrize("match", ["auto", "exact"])
def test_rows_without_an_answer(match: str) -> None:
    for answer in ("...", " ", '"', "---", None, True, float("inf")):
        with pytest.raises(BadRow):
            generation.parse({"question": "q", "answer": answer}, match)


@pytest.mark.parametrize(("last", "match"), [("one and two\n#### 3", "numeric"), ("3 apples", "exact")])
def test_auto_compares_numbers_where_every_right_answer_of_the_file_is_one(
    tmp_path: Path, subject: EvaluatedModel, last: str, match: str
) -> None:
    rows = [
        {"question": "longest question?", "answer": "#### 1,000"}, {"question": "question?", "answer": 2},
        {"question": "why?", "answer": "..."}, {"question": "q?", "answer": last},
    ]  # fmt: skip
    outcome = asked(tmp_path, rows, saying(subject, "so 1000", "2", "3 apples"))
    assert outcome.primary.name == f"accuracy_{match}"
    assert [row["match"] for row in outcome.rows] == [match] * 3
    assert [row["right"] for row in outcome.rows] == [match == "numeric", True, True]
    assert sum(outcome.left_out.values()) == 1
    same = asked(tmp_path, rows, saying(subject, "so 1000", "2", "3 apples"), match=match)
    assert same.items == outcome.items
    few = GenerationTask(file="a.jsonl", limit=1, seed=3)  # the sample decides nothing
    (items,) = [generation.read("sums", few, SuiteFiles(tmp_path))]
    assert isinstance(items.spec, GenerationTask)
    assert items.spec.match == match


def test_worked_examples_of_another_file_follow_what_auto_found(tmp_path: Path, subject: EvaluatedModel) -> None:
    (tmp_path / "worked.jsonl").write_text('{"question": "w?", "answer": "none"}\n{"question": "v?", "answer": "4"}\n')
    outcome = asked(
        tmp_path, [{"question": "q?", "answer": "3"}], saying(subject, "3.0"), shots=1, shots_file="worked.jsonl"
    )
    assert outcome.primary.name == "accuracy_numeric"
    assert outcome.primary.value == 1
    assert outcome.left_out == {"as an example: no number in the answer": 1}


def test_a_text_ends_an_answer_and_what_follows_costs_little(tmp_path: Path, subject: EvaluatedModel) -> None:
    rows = [{"question": "first one?", "answer": "1"}, {"question": "other?", "answer": "2"}]
    counted: list[int] = []
    one = saying(subject, "1\n\n" + "Question: and 7 " * 40, "2 " * 300)

    def generate(prompts: Sequence[Sequence[int]], count: int) -> Any:
        counted.append(len(prompts) * count)
        return one.generate(prompts, count)

    watched = subject_of(subject.model, subject.encoder, generate=generate, max_length=None, batch_tokens=10**6)
    outcome = asked(tmp_path, rows, watched, match="numeric", new_tokens=200)
    assert outcome.rows[0]["answer"].strip() == "1"
    assert [row["right"] for row in outcome.rows] == [True, True]
    assert [row["ended"] for row in outcome.rows] == [True, False]
    assert sum(counted) == generation.PIECE + 200


def test_no_batch_and_no_piece_changes_an_answer(
    tmp_path: Path, subject: EvaluatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": "why " * count, "answer": "x"} for count in (1, 9, 4, 2)]
    wanted = [row["answer"] for row in asked(tmp_path, rows, subject, stop=(), new_tokens=10).rows]
    monkeypatch.setattr(generation, "PIECE", 3)
    small = subject_of(subject.model, subject.encoder, batch_tokens=1)
    assert [row["answer"] for row in asked(tmp_path, rows, small, stop=("never",), new_tokens=10).rows] == wanted
    assert len(set(wanted)) > 1


def test_prompts_that_are_too_long_lose_their_oldest_examples_first(tmp_path: Path, subject: EvaluatedModel) -> None:
    rows = [{"question": f"{number} {'word ' * 5}?", "answer": str(number)} for number in range(6)]
    watched, given = watching(subject, [])
    outcome = asked(tmp_path, rows, watched, shots=5)
    unlimited, wholes = watching(subject, [], max_length=None)
    asked(tmp_path, rows, unlimited, shots=5)
    assert all(len(ids) <= 128 - 20 and ids[0] == subject.begin_ids[0] for ids in given)
    texts = [subject.encoder.decode(ids) for ids in given]
    assert all(text.startswith("Question: ") and text.endswith("Answer:") for text in texts)
    whole = "".join(map(subject.encoder.decode, wholes))
    assert all(text in whole and len(text) < len(whole) / len(rows) for text in texts)
    assert outcome.figures[-1].name == "cut"


def test_a_chat_is_asked_through_the_template(tmp_path: Path, subject: EvaluatedModel) -> None:
    rows = [{"question": "first?", "answer": "1"}, {"question": "second?", "answer": "2"}]
    watched, given = watching(subject, subject.encoder.encode(["2"])[0])
    outcome = asked(tmp_path, rows, watched, shots=1, chat=True)
    turns = (Message("user", "second?"), Message("assistant", "2"), Message("user", "first?"))
    assert prompt_ids(subject.encoder, turns) in given
    assert [row["right"] for row in outcome.rows] == [False, True]
    with pytest.raises(UsageError, match=r"tasks.sums.chat is true, but the tokenizer of 'tiny' has no chat template"):
        asked(tmp_path, rows, subject_of(subject.model, subject.encoder, can_chat=False), chat=True)
