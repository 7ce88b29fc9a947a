"""Bad input of every kind goes the whole way from a file to shards: what is kept, skipped, rejected or refused is exact.

Files that are cut or unreadable are refused by name.
"""

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

VALUE, CONTENT = (
    json_error("unexpected character, expected a JSON value"),
    json_error("unexpected content after document"),
)
INFINITE, DEEP = (
    json_error("number is infinity when parsed as double"),
    json_error("depth limit exceeded"),
)
LONE_HIGH, LONE_LOW = (
    json_error("no low surrogate in string"),
    json_error("invalid high surrogate in string"),
)
END, CONTROL = (
    json_error("unexpected end of data"),
    json_error("unexpected control character in string"),
)

# {what is wrong: (the lines, what becomes of them, the numbers of the bad lines)}; what a text is, and under which key:
# tests/data/test_records.py
DOCUMENTS: dict[str, tuple[Sequence[bytes], Outcome, list[int]]] = {
    "broken JSON": ([FIRST, b'{"text": "cut off in the mid', LAST], bad(END), [2]),
    "invalid UTF-8": (
        [FIRST, b'{"text": "\xff"}', b'{"text": "\xed\xa0\x80"}', LAST],
        bad(*[NOT_UTF8] * 2),
        [2, 3],
    ),
    "a BOM at the start": ([BOM + FIRST, LAST], {"kept": 2}, []),
    "a BOM in the middle, as of joined files": ([FIRST, BOM + FIRST, LAST], bad(MARK), [2]),
    "CRLF and blank lines": (
        [b"\r", FIRST + b"\r", b"\r", b" \t\r", LAST + b"\r", b"\r"],
        {"kept": 2},
        [],
    ),
    "no object": (
        [FIRST, b'["text"]', b'"a string"', b"42", b"null", b"true", LAST],
        bad(
            *(
                f"not a JSON object but {kind}"
                for kind in ("a list", "text", "a number", "null", "a boolean")
            )
        ),
        [2, 3, 4, 5, 6],
    ),
    "lone surrogates": (
        [
            FIRST,
            b'{"text": "\\ud83d high"}',
            b'{"text": "\\ude00 low"}',
            b'{"text": "\\ude00\\ud83d"}',
            LAST,
        ],
        bad(LONE_HIGH, LONE_LOW, LONE_LOW),
        [2, 3, 4],
    ),
    "raw NUL": ([FIRST, b'{"text": "\0"}', LAST], bad(CONTROL), [2]),
    "a first line of NUL": ([bytes(3), FIRST, LAST], bad(NULS), [1]),
    "nothing": ([], {}, []),
    "duplicates": (
        [
            FIRST,
            FIRST,
            b'{"id": 1, "text": "A first line."}',
            text("a first line."),
            text("A first line. "),
            LAST,
        ],
        {"kept": 4, "skipped": {"duplicate": 2}},
        [],
    ),
    "U+2028 and U+0085": ([text("a\u2028b"), text("a\x85b")], {"kept": 2}, []),
    "a key twice: the last one counts": (
        [b'{"text": "x", "text": "A first line."}', FIRST, b'{"text": "x", "text": null}', LAST],
        bad("'text' is null, not text", skipped={"duplicate": 1}),
        [3],
    ),
    "NaN": ([FIRST, b'{"text": "a", "x": NaN}', LAST], bad(VALUE), [2]),
    "numbers beyond every type": (
        [
            FIRST,
            b'{"text": "a", "x": 1e400}',
            b'{"text": "b", "x": 1e-400}',
            b'{"text": "c", "x": ' + b"9" * 30 + b"}",
            b'{"text": "d", "x": ' + b"9" * 5000 + b"}",
            LAST,
        ],
        bad(INFINITE, INFINITE, kept=4),
        [2, 5],
    ),
    "nested too deep": (
        [
            FIRST,
            b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            b'{"x":' * 5000,
            LAST,
        ],
        bad(DEEP, DEEP),
        [2, 3],
    ),
    "a whole file in a JSON array": (
        [b"[", FIRST + b",", b"4,", LAST, b"]"],
        bad("not a JSON object but a number"),
        [2],
    ),
    "a JSON array in one line": ([b"[" + FIRST + b", " + LAST + b"]"], {"kept": 2}, []),
    "lists in lines": (
        [b"[" + FIRST + b"]", b"[" + LAST + b"]", FIRST],
        bad(*["not a JSON object but a list"] * 2, kept=1),
        [1, 2],
    ),
    "pretty-printed within": (
        [FIRST, b"{", b'  "text": "spread over lines"', b"}"],
        bad(END, CONTENT, VALUE, kept=1),
        [2, 3, 4],
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_row_is_kept_skipped_or_rejected_by_its_rule(
    tmp_path: Path, recipe: BlockRecipe, name: str
) -> None:
    lines, expected, where = DOCUMENTS[name]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n" * bool(lines), 1))
    for path, block_bytes in ((plain, 1 << 20), (packed, 1024)):
        assert outcome(path, recipe, block_bytes) == (expected, where)


GOOD_FILE = FIRST + b"\n" + LAST + b"\n"
LARGE = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(10_000))


class Changing(Processes):
    """Changes the file after its blocks are known and before they are read."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._change = change

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:  # type: ignore[override]
        for task in tasks:
            self._change()
            yield function(*task)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(gzip.compress(LARGE)[:-3000]), "is truncated"),
    "missing": (lambda path: None, "cannot read"),
}
if Path("/proc/self/mem").exists():  # a file whose bytes cannot be read, as on a broken disk
    REFUSED["an error of the disk"] = (
        lambda path: path.symlink_to("/proc/self/mem"),
        "cannot read",
    )


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_cannot_be_read_whole_is_one_error_with_its_name_and_leaves_no_shards(
    tmp_path: Path, recipes: dict[str, BlockRecipe], make: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / ("rows.jsonl.gz" if says == "is truncated" else "rows.jsonl")
    make(path)
    for kind, recipe in recipes.items():
        with pytest.raises(DataError, match=says) as raised:
            build(path, recipe)
        assert str(path) in str(raised.value)
        assert raised.value.files == (() if isinstance(raised.value, CannotRead) else (str(path),))
        assert isinstance(raised.value, CannotRead) == (says == "cannot read")
        assert not list(tmp_path.glob("shards-*/*/index.json"))
        (report,) = check([str(path)], READING, kind=kind)
        assert report.error == str(raised.value)


def test_files_of_bad_rows_are_named_where_these_are_too_many_and_others_are_not(
    tmp_path: Path, tokenizer: Path
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(GOOD_FILE)
    bad.write_bytes(b'{"text": 1}\n' * 500)
    files = {"train": [str(good), str(bad)]}
    job = StageContext(
        {"tokenizer": tokenizer},
        files,
        {"kind": "documents", "dataset": "pretrain"},
        tmp_path / "out",
        Runtime(workers=1),
        ProgressWriter(None),
        lambda: False,
        groups={"train": [0, 0]},
    )
    with pytest.raises(DataError, match=r"500 of \d+ rows are bad") as raised:
        shards.run(Settings(), job)
    assert raised.value.files == (str(bad),)


def append_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(GOOD_FILE)


def test_what_is_appended_while_a_file_is_read_is_left_out_and_one_that_becomes_shorter_is_an_error(
    tmp_path: Path, recipe: BlockRecipe
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LARGE)
    built, _ = build(path, recipe, 1 << 16, Changing(lambda: append_to(path)))
    assert built.tallies["train"].to_json() == {
        "rows": 10_000,
        "kept": 10_000,
        "skipped": {},
        "rejected": {},
    }
    with pytest.raises(CannotRead, match="shorter while it was read") as raised:
        build(path, recipe, 1 << 17, Changing(lambda: os.truncate(path, 100_000)))
    assert str(path) in str(raised.value)
