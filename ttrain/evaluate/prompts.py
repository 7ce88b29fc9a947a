"""How items become the text that a model is given: worked examples before them, and what stands between their parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

from ttrain.config.suite import Shots
from ttrain.errors import DataError
from ttrain.evaluate.items import BadRow, LeftOut, Places, read_rows

T = TypeVar("T")
# Scripts without spaces between words: Thai to Lao, Khmer, kana, Han and their full-width punctuation. Not Korean.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")  # fmt: skip # noqa: E501


def between(before: str, after: str) -> str:
    """What stands between a text and what continues it: a space, where neither brings one and the script has them."""
    if not before or before[-1].isspace() or after[:1].isspace() or UNSPACED.match(before[-1]):
        return ""
    return " "


def examples(
    task: str, spec: Shots, rows: Sequence[T], items: Sequence[T], places: Places, parse: Callable[[dict[str, Any]], T]
) -> tuple[list[tuple[T, ...]], list[LeftOut]]:
    """(the worked examples of each item, rows of their file that are none): the first ones of the file, or of `rows`.

    Never the item itself, nor another row that is equal to it: the next one takes its place. Raises DataError where there
    are too few.
    """
    if not spec.shots:
        return [()] * len(items), []
    found, left_out = rows, list[LeftOut]()
    if spec.shots_file is not None:
        found, left_out = read_rows(places.file(spec.shots_file), parse, places.setting(task, "shots_file"))
    taken = [tuple(islice((row for row in found if row != item), spec.shots)) for item in items]
    fewest = min(map(len, taken), default=0)
    if fewest < spec.shots:
        place = spec.shots_file or f"the own file of {task}"
        has = f"{fewest} row that is" if fewest == 1 else f"{fewest} rows that are"
        raise DataError(
            f"{places.setting(task, 'shots')} is {spec.shots}, but {place} has {has} no item itself; ask for fewer"
        )
    return taken, [LeftOut(row.where, f"as an example: {row.reason}") for row in left_out]


def text(record: dict[str, Any], key: str) -> str:
    """The string under a key of a row. Raises BadRow where there is none, or nothing in it."""
    value = record.get(key)
    if not isinstance(value, str):
        raise BadRow(f"no {key}" if value is None else f"{key} is no string")
    if not value.strip():
        raise BadRow(f"{key} is empty")
    return value


def labels(record: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    """What a row says of itself, such as its source."""
    return {key: record[key] for key in keys if key in record}


def check_some(items: Sequence[object], left_out: Sequence[LeftOut], setting: str, wanted: str) -> None:
    """Raises DataError where a file has no item."""
    if not items:
        reasons = "; ".join(f"{row.where}: {row.reason}" for row in left_out[:3]) or "it is empty"
        raise DataError(
            f"{setting} has no row that can be used ({reasons}); ttrain looked for one JSON object per line, {wanted}"
        )
