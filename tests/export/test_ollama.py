"""Ollama's Modelfile: its template writes the same text as the chat template."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ttrain.export.export import Request, export
from ttrain.export.ollama import Render, chat_format, renderer
from ttrain.lineage.lookup import resolve

CHATML = """{%- if messages[0].role != 'system' %}<|im_start|>system
You are kind.<|im_end|>
{% endif %}{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
CONVERSATIONS: tuple[list[dict[str, str]], ...] = (
    [{"role": "system", "content": 'Say "yes".\n'}, {"role": "user", "content": " 1+1? "}],
    [
        {"role": "user", "content": "你好"},
        {"role": "assistant", "content": "Hi\n\n"},
        {"role": "user", "content": "{{ .Content }}"},
    ],
    [{"role": "user", "content": "x"}],
)
ACTION = re.compile(r"\{\{-? (.*?) \}\}", re.DOTALL)


def write_go(template: str, turns: Sequence[Mapping[str, str]]) -> str:
    """What Go's text/template writes, of the actions that a Modelfile of ours has."""
    trimmed = re.sub(r"\s+(?=\{\{-)", "", template)
    actions = ACTION.findall(trimmed)
    assert "".join(ACTION.split(trimmed)[::2]) == "", "text between actions"
    start, end = actions.index("range .Messages"), len(actions) - 1 - actions[::-1].index("end")
    texts = []
    for turn in turns:
        is_taken = False
        for action in actions[start + 1 : end]:
            if test := re.fullmatch(r'(?:else )?if eq \.Role "(\w+)"', action):
                is_taken = test[1] == turn["role"]
            elif is_taken and action != "end":
                texts.append(turn["content"] if action == ".Content" else json.loads(action))
    return "".join([*texts, *map(json.loads, actions[end + 1 :])])


def by_jinja(source: str) -> Render:
    template = ImmutableSandboxedEnvironment().from_string(source)
    return lambda turns, prompt: template.render(messages=turns, add_generation_prompt=prompt)


@pytest.mark.usefixtures("use_trained_home")
def test_the_template_of_a_modelfile_writes_the_bytes_of_ours(tmp_path: Path) -> None:
    out = tmp_path / "out"
    export(resolve("sft"), out, Request(gguf="q8_0,f16"))
    text = (out / "Modelfile").read_text(encoding="utf-8")
    template = text.split('TEMPLATE """')[1].split('"""')[0]
    render = renderer(out)
    for turns in CONVERSATIONS:
        assert "<|bos|>" + write_go(template, turns) == render(turns, True)
    assert text.startswith("FROM ./out-q8_0.gguf\nPARAMETER num_ctx ")
    stops = re.findall(r"^PARAMETER stop (.*)$", text, re.MULTILINE)
    assert set(map(json.loads, stops)) == {"<|eos|>", "<|end|>"}


def test_a_system_text_of_the_template_is_kept() -> None:
    render = by_jinja(CHATML)
    chat = chat_format(render, "<|endoftext|>")
    assert chat
    assert chat.system == "You are kind."
    assert chat.begin == ""
    for turns in CONVERSATIONS:
        assert chat.render(turns) == render(turns, True)
    assert write_go(chat.go_template(), CONVERSATIONS[0]) == render(CONVERSATIONS[0], True)


@pytest.mark.parametrize(
    "source",
    [
        CHATML.replace("{{ m.content }}", "{{ m.content | trim }}"),  # contents are changed
        CHATML.replace("{{ m.role }}", "{{ loop.index }}"),  # turns are counted
        "{{ raise_exception('no system') }}",
    ],
)
def test_another_template_is_not_imitated(source: str) -> None:
    assert chat_format(by_jinja(source), "") is None
