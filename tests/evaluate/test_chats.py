"""Chats and pairs as evaluations: losses of the answers, and metrics of the model's own answers."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.evaluated_models import quiet, subject_of
from support.tiny_data import chats as plain_chats
from support.tiny_data import make_tokenizer
from support.tiny_trainers import tiny_model
from torch.nn import functional as F

from ttrain.config.evaluate import ChatsTask, PairsTask
from ttrain.data.chat import encode_chat
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.evaluate import chats
from ttrain.evaluate.items import SuiteFiles
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference.loading import LoadedModel

NO_SYSTEM_TURN = (
    "{% for turn in messages %}"
    "{% if turn['role'] == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
    "{{ '### ' + turn['role'] + ': ' + turn['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### assistant: ' }}{% endif %}"
)
CHINESE = {"prompt": [{"role": "user", "content": "你好"}], "chosen": "你好！", "rejected": "走开"}
PAIRS: list[dict[str, Any]] = [
    {"prompt": "How many?", "chosen": "one", "rejected": "two or three", "lang": "en"},
    {**CHINESE, "lang": "zh"},
    {"prompt": "Equal?", "chosen": "yes", "rejected": "yes"},
    {"prompt": "Rated?", "completion": "yes", "label": True},
]


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Any:
    return tiny_model(vocab=len(encoder), init_std=0.5).eval()


def turns(*contents: str, system: str = "") -> Messages:
    roles = ("user", "assistant") * len(contents)
    messages = [Message(role, text) for role, text in zip(roles, contents, strict=False)]
    return (*([Message("system", system)] if system else []), *messages)


def write(directory: Path, rows: Sequence[dict[str, Any]]) -> SuiteFiles:
    (directory / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SuiteFiles(directory)


def evaluated(
    chats_: Sequence[Messages], directory: Path, subject: LoadedModel, **settings: Any
) -> TaskResult:
    rows = [{"messages": [vars(turn) for turn in messages]} for messages in chats_]
    spec = ChatsTask(file="rows.jsonl", **settings)
    return chats.run(chats.read("talk", spec, write(directory, rows)), subject, quiet)


def nats_of(model: Any, encoder: Encoder, messages: Messages) -> torch.Tensor:
    """By hand: the cost of each token of the answers and of their ends."""
    ids, live = encode_chat(encoder, messages)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].double()
    losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return losses[torch.tensor(live[1:])]


def test_special_tokens_and_the_turns_of_others_are_markers(encoder: Encoder) -> None:
    user = encoder.special("<|user|>")
    (hello,) = encoder.encode(["Hello"])
    outside = len(encoder)  # of the vocabulary
    markers = chats.find_markers(encoder, [*hello, user, outside], "Hello")
    assert markers == [f"token {user}", f"token {outside}"]
    spelt = chats.find_markers(encoder, [], "Yes.<|im_end|>\n### Human: and?\n用户：再见\n[INST]")
    assert spelt == ["<|im_end|>", "### Human:", "用户：", "[INST]"]
    prose = "A user: somebody. The assistant said: if a < b | c > d"
    assert chats.find_markers(encoder, [], prose) == []


def test_the_loss_is_that_of_answers_and_ends(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    rows = plain_chats(5)
    result = evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=0, row_length=128)
    loss = float(torch.cat([nats_of(model, encoder, messages) for messages in rows]).mean())
    values = {metric.name: metric.value for metric in result.figures}
    expected = {"loss": loss, "perplexity": math.exp(loss)}
    assert values == pytest.approx(expected, rel=1e-6)


def test_metrics_of_answers(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    long = turns("A question that is long", "An answer", "And what more do you think?", "No more")
    rows = [long, turns("Who is it?", "Me"), turns("Hm?", "Yes")]
    texts = ["Nothing", "well well", "one two three four one two three four", ""]
    answers = encoder.encode(texts)
    answers[1] = [*answers[1], encoder.special("<|user|>")]
    answered = iter([*zip(answers, [True, True, False, True], strict=True)] * 2)
    subject = subject_of(
        model, encoder, said=lambda prompts, count: [next(answered) for _ in prompts]
    )
    result = evaluated(rows, tmp_path, subject, new_tokens=40)
    metrics = {metric.name: metric for metric in result.figures}
    expected = {"ended": 3 / 4, "clean": 3 / 4, "empty": 1 / 4, "repeated": 1 / 5}
    expected["length"] = sum(map(len, texts)) / 4
    assert {name: metrics[name].value for name in expected} == expected
    assert metrics["ended"].sizes == (2, 1, 1)
    references = [(turn["turn"], turn["reference"]) for turn in result.rows[0]["answers"]]
    assert references == [(1, "An answer"), (3, "No more")]
    limited = evaluated(rows, tmp_path, subject, new_tokens=40, answers=1)
    assert [[turn["turn"] for turn in row["answers"]] for row in limited.rows] == [[3], [1], [1]]
    assert limited.items.digests == result.items.digests


def test_chats_that_a_template_refuses_are_reported_and_stop_nothing(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer(tmp_path / "named")
    (tmp_path / "named" / "chat_template.jinja").write_text(NO_SYSTEM_TURN)
    subject = subject_of(model, Encoder(tmp_path / "named"))
    rows = [turns("Hi", "Hello", system="Be kind."), turns("Hi", "Hello")]
    result = evaluated(rows, tmp_path, subject, new_tokens=3)
    assert "talk: 1 of 2" in caplog.text
    refused, scored = result.rows
    assert "no system turn here" in refused["refused"]
    assert (refused["answers"], len(scored["answers"])) == ([], 1)
    assert all(metric.sizes[0] == 0 for metric in result.figures)


def test_the_margin_of_a_pair(encoder: Encoder, model: Any, tmp_path: Path) -> None:
    spec = PairsTask(file="rows.jsonl", by=("lang",))
    items = chats.read_pairs("mine", spec, write(tmp_path, PAIRS))
    result = chats.run_pairs(items, subject_of(model, encoder), quiet)
    margins = [
        float(
            nats_of(model, encoder, (*pair.prompt, *pair.rejected)).sum()
            - nats_of(model, encoder, (*pair.prompt, *pair.chosen)).sum()
        )
        for pair in items.items
    ]
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
