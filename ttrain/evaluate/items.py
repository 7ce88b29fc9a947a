"""The items of a task, read once for all models. Bad rows are left out and reported."""

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ttrain.config.evaluate import (
    HELDOUT_PARTS,
    ChoicesTask,
    GenerationTask,
    LastWordTask,
    RecordsTask,
    Task,
    TextTask,
)
from ttrain.core.files import JsonDict, JsonObject, user_path
from ttrain.core.text import counted, first_of
from ttrain.data import json_rows
from ttrain.errors import DataError, UsageError
from ttrain.evaluate.task_result import Metric, TaskResult, record_name

T = TypeVar("T")
Groups = Mapping[str, tuple[int, ...]]  # "lang=zh" -> numbers of the items that belong to it

MOST_GROUPS = 20  # of a key
Rows = list[tuple[T, JsonObject]]  # (what a row says, the row)
RowParser = tuple[
    Callable[[JsonDict], T], str
]  # parses a row, or raises BadRow with the reason; and what a row needs
SHOWN_PLACES = 3  # of each reason
# Scripts without spaces between words: Thai to Lao, Khmer, kana, Han and their full-width
# punctuation. Not Korean.
UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    r"\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]"
)


class BadRow(ValueError):
    """A row that is not a valid item of its task; the message is the reason."""


@dataclass(frozen=True)
class SuiteFiles:
    """Where a suite's data comes from: `base` is the directory of its relative paths.

    `heldout` has the records of a run's held-out parts ("documents", "chats", "pairs", "domain").
    """

    base: Path
    heldout: Mapping[str, Sequence[JsonObject]] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Items(Generic[T]):
    """The items of a task, the same for every model.

    spec      settings of the task
    digests   evaluations with equal digests used the same items
    rows      from which the items were made; none of the harness
    left_out  file, line and reason of each bad row
    groups    "lang=zh" -> numbers of its items
    """

    task: str
    spec: Any
    items: tuple[T, ...]
    digests: tuple[str, ...]
    rows: Sequence[JsonObject] = ()
    left_out: Sequence[JsonDict] = ()
    groups: Groups = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, int]:
        """Number of rows that were left out, by reason."""
        return dict(Counter(row["reason"] for row in self.left_out))

    def result(
        self,
        subject: str,
        figures: Iterable[Metric],
        rows: list[JsonDict],
        baselines: Mapping[str, float] | None = None,
    ) -> TaskResult:
        """The result of a model; the first metric is primary, and has values for groups too."""
        primary, *others = (replace(metric, records=self.digests) for metric in figures)
        groups = (primary.restricted(numbers, group) for group, numbers in self.groups.items())
        return TaskResult(self, subject, (primary, *groups, *others), rows, baselines or {})


def read_rows(
    setting: str, file: str, files: SuiteFiles, parser: RowParser[T]
) -> tuple[Rows[T], list[JsonDict]]:
    """Read JSON Lines, also .gz, .zst and parquet, as (parsed rows, bad rows).

    Raises UsageError, naming `setting`, if the file does not exist, DataError if it has no usable
    row or is damaged.
    """
    path = files.base / user_path(file)
    if not path.is_file():
        raise UsageError(
            f"{setting} is {path}, which is not a file; a suite's paths are relative to the "
            "suite's own file"
        )
    parse, row_format = parser
    left_out: list[JsonDict] = []
    tally = json_rows.Tally(quarantine=left_out.append)
    rows: Rows[T] = []
    for name, line, record in json_rows.read([str(path)], tally, json_rows.MAX_LINE_BYTES):
        try:
            rows.append((parse(record), record))
        except BadRow as bad:
            tally.reject(name, line, str(bad))
    if not rows:
        reasons = (
            "; ".join(f"{row['file']}:{row['line']}: {row['reason']}" for row in left_out[:3])
            or "it is empty"
        )
        raise DataError(f"{setting} {file} has no usable row ({reasons}); a row needs {row_format}")
    return rows, left_out


class Parsers(NamedTuple, Generic[T]):
    """How records become items: those of a file, those held out, and an item's identity."""

    of_file: RowParser[T]
    of_heldout: Callable[[JsonDict], T]
    identity: Callable[[T], object]


def read_texts(task: str, spec: RecordsTask, files: SuiteFiles, parsers: Parsers[T]) -> Items[T]:
    """Read a held-out part or the task's file, and draw the records that the limits allow.

    `max_bytes` applies after `limit`; the first text is used whatever its length.
    """
    left_out = list[JsonDict]()
    if part := heldout_part(spec):
        rows: Rows[T] = [
            (parsers.of_heldout(dict(record)), record) for record in files.heldout[part]
        ]
    else:
        rows, left_out = read_rows(f"tasks.{task}.file", spec.file, files, parsers.of_file)
    rows = sampled(rows, spec.limit, spec.seed)
    if isinstance(spec, TextTask) and spec.max_bytes is not None:
        sizes = accumulate(len(str(text).encode("utf-8")) for text, _ in rows)
        rows = rows[: max(1, sum(size <= spec.max_bytes for size in sizes))]
    values = tuple(value for value, _ in rows)
    drawn = [row for _, row in rows]
    return Items(
        task,
        spec,
        values,
        tuple(record_name(parsers.identity(value)) for value in values),
        drawn,
        left_out,
        groups(drawn, spec.by),
    )


def accepted(record: Any, kind: type[T]) -> T:
    """The parsed record. Raises BadRow with the reason if there is none."""
    if isinstance(record, kind):
        return record
    raise BadRow(record.reason)


def heldout_part(task: Task) -> str | None:
    """Held-out part that a task names instead of a file."""
    return HELDOUT_PARTS[task.kind].get(task.file) if isinstance(task, RecordsTask) else None


def comparable(records: Iterable[JsonDict]) -> list[JsonDict]:
    """Held-out records without single rated answers, which have nothing to be compared with."""
    return [record for record in records if "completion" not in record]


def sampled(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Draw at most `limit` items by the seed, in their original order."""
    if limit is None or limit >= len(items):
        return list(items)
    return [
        items[number] for number in sorted(random.Random(seed).sample(range(len(items)), limit))
    ]


def groups(rows: Sequence[JsonObject], keys: Sequence[str], most: int = MOST_GROUPS) -> Groups:
    """Group rows by the values of each key: {"lang=zh": row numbers}.

    A key with more than `most` values, or with the same value on every row, forms no groups.
    """
    numbers: dict[str, tuple[int, ...]] = {}
    for key in keys:
        of_key: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            if isinstance(value := row.get(key), str | int) and not isinstance(value, bool):
                of_key.setdefault(f"{key}={value}", []).append(number)
        if len(of_key) <= most:
            numbers |= {
                name: tuple(found) for name, found in of_key.items() if len(found) < len(rows)
            }
    return dict(sorted(numbers.items()))


def notes_on(items: Sequence[Items[Any]]) -> list[str]:
    """Notes on the tasks, a line each: rows that were left out, and copies.

    Copies are not independent: five of a row would show a difference that one cannot.
    """
    notes: list[str] = []
    for each in items:
        for reason, count in each.reasons.items():
            places = first_of(
                [
                    f"{row['file']}:{row['line']}"
                    for row in each.left_out
                    if row["reason"] == reason
                ],
                SHOWN_PLACES,
            )
            notes.append(f"{each.task}: {counted(count, 'row')} left out: {reason} ({places})")
        if copies := len(each.digests) - len(set(each.digests)):
            notes.append(
                f"{each.task}: {copies:,} of {counted(len(each.digests), 'item')} are copies; "
                "intervals are narrower than they should be"
            )
    return notes


def separator(text_before: str, text_after: str) -> str:
    """A space between a text and its continuation, if neither has one and the script has spaces."""
    if (
        not text_before
        or text_before[-1].isspace()
        or text_after[:1].isspace()
        or UNSPACED.match(text_before[-1])
    ):
        return ""
    return " "


def with_examples(
    task: str,
    spec: ChoicesTask | LastWordTask | GenerationTask,
    read: tuple[Rows[T], list[JsonDict]],
    files: SuiteFiles,
    parser: RowParser[T],
    item_of: Callable[[T, tuple[T, ...]], tuple[Any, object]],
) -> Items[Any]:
    """Draw the items of a task: `item_of(row, examples)` is (the item, its identity).

    Examples are the first rows of the examples file, or of the task's, never a row equal to the
    item. Raises DataError if there are too few.
    """
    rows, left_out = read
    drawn = sampled(rows, spec.limit, spec.seed)
    candidates, bad_examples = (
        read_rows(f"tasks.{task}.shots_file", spec.shots_file, files, parser)
        if spec.shots_file is not None
        else (rows, list[JsonDict]())
    )
    shots = []
    for row, _ in drawn:
        different = (example for example, _ in candidates if example != row)
        shots.append(tuple(islice(different, spec.shots)))
    if (fewest := min(map(len, shots))) < spec.shots:
        raise DataError(
            f"tasks.{task}.shots is {spec.shots}, but {spec.shots_file or f'the file of {task}'} "
            f"has {counted(fewest, 'row')} besides the item itself; set fewer"
        )
    left_out = [
        *left_out,
        *({**row, "reason": f"as an example: {row['reason']}"} for row in bad_examples),
    ]
    items, identities = zip(
        *(item_of(row, shown) for (row, _), shown in zip(drawn, shots, strict=True)), strict=True
    )
    records_drawn = [record for _, record in drawn]
    return Items(
        task,
        spec,
        items,
        tuple(map(record_name, identities)),
        records_drawn,
        left_out,
        groups(records_drawn, spec.by),
    )


def text_of(record: JsonDict, key: str) -> str:
    """The string under a key of a row. Raises BadRow if it is missing, not a string or empty."""
    value = record.get(key)
    if not isinstance(value, str):
        raise BadRow(f"no {key}" if value is None else f"{key} is not a string")
    if not value.strip():
        raise BadRow(f"{key} is empty")
    return value
