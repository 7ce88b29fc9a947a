"""Chats as an evaluation: loss on the answers, and what answers look like, which these tests put into a model's mouth."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import subject_of
from support.tiny_data import chats as plain_chats
from support.tiny_data import make_tokenizer
from support.tiny_trainers import tiny_model
from torch.nn import functional as F

from ttrain.config.evaluate import ChatsTask
from ttrain.core.sandbox import Sandbox
from ttrain.data import records, tokenizer
from ttrain.data.chat import encode_chat, prompt_ids
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.errors import DataError
from ttrain.evaluate import chats, tool_calls
from ttrain.evaluate.evaluated_model import EvaluatedModel
from ttrain.evaluate.items import SuiteFiles
from ttrain.evaluate.task_result import TaskResult
from ttrain.evaluate.tool_calls import Budget

# Names in plain text, a special token at the end of each turn, and no system turn.
NAMED = (
    "{% for turn in messages %}{% if turn['role'] == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
    "{{ '### ' + ('Human' if turn['role'] == 'user' else 'Assistant') + ': ' + turn['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant: ' }}{% endif %}"
)
WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    },
}  # fmt: skip
TOOLS = {
    "tools": [{"type": "function", "function": WEATHER}, {"name": "now"}, {"name": "odd", "parameters": {"type": "dict"}}]
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom", "days": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Any:
    return tiny_model(vocab=len(encoder))


def turns(*contents: str, system: str = "") -> Messages:
    """A conversation that user and assistant take turns in."""
    roles = [Message("user" if number % 2 == 0 else "assistant", text) for number, text in enumerate(contents)]
    return (*([Message("system", system)] if system else []), *roles)


def offering(*contents: str) -> Messages:
    """The same with functions."""
    messages = [{"role": turn.role, "content": turn.content} for turn in turns(*contents)]
    return tuple(records.messages_of({"messages": messages, **TOOLS}))


FUNCTIONS = tool_calls.offered_functions(offering("Hi", "Hello"))


@pytest.fixture(scope="module")
def small_sandbox() -> Iterator[Sandbox]:
    limits = {"seconds": 0.15, "seconds_per_result": 0.05, "memory_bytes": 256 << 20}
    with contextlib.closing(Sandbox(tool_calls.answer, preloaded=("jsonschema", "referencing"), **limits)) as sandbox:
        yield sandbox


@pytest.fixture
def small(small_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setattr(tool_calls, "SANDBOX", small_sandbox)
    return small_sandbox


def saying(encoder: Encoder, model: Any, said: Sequence[tuple[Sequence[int], bool]], **changes: Any) -> EvaluatedModel:
    """A model whose answers, to prompts of any order, are these; they are told apart by the user's last turn."""
    waiting = iter(said)
    return subject_of(model, encoder, generate=lambda prompts, count: [next(waiting) for _ in prompts], **changes)


def evaluated(rows: Sequence[Messages], directory: Path, subject: EvaluatedModel, **settings: Any) -> TaskResult:
    lines = [json.dumps({"messages": [vars(turn) for turn in messages]}) for messages in rows]
    (directory / "chats.jsonl").write_text("\n".join(lines))
    spec = ChatsTask(file="chats.jsonl", **settings)
    return chats.run(chats.read("talk", spec, SuiteFiles(directory)), subject, lambda done, total: None)


def values(outcome: TaskResult) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


# --- fluency ------------------------------------------------------------------------------------------------------------


def test_words_are_characters_where_a_script_has_no_spaces() -> None:
    assert chats.words("Don't say: 3 Äpfel_2!\n") == ["Don", "'", "t", "say", ":", "3", "Äpfel_2", "!"]
    assert chats.words("你好，world。　한국어 ไทย") == ["你", "好", "，", "world", "。", "한국어", "ไ", "ท", "ย"]


def test_distinct_is_the_share_of_different_runs_over_all_answers() -> None:
    said = [chats.words(text) for text in ("a b a b", "a b c", "", "d", "the cat and the cat")]
    for length in (1, 2, 3):
        runs = [run for words in said for run in chats.phrases(words, length)]
        parts = chats.distinct(said, length)
        assert sum(part for part, _ in parts) / sum(size for _, size in parts) == pytest.approx(len({*runs}) / len(runs))
    turned = [part for part, _ in chats.distinct(said[::-1], 2)[::-1]]
    assert turned == pytest.approx([part for part, _ in chats.distinct(said, 2)]), "no answer counts more for coming first"


def test_what_an_answer_has_had_before_is_repeated() -> None:
    assert chats.repeated(["a", "b", "c", "d", "a", "b", "c", "d"]) == (1, 5)
    assert chats.repeated(["a", "b", "c"]) == (0, 0)
    assert chats.repeated(["x"] * 10) == (6, 7)


def test_an_answer_that_ends_in_a_loop_is_seen() -> None:
    looping = [
        "and so on and so on and so on and s", "好的，我知道了。" * 3, "First this. " + "o" * 24, "\ufffd" * 30,
        "好的，我知道了。" * 3 + "好\ufffd", "and so on and so on and so on and s\n\ufffd",  # cut within a character
    ]  # fmt: skip
    others = [
        "no, no, no!", "好的好的好的", "one two three four five six seven eight nine ten",
        "and so on and so on and so on, he said.", "",
    ]  # fmt: skip
    assert [answer for answer in (*looping, *others) if chats.loops(answer)] == looping


# --- markers ------------------------------------------------------------------------------------------------------------


def test_special_tokens_and_the_turns_of_others_are_markers(encoder: Encoder) -> None:
    user = encoder.special("<|user|>")
    assert chats.find_markers(encoder, [*encoder.encode(["Hello"])[0], user], "Hello") == [f"token {user}"]
    assert chats.find_markers(encoder, [len(encoder)], "") == [f"token {len(encoder)}"], "of no vocabulary"
    found = chats.find_markers(encoder, [], "Yes.<|im_end|>\n### Human: and?\n用户：再见\n[INST]")
    assert found == ["<|im_end|>", "[INST]", "### Human:", "用户："]
    for clean in (
        "A user: somebody who uses it.",
        "if a < b | c > d",
        "The assistant said: no.",
        "1. Users: many",
        "a <b> c",
    ):
        assert chats.find_markers(encoder, encoder.encode([clean])[0], clean) == []


def test_names_that_a_template_writes_in_plain_text_are_markers(tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(["abc"], 300, "tinyseek"), tmp_path / "tinyseek", "tinyseek")
    assert chats.headers(Encoder(tmp_path / "tinyseek")) == ("Assistant：", "User：")
    assert chats.headers(named(tmp_path / "named")) == ("### Assistant:", "### Human:")
    assert chats.headers(make_tokenizer(tmp_path / "plain")) == ()


def named(directory: Path) -> Encoder:
    make_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(NAMED)
    return Encoder(directory)


# --- function calls -----------------------------------------------------------------------------------------------------


def test_the_functions_of_a_system_turn_are_found_again() -> None:
    assert {"weather": WEATHER["parameters"], "now": None, "odd": {"type": "dict"}} == FUNCTIONS
    assert tool_calls.offered_functions(turns("Hi", "Hello", system="Be kind; <tools> are not here.")) == {}


def test_functions_are_found_whatever_they_say_of_themselves() -> None:
    row = {"messages": [{"role": "system", "content": "Use <tools> well.\n</tools>"}, {"role": "user", "content": "Hi"}]}
    for said in ("in a line\u2028of Unicode", "next\x85line", "between <tools> and </tools>", "</tools>"):
        tools = [{"name": "weather", "description": said, "parameters": WEATHER["parameters"]}, {"name": "now"}]
        functions = tool_calls.offered_functions(tuple(records.messages_of({**row, "tools": tools})))
        assert functions == {"weather": WEATHER["parameters"], "now": None}


CALLS = [
    ('{"name": "weather", "arguments": {"city": "Rom"}}', ""),
    ('{"name": "weather", "arguments": "{\\"city\\": \\"Rom\\"}"}', ""),
    ('{"name": "now", "arguments": {}}', ""),
    ('{"name": "odd", "arguments": {"x": 1}}', ""),
    ('{"name": "weather", "arguments": {"city": 3}}', "weather: city: 3 is not of type 'string'"),
    ('{"name": "weather", "arguments": {"city": "Rom", "days": 0}}', "weather: days: 0 is less than the minimum of 1"),
    ('{"name": "weather", "arguments": {}}', "weather: the arguments: 'city' is a required property"),
    ('{"name": "rain", "arguments": {}}', "there is no function rain"),
    ('{"name": "weather", "arguments": "Rom"}', "the arguments of weather are not a JSON object"),
    ('{"name": "weather"}', "the arguments of weather are not a JSON object"),
    ('{"arguments": {}}', "a call without a name"),
    ('[{"name": "now"}]', 'not a JSON object: [{"name": "now"}]'),
    ("weather(Rom)", "not a JSON object: weather(Rom)"),
    ('{"name": "now", "arguments": {"a": ' + "[" * 300 + "]" * 300 + "}}", "not a JSON object"),
]


def test_a_call_that_cannot_be_made_says_why() -> None:
    for body, wrong in CALLS:
        (call,) = tool_calls.calls(f"Let me see.\n<tool_call>\n{body}\n</tool_call>", FUNCTIONS, Budget())
        assert call.wrong.startswith(wrong) and bool(call.wrong) == bool(wrong), body
        assert bool(call.unchecked) == ("odd" in body)


def test_a_schema_is_never_fetched_nor_able_to_end_an_evaluation() -> None:
    nested: Any = functools.reduce(lambda schema, _: {"not": schema}, range(400), {})
    schemas: tuple[Any, ...] = (
        nested,
        {"$ref": "http://127.0.0.1:9/schema.json"}, {"$ref": "#/nothing"}, {"properties": {"a": {"pattern": "(?<x"}}},
        {"$ref": "#"}, {"required": True}, [], "text", {"$ref": "#/required", "required": ["a"]},
        {"$ref": "#/enum/x", "enum": [1]},
    )  # fmt: skip
    for schema in schemas:
        (call,) = tool_calls.calls('<tool_call>{"name": "f", "arguments": {"a": "b"}}</tool_call>', {"f": schema}, Budget())
        assert call.unchecked and not call.wrong, schema


DOUBLING = {"$defs": {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)} | {"d40": {}}}
COSTLY: dict[str, Any] = {
    "a pattern that tries all ways": {"properties": {"a": {"pattern": "^(a+)+$"}}},
    "references that double": {**DOUBLING, "$ref": "#/$defs/d0"},
    "names that a pattern matches": {"patternProperties": {"^(a+)+$": {}}, "propertyNames": {"pattern": "^(b|b)*$"}},
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("schema", COSTLY.values(), ids=COSTLY)
def test_a_schema_that_asks_for_hours_is_named_and_the_next_call_is_judged(schema: dict[str, Any]) -> None:
    body = json.dumps({"name": "f", "arguments": {"a": "a" * 40 + "!", "b" * 40 + "!": 1, "a" * 40 + "!": 2}})
    begun = time.process_time()
    judged = tool_calls.judge(*[f"<tool_call>{body}</tool_call>"] * 2, {"f": schema}, Budget())
    assert len(judged.unchecked) == 1 and "asks for too much: it needs more than 0." in judged.unchecked[0]
    assert judged.valid and judged.right, "what cannot be compared is judged by name and arguments alone"
    again = tool_calls.judge(*[f"<tool_call>{body}</tool_call>"] * 2, {"f": schema}, Budget())
    assert again == judged, "it is not asked twice"
    (call,) = tool_calls.calls(CALL.replace("2", "0"), FUNCTIONS, Budget())
    assert call.wrong == "weather: days: 0 is less than the minimum of 1" and not call.unchecked
    assert time.process_time() - begun < 1


def test_marks_that_never_end_take_no_time() -> None:
    begun = time.process_time()
    assert tool_calls.offered_functions(turns("Hi", "Hello", system="<tools>\n" * 100_000)) == {}
    assert time.process_time() - begun < 2, "300 s where each mark was looked up to the end of the text"


ANSWERS = [  # called, valid, right functions, right calls
    (CALL, (True, True, True, True)),
    (CALL.replace('"city": "Rom", "days": 2', '"days": 2.0, "city": "Rom"'), (True, True, True, True)),
    (CALL.replace("Rom", "Bonn"), (True, True, True, False)),
    (CALL.replace("2", '"two"'), (True, False, True, False)),
    (CALL + CALL, (True, True, False, False)),
    (CALL + CALL[:30], (True, False, False, False)),
    (CALL.replace("weather", "now"), (True, True, False, False)),
    (CALL[:30], (True, False, False, False)),
    ("It is warm in Rom.", (False, False, False, False)),
    ("</tool_call>" + CALL, (True, True, True, True)),
]


def test_calls_are_right_where_they_are_those_of_the_reference() -> None:
    budget = Budget()
    for answer, expected in ANSWERS:
        judged = tool_calls.judge(answer, CALL, FUNCTIONS, budget)
        assert (judged.called, judged.valid, judged.right_names, judged.right) == expected, answer
    reference = CALL.replace("2", "0")
    judged = tool_calls.judge(reference, reference, FUNCTIONS, budget)
    assert judged.right and not judged.valid, "one that its own schema refuses can still be given"
    for days in range(20):
        tool_calls.judge(CALL.replace("2", str(days)), CALL, FUNCTIONS, budget)
    assert budget.used_seconds < 0.5 and not budget.refused, "cheap schemas use nothing of the budget"


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("98765432109876543210", "98765432109876543211", False),
        ("98765432109876543210", "98765432109876543210.0", True),
        ("9007199254740993", "9007199254740992.0", False),
        ("1e2", "100", True),
        ("-0", "0.0", True),
        ('"5"', "5", False),
        ("true", "1", False),
    ],
)
def test_numbers_of_calls_are_compared_to_the_last_digit(one: str, other: str, is_same: bool) -> None:
    answer, reference = (f'<tool_call>{{"name": "f", "arguments": {{"n": {n}}}}}</tool_call>' for n in (one, other))
    assert tool_calls.judge(answer, reference, {}, Budget()).right == is_same


def test_a_schema_holds_for_whole_numbers_beyond_64_bits_and_with_properties_that_are_null() -> None:
    schema = '{"properties": {"n": {"enum": [98765432109876543210]}, "m": null}}'
    system = f'<tools>\n{{"name": "f", "parameters": {schema}}}\n</tools>'
    functions = tool_calls.offered_functions(turns("Hi", "Hello", system=system))
    for number, is_valid in (("98765432109876543210", True), ("98765432109876543211", False)):
        answer = f'<tool_call>{{"name": "f", "arguments": {{"n": {number}}}}}</tool_call>'
        (call,) = tool_calls.calls(answer, functions, Budget())
        assert (not call.wrong, call.unchecked) == (is_valid, "")


# --- the task -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_answers_and_of_the_tokens_that_end_them(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    rows = plain_chats(5)
    found = values(evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=0, row_length=128))
    nats, tokens = 0.0, 0
    for messages in rows:
        ids, live = encode_chat(encoder, messages)
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].detach()
        each = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")[torch.tensor(live[1:])]
        nats, tokens = nats + float(each.double().sum()), tokens + len(each)
    assert found == {
        "loss": pytest.approx(nats / tokens, rel=1e-6),
        "perplexity": pytest.approx(2.71828 ** found["loss"], rel=1e-4),
    }


def test_figures_of_answers_are_counted_by_hand(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    """Three chats with two, one and one answers; the longest prompt is asked first."""
    long = turns("A question that is long", "An answer", "And what is there more to say, do you think?", "Nothing more")
    rows = [long, turns("Who is it, then?", "Me"), turns("Hm?", "Yes")]
    texts = [("Nothing", True), ("well well", True), ("one two three four one two three four", False), ("", True)]
    said = [(encoder.encode([text])[0], ended) for text, ended in texts]
    said[1] = ([*said[1][0], encoder.special("<|user|>")], True)
    outcome = evaluated(rows, tmp_path, saying(encoder, model, said), new_tokens=40)
    found = values(outcome)
    assert found["ended"] == 3 / 4 and found["clean"] == 3 / 4 and found["empty"] == 1 / 4 and found["loops"] == 0
    assert found["repeated"] == 1 / 5
    assert found["distinct_1"] == pytest.approx((1 + 1 + 4) / (1 + 2 + 8))
    assert found["length"] == sum(len(text) for text, _ in texts) / 4
    assert "cut" not in found and "calls" not in found
    first = outcome.rows[0]["answers"]
    assert [(turn["turn"], turn["reference"]) for turn in first] == [(1, "An answer"), (3, "Nothing more")]
    (ended,) = (figure for figure in outcome.figures if figure.name == "ended")
    assert first[1]["answer"] == "Nothing" and ended.sizes[0] == 2
    once = evaluated(rows, tmp_path, saying(encoder, model, said), new_tokens=40, answers=1)
    assert [len(row["answers"]) for row in once.rows] == [1, 1, 1] and once.rows[0]["answers"][0]["turn"] == 3
    assert once.items == outcome.items, "how many answers are asked for makes no other items"


def test_what_a_model_calls_is_set_against_the_reference(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    rows = [
        offering("The weather in Rom, for two days and not a day more, please?", CALL, "Thanks a lot for that!", "Welcome"),
        offering("Rom, once more?", CALL),
        offering("Hi", "Hello"),
        turns("No functions here", "No"),
    ]
    said = ["You are welcome", CALL, CALL.replace("Rom", "Bonn"), CALL, "No"]
    subject = saying(encoder, model, [(encoder.encode([text])[0], True) for text in said], max_length=None)
    outcome = evaluated(rows, tmp_path, subject, new_tokens=99, row_length=2048)
    found = values(outcome)
    wanted = {"calls": 1, "valid_calls": 1, "right_functions": 1, "right_calls": 1 / 2, "needless_calls": 1 / 2}
    assert {name: found[name] for name in wanted} == wanted
    (needless,) = outcome.rows[2]["answers"]
    assert needless["answer"] == CALL and needless["calls_right"] is False


def test_answers_with_calls_are_asked_for_before_the_last_ones() -> None:
    messages = turns("a", CALL, "b", "B", "c", "  ", "d", "D", "e", "E")
    assert chats.turns_of(messages, 2) == [1, 9] and chats.turns_of(messages, 3) == [1, 7, 9]
    assert chats.turns_of(messages, 0) == [] and chats.turns_of(turns("a", "  "), 2) == []
    assert chats.turns_of((Message("assistant", "Hello"), *messages), 9) == [2, 4, 8, 10], "nothing stands before the first"


def test_a_short_context_gets_the_end_of_what_was_said(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    asked: list[Any] = []

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        asked.extend((list(prompt), count) for prompt in prompts)
        return [([], True) for _ in prompts]

    rows = [turns("word " * 30, "Yes"), turns("Hi", "Yes")]
    outcome = evaluated(rows, tmp_path, subject_of(model, encoder, max_length=24, generate=generate), new_tokens=50)
    whole = prompt_ids(encoder, rows[0][:1])
    assert (whole[-12:], 12) in asked and values(outcome)["cut"] == 1 / 2
    assert outcome.rows[0]["answers"][0]["cut"] == len(whole) - 12


def test_chats_that_a_template_refuses_are_told_and_stop_nothing(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = named(tmp_path / "named")
    rows = [turns("Hi", "Hello", system="Be kind."), turns("Hi", "Hello")]
    with caplog.at_level(logging.WARNING, "ttrain"):
        outcome = evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=3)
    assert "talk: 1 of 2 chats are not scored" in caplog.text and "no system turn here" in caplog.text
    assert "no system turn here" in outcome.rows[0]["refused"] and outcome.rows[0]["answers"] == []
    assert all(figure.sizes[0] == 0 for figure in outcome.figures) and len(outcome.rows[1]["answers"]) == 1


def test_rows_that_are_no_chats_are_left_out_with_their_reason(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    good = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "source": "a"}
    rows: list[Any] = [good, {"messages": []}, {"messages": [{"role": "user", "content": "Hi"}]}, {"text": "no chat"}]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    items = chats.read("talk", ChatsTask(file="chats.jsonl"), SuiteFiles(tmp_path))
    assert len(items.items) == 1 and [one.location.rpartition(":")[2] for one in items.left_out] == ["2", "3", "4", "5"]
    assert any(reason.startswith("'messages' has no turns; write") for reason in items.reasons)
    assert "no answer" in items.reasons
    outcome = chats.run(items, subject_of(model, encoder), lambda done, total: None)
    assert sum(outcome.left_out.values()) == 4 and len(outcome.items) == 1
    (tmp_path / "chats.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"has no chat; a row needs 'messages' or 'conversations'.*chats.jsonl:1"):
        chats.read("talk", ChatsTask(file="chats.jsonl"), SuiteFiles(tmp_path))


def test_progress_goes_from_nothing_to_all_once(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [vars(turn) for turn in turns("a", "b")]}))
    items = chats.read("talk", ChatsTask(file="chats.jsonl", new_tokens=2), SuiteFiles(tmp_path))
    seen: list[float] = []
    chats.run(items, replace(subject_of(model, encoder), batch_tokens=8), lambda done, total: seen.append(done / total))
    assert seen == sorted(seen) and seen[-1] == 1 and 0.5 in seen


def test_many_costly_schemas_have_one_budget(small: Sandbox) -> None:
    budget, before = Budget(seconds=0.4), small.used_seconds
    body = f"<tool_call>{json.dumps({'name': 'f', 'arguments': {'a': 'a' * 40 + '!'}})}</tool_call>"
    reasons = []
    for number in range(60):
        schema = {"title": f"costly {number}", "properties": {"a": {"pattern": "^(a+)+$"}}}
        reasons += tool_calls.judge(body, body, {"f": schema}, budget).unchecked
    assert len(reasons) == 60 and "asks for too much" in reasons[0]
    assert reasons[-1] == "the schemas of this evaluation have used up their 0.4 s of CPU time"
    assert budget.refused > 40 and small.used_seconds - before < 1
