"""Which settings a sweep varies, and over which values: `log(1e-4,3e-3)`, `uniform(0,0.2)`, `int(2,8)`, `choice(a,b,c)`."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ttrain.config import Settings
from ttrain.config.loading import Override, type_of
from ttrain.config.yaml_text import InvalidYaml, read_list
from ttrain.core import redact
from ttrain.core.text import counted
from ttrain.errors import UsageError

DIGITS = 4  # of a drawn number: enough for any setting, and short enough to be typed again
Values = Mapping[str, Any]  # of the settings that vary, by name
FORMS = {
    "log": "log(low,high) or log(low,high,count)",
    "uniform": "uniform(low,high) or uniform(low,high,count)",
    "int": "int(low,high) or int(low,high,step)",
    "choice": "choice(a,b,...)",
}
_RANGE = re.compile(rf"\s*({'|'.join(FORMS)})\s*\(")


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

    def combination(self, number: int) -> Values:
        """Combination `number` of `size`; the last setting varies fastest, as in nested loops."""
        chosen: dict[str, Any] = {}
        for key, dimension in reversed(list(self.dimensions.items())):
            assert dimension.values is not None, "only what can be counted has combinations"
            number, index = divmod(number, len(dimension.values))
            chosen[key] = dimension.values[index]
        return {key: chosen[key] for key in self.dimensions}

    def probes(self) -> Iterator[dict[str, Any]]:
        """Settings that show whether all values are taken: each value of each setting beside the first of the others."""
        first = {key: dimension.probes[0] for key, dimension in self.dimensions.items()}
        yield first
        for key, dimension in self.dimensions.items():
            yield from ({**first, key: value} for value in dimension.probes[1:])


def parse_space(overrides: Sequence[Override]) -> Space:
    """The settings that vary among the overrides. A plain value in a stronger layer removes a weaker layer's range. Raises
    UsageError where a range cannot be read, or there is none."""
    last = {item.key: item.value for item in overrides}
    texts = {key: value.strip() for key, value in last.items() if isinstance(value, str) and _RANGE.match(value)}
    if not texts:
        raise UsageError(
            f"a sweep needs a setting that varies; write one as {', '.join(FORMS.values())}, "
            f"for example 'pretrain.optim.lr=log(1e-4,3e-3)'"
        )
    return Space({key: parse(key, text) for key, text in texts.items()}, texts)


def with_values(overrides: Sequence[Override], space: Space, values: Values) -> list[Override]:
    """The overrides, with one value for each setting that varies, in place of its range."""
    last = {item.key: position for position, item in enumerate(overrides)}
    return [
        item._replace(value=values[item.key]) if item.key in space.dimensions else item
        for position, item in enumerate(overrides)
        if item.key not in space.dimensions or position == last[item.key]
    ]


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
    kind, _, inside = text.strip().removesuffix(")").partition("(")
    kind = kind.strip()
    try:
        arguments = read_list(f"[{inside}]", type_of(Settings, key) if kind == "choice" else float)
    except InvalidYaml:
        raise UsageError(f"{key} is '{text}', whose values cannot be read; quote what has commas or brackets") from None
    try:
        if kind != "choice":
            return _range(kind, _numbers(arguments))
        if len(arguments) < 2:
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
