"""Bad input of every kind, from a file to shards: what becomes of each row is exact."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.hostile_rows import (
    BOM,
    FIRST,
    LAST,
    MARK,
    READING,
    Outcome,
    bad,
    build,
    json_error,
    outcome,
    text,
)

from ttrain.config import Runtime, Settings
from ttrain.core.files import ProgressWriter
from ttrain.data.blocks import BlockRecipe
from ttrain.data.check import check
from ttrain.data.json_rows import NOT_UTF8, NULS
from ttrain.data.pool import Processes
from ttrain.errors import CannotRead, DataError
from ttrain.tasks import shards
from ttrain.tasks.common.job import StageContext

VALUE = json_error("unexpected character, expected a JSON value")
CONTENT = json_error("unexpected content after document")
INFINITE = json_error("number is infinity when parsed as double")
DEEP = json_error("depth limit exceeded")
LONE_HIGH = json_error("no low surrogate in string")
LONE_LOW = json_error("invalid high surrogate in string")
END = json_error("unexpected end of data")
CONTROL = json_error("unexpected control character in string")
KINDS = ("a list", "text", "a number", "null", "a boolean")
NO_OBJECTS = [f"not a JSON object but {kind}" for kind in KINDS]
KEPT: Outcome = {"kept": 2}
LARGE = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(10_000))
GOOD_FILE = FIRST + b"\n" + LAST + b"\n"


def between(*lines: bytes) -> list[bytes]:
    return [FIRST, *lines, LAST]


def number(key: bytes, value: bytes) -> bytes:
    return b'{"text": "%s", "x": %s}' % (key, value)


NUMBERS = (b"1e400", b"1e-400", b"9" * 30, b"9" * 5000)
COPIES = [FIRST, FIRST, b'{"id": 1, "text": "A first line."}']
TWICE = [b'{"text": "x", "text": "A first line."}', FIRST, b'{"text": "x", "text": null}', LAST]
# {name: (lines, outcome, numbers of the bad lines)}; which texts a document has: test_records.py
DOCUMENTS: dict[str, tuple[Sequence[bytes], Outcome, list[int]]] = {
    "broken JSON": (between(b'{"text": "cut off in the mid'), bad(END), [2]),
    "invalid UTF-8": (
        between(b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}'),
        bad(NOT_UTF8, NOT_UTF8),
        [2, 3],
    ),
    "a BOM at the start": ([BOM + FIRST, LAST], KEPT, []),
    "a BOM in the middle, as of joined files": ([FIRST, BOM + FIRST, LAST], bad(MARK), [2]),
    "CRLF and blank lines": ([b"\r", FIRST + b"\r", b"\r", b" \t\r", LAST + b"\r"], KEPT, []),
    "no object": (
        between(b'["text"]', b'"a string"', b"42", b"null", b"true"),
        bad(*NO_OBJECTS),
        [2, 3, 4, 5, 6],
    ),
    "lone surrogates": (
        between(rb'{"text": "\ud83d high"}', rb'{"text": "\ude00"}', rb'{"text": "\ude00\ud83d"}'),
        bad(LONE_HIGH, LONE_LOW, LONE_LOW),
        [2, 3, 4],
    ),
    "raw NUL": (between(b'{"text": "\0"}'), bad(CONTROL), [2]),
    "a first line of NUL": ([bytes(3), FIRST, LAST], bad(NULS), [1]),
    "nothing": ([], {}, []),
    "duplicates": (
        [*COPIES, text("a first line."), text("A first line. "), LAST],
        {"kept": 4, "skipped": {"duplicate": 2}},
        [],
    ),
    "U+2028 and U+0085": ([text("a\u2028b"), text("a\x85b")], KEPT, []),
    "a key twice: the last one counts": (
        TWICE,
        bad("'text' is null, not text", skipped={"duplicate": 1}),
        [3],
    ),
    "NaN": (between(number(b"a", b"NaN")), bad(VALUE), [2]),
    "numbers beyond every type": (
        between(*map(number, (b"a", b"b", b"c", b"d"), NUMBERS)),
        bad(INFINITE, INFINITE, kept=4),
        [2, 5],
    ),
    "nested too deep": (
        between(number(b"a", b"[" * 100_000 + b"]" * 100_000), b'{"x":' * 5000),
        bad(DEEP, DEEP),
        [2, 3],
    ),
    "an array in lines": ([b"[", FIRST + b",", b"4,", LAST, b"]"], bad(NO_OBJECTS[2]), [2]),
    "an array in one line": ([b"[" + FIRST + b", " + LAST + b"]"], KEPT, []),
    "lists in lines": (
        [b"[" + FIRST + b"]", b"[" + LAST + b"]", FIRST],
        bad(*[NO_OBJECTS[0]] * 2, kept=1),
        [1, 2],
    ),
    "pretty-printed within": (
        [FIRST, b"{", b'  "text": "spread over lines"', b"}"],
        bad(END, CONTENT, VALUE, kept=1),
        [2, 3, 4],
    ),
}


@pytest.mark.parametrize(("lines", "expected", "bad_lines"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_every_row_is_kept_skipped_or_rejected_by_its_rule(
    tmp_path: Path,
    recipe: BlockRecipe,
    lines: Sequence[bytes],
    expected: Outcome,
    bad_lines: list[int],
) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n" * bool(lines), 1))
    assert outcome(plain, recipe) == outcome(packed, recipe, 1024) == (expected, bad_lines)


def write_truncated(path: Path) -> None:
    path.write_bytes(gzip.compress(LARGE)[:-3000])


def link_unreadable(path: Path) -> None:
    """A file whose bytes cannot be read, as on a broken disk."""
    if not Path("/proc/self/mem").exists():
        pytest.skip("no /proc")
    path.symlink_to("/proc/self/mem")


@pytest.mark.parametrize(
    ("make", "reason", "is_damaged"),
    [
        (write_truncated, "is truncated", True),
        (lambda path: None, "cannot read", False),
        (link_unreadable, "cannot read", False),
    ],
    ids=["truncated", "missing", "an error of the disk"],
)
def test_a_file_that_cannot_be_read_to_its_end_is_one_error_with_its_name_and_leaves_no_shards(
    tmp_path: Path,
    recipes: dict[str, BlockRecipe],
    make: Callable[[Path], object],
    reason: str,
    is_damaged: bool,
) -> None:
    path = tmp_path / ("rows.jsonl.gz" if is_damaged else "rows.jsonl")
    make(path)
    for kind, recipe in recipes.items():
        with pytest.raises(DataError, match=reason) as raised:
            build(path, recipe)
        assert str(path) in str(raised.value)
        assert raised.value.files == ((str(path),) if is_damaged else ())
        assert isinstance(raised.value, CannotRead) != is_damaged
        assert not list(tmp_path.glob("shards-*/*/index.json"))
        (report,) = check([str(path)], READING, kind=kind)
        assert report.error == str(raised.value)


def test_files_of_bad_rows_are_named_where_these_are_too_many_and_others_are_not(
    tmp_path: Path, tokenizer: Path
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(GOOD_FILE)
    bad.write_bytes(b'{"text": 1}\n' * 500)
    context = StageContext(
        {"tokenizer": tokenizer},
        {"train": [str(good), str(bad)]},
        {"kind": "documents", "dataset": "pretrain"},
        tmp_path / "out",
        Runtime(workers=1),
        ProgressWriter(None),
        lambda: False,
        groups={"train": [0, 0]},
    )
    with pytest.raises(DataError, match=r"500 of \d+") as raised:
        shards.run(Settings(), context)
    assert raised.value.files == (str(bad),)


class Changing(Processes):
    """Changes the file after its blocks are known and before they are read."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:  # type: ignore[override]
        for task in tasks:
            self._change()
            yield function(*task)


def test_what_is_appended_while_a_file_is_read_is_left_out_and_one_that_becomes_shorter_is_an_error(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LARGE)

    def append() -> None:
        with path.open("ab") as file:
            file.write(GOOD_FILE)

    built, _ = build(path, recipe, 1 << 16, Changing(append))
    tally = built.tallies["train"]
    assert (tally.rows, tally.kept) == (10_000, 10_000)
    assert not tally.skipped and not tally.rejected
    with pytest.raises(CannotRead, match="shorter") as raised:
        build(path, recipe, 1 << 17, Changing(lambda: os.truncate(path, 100_000)))
    assert str(path) in str(raised.value)
