"""Read YAML that people write.

What is read is YAML 1.1 as PyYAML's safe loader has it, but: a key that is given twice is an error; `on` is a key like any;
22:30 is a time and not the number 1350; an integer has at most 64 bits; tags name plain types only.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer, ComposerError
from yaml.constructor import ConstructorError

from ttrain.core import redact
from ttrain.core.text import truncated

MOST_BYTES = 1 << 20  # of a file; 10,000 settings in 120 KB take 0.4 s
MOST_DEPTH = 50
MESSAGE_CHARACTERS = 300
VALUE_CHARACTERS = 80
TAG = "tag:yaml.org,2002:"
BOOLEAN = f"{TAG}bool"
PLAIN = frozenset({"!", *(TAG + name for name in ("str", "int", "float", "bool", "null", "seq", "map", "timestamp"))})
_PARSER: Any = (Composer, yaml.CSafeLoader) if yaml.__with_libyaml__ else (yaml.SafeLoader,)


class InvalidYaml(ValueError):
    """What is wrong and where, in one line: "line 2, column 5: 'lr' is given twice"."""


def read(path: Path) -> Any:
    """The value in a regular file. Raises OSError where it cannot be read, InvalidYaml for what is in it."""
    if not stat.S_ISREG(path.stat().st_mode):  # a pipe would wait for its writer, and /dev/zero never ends
        raise OSError(0, "it is not a regular file; write the settings into one")
    with path.open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise InvalidYaml(f"it is longer than {MOST_BYTES >> 20} MiB")
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
    if len(text) > MOST_BYTES:
        raise InvalidYaml(f"it is longer than {MOST_BYTES >> 20} MiB")
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


class Loader(*_PARSER):  # type: ignore[misc]
    """A YAML loader that says what is wrong in a person's words."""

    tags: frozenset[str] = PLAIN

    def __init__(self, text: str) -> None:
        _PARSER[-1].__init__(self, text)
        Composer.__init__(self)
        self._depth = 0
        self._ended: set[str] = set()  # anchors whose values are whole

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            if event.anchor in self.anchors and event.anchor not in self._ended:
                raise ComposerError(problem=f"the alias *{event.anchor} contains itself", problem_mark=mark)
            return super().compose_node(parent, index)
        if event.tag is not None and event.tag not in self.tags:
            raise ComposerError(problem=f"the tag {event.tag} is not a plain type; leave it out", problem_mark=mark)
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise ComposerError(problem=f"it is nested more than {MOST_DEPTH} deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._ended.add(event.anchor)
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        names = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in names:
                    raise ComposerError(problem=f"{shown(key.value)} is given twice", problem_mark=key.start_mark)
                names.add(key.value)
            if key.tag == BOOLEAN:  # to YAML 1.1 `on` means true, and `notify.on` is a setting
                key.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
        except (ValueError, OverflowError, LookupError, AttributeError):  # what PyYAML's own conversions raise
            kind = {"int": "integer", "timestamp": "date"}.get(node.tag.removeprefix(TAG), "value of its type")
            problem = f"{shown(node.value)} looks like a {kind} but is not one; put text between quotes"
            raise ConstructorError(problem=problem.replace(" a i", " an i"), problem_mark=node.start_mark) from None
        if isinstance(value, int) and value.bit_length() > 63:
            raise ConstructorError(
                problem=f"{shown(node.value)} has more than 64 bits; put text between quotes", problem_mark=node.start_mark
            )
        return value

    def construct_yaml_int(self, node: Any) -> Any:
        return node.value if ":" in node.value else super().construct_yaml_int(node)


Loader.add_constructor(f"{TAG}int", Loader.construct_yaml_int)
Loader.add_constructor(f"{TAG}value", Loader.construct_yaml_str)  # a lone =
