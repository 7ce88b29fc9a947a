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
from pydantic import BaseModel, BeforeValidator

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
    if QUOTED.fullmatch(text):
        return yaml_text.parse(text)
    forms = [*_forms(kind)]
    has_parts = any(get_origin(form) in (*LISTS, dict) or _is_section(form) for form in forms)
    if Any in forms:
        _composed(text)
        return yaml_text.parse(text)
    if text.startswith(("[", "{")) and (has_parts or not _takes_text(forms)):
        return _value(_composed(text), kind)
    value = _scalar(text, forms)
    is_listed = value is not None and any(_is_plain_list(form) for form in forms)
    if is_listed and not _reads_itself(kind):
        return [_scalar(text, [*_forms(_element_type(kind, 0))])]
    return value


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
        if any(not isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise InvalidYaml("the names of a mapping must be texts")
        return {key.value: _value(child, _value_type(kind, key.value)) for key, child in node.value}
    return node.value if node.style else _scalar(node.value, [*_forms(kind)])


def _scalar(text: str, forms: list[Any]) -> Any:
    for form in forms:
        if get_origin(form) is Literal and text in get_args(form):
            return text
    word = text.strip().lower()
    if word in EMPTY and (NoneType in forms or not _takes_text(forms)):
        return None
    if word == "none" and NoneType in forms:
        return None
    takes_all = Any in forms
    takes_number = takes_all or int in forms or float in forms
    if takes_number and (number := _number(word)) is not None:
        return number
    if word in TRUTHS and (takes_all or bool in forms or (takes_number and not _takes_text(forms))):
        return TRUTHS[word]
    return text


def _number(word: str) -> int | float | None:
    """The number in decimal digits, which begins with a digit, a sign or a point; None for anything else."""
    if not re.match(r"[-+]?\.?(\d|inf$|nan$)", word):
        return None
    with contextlib.suppress(ValueError):
        whole = int(word)
        if whole.bit_length() <= 63:
            return whole
        return None  # which stays a text, and is refused as one
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


def _is_plain_list(form: Any) -> bool:
    """Whether it is a list of any length whose elements are not lists."""
    if get_origin(form) not in LISTS:
        return False
    element, *others = get_args(form)
    has_any_length = others in ([], [Ellipsis])
    return has_any_length and not any(get_origin(inner) in LISTS for inner in _forms(element))


def _reads_itself(kind: Any) -> bool:
    """Whether the setting's own rule makes a list of a text, such as of paths between commas."""
    return any(isinstance(rule, BeforeValidator) for rule in get_args(kind)[1:])


def _element_type(kind: Any, place: int) -> Any:
    for form in _forms(kind):
        if get_origin(form) in LISTS:
            types = get_args(form)
            return types[place] if place < len(types) and types[-1] is not Ellipsis else types[0]
    return Any


def _value_type(kind: Any, name: str) -> Any:
    """The type of what a section or mapping has under this name, with the rule that reads it."""
    for form in _forms(kind):
        if _is_section(form) and name in form.model_fields:
            return form.model_fields[name].rebuild_annotation()
        if get_origin(form) is dict:
            return get_args(form)[1]
    return Any
