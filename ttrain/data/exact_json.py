"""JSON whose numbers stay as they are written: 98765432109876543210 is no double, and 1.10 is not 1.1.

orjson reads whole numbers beyond 64 bits as doubles: an order number was trained on as 9.876543210987654e+19.
"""

from __future__ import annotations

import json
from typing import Any

import orjson

MOST_DIGITS = 18  # of a whole number that certainly fits 64 bits


class Number(float):
    """A number that neither int nor float writes again as it was written; `text` is how it was."""

    text: str

    def __str__(self) -> str:
        return self.text


def parse(data: str | bytes) -> Any:
    """Parse JSON. Raises orjson.JSONDecodeError, and RecursionError for deep nesting."""
    orjson.loads(data)  # it decides what is JSON: no NaN, no number beyond a double
    return _decode(data)


def parse_row(data: str | bytes, value: Any) -> Any:
    """A row without keys that are null, numbers as they are written; `value` is what orjson read.

    It is parsed a second time only where it may have a number that changes: of 5.7 kB of functions,
    looking for one takes 16 us, and parsing 50.
    """
    if drop_null_keys(value):
        value = _decode(data)
        drop_null_keys(value)
    return value


def drop_null_keys(value: Any) -> bool:
    """Remove keys that are null, at any depth: structs of parquet have the keys of all rows.

    Returns whether a number may have been written otherwise: a double, or 0, which may be -0.
    """
    nulls = []
    may_change = False
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, element in items:
        kind = type(element)
        if kind is str:
            continue
        if kind is dict or kind is list:
            may_change |= drop_null_keys(element)
        elif element is None:
            nulls.append(key)
        elif kind is float or (kind is int and not element):
            may_change = True
    if nulls and type(value) is dict:
        for key in nulls:
            del value[key]
    return may_change


def as_json(value: object) -> orjson.Fragment:
    """The `default` of `orjson.dumps` for what `parse` returns."""
    if isinstance(value, Number):
        return orjson.Fragment(value.text)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _whole(text: str) -> int | Number:
    return int(text) if len(text) <= MOST_DIGITS and text != "-0" else _number(text)


def _fraction(text: str) -> float:
    value = float(text)
    return value if repr(value) == text else _number(text)


def _number(text: str) -> Number:
    number = Number(text)
    number.text = text
    return number


_DECODER = json.JSONDecoder(parse_int=_whole, parse_float=_fraction)


def _decode(data: str | bytes) -> Any:
    return _DECODER.decode(data if isinstance(data, str) else data.decode("utf-8"))
