"""docs/evaluation.md: its suite is one, its settings and options exist, its defaults are the code's."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest
import yaml

from ttrain.cli import evaluate
from ttrain.config import evaluate as suite
from ttrain.config.loading import load
from ttrain.config.runtime import Runtime
from ttrain.evaluate import suites

PAGE = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE))
KINDS_OF_SECTIONS = {
    "Text": suite.TextTask, "Chats": suite.ChatsTask, "Choices": suite.ChoicesTask,
    "Answers in its own words": suite.GenerationTask,
}  # fmt: skip


def commands(beginning: str) -> list[list[str]]:
    found = re.findall(rf"^(?:\$ )?({beginning}.*?)\s*(?:#.*)?$", PAGE, re.MULTILINE)
    assert found, beginning
    return [shlex.split(command) for command in found]


def test_the_suites_on_the_page_are_suites_and_the_table_has_every_kind() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert [suites.checked(yaml.safe_load(block), "the page").allow_code for block in blocks] == [False, True]
    assert re.findall(r"^\| \[`(\w+)`\]", PAGE, re.MULTILINE) == list(suite.KINDS)


def test_every_option_of_eval_on_the_page_is_one() -> None:
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(evaluate.evaluate).parameters} | {"--json"}
    table = "".join(line for line in PAGE.splitlines(keepends=True) if line.startswith("- `--"))
    named = {word for command in commands("ttrain eval ") for word in command if word.startswith("--")}
    named |= set(re.findall(r"--[a-z][a-z-]+", table))
    assert named <= known and {"--suite", "--track", "--last-word"} <= named


def test_every_setting_of_a_pipeline_on_the_page_is_one() -> None:
    given = [word for command in commands("ttrain pipeline run full") for word in command if "=" in word]
    given += re.findall(r"`((?:evaluate|shards|runtime|promotion)\.[\w.]+=[^`]+)`", PAGE)
    assert len(given) >= 6
    for setting in given:
        load([setting], environment={})


@pytest.mark.parametrize("section", KINDS_OF_SECTIONS)
def test_the_defaults_on_the_page_are_those_of_the_code(section: str) -> None:
    fields = KINDS_OF_SECTIONS[section].model_fields
    told = re.findall(r"`(\w+): (\d+|\"[^`]*\")`", SECTIONS[section])
    first = {name: value for name, value in reversed(told) if name != "shots"}  # later ones, and shots, are examples
    assert first
    for name, value in first.items():
        assert fields[name].default == yaml.safe_load(value), name


def test_the_default_of_the_small_suite_is_the_page_s() -> None:
    assert f"`runtime.eval_limit={Runtime().eval_limit}`" in PAGE
