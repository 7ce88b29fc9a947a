"""Chats as an evaluation: loss on the answers, and what answers look like, which these tests put into a model's mouth."""

import json
import logging
from collections.abc import Sequence
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
from ttrain.data.chat import encode_chat, prompt_ids
from ttrain.data.chat_templates import Message, Messages
from ttrain.data.encoder import Encoder
from ttrain.evaluate import chats
from ttrain.evaluate.items import SuiteFiles
from ttrain.evaluate.task_result import TaskResult
from ttrain.inference.loading import LoadedModel

# Names in plain text, a special token at the end of each turn, and no system turn.
NAMED = (
    "{% for turn in messages %}{% if turn['role'] == 'system' %}{{ raise_exception('no system turn here') }}{% endif %}"
    "{{ '### ' + ('Human' if turn['role'] == 'user' else 'Assistant') + ': ' + turn['content'] + '<|end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant: ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def model(encoder: Encoder) -> Any:
    return tiny_model(vocab=len(encoder))


def turns(*contents: str, system: str = "") -> Messages:
    roles = [
        Message("user" if number % 2 == 0 else "assistant", text)
        for number, text in enumerate(contents)
    ]
    return (*([Message("system", system)] if system else []), *roles)


def saying(
    encoder: Encoder, model: Any, said: Sequence[tuple[Sequence[int], bool]], **changes: Any
) -> LoadedModel:
    waiting = iter(said)
    return subject_of(
        model, encoder, said=lambda prompts, count: [next(waiting) for _ in prompts], **changes
    )


def evaluated(
    rows: Sequence[Messages], directory: Path, subject: LoadedModel, **settings: Any
) -> TaskResult:
    lines = [json.dumps({"messages": [vars(turn) for turn in messages]}) for messages in rows]
    (directory / "chats.jsonl").write_text("\n".join(lines))
    spec = ChatsTask(file="chats.jsonl", **settings)
    return chats.run(
        chats.read("talk", spec, SuiteFiles(directory)), subject, lambda done, total: None
    )


def values(outcome: TaskResult) -> dict[str, float]:
    return {figure.name: figure.value for figure in outcome.figures}


def test_special_tokens_and_the_turns_of_others_are_markers(encoder: Encoder) -> None:
    user = encoder.special("<|user|>")
    assert chats.find_markers(encoder, [*encoder.encode(["Hello"])[0], user], "Hello") == [
        f"token {user}"
    ]
    assert chats.find_markers(encoder, [len(encoder)], "") == [f"token {len(encoder)}"], (
        "of no vocabulary"
    )
    found = chats.find_markers(encoder, [], "Yes.<|im_end|>\n### Human: and?\n用户：再见\n[INST]")
    assert found == ["<|im_end|>", "### Human:", "用户：", "[INST]"]
    assert (
        chats.find_markers(encoder, [], "A user: somebody. The assistant said: if a < b | c > d")
        == []
    )


def test_the_loss_is_that_of_the_answers_and_of_the_tokens_that_end_them(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    rows = plain_chats(5)
    found = values(
        evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=0, row_length=128)
    )
    nats, tokens = 0.0, 0
    for messages in rows:
        ids, live = encode_chat(encoder, messages)
        logits = model(input_ids=torch.tensor([ids])).logits[0, :-1].detach()
        each = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")[
            torch.tensor(live[1:])
        ]
        nats, tokens = nats + float(each.double().sum()), tokens + len(each)
    assert found == {
        "loss": pytest.approx(nats / tokens, rel=1e-6),
        "perplexity": pytest.approx(2.71828 ** found["loss"], rel=1e-4),
    }


def test_figures_of_answers_are_counted_by_hand(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    long = turns(
        "A question that is long",
        "An answer",
        "And what is there more to say, do you think?",
        "Nothing more",
    )
    rows = [long, turns("Who is it, then?", "Me"), turns("Hm?", "Yes")]
    texts = [
        ("Nothing", True),
        ("well well", True),
        ("one two three four one two three four", False),
        ("", True),
    ]
    said = [(encoder.encode([text])[0], ended) for text, ended in texts]
    said[1] = ([*said[1][0], encoder.special("<|user|>")], True)
    outcome = evaluated(rows, tmp_path, saying(encoder, model, said), new_tokens=40)
    found = values(outcome)
    assert found["ended"] == 3 / 4 and found["clean"] == 3 / 4 and found["empty"] == 1 / 4
    assert found["repeated"] == 1 / 5
    assert found["length"] == sum(len(text) for text, _ in texts) / 4
    first = outcome.rows[0]["answers"]
    assert [(turn["turn"], turn["reference"]) for turn in first] == [
        (1, "An answer"),
        (3, "Nothing more"),
    ]
    (ended,) = (figure for figure in outcome.figures if figure.name == "ended")
    assert first[1]["answer"] == "Nothing" and ended.sizes[0] == 2
    once = evaluated(rows, tmp_path, saying(encoder, model, said), new_tokens=40, answers=1)
    assert [len(row["answers"]) for row in once.rows] == [1, 1, 1] and once.rows[0]["answers"][0][
        "turn"
    ] == 3
    assert once.items.digests == outcome.items.digests, (
        "how many answers are asked for makes no other items"
    )


def test_a_short_context_gets_the_end_of_what_was_said(
    encoder: Encoder, model: Any, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def generate(prompts: Sequence[Sequence[int]], count: int) -> list[tuple[list[int], bool]]:
        asked.extend((list(prompt), count) for prompt in prompts)
        return [([], True) for _ in prompts]

    rows = [turns("word " * 30, "Yes"), turns("Hi", "Yes")]
    outcome = evaluated(
        rows, tmp_path, subject_of(model, encoder, max_length=24, said=generate), new_tokens=50
    )
    whole = prompt_ids(encoder, rows[0][:1])
    assert (whole[-12:], 12) in asked and len(outcome.rows[0]["answers"]) == 1


def test_chats_that_a_template_refuses_are_told_and_stop_nothing(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_tokenizer(tmp_path / "named")
    (tmp_path / "named" / "chat_template.jinja").write_text(NAMED)
    encoder = Encoder(tmp_path / "named")
    rows = [turns("Hi", "Hello", system="Be kind."), turns("Hi", "Hello")]
    with caplog.at_level(logging.WARNING, "ttrain"):
        outcome = evaluated(rows, tmp_path, subject_of(model, encoder), new_tokens=3)
    assert (
        "talk: 1 of 2 chats are not scored" in caplog.text and "no system turn here" in caplog.text
    )
    assert "no system turn here" in outcome.rows[0]["refused"] and outcome.rows[0]["answers"] == []
    assert (
        all(figure.sizes[0] == 0 for figure in outcome.figures)
        and len(outcome.rows[1]["answers"]) == 1
    )
