"""What a text on the command line or in a variable means: the type of its setting decides, not the text's look.

A text setting takes it whole: `run #3`, `*.jsonl`, `2026-11-28`, `0123`, `no`. Quotes of its own around the whole text,
as YAML has them, are removed. Lists and mappings are written as in YAML: `[a, b]`, `{path: a, weight: 2}`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from ttrain.config import yaml_text
from ttrain.config.yaml_text import InvalidYaml, Loader

QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
NUMBER = re.compile(r"[-+]?\.?(\d|inf$|nan$)")
EMPTY = ("", "~", "null")
TRUTHS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}


class WordLoader(Loader):
    """Reads lists and mappings whose scalars stay texts."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


def type_of(root: Any, key: str) -> Any:
    """The type of a setting by its dotted name in a tree of settings; Any where there is none of that name."""
    kind = root
    for name in key.split("."):
        kind = _type_within(kind, name)
    return kind


def takes_numbers(root: Any, key: str) -> bool:
    """Whether the values of a setting are numbers, and none is true or false."""
    forms = {*_forms(type_of(root, key))}
    return not forms.isdisjoint({int, float}) and bool not in forms


def read(text: str, kind: Any) -> Any:
    """The value of a text for a setting of this type. Raises InvalidYaml for a wrong list or mapping.

    What does not fit the type stays a text, which the validation then refuses by its rule. Where any type fits, as in
    `model.fields`, it is what YAML reads, if that is all of the text.
    """
    forms = [*_forms(kind)]
    if QUOTED.fullmatch(text):
        return yaml_text.parse(text)
    if Any in forms:
        return _whole(text, Loader)
    has_parts = any(get_origin(form) in (list, tuple, dict) or _is_section(form) for form in forms)
    if text.startswith(("[", "{")) and (has_parts or not _takes_text(forms)):
        return _typed(_whole(text, WordLoader), kind)
    return _scalar(text, forms)


def _whole(text: str, loader: Any) -> Any:
    """The value of a YAML text. Raises InvalidYaml where something follows it, such as a comment."""
    value = yaml_text.parse(text, loader)
    node = yaml.compose(text, yaml.SafeLoader)
    if rest := text[node.end_mark.index :].strip() if node else "":
        raise InvalidYaml(f"nothing may follow its end, but {yaml_text.shown(rest)} does")
    return value


def _typed(value: Any, kind: Any) -> Any:
    """A list or mapping of texts with the values that these have."""
    if isinstance(value, list):
        return [_typed(entry, _type_within(kind, place)) for place, entry in enumerate(value)]
    if isinstance(value, dict):
        return {name: _typed(entry, _type_within(kind, name)) for name, entry in value.items()}
    return _scalar(value, [*_forms(kind)])


def _scalar(text: str, forms: list[Any]) -> Any:
    if any(get_origin(form) is Literal and text in get_args(form) for form in forms):
        return text
    word = text.strip().lower()
    if (word in EMPTY and not _takes_text(forms)) or (NoneType in forms and word in (*EMPTY, "none")):
        return None
    takes_number = not {Any, int, float}.isdisjoint(forms)
    if takes_number and NUMBER.match(word):
        for number in (int, float):
            with contextlib.suppress(ValueError):
                return number(word.replace(".inf", "inf").replace(".nan", "nan"))
    if word in TRUTHS and (bool in forms or (takes_number and not _takes_text(forms))):
        return TRUTHS[word]
    return text


def _forms(kind: Any) -> Iterator[Any]:
    """The types that a setting's type is a union of, without their rules."""
    if get_origin(kind) is Annotated:
        yield from _forms(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for form in get_args(kind):
            yield from _forms(form)
    else:
        yield kind


def _takes_text(forms: list[Any]) -> bool:
    return str in forms or Path in forms


def _is_section(form: Any) -> bool:
    return inspect.isclass(form) and issubclass(form, BaseModel)


def _type_within(kind: Any, place: Any) -> Any:
    """The type of an entry of a list, by its number, or of what a section or mapping has under a name."""
    for form in _forms(kind):
        types = get_args(form)
        if get_origin(form) in (list, tuple):
            return types[place] if Ellipsis not in types and place < len(types) else types[0]
        if get_origin(form) is dict:
            return types[1]
        if _is_section(form) and place in form.model_fields:
            return form.model_fields[place].rebuild_annotation()
    return Any
