"""The items of a task, read once for all models. Bad rows are left out and reported with location and reason."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from ttrain.config.evaluate import HELDOUT_PARTS, ChoicesTask, GenerationTask, LastWordTask, RecordsTask, Task
from ttrain.core.files import JsonDict, user_path
from ttrain.core.hashing import digest_of
from ttrain.core.text import counted, first_of
from ttrain.data import records
from ttrain.errors import DataError, UsageError
from ttrain.evaluate.task_result import DIGEST_CHARACTERS, Groups, Metric, TaskResult

T = TypeVar("T")

NO_BASELINES: Mapping[str, float] = MappingProxyType({})

MAX_LINE_BYTES = 32 << 20

MOST_GROUPS = 20  # of a key


class BadRow(ValueError):
    """A row that is not a valid item of its task; the message is the reason."""


IN_TRAINING = "occurs in the training documents"


class LeftOut(NamedTuple):
    """An unused row: its file and line, or the digest of its text alone if it is left out as IN_TRAINING."""

    file: str
    line: int | None
    reason: str

    @property
    def location(self) -> str:
        """Where a row of a file is, for messages."""
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class SuiteFiles:
    """Where a suite's data comes from: paths in it are relative to `base`; `heldout` has the records of a run's held-out
    parts ("documents", "chats", "pairs", "domain"), which tasks name instead of a file; `options` has the command-line
    option that gave a task's file, such as "--choices"; `allow_code`: whether task files of the harness are opened."""

    base: Path
    heldout: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    allow_code: bool = False

    def file(self, name: str) -> Path:
        """Path of a file that the suite names."""
        return self.base / user_path(name)

    def setting(self, task: str, name: str) -> str:
        """Name of a task's setting in error messages, as the user wrote it."""
        if task not in self.options:
            return f"tasks.{task}.{name}"
        return self.options[task] if name == "file" else f"--{name.replace('_', '-')}"


@dataclass(frozen=True, eq=False)
class Items(Generic[T]):
    """The items of a task, the same for every model.

    task      its name in the suite
    spec      its settings, of the kind that the task's own module reads
    items     of the task's own type
    digests   of each item: two evaluations with equal digests used the same items
    left_out  rows that are not valid items
    groups    "lang=zh" -> numbers of the items that belong to it
    unused    keys of `by` that form no groups, with the reason
    """

    task: str
    spec: Any
    items: tuple[T, ...]
    digests: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    groups: Groups = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows were left out, by reason."""
        return dict(Counter(row.reason for row in self.left_out))

    def result(
        self,
        subject: str,
        figures: Sequence[Metric],
        rows: list[JsonDict],
        baselines: Mapping[str, float] = NO_BASELINES,
    ) -> TaskResult:
        """The result of a model on these items; the first metric is primary."""
        return TaskResult(
            self.task, self.spec.kind, subject, self.digests, tuple(figures), rows, self.reasons, self.groups, baselines
        )


Rows = list[tuple[T, Mapping[str, Any]]]  # (what a row says, the row)


def read_rows(path: Path, parse: Callable[[JsonDict], T], setting: str) -> tuple[Rows[T], list[LeftOut]]:
    """Read a file as (parsed rows, bad rows). `parse` raises BadRow with the reason.

    Reads JSON Lines as the rest of ttrain does, .gz, .zst and parquet too. Raises UsageError, naming `setting`, if the file
    does not exist, and DataError if it is truncated, corrupt or in another encoding.
    """
    if not path.is_file():
        problem = "is a directory; name a file in it" if path.is_dir() else "does not exist"
        raise UsageError(f"{setting} is {path}, which {problem}; a suite's paths are relative to the suite's own file")
    left_out: list[LeftOut] = []
    tally = records.Tally(quarantine=lambda row: left_out.append(LeftOut(row["file"], row["line"], row["reason"])))
    rows: Rows[T] = []
    for name, line, record in records.records([str(path)], tally, MAX_LINE_BYTES):
        try:
            rows.append((parse(record), record))
        except BadRow as bad:
            tally.reject(name, line, str(bad))
    return rows, left_out


def read_file(
    task: str, file: str, files: SuiteFiles, parse: Callable[[JsonDict], T], row_format: str
) -> tuple[Rows[T], list[LeftOut]]:
    """Read the file of a task as `read_rows` does. Raises DataError where it has no usable row."""
    setting = files.setting(task, "file")
    rows, left_out = read_rows(files.file(file), parse, setting)
    if not rows:
        reasons = "; ".join(f"{row.location}: {row.reason}" for row in left_out[:3]) or "it is empty"
        raise DataError(f"{setting} {file} has no usable row ({reasons}); write one JSON object per line, {row_format}")
    return rows, left_out


def read_texts(
    task: str,
    spec: RecordsTask,
    files: SuiteFiles,
    parse: Callable[[JsonDict], T],
    row_format: str,
    identity: Callable[[T], object],
    within: Callable[[Rows[T]], Rows[T]] = lambda rows: rows,
) -> Items[T]:
    """Read the records of a held-out part, or of the task's file, as `read_rows` does, draw those that `limit` allows, and
    take of them those `within` other limits. `identity`: what identifies a record. Raises DataError where there is none."""
    setting, left_out, part = files.setting(task, "file"), list[LeftOut](), heldout_part(spec)
    if part:
        rows: Rows[T] = [(parse(dict(record)), record) for record in files.heldout[part]]
    else:
        rows, left_out = read_rows(files.file(spec.file), parse, setting)
    if not rows:
        bad = f"; the first of {len(left_out)} bad rows is {left_out[0].location}: {left_out[0].reason}" if left_out else ""
        noun = {"text": "document"}.get(spec.kind, spec.kind.removesuffix("s"))
        raise DataError(f"{setting} {spec.file} has no {noun}; a row needs {row_format}{bad}")
    rows = within(sampled(rows, spec.limit, spec.seed))
    values = tuple(value for value, _ in rows)
    by_label = groups([row for _, row in rows], spec.by)
    return Items(task, spec, values, digests(map(identity, values)), tuple(left_out), *by_label)


def heldout_part(task: Task) -> str | None:
    """Held-out part that a task names instead of a file."""
    return HELDOUT_PARTS[task.kind].get(task.file) if isinstance(task, RecordsTask) else None


def comparable(records: Iterable[JsonDict]) -> list[JsonDict]:
    """Held-out records without single rated answers, which have no other one to be compared with."""
    return [record for record in records if "completion" not in record]


def digests(values: Iterable[object]) -> tuple[str, ...]:
    """Digest of each item, from JSON with everything that the model gets and is judged by."""
    return tuple(digest_of(value)[:DIGEST_CHARACTERS] for value in values)


def sampled(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """Draw at most `limit` items by the seed, in their original order; all of them without a limit."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[number] for number in sorted(random.Random(seed).sample(range(len(items)), limit))]


def groups(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> tuple[Groups, dict[str, str]]:
    """Group rows by the values of each key: ({"lang=zh": row numbers}, {unused key: reason}); rows without the key are in
    none of its groups.

    A key with more than MOST_GROUPS values, such as the address that each row came from, or with the same value on every
    row forms no groups and is listed as unused.
    """
    numbers_by_group: dict[str, tuple[int, ...]] = {}
    unused: dict[str, str] = {}
    for key in keys:
        of_key: dict[str, list[int]] = {}
        for number, row in enumerate(rows):
            if isinstance(value := row.get(key), str | int) and not isinstance(value, bool):
                of_key.setdefault(f"{key}={value}", []).append(number)
        if not of_key:
            unused[key] = "no item has it as a text or a whole number"
        elif len(of_key) > MOST_GROUPS:
            unused[key] = f"it has {len(of_key):,} values, more than {MOST_GROUPS}"
        elif [len(numbers) for numbers in of_key.values()] == [len(rows)]:
            unused[key] = "it is the same for every item"
        else:
            numbers_by_group |= {name: tuple(numbers) for name, numbers in of_key.items()}
    return dict(sorted(numbers_by_group.items())), unused


SHOWN_PLACES = 3  # of each reason


def lines(items: Sequence[Items[Any]]) -> list[str]:
    """All notes on each task, a line each."""
    return [
        f"{task_items.task}: {line}"
        for task_items in items
        for line in (*_left_out(task_items.left_out), *_copies(task_items), *_unused(task_items))
    ]


def _left_out(rows: Sequence[LeftOut]) -> Iterator[str]:
    """Format as "3 rows left out: no text (2: a.jsonl:3, 7), two choices are the same (1: a.jsonl:9)"."""
    if not rows:
        return
    by_reason: dict[str, list[LeftOut]] = {}
    for row in rows:
        by_reason.setdefault(row.reason, []).append(row)
    reasons = [
        f"{reason} ({len(some):,}{'' if reason == IN_TRAINING else f': {_locations(some)}'})"
        for reason, some in by_reason.items()
    ]
    yield f"{counted(len(rows), 'row')} left out: {', '.join(reasons)}"


def _copies(items: Items[Any]) -> Iterator[str]:
    """Warn about duplicates, which are not independent: five copies of a row would show a difference that one cannot."""
    if copies := len(items.digests) - len(set(items.digests)):
        are = "is a copy of another" if copies == 1 else "are copies of others"
        of = f"{copies:,} of {counted(len(items.digests), 'item')}"
        yield f"{of} {are}; intervals are narrower than they should be"


def _unused(items: Items[Any]) -> Iterator[str]:
    """Report keys of the suite that form no groups; a task's default keys may be missing."""
    default_keys = type(items.spec).model_fields["by"].default
    for key, why in items.unused.items():
        if key not in default_keys:
            yield f"by names '{key}', which forms no groups: {why}"


def _locations(rows: Sequence[LeftOut]) -> str:
    """Format as "a.jsonl:3, 7, b.jsonl:1 and 12 more"."""
    files = ["", *(row.file for row in rows)]
    places = [
        f"{row.line}" if row.file == previous else f"{Path(row.file).name}:{row.line}"
        for previous, row in zip(files, rows, strict=False)
    ]
    return first_of(places, SHOWN_PLACES)


# Scripts without spaces between words: Thai to Lao, Khmer, kana, Han and their full-width punctuation. Not Korean.
UNSPACED = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef\U00020000-\U0003ffff]")  # fmt: skip # noqa: E501


def separator(text_before: str, text_after: str) -> str:
    """Separator between a text and its continuation: a space if neither has one and the script has spaces."""
    if not text_before or text_before[-1].isspace() or text_after[:1].isspace() or UNSPACED.match(text_before[-1]):
        return ""
    return " "


def with_examples(
    task: str,
    spec: ChoicesTask | LastWordTask | GenerationTask,
    read: tuple[Rows[T], list[LeftOut]],
    files: SuiteFiles,
    parse: Callable[[JsonDict], T],
    item_of: Callable[[T, tuple[T, ...]], tuple[Any, object]],
) -> Items[Any]:
    """Draw the items of a task: `item_of` a row and its worked examples is (the item, what identifies it).

    Examples are the first rows of the examples file, or of the rows that were read, but never the item itself or a row equal
    to it: the next row takes its place. Raises DataError if there are too few.
    """
    rows, left_out = read
    drawn = sampled(rows, spec.limit, spec.seed)
    candidates, bad_examples = rows, list[LeftOut]()
    if spec.shots_file is not None:
        candidates, bad_examples = read_rows(files.file(spec.shots_file), parse, files.setting(task, "shots_file"))
    examples = [example for example, _ in candidates]
    shots = [tuple(islice((example for example in examples if example != row), spec.shots)) for row, _ in drawn]
    if (fewest := min(map(len, shots))) < spec.shots:
        source = spec.shots_file or f"the file of {task}"
        raise DataError(
            f"{files.setting(task, 'shots')} is {spec.shots}, but {source} has {counted(fewest, 'row')} "
            f"besides the item itself; set fewer"
        )
    left_out = [*left_out, *(row._replace(reason=f"as an example: {row.reason}") for row in bad_examples)]
    items, identities = zip(*(item_of(row, shown) for (row, _), shown in zip(drawn, shots, strict=True)), strict=True)
    by_label = groups([record for _, record in drawn], spec.by)
    return Items(task, spec, items, digests(identities), tuple(left_out), *by_label)


def text(record: JsonDict, key: str) -> str:
    """Return the string under a key of a row. Raises BadRow if it is missing, not a string or empty."""
    value = record.get(key)
    if not isinstance(value, str):
        raise BadRow(f"no {key}" if value is None else f"{key} is not a string")
    if not value.strip():
        raise BadRow(f"{key} is empty")
    return value
