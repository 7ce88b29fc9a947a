"""Bad input of every kind, from a file to shards: what becomes of each row is exact."""

import gzip
import os
from collections.abc import Callable, Sequence
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

CONTENT = json_error("unexpected content after document")
INFINITE = json_error("number is infinity when parsed as double")
DEEP = json_error("depth limit exceeded")
END = json_error("unexpected end of data")
KINDS = ("a list", "text", "a number", "null")
NO_OBJECTS = [f"not a JSON object but {kind}" for kind in KINDS]
KEPT: Outcome = {"kept": 2}
LARGE = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(10_000))
GOOD_FILE = FIRST + b"\n" + LAST + b"\n"


def between(*lines: bytes) -> list[bytes]:
    return [FIRST, *lines, LAST]


def number(key: bytes, value: bytes) -> bytes:
    return b'{"text": "%s", "x": %s}' % (key, value)


COPIES = [FIRST, FIRST, b'{"id": 1, "text": "A first line."}']
TWICE = [b'{"text": "x", "text": "A first line."}', FIRST, b'{"text": "x", "text": null}', LAST]
# {name: (lines, outcome, numbers of the bad lines)}; which texts a document has: test_records.py
DOCUMENTS: dict[str, tuple[Sequence[bytes], Outcome, list[int]]] = {
    "broken JSON": (between(b'{"text": "cut off in the mid'), bad(END), [2]),
    "invalid UTF-8": (between(b'{"text": "\xff"}'), bad(NOT_UTF8), [2]),
    "a BOM at the start": ([BOM + FIRST, LAST], KEPT, []),
    "a BOM in the middle, as of joined files": ([FIRST, BOM + FIRST, LAST], bad(MARK), [2]),
    "CRLF and blank lines": ([b"\r", FIRST + b"\r", b"\r", b" \t\r", LAST + b"\r"], KEPT, []),
    "no object": (between(b'["text"]', b'"a"', b"4", b"null"), bad(*NO_OBJECTS), [2, 3, 4, 5]),
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
    "numbers beyond every type": (
        between(number(b"a", b"1e400"), number(b"b", b"9" * 30)),
        bad(INFINITE, kept=3),
        [2],
    ),
    "nested too deep": (between(number(b"a", b"[" * 9000 + b"]" * 9000)), bad(DEEP), [2]),
    "an array in one line": ([b"[" + FIRST + b", " + LAST + b"]"], KEPT, []),
    "objects over lines": (
        [FIRST, b"{", b'"text": "x"', b"}"],
        bad(END, CONTENT, json_error("unexpected character, expected a JSON value"), kept=1),
        [2, 3, 4],
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_row_is_treated_by_its_rule(tmp_path: Path, recipe: BlockRecipe, name: str) -> None:
    lines, *expected = DOCUMENTS[name]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n" * bool(lines), 1))
    assert outcome(plain, recipe) == outcome(packed, recipe, 1024) == tuple(expected)


@pytest.mark.parametrize(("is_damaged", "reason"), [(True, "is truncated"), (False, "cannot read")])
def test_a_file_that_cannot_be_read_to_its_end_is_one_error_with_its_name_and_leaves_no_shards(
    tmp_path: Path, recipes: dict[str, BlockRecipe], is_damaged: bool, reason: str
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    if is_damaged:
        path.write_bytes(gzip.compress(LARGE)[:-3000])
    for kind, recipe in recipes.items():
        with pytest.raises(DataError, match=reason) as raised:
            build(path, recipe)
        assert str(path) in str(raised.value)
        assert raised.value.files == ((str(path),) if is_damaged else ())
        assert isinstance(raised.value, CannotRead) != is_damaged
        assert not list(tmp_path.glob("shards-*/*/index.json"))
        (report,) = check([str(path)], READING, kind=kind)
        assert report.error == str(raised.value)


def test_files_with_too_many_bad_rows_are_named(tmp_path: Path, tokenizer: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(GOOD_FILE)
    bad.write_bytes(b'{"text": 1}\n' * 500)
    stage: Any = {"kind": "documents", "dataset": "pretrain"}
    more: Any = (tmp_path / "out", Runtime(workers=1), ProgressWriter(None), lambda: False)
    files, groups = {"train": [str(good), str(bad)]}, {"train": [0, 0]}
    context = StageContext({"tokenizer": tokenizer}, files, stage, *more, groups=groups)
    with pytest.raises(DataError, match=r"500 of \d+") as raised:
        shards.run(Settings(), context)
    assert raised.value.files == (str(bad),)


class Changing(Processes):
    """Changes the file after its blocks are known and before they are read."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def map(self, function: Any, tasks: Any) -> Any:
        for task in tasks:
            self._change()
            yield function(*task)


def test_what_is_appended_meanwhile_is_left_out(tmp_path: Path, recipe: BlockRecipe) -> None:
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
