"""The items of a task: read once, for all models. A bad row is left out with its place and reason, and never counts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from ttrain.config.suite import Task
from ttrain.core.hashing import digest_of
from ttrain.data import jsonl
from ttrain.errors import UsageError
from ttrain.evaluate.scores import DIGEST_CHARACTERS

T = TypeVar("T")
MAX_LINE_BYTES = 32 << 20
MOST_GROUPS = 20  # of a key


class BadRow(ValueError):
    """A row that is no item of its task; the message is the reason."""


IN_TRAINING = "stands in the training documents"


class LeftOut(NamedTuple):
    """A row that is not used: `where` is file:line; of one that is left out as IN_TRAINING, the digest of its text."""

    where: str
    reason: str


@dataclass(frozen=True)
class Places:
    """Where the files of a suite lie: paths in it are relative to `base`; `heldout` has the records of a run's held-out
    parts ("documents", "chats", "domain"), which tasks name instead of a file; `named` is how the command line named the
    file of a task, such as "--choices"; `allow_code`: whether task files of the harness may run Python."""

    base: Path
    heldout: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    named: Mapping[str, str] = field(default_factory=dict)
    allow_code: bool = False

    def file(self, name: str) -> Path:
        """The file of that name."""
        return self.base / Path(name).expanduser()

    def setting(self, task: str, name: str) -> str:
        """What an error calls a setting of a task: as the user wrote it."""
        if task not in self.named:
            return f"tasks.{task}.{name}"
        return self.named[task] if name == "file" else f"--{name.replace('_', '-')}"


class Groups(dict[str, tuple[int, ...]]):
    """ "lang=zh" -> numbers of the rows that belong to it. `unused`: the keys that group nothing, and why."""

    unused: dict[str, str]

    def __init__(self, found: Mapping[str, tuple[int, ...]], unused: Mapping[str, str]) -> None:
        super().__init__(found)
        self.unused = dict(unused)


@dataclass(frozen=True, eq=False)
class Items(Generic[T]):
    """What a task asks of every model.

    task      its name in the suite
    spec      its settings
    items     what is asked, of the task's own type
    digests   of each item: two evaluations with equal digests asked the same
    left_out  rows that are no items
    groups    "lang=zh" -> numbers of the items that belong to it
    """

    task: str
    spec: Task
    items: tuple[T, ...]
    digests: tuple[str, ...]
    left_out: tuple[LeftOut, ...] = ()
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def reasons(self) -> dict[str, int]:
        """How many rows were left out, by reason."""
        return dict(Counter(row.reason for row in self.left_out))


def read_rows(path: Path, parse: Callable[[dict[str, Any]], T], setting: str) -> tuple[list[T], list[LeftOut]]:
    """(what `parse` makes of each row, the rows that are bad). `parse` raises BadRow with the reason.

    JSON Lines as the rest of ttrain reads them, .gz, .zst and parquet too. Raises UsageError where there is no such file,
    naming `setting`, and DataError where it is truncated, corrupt or in another encoding.
    """
    if not path.is_file():
        what = "a directory; name a file in it" if path.is_dir() else "no file"
        raise UsageError(f"{setting} is {path}, which is {what}; a suite's paths are relative to the suite's own file")
    left_out: list[LeftOut] = []
    tally = jsonl.Tally(quarantine=lambda row: left_out.append(LeftOut(f"{row['file']}:{row['line']}", row["reason"])))
    found: list[T] = []
    for name, line, record in jsonl.records([str(path)], tally, MAX_LINE_BYTES):
        try:
            found.append(parse(record))
        except BadRow as bad:
            tally.reject(name, line, str(bad))
    return found, left_out


def digests(values: Sequence[object]) -> tuple[str, ...]:
    """Of each item, by what it says: JSON that has everything the model is asked and judged by."""
    return tuple(digest_of(value)[:DIGEST_CHARACTERS] for value in values)


def sampled(items: Sequence[T], limit: int | None, seed: int) -> list[T]:
    """At most `limit` items, drawn by the seed, in the order in which they came; all of them where there is no limit."""
    if limit is None or limit >= len(items):
        return list(items)
    return [items[number] for number in sorted(random.Random(seed).sample(range(len(items)), limit))]


def groups(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> Groups:
    """{"lang=zh": numbers of the rows with that value}, for each key; rows without it are in no group of the key.

    A key with more than MOST_GROUPS values, such as the address that each row came from, groups nothing, and one with the
    same value on every row divides nothing: they are left out.
    """
    found: dict[str, dict[str, list[int]]] = {key: {} for key in keys}
    for number, row in enumerate(rows):
        for key in keys:
            value = row.get(key)
            if isinstance(value, str | int) and not isinstance(value, bool):
                found[key].setdefault(f"{key}={value}", []).append(number)
    kept: dict[str, tuple[int, ...]] = {}
    unused: dict[str, str] = {}
    for key, of_key in found.items():
        if not of_key:
            unused[key] = "no item has it as a text or a whole number"
        elif len(of_key) > MOST_GROUPS:
            unused[key] = f"it has {len(of_key):,} values, more than {MOST_GROUPS}"
        elif [len(numbers) for numbers in of_key.values()] == [len(rows)]:
            unused[key] = "it is the same for every item"
        else:
            kept |= {name: tuple(numbers) for name, numbers in of_key.items()}
    return Groups(dict(sorted(kept.items())), unused)
