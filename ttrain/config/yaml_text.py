"""Read YAML that people write.

It is YAML 1.1, but `on` and `off` are words, 22:30 is a time, and a key that is given twice is an error.
"""

from __future__ import annotations

from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError

from ttrain.core import redact
from ttrain.core.text import truncated

MESSAGE_CHARACTERS = 300
VALUE_CHARACTERS = 80
SAFE: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
INTEGER, BOOLEAN = "tag:yaml.org,2002:int", "tag:yaml.org,2002:bool"


class InvalidYaml(ValueError):
    """What is wrong and where, in one line: "line 2, column 5: 'lr' is given twice"."""


class Loader(SAFE):  # type: ignore[misc]
    """PyYAML's safe loader with the differences of this module."""

    # Of the booleans those that begin with an o.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [each for each in resolvers if first not in "oO" or each[0] != BOOLEAN]
        for first, resolvers in SAFE.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise ConstructorError(problem=f"{shown(key.value)} is given twice", problem_mark=key.start_mark)
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        return node.value if ":" in node.value else super().construct_yaml_int(node)


Loader.add_constructor(INTEGER, Loader.construct_yaml_int)


def parse(text: str, loader: Any = Loader) -> Any:
    """The value of a YAML text; None for an empty one. Raises InvalidYaml."""
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, ValueError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        if mark and "\t" in "".join(text.splitlines()[mark.line : mark.line + 1]):
            problem = "the line is indented with a tab, which YAML does not allow; indent it with spaces"
        raise InvalidYaml(one_line(f"{place}{problem or error}")) from None


def shown(value: object) -> str:
    """A value in a message: as Python writes it, lists as a file has them, without the secrets of URLs, and shortened."""
    whole = repr([*value] if isinstance(value, tuple) else value)
    text = redact.text(whole[: 16 * VALUE_CHARACTERS])  # before it is cut: a URL ends in what makes it one with a user
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}... ({len(whole):,} characters)"


def one_line(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    """A message without line breaks, and shortened."""
    return truncated(" ".join(text[: 4 * most].split()), most)
