"""What is to be said of the items beside the figures: rows that were left out, copies, keys that group nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ttrain.evaluate.items import IN_TRAINING, Groups, Items, LeftOut

SHOWN_PLACES = 3  # of each reason


def lines(items: Sequence[Items[Any]]) -> list[str]:
    """A line for everything that there is to say of each task."""
    return [f"{one.task}: {line}" for one in items for line in (*_left_out(one.left_out), *_copies(one), *_unused(one))]


def left_out_json(items: Items[Any]) -> list[dict[str, Any]]:
    """Every row of a task that is not used: its file, its line (None where it has none), the reason."""
    return [{"file": file, "line": line, "reason": row.reason} for row in items.left_out for file, line in [_place(row)]]


def _left_out(rows: Sequence[LeftOut]) -> Iterator[str]:
    """ "3 rows left out: no text (2: a.jsonl:3, 7), two choices are the same (1: a.jsonl:9)"."""
    if not rows:
        return
    by_reason: dict[str, list[LeftOut]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row)
    where = {reason: "" if reason == IN_TRAINING else f": {_places(some)}" for reason, some in by_reason.items()}
    told = ", ".join(f"{reason} ({len(some):,}{where[reason]})" for reason, some in by_reason.items())
    yield f"{counted(len(rows), 'row')} left out: {told}"


def _copies(items: Items[Any]) -> Iterator[str]:
    """Copies are no items of their own: five of one row would show a difference that one row cannot."""
    if copies := len(items.digests) - len(set(items.digests)):
        are = "is a copy of another" if copies == 1 else "are copies of others"
        of = f"{copies:,} of {counted(len(items.digests), 'item')}"
        yield f"{of} {are}, so that intervals are narrower than they should be"


def _unused(items: Items[Any]) -> Iterator[str]:
    """Of the keys that the suite names; what a task has without being told may be missing."""
    own = type(items.spec).model_fields["by"].default
    for key, why in items.groups.unused.items() if isinstance(items.groups, Groups) else ():
        if key not in own:
            yield f"by names '{key}', which groups nothing: {why}"


def _places(rows: Sequence[LeftOut]) -> str:
    """ "a.jsonl:3, 7, b.jsonl:1 and 12 more"."""
    told: list[str] = []
    before = ""
    for file, line in map(_place, rows[:SHOWN_PLACES]):
        if line is None:
            told.append(file)
        else:
            told.append(f"{line}" if file == before else f"{Path(file).name}:{line}")
        before = file
    more = len(rows) - len(told)
    return ", ".join(told) + (f" and {more:,} more" if more else "")


def _place(row: LeftOut) -> tuple[str, int | None]:
    file, _, line = row.where.rpartition(":")
    return (file, int(line)) if file and line.isdecimal() else (row.where, None)


def counted(number: int, word: str) -> str:
    """ "1 row", "1,200 rows"."""
    return f"{number:,} {word}" + ("" if number == 1 else "s")
