"""docs/evaluation.md: its suite is one, its settings and options exist, its defaults are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from ttrain.config import evaluate as suite
from ttrain.config.runtime import Runtime
from ttrain.evaluate import suites

PAGE = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
KINDS_OF_SECTIONS = {
    "Text": suite.TextTask, "Chats": suite.ChatsTask, "Choices": suite.ChoicesTask,
    "Answers in its own words": suite.GenerationTask,
}  # fmt: skip


def test_the_suites_on_the_page_are_suites_and_the_table_has_every_kind() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert [suites.checked(yaml.safe_load(block), "the page").allow_code for block in blocks] == [False, True]
    assert re.findall(r"^\| \[`(\w+)`\]", PAGE, re.MULTILINE) == list(suite.KINDS)


def test_the_defaults_on_the_page_are_those_of_the_code() -> None:
    for section, kind in KINDS_OF_SECTIONS.items():
        told = re.findall(r"`(\w+): (\d+|\"[^`]*\")`", SECTIONS[section])
        first = {name: value for name, value in reversed(told) if name != "shots"}  # later ones, and shots, are examples
        assert first
        for name, value in first.items():
            assert kind.model_fields[name].default == yaml.safe_load(value), name
    assert f"`runtime.eval_limit={Runtime().eval_limit}`" in PAGE
