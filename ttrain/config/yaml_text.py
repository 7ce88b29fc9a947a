"""Read values that people write: YAML files, texts on the command line and in variables.

Files are YAML 1.1, but `on` and `off` are words and duplicate keys are errors. The type of a
setting decides how its text is read: a text setting takes the text unchanged, such as `run #3` or
`no`. Lists and mappings are YAML.
"""

import contextlib
import re
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, get_origin

import yaml
from yaml.constructor import ConstructorError

from ttrain.config.base import types_of
from ttrain.core import redact
from ttrain.core.text import truncated

MESSAGE_CHARACTERS = 300
VALUE_CHARACTERS = 80
SAFE: Any = yaml.CSafeLoader
INTEGER = "tag:yaml.org,2002:int"
FLOAT = "tag:yaml.org,2002:float"
QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
WRITTEN_AS_NULL = ("", "~", "null", "none")


class InvalidYaml(ValueError):
    """Problem and place in one line: "line 2, column 5: 'lr' is given twice"."""


class Loader(SAFE):  # type: ignore[misc]
    """PyYAML's safe loader with the differences of this module."""

    # Drop the resolvers of `on` and `off`; no other resolver begins with "o".
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: resolvers
        for first, resolvers in SAFE.yaml_implicit_resolvers.items()
        if first not in ("o", "O")
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise ConstructorError(
                    problem=f"{shown(key.value)} is given twice", problem_mark=key.start_mark
                )
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> Any:
        try:
            return int(node.value)  # 010 is 10, and 22:30 a time
        except ValueError:
            return node.value


Loader.add_constructor(INTEGER, Loader.construct_yaml_int)


class WordLoader(Loader):
    """Reads lists whose scalars, but for plain numbers, stay texts for pydantic."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


WordLoader.add_implicit_resolver(INTEGER, re.compile(r"(0|-?[1-9][0-9]*)$"), [*"-0123456789"])
WordLoader.add_implicit_resolver(FLOAT, re.compile(r"-?[0-9]+\.[0-9]+$"), [*"-0123456789"])


def parse(text: str, loader: Any = Loader) -> Any:
    """The value of a YAML text; None for an empty one. Raises InvalidYaml."""
    try:
        return yaml.load(text, loader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidYaml(one_line(f"{place}{getattr(error, 'problem', None) or error}")) from None


def read(text: str, kind: Any) -> Any:
    """The value of a text for a setting of this type; validation follows.

    Raises InvalidYaml, but not for a text setting.
    """
    forms = types_of(kind)
    if QUOTED.fullmatch(text):
        return parse(text)
    has_entries = any(get_origin(form) in (list, tuple) for form in forms)
    if text.strip().lower() in WRITTEN_AS_NULL and (has_entries or NoneType in forms):
        return None
    if has_entries:  # one entry, or several between commas, may stand without brackets
        return _whole(text, WordLoader) if text.startswith(("[", "{")) else text
    if str in forms or Path in forms:
        return text
    for number in {int, float}.intersection(forms):
        with contextlib.suppress(ValueError):
            return number(text)  # YAML takes 3e-4 for a text, and 010 for 8
    return _whole(text)


def read_list(text: str, kind: Any) -> list[Any]:
    """The entries of a list in brackets, each read as this type. Raises InvalidYaml."""
    return [
        read(entry, kind) if isinstance(entry, str) else entry for entry in _whole(text, WordLoader)
    ]


def _whole(text: str, loader: Any = Loader) -> Any:
    value = parse(text, loader)
    node = yaml.compose(text, SAFE)
    if rest := text[node.end_mark.index :].strip() if node else "":
        raise InvalidYaml(f"nothing may follow its end, but {shown(rest)} does")
    return value


def shown(value: object) -> str:
    """A value for a message: shortened, without secrets of URLs."""
    whole = (
        str(value).lower()
        if isinstance(value, bool)
        else repr([*value] if isinstance(value, tuple) else value)
    )
    # Mask before cutting: the "@" that shows a user may be cut off.
    text = redact.text(whole[: 16 * VALUE_CHARACTERS])
    return (
        text
        if len(text) <= VALUE_CHARACTERS
        else f"{text[:VALUE_CHARACTERS]}... ({len(whole):,} characters)"
    )


def one_line(text: str, most: int = MESSAGE_CHARACTERS) -> str:
    return truncated(" ".join(text[: 4 * most].split()), most)


def configs_directory() -> Path:
    """The YAML files that ship with ttrain, in the wheel or the checkout."""
    package = Path(__file__).parents[1]
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"
