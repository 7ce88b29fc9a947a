"""Which settings a sweep varies, and over which values: `1e-3,2e-3`, `log(1e-4,3e-3)`, `uniform(0,0.2)`, `int(2,8)`,
`choice(a,b,c)`."""

import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_origin

import numpy as np

from ttrain.config import Settings
from ttrain.config.base import takes_numbers, types_of
from ttrain.config.loading import Override, type_of
from ttrain.config.yaml_text import InvalidYaml, read_list
from ttrain.core import redact
from ttrain.core.text import counted
from ttrain.errors import UsageError

DIGITS = 4  # of a drawn number: enough for any setting, and short enough to be typed again
Values = Mapping[str, Any]  # of the settings that vary, by name
FORMS = {
    "list": "a,b,...",
    "log": "log(low,high) or log(low,high,count)",
    "uniform": "uniform(low,high) or uniform(low,high,count)",
    "int": "int(low,high) or int(low,high,step)",
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

    @property
    def probes(self) -> tuple[Any, ...]:
        """Values that stand for all, to see whether the setting takes them: the ends and one between."""
        return (self.low, self.high, self.at(0.5))

    def at(self, share: float) -> Any:
        """The value at a share of the range, from 0 to 1."""
        evenly = self.low + (self.high - self.low) * share
        return self.nearest(self.low * (self.high / self.low) ** share if self.log else evenly)

    def nearest(self, drawn: float) -> float:
        """The number that is used for the one that was drawn: rounded to DIGITS, within the ends."""
        return min(self.high, max(self.low, float(f"{drawn:.{DIGITS}g}")))


@dataclass(frozen=True)
class ValueList:
    """The values that are listed; `ordered` where they are points of an interval, so that near ones are alike."""

    values: Sequence[Any]
    ordered: bool = False

    @property
    def probes(self) -> Sequence[Any]:
        """Values that stand for all: of an interval its ends and one between."""
        return (self.values[0], self.values[-1], self.at(0.5)) if self.ordered else self.values

    def at(self, share: float) -> Any:
        """The value at a share of the list, from 0 to 1."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]


Dimension = Interval | ValueList


@dataclass(frozen=True)
class Space:
    """The settings that vary, by name in the order in which they were given, each with its values and its text."""

    dimensions: Mapping[str, Dimension]
    texts: Mapping[str, str]

    @property
    def size(self) -> int | None:
        """How many combinations there are; None where a setting takes any number of an interval."""
        counts = [None if d.values is None else len(d.values) for d in self.dimensions.values()]
        return None if None in counts else math.prod(count for count in counts if count is not None)

    def combinations(self, count: int) -> list[Values]:
        """All combinations, the last setting varying fastest, or `count` that are spread where there are more."""
        if self.size is None or self.size > count:
            return self.spread(count)
        values = (dimension.values or () for dimension in self.dimensions.values())
        return [dict(zip(self.dimensions, chosen, strict=True)) for chosen in itertools.product(*values)]

    def spread(self, count: int) -> list[Values]:
        """`count` combinations that together reach all parts of each setting's range: the middles of a Latin hypercube
        (McKay, Beckman and Conover 1979, doi.org/10.1080/00401706.1979.10489755)."""
        random = np.random.default_rng(1)
        parts = {key: random.permutation(count) for key in self.dimensions}
        shares = ({key: float(parts[key][row] + 0.5) / count for key in parts} for row in range(count))
        return [{key: self.dimensions[key].at(share) for key, share in row.items()} for row in shares]

    def probes(self) -> Iterator[dict[str, Any]]:
        """Settings that show whether all values are taken: each value of each setting beside the first of the others."""
        first = {key: dimension.probes[0] for key, dimension in self.dimensions.items()}
        yield first
        for key, dimension in self.dimensions.items():
            yield from ({**first, key: value} for value in dimension.probes[1:])


def parse_space(overrides: Sequence[Override]) -> Space:
    """The settings that vary among the overrides; empty where none does. A plain value in a stronger layer removes a weaker
    layer's range. Raises UsageError where a range cannot be read."""
    last = {item.key: item.value for item in overrides}
    texts = {key: value.strip() for key, value in last.items() if isinstance(value, str) and _varies(key, value)}
    return Space({key: parse(key, text) for key, text in texts.items()}, texts)


def _varies(key: str, text: str) -> bool:
    """Whether a text has several values: a range, or a comma where the setting takes one number or word."""
    kind = type_of(Settings, key)
    takes_one = takes_numbers(kind) or not {bool, Literal}.isdisjoint({*types_of(kind), *map(get_origin, types_of(kind))})
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
    """The values that `text` names for a setting. Raises UsageError that names setting, value, rule and fix."""
    if (masked := redact.text(text)) != text:
        raise UsageError(
            f"{key} is '{masked}', but the values of a sweep are on record, and secrets of URLs must not be; "
            f"put them where the library that opens the URL finds them, such as its environment variables"
        )
    is_range = bool(RANGE.match(text))
    kind, _, inside = text.strip().removesuffix(")").partition("(") if is_range else ("list", "", text)
    kind = kind.strip()
    lists = kind in ("list", "choice")
    try:
        arguments = read_list(f"[{inside}]", type_of(Settings, key) if lists else float)
    except InvalidYaml:
        raise UsageError(f"{key} is '{text}', whose values cannot be read; quote what has commas or brackets") from None
    try:
        if not lists:
            return _range(kind, _numbers(arguments))
        if len(arguments) < 2 and kind == "choice":
            raise ValueError("a choice needs two values or more")
        return ValueList(tuple(arguments))
    except ValueError as wrong:
        raise UsageError(f"{key} is '{text}', but {wrong}; write {FORMS[kind]}") from None


def _range(kind: str, numbers: Sequence[float]) -> Dimension:
    """The values of every form but `choice`. Raises ValueError, which names the rule that the numbers break."""
    low, high, *third = numbers
    whole = kind == "int"
    if kind == "log" and low <= 0:
        raise ValueError("a logarithm needs numbers above 0")
    if any(number != int(number) for number in (numbers if whole else third)):
        raise ValueError("it takes whole numbers" if whole else "the count of values must be a whole number")
    if whole:
        return ValueList(range(int(low), int(high) + 1, *map(int, third)), ordered=True)
    interval = Interval(low, high, kind == "log")
    if not third:
        return interval
    shares = [index / max(1, third[0] - 1) for index in range(int(third[0]))]
    return ValueList(tuple(dict.fromkeys([low, *map(interval.at, shares[1:-1]), high])), ordered=True)


def _numbers(arguments: Sequence[Any]) -> list[float]:
    """The arguments as two or three finite numbers, the first of them below the second."""
    if not 2 <= len(arguments) <= 3:
        raise ValueError(f"it has {counted(len(arguments), 'value')}, with commas between")
    try:
        numbers = [float(argument) for argument in arguments if not isinstance(argument, bool)]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) < len(arguments) or not all(map(math.isfinite, numbers)):
        raise ValueError("it takes numbers")
    if numbers[0] >= numbers[1] or (numbers[2:] and numbers[2] < 1):
        raise ValueError("the first number must be below the second, and the third 1 or more")
    return numbers
