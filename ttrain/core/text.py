"""Numbers, sizes, times and lists as text for people."""

import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, TypeGuard

ABSENT = "–"
UNITS = ("B", "kB", "MB", "GB", "TB")
SHOWN_DIGITS = 12  # of a digest
# Plain wording by pydantic's error type, where its own message uses terms of pydantic or Python.
# For other types `rule_of` takes pydantic's message.
RULES: Mapping[str, str] = {
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "model_type", "model_attributes_type"), "a group of names with values"
    ),
    "string_type": "text",
    "path_type": "a path",
    "invalid-json-value": "a value that JSON has; quote a text",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "at least {min_length} characters long",
    "too_short": "a list of {min_length} or more",
    "string_too_long": "at most {max_length} characters long",
    "too_long": "a list of {max_length} at most",
}


def format_number(value: float | None, name: str = "") -> str:
    """Four significant digits; units of seconds and bytes by the end of the name."""
    if value is None:
        return ABSENT
    if not math.isfinite(value):
        return str(value)
    if name.endswith("seconds"):
        return format_duration(value)
    if name.endswith("bytes"):
        return format_size(value)
    if float(value).is_integer() or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if 1 <= abs(value) < 10 else f"{value:.4g}"


def is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def format_value(value: object) -> str:
    """A cell of a table: numbers as of `format_number`, "" for None."""
    if is_number(value):
        return format_number(value)
    return "" if value is None else str(value)


def format_size(count: float) -> str:
    """Bytes with three digits, in powers of a thousand; exact below 10 kB."""
    if abs(count) < 10_000:
        return f"{count:,.0f} B"
    unit = min(int(f"{count:.2e}".partition("e")[2]) // 3, len(UNITS) - 1)
    return f"{count / 1000**unit:.3g} {UNITS[unit]}"


def format_duration(seconds: float | None) -> str:
    """A duration: "3.2 s", "4 min 10 s", "2 h 05 min"."""
    if seconds is None:
        return ABSENT
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 99.5:
        return f"{seconds:.3g} s" if seconds < 9.95 else f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {remainder:02d} s"


def format_time(seconds: float | None) -> str:
    """Local time of a time since the epoch: "2026-11-21 16:02"."""
    return (
        ABSENT
        if seconds is None
        else f"{datetime.fromtimestamp(seconds, UTC).astimezone():%Y-%m-%d %H:%M}"
    )


def timed_lines(text: str) -> str:
    """Prefix each line of a text with the local time: "2026-11-21 16:02:07  ..."."""
    now = f"{datetime.now(UTC).astimezone():%Y-%m-%d %H:%M:%S}"
    return "\n".join(f"{now}  {line}" for line in text.split("\n"))


def rule_of(error: Mapping[str, Any]) -> str:
    """The rule that a value breaks, in plain words, from an error of pydantic."""
    if error["type"] in RULES:
        return f"must be {RULES[error['type']].format(**error.get('ctx', {}))}"
    if error["type"] == "missing":
        return f"needs the key '{error['loc'][-1]}'"
    if error["type"] == "extra_forbidden":
        return "there is no such setting"
    return str(error["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")


def invalid_values(errors: Iterable[Mapping[str, Any]]) -> str:
    lines = []
    for error in errors:
        name = ".".join(map(str, error["loc"]))
        lines.append(
            f"{name} is {error['input']!r} but {rule_of(error)}" if name else rule_of(error)
        )
    return "; ".join(lines)


def counted(number: int, noun: str) -> str:
    """ "1 row" or "1,200 rows"."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def first_of(items: Iterable[object], most: int, separator: str = ", ") -> str:
    """The first items and the number of others: "a, b and 12 more"."""
    texts = [str(item) for item in items]
    hidden = len(texts) - most
    return separator.join(texts[:most]) + (f" and {hidden:,} more" if hidden > 0 else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def truncated(text: str, most: int) -> str:
    """The text in at most so many characters, with "..." if cut."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def short_digest(digest: str) -> str:
    return digest[:SHOWN_DIGITS]
