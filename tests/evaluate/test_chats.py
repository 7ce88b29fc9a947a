"""Chats as an evaluation: loss on the answers, and metrics of answers that the tests prescribe."""

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

from ttrain.config.evaluate import ChatsTask
from ttrain.data.chat import encode_chat, prompt_ids
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


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Any:
    return tiny_model(vocab=len(encoder))


def turns(*contents: str, system: str = "") -> Messages:
    roles = ("user", "assistant") * len(contents)
    messages = [Message(role, text) for role, text in zip(roles, contents, strict=False)]
    return (*([Message("system", system)] if system else []), *messages)


def evaluated(
    rows: Sequence[Messages], directory: Path, subject: LoadedModel, **settings: Any
) -> TaskResult:
    lines = [json.dumps({"messages": [vars(turn) for turn in messages]}) for messages in rows]
    (directory / "chats.jsonl").write_text("\n".join(lines))
    spec = ChatsTask(file="chats.jsonl", **settings)
    return chats.run(chats.read("talk", spec, SuiteFiles(directory)), subject, quiet)


def values(result: TaskResult) -> dict[str, float]:
    return {metric.name: metric.value for metric in result.figures}


def test_special_tokens_and_the_turns_of_others_are_markers(encoder: Encoder) -> None:
    user = encoder.special("<|user|>")
    (hello,) = encoder.encode(["Hello"])
    assert chats.find_markers(encoder, [*hello, user], "Hello") == [f"token {user}"]
    outside = len(encoder)  # of the vocabulary
    assert chats.find_markers(encoder, [outside], "") == [f"token {outside}"]
    spelt = chats.find_markers(encoder, [], "Yes.<|im_end|>\n### Human: and?\n用户：再见\n[INST]")
    assert spelt == ["<|im_end|>", "### Human:", "用户：", "[INST]"]
    prose = "A user: somebody. The assistant said: if a < b | c > d"
    assert chats.find_markers(encoder, [], prose) == []


def test_the_loss_is_that_of_the_answers_and_of_the_tokens_that_end_them(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    rows = plain_chats(5)
    result = evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=0, row_length=128)
    nats = torch.tensor([])
    for messages in rows:
        ids, live = encode_chat(encoder, messages)
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].detach()
        losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        nats = torch.cat([nats, losses[torch.tensor(live[1:])]])
    loss = float(nats.double().mean())
    perplexity = pytest.approx(math.exp(loss), rel=1e-4)
    assert values(result) == {"loss": pytest.approx(loss, rel=1e-6), "perplexity": perplexity}


def test_metrics_of_answers_are_counted_by_hand(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    long = turns("A question that is long", "An answer", "And what more do you think?", "No more")
    rows = [long, turns("Who is it?", "Me"), turns("Hm?", "Yes")]
    texts = ["Nothing", "well well", "one two three four one two three four", ""]
    answers = encoder.encode(texts)
    answers[1] = [*answers[1], encoder.special("<|user|>")]

    def result_of(**settings: Any) -> TaskResult:
        answered = iter(zip(answers, [True, True, False, True], strict=True))
        subject = subject_of(
            model, encoder, said=lambda prompts, count: [next(answered) for _ in prompts]
        )
        return evaluated(rows, tmp_path, subject, new_tokens=40, **settings)

    result = result_of()
    metrics = values(result)
    expected = {"ended": 3 / 4, "clean": 3 / 4, "empty": 1 / 4, "repeated": 1 / 5}
    expected["length"] = sum(map(len, texts)) / 4
    assert {name: metrics[name] for name in expected} == expected
    first = result.rows[0]["answers"]
    references = [(turn["turn"], turn["reference"]) for turn in first]
    assert references == [(1, "An answer"), (3, "No more")]
    (ended,) = (metric for metric in result.figures if metric.name == "ended")
    assert ended.sizes == (2, 1, 1)
    limited = result_of(answers=1)
    assert [[turn["turn"] for turn in row["answers"]] for row in limited.rows] == [[3], [1], [1]]
    assert limited.items.digests == result.items.digests


def test_a_short_context_gets_the_end_of_the_preceding_turns(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    calls: list[Any] = []

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        calls.extend((list(prompt), count) for prompt in prompts)
        return [([], True) for _ in prompts]

    chat = turns("word " * 30, "Yes")
    subject = subject_of(model, encoder, max_length=24, said=generate)
    evaluated([chat], tmp_path, subject, new_tokens=50)
    assert calls == [(prompt_ids(encoder, chat[:1])[-12:], 12)]


def test_chats_that_a_template_refuses_are_reported_and_stop_nothing(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer(tmp_path / "named")
    (tmp_path / "named" / "chat_template.jinja").write_text(NO_SYSTEM_TURN)
    encoder = Encoder(tmp_path / "named")
    rows = [turns("Hi", "Hello", system="Be kind."), turns("Hi", "Hello")]
    result = evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=3)
    assert "talk: 1 of 2" in caplog.text
    refused, scored = result.rows
    assert "no system turn here" in refused["refused"]
    assert (refused["answers"], len(scored["answers"])) == ([], 1)
    assert all(metric.sizes[0] == 0 for metric in result.figures)
