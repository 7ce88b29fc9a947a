"""Read YAML that people write.

What is read is YAML 1.1 as PyYAML's safe loader has it, but: a key that is given twice is an error; `on` is a key like any;
22:30 is a time and not the number 1350.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from ttrain.core import redact
from ttrain.core.text import truncated

MESSAGE_CHARACTERS = 300
VALUE_CHARACTERS = 80
TAG = "tag:yaml.org,2002:"
BOOLEAN = f"{TAG}bool"
SAFE: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class InvalidYaml(ValueError):
    """What is wrong and where, in one line: "line 2, column 5: 'lr' is given twice"."""


def read(path: Path) -> Any:
    """The value in a file. Raises OSError where it cannot be read, InvalidYaml for what is in it."""
    data = path.read_bytes()
    try:
        return parse(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidYaml(f"line {data.count(10, 0, error.start) + 1}: it is not UTF-8") from None


def parse(text: str) -> Any:
    """The value of a YAML text; None for an empty one. Raises InvalidYaml."""
    return _loaded(text, yaml.load)


def compose(text: str) -> Any:
    """The nodes of a YAML text, whose scalars are texts still. Raises InvalidYaml."""
    return _loaded(text, yaml.compose)


def _loaded(text: str, load: Callable[[str, Any], Any]) -> Any:
    try:
        return load(text, Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        location = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = error.problem or error.context
        if mark and "\t" in "".join(re.split(r"\r\n|[\r\n\x85\u2028\u2029]", text)[mark.line :][:1])[: mark.column + 1]:
            problem = "the line is indented with a tab, which YAML does not allow; indent it with spaces"
        raise InvalidYaml(one_line(f"{location}{problem}")) from None
    except yaml.reader.ReaderError as error:  # the only other one
        line = text.encode("utf-8", "replace").count(b"\n", 0, error.position) + 1
        raise InvalidYaml(f"line {line}: a character that YAML does not allow: {error.reason}") from None
    except UnicodeEncodeError:  # half a character, of the command line
        raise InvalidYaml("it is not UTF-8") from None


def shown(value: object) -> str:
    """A value in a message: as Python writes it, lists as a file has them, without the secrets of URLs, and shortened."""
    whole = repr([*value] if isinstance(value, tuple) else value)
    text = redact.text(whole[: 16 * VALUE_CHARACTERS])  # before it is cut: a URL ends in what makes it one with a user
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}... ({len(whole):,} characters)"


def one_line(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """A message without line breaks, and shortened."""
    text = " ".join(text[: 4 * most].split())
    return truncated(text, most)


class Loader(SAFE):  # type: ignore[misc]
    """A YAML loader that says what is wrong in a person's words."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise ConstructorError(problem=f"{shown(key.value)} is given twice", problem_mark=key.start_mark)
                names.add(key.value)
            if key.tag == BOOLEAN:  # to YAML 1.1 `on` means true, and `notify.on` is a setting
                key.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError:  # what Python's own conversions raise
            kind = {"int": "an integer", "timestamp": "a date"}.get(node.tag.removeprefix(TAG), "a value of its type")
            problem = f"{shown(node.value)} looks like {kind} but is not one; put text between quotes"
            raise ConstructorError(problem=problem, problem_mark=node.start_mark) from None

    def construct_yaml_int(self, node: Any) -> Any:
        return node.value if ":" in node.value else super().construct_yaml_int(node)


Loader.add_constructor(f"{TAG}int", Loader.construct_yaml_int)
