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
    return exact(orjson.loads(data), data)


def exact(value: Any, data: str | bytes) -> Any:
    """The object or list that orjson has read from `data`, with numbers as they are written there.

    orjson decides what is JSON: no NaN, no number beyond a double. Rows of functions are parsed a second time only where
    they may have a number that changes: of 5.7 kB, looking for one takes 16 us, and parsing 50.
    """
    if not _may_change([value]):
        return value
    return _DECODER.decode(data if isinstance(data, str) else data.decode("utf-8"))


def _may_change(values: Any) -> bool:
    """Whether one of the values, or within them, may have been written otherwise: a double, or 0, which may be -0."""
    for value in values:
        kind = type(value)
        if kind is dict or kind is list:
            if _may_change(value.values() if kind is dict else value):
                return True
        elif kind is float or (kind is int and not value):
            return True
    return False


def without_null_keys(value: Any) -> Any:
    """The same without keys that are null: a struct of parquet has the keys of all rows."""
    if isinstance(value, dict):
        items = value.items()
        return {key: without_null_keys(element) for key, element in items if element is not None}
    return list(map(without_null_keys, value)) if isinstance(value, list) else value


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
