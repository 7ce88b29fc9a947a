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
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel

from ttrain.config import yaml_text
from ttrain.config.yaml_text import InvalidYaml

QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
EMPTY = ("", "~", "null")
TRUTHS = {
    **dict.fromkeys(("true", "yes", "on"), True),
    **dict.fromkeys(("false", "no", "off"), False),
}
LISTS = (list, tuple)


def type_of(root: Any, key: str) -> Any:
    """The type of a setting by its dotted name in a tree of settings; Any where there is none of that name."""
    kind = root
    for name in key.split("."):
        kind = _value_type(kind, name)
    return kind


def read(text: str, kind: Any) -> Any:
    """The value of a text for a setting of this type. Raises InvalidYaml for a wrong list or mapping.

    What does not fit the type stays a text, which the validation then refuses by its rule. Where any type fits, as in
    `model.fields`, it is what YAML reads, if that is all of the text.
    """
    forms = [*_forms(kind)]
    has_parts = any(get_origin(form) in (*LISTS, dict) or _is_section(form) for form in forms)
    if QUOTED.fullmatch(text):
        return yaml_text.parse(text)
    if Any in forms:
        _composed(text)
        return yaml_text.parse(text)
    if text.startswith(("[", "{")) and (has_parts or not _takes_text(forms)):
        return _value(_composed(text), kind)
    return _scalar(text, forms)


def _composed(text: str) -> Any:
    """The nodes of a text. Raises InvalidYaml where something follows them, such as a comment."""
    node = yaml_text.compose(text)
    end = 0 if node is None else node.end_mark.index
    if rest := text[end:].strip():
        raise InvalidYaml(f"nothing may follow its end, but {yaml_text.shown(rest)} does")
    return node


def _value(node: Any, kind: Any) -> Any:
    """The value of a part of a list or mapping."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(child, _element_type(kind, place)) for place, child in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return {key.value: _value(child, _value_type(kind, key.value)) for key, child in node.value}
    return node.value if node.style else _scalar(node.value, [*_forms(kind)])


def _scalar(text: str, forms: list[Any]) -> Any:
    word = text.strip().lower()
    if any(get_origin(form) is Literal and text in get_args(form) for form in forms):
        return text
    if (word in EMPTY and not _takes_text(forms)) or (NoneType in forms and word in (*EMPTY, "none")):
        return None
    takes_number = not {Any, int, float}.isdisjoint(forms)
    if takes_number and (number := _number(word)) is not None:
        return number
    if word in TRUTHS and (bool in forms or (takes_number and not _takes_text(forms))):
        return TRUTHS[word]
    return text


def _number(word: str) -> int | float | None:
    """The number that begins with a digit, a sign or a point; None for anything else."""
    if not re.match(r"[-+]?\.?(\d|inf$|nan$)", word):
        return None
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError):
        return float(word.replace(".inf", "inf").replace(".nan", "nan"))
    return None


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


def _element_type(kind: Any, place: int) -> Any:
    for form in _forms(kind):
        if get_origin(form) in LISTS:
            types = get_args(form)
            return types[place] if place < len(types) and types[-1] is not Ellipsis else types[0]
    return Any


def _value_type(kind: Any, name: Any) -> Any:
    """The type of what a section or mapping has under this name, with the rule that reads it."""
    for form in _forms(kind):
        if _is_section(form) and name in form.model_fields:
            return form.model_fields[name].rebuild_annotation()
        if get_origin(form) is dict:
            return get_args(form)[1]
    return Any
