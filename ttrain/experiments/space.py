"""Settings that vary: `1e-3,2e-3`, `log(1e-4,3e-3)`, `uniform(0,0.2)`, `choice(a,b,c)`."""

import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_origin

import numpy as np

from ttrain.config import Settings
from ttrain.config.base import takes_numbers, types_of
from ttrain.config.loading import Override, type_of
from ttrain.config.yaml_text import InvalidYaml, read_list
from ttrain.core import redact
from ttrain.core.text import is_number
from ttrain.errors import UsageError

DIGITS = 4  # of a drawn number: enough for any setting, and short enough to be typed again
Values = Mapping[str, Any]  # of the settings that vary, by name
FORMS = {
    "list": "a,b,...",
    "log": "log(low,high)",
    "uniform": "uniform(low,high)",
    "choice": "choice(a,b,...)",
}
RANGE = re.compile(rf"\s*({'|'.join(FORMS)})\s*\(")


@dataclass(frozen=True)
class Interval:
    """Any number from `low` to `high`, drawn evenly or, with `log`, evenly in its logarithm."""

    low: float
    high: float
    log: bool = False
    values: ClassVar[None] = None  # they cannot be counted

    def at(self, share: float) -> float:
        """The value at a share of the range, from 0 to 1."""
        evenly = self.low + (self.high - self.low) * share
        return self.value(self.low * (self.high / self.low) ** share if self.log else evenly)

    def value(self, drawn: float) -> float:
        """The value of a drawn number: rounded to DIGITS, within the ends."""
        return min(self.high, max(self.low, float(f"{drawn:.{DIGITS}g}")))


@dataclass(frozen=True)
class ValueList:
    """The values that are listed."""

    values: Sequence[Any]

    def at(self, share: float) -> Any:
        """The value at a share of the list, from 0 to 1."""
        return self.value(min(int(share * len(self.values)), len(self.values) - 1))

    def value(self, index: int) -> Any:
        """The value of a drawn index."""
        return self.values[index]


Dimension = Interval | ValueList


@dataclass(frozen=True)
class Space:
    """The settings that vary, in the given order, each with its values."""

    dimensions: Mapping[str, Dimension]

    @property
    def size(self) -> int | None:
        """How many combinations there are; None where a setting takes any number of an interval."""
        counts = [None if d.values is None else len(d.values) for d in self.dimensions.values()]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def combinations(self, count: int) -> list[Values]:
        """All combinations, the last setting varying fastest; of more than `count`, spread ones."""
        if self.size is None or self.size > count:
            return self.spread(count)
        values = (dimension.values or () for dimension in self.dimensions.values())
        return [
            dict(zip(self.dimensions, chosen, strict=True)) for chosen in itertools.product(*values)
        ]

    def spread(self, count: int) -> list[Values]:
        """`count` combinations that reach all parts of each range: a Latin hypercube's middles.

        Source: McKay, Beckman and Conover 1979, doi.org/10.1080/00401706.1979.10489755.
        """
        random = np.random.default_rng(1)
        columns = [
            map(dimension.at, ((random.permutation(count) + 0.5) / count).tolist())
            for dimension in self.dimensions.values()
        ]
        return [dict(zip(self.dimensions, row, strict=True)) for row in zip(*columns, strict=True)]


def parse_space(overrides: Sequence[Override]) -> Space:
    """The settings that vary among the overrides.

    A plain value in a stronger layer removes a weaker layer's range. Raises UsageError where a
    range cannot be read.
    """
    last = {item.key: item.value for item in overrides}
    texts = {key: value for key, value in last.items() if isinstance(value, str)}
    return Space({key: parse(key, text) for key, text in texts.items() if varies(key, text)})


def varies(key: str, text: str) -> bool:
    """Whether a text has several values: a range, or a comma where a setting takes one value."""
    kind = type_of(Settings, key)
    takes_one = takes_numbers(kind) or not {bool, Literal}.isdisjoint(
        {*types_of(kind), *map(get_origin, types_of(kind))}
    )
    return bool(RANGE.match(text)) or ("," in text and takes_one)


def assignment(key: str, value: Any) -> str:
    """`key=value` as the command line takes it."""
    return f"{key}={format_value(value)}"


def format_value(value: Any) -> str:
    """A value as the command line takes it, and as a table shows it."""
    if isinstance(value, str):
        return value
    short = f"{value:g}" if isinstance(value, float) else ""
    return short if short and float(short) == value else json.dumps(value, ensure_ascii=False)


def parse(key: str, text: str) -> Dimension:
    """The values that `text` names for a setting. Raises UsageError."""
    if (masked := redact.text(text)) != text:
        raise UsageError(
            f"{key} is '{masked}', but the values of a sweep are on record, and secrets of URLs "
            "must not be; put them where the library that opens the URL finds them, such as its "
            "environment variables"
        )
    kind, _, inside = (
        text.strip().removesuffix(")").partition("(") if RANGE.match(text) else ("list", "", text)
    )
    kind = kind.strip()
    has_ends = kind in ("log", "uniform")
    try:
        values = read_list(f"[{inside}]", float if has_ends else type_of(Settings, key))
    except InvalidYaml:
        raise UsageError(
            f"{key} is '{text}', whose values cannot be read; quote what has commas or brackets"
        ) from None
    if not has_ends:
        return ValueList(tuple(values))
    are_numbers = len(values) == 2 and all(
        is_number(value) and math.isfinite(value) for value in values
    )
    if not are_numbers or values[0] >= values[1] or (kind == "log" and values[0] <= 0):
        rule = "two numbers, the lower first" + (" and above 0" if kind == "log" else "")
        raise UsageError(f"{key} is '{text}' but must have {rule}; write {FORMS[kind]}")
    return Interval(values[0], values[1], log=kind == "log")
