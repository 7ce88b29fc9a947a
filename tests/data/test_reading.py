"""Reading files, also bad ones: nothing is lost, damage is named, and each row has its rule."""

import bz2
import gzip
import itertools
import json
import lzma
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hostile_rows
from support.hostile_rows import BOM, FIRST, LAST, MARK, bad, build, outcome, text
from support.shard_sets import write_lines
from support.streamed_files import SMALL, TABLE, TEXT, read, table_bytes, written
from support.web import Site

from ttrain.config import Reading
from ttrain.data import first_rows, json_rows, streams
from ttrain.data.blocks import BlockRecipe
from ttrain.data.check import check
from ttrain.data.json_rows import NOT_UTF8, NULS, Tally, lines
from ttrain.errors import CannotRead, DataError, UsageError

PARTS = (TEXT[:999], TEXT[999:])
PACKED = {
    "": TEXT,
    ".gz": gzip.compress(b"").join(gzip.compress(part, 1) for part in PARTS),
    ".bz2": b"".join(map(bz2.compress, PARTS)),
    ".xz": b"".join(lzma.compress(part, preset=0) for part in PARTS),
    ".zst": b"".join(pa.compress(part, "zstd", asbytes=True) for part in (b"", *PARTS)),
}


def lines_of(path: Path) -> list[bytes]:
    with streams.noting_faults(str(path)):
        return b"".join(streams.json_lines(str(path), "text")).splitlines()


@pytest.mark.parametrize("ending", PACKED)
def test_every_member_and_frame_arrives_in_bounded_pieces(tmp_path: Path, ending: str) -> None:
    path = written(tmp_path, PACKED[ending], f"文件 名 (1) #%20.jsonl{ending}")
    pieces = list(streams.chunks(str(path)))
    assert b"".join(pieces) == TEXT
    assert all(pieces) and len(pieces) > 1 and max(map(len, pieces)) < len(TEXT)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_with_its_mark_is_read_as_utf_8(tmp_path: Path, encoding: str) -> None:
    text = "\ufeff" * (encoding == "utf-16-be") + "他🏽\n" * 400_000 + "half a pair: \ud83d\n"
    data = text.encode(encoding, "surrogatepass")
    assert read(written(tmp_path, data)) == text.lstrip("\ufeff").encode("utf-8", "surrogatepass")
    path = written(tmp_path, data[:-1])
    with pytest.raises(DataError, match="truncated"), streams.noting_faults(str(path)):
        read(path)


def test_a_json_array_is_read_element_by_element(tmp_path: Path) -> None:
    rows = [{"text": "a\nb"}, 4, {"text": "世界", "n": [1, {"m": None}]}]
    for indent in (None, 1):
        path = written(tmp_path, json.dumps(rows, indent=indent).encode())
        assert list(map(json.loads, lines_of(path))) == rows
    assert lines_of(written(tmp_path, b"[]")) == []
    assert len(lines_of(written(tmp_path, b'[{"text": "a"}]\n[1]\n'))) == 2, "lines of lists"
    with pytest.raises(DataError, match="truncated"):
        lines_of(written(tmp_path, b'[{"text": "a"},\n{"te'))


def test_a_text_file_is_one_row_to_the_byte(tmp_path: Path) -> None:
    text = 'A "quote" \\ and\r\n\t世界\x01' * 100_000
    (line,) = lines_of(written(tmp_path, text.encode(), "a.txt"))
    assert orjson.loads(line) == {"text": text}
    rows = lines_of(written(tmp_path, SMALL, "a.txt"))
    assert rows == SMALL.splitlines(), "rows with another name"


def test_other_formats_are_refused_with_a_fix(tmp_path: Path) -> None:
    for name, data, fix in (
        ("a.txt", "ab".encode("utf-16-le"), "iconv"),
        ("rows.jsonl", b'{\n "text": "a"\n}\n', "jq -c"),
    ):
        with pytest.raises(DataError, match=fix):
            lines_of(written(tmp_path, data, name))


def test_files_behind_urls_of_any_kind_are_read(tmp_path: Path, site: Site) -> None:
    packed = PACKED[".gz"]
    site.files = {"/rows.jsonl.gz": packed, "/a b.jsonl": TEXT}
    fsspec.filesystem("memory").pipe("/streams/rows.jsonl.gz", packed)
    path = written(tmp_path, packed, "rows.jsonl.gz")
    urls = [f"{site.url}/rows.jsonl.gz?key=1", f"{site.url}/a%20b.jsonl?key=1"]
    for location in (*urls, "memory://streams/rows.jsonl.gz", f"file://{path}"):
        assert read(location) == TEXT
    site.statuses = [503] * 100
    with pytest.raises(CannotRead, match="503"), streams.noting_faults(urls[0]):
        read(urls[0])


def rows_in(path: str, *groups: int) -> list[tuple[int, dict[str, Any]]]:
    return [(number, orjson.loads(line)) for number, line in streams.parquet_lines(path, *groups)]


def test_parquet_rows_are_numbered_through_the_file_and_come_by_group(tmp_path: Path) -> None:
    user = {"role": "user", "content": None}
    nested = [{"messages": [user], "x": None}, {"messages": [], "x": 1.5}]
    path = str(written(tmp_path, table_bytes(pa.Table.from_pylist(nested))))
    assert rows_in(path, 0, 1) == [(1, {"messages": [user]}), (2, nested[1])]
    path = str(written(tmp_path, table_bytes(TABLE, row_group_size=1000), "no ending"))
    assert streams.is_parquet(path)
    assert [rows for rows, _ in streams.row_groups(path)] == [1000, 1000, 500]
    rows = rows_in(path, 0, 3)
    assert rows == list(enumerate(TABLE.to_pylist(), start=1))
    assert rows_in(path, 1, 2) == rows[1000:2000]


@pytest.mark.parametrize(("end", "extra"), [*itertools.product((b"\n", b""), (0, 1))])
def test_the_limit_of_a_line_is_exact(tmp_path: Path, end: bytes, extra: int) -> None:
    line = b'{"text": "xxxx"}'
    tally, path = Tally(), written(tmp_path, line + end)
    rows = list(json_rows.read([str(path)], tally, len(line) - extra))
    assert (len(rows), tally.rejected.total()) == (1 - extra, extra)
    assert tally.keys_seen["text"] == 1 - extra


@settings(max_examples=60, deadline=None)
@given(
    data=st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\r", b"\n\n", b" "]), max_size=30),
    cuts=st.lists(st.integers(0, 40)),
)
def test_any_chunks_give_the_lines_of_the_whole(data: list[bytes], cuts: list[int]) -> None:
    text = b"".join(data)
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    chunks = [text[start:end] for start, end in itertools.pairwise(borders)]
    expected = text.removesuffix(b"\n").split(b"\n") if text else []
    assert list(lines(chunks, 1000)) == list(enumerate(expected, start=1))
    short = [line[:4] for _, line in lines(chunks, 3)]
    assert short == [line[:4] for line in expected], "of a long line, enough to see that it is"


CHAT, BROKEN = {"question": "q", "answer": "a"}, b"{broken"


def test_first_rows_of_another_kind_or_mostly_bad_are_refused(tmp_path: Path) -> None:
    rows: dict[str, list[Any]] = {
        "empty": [],
        "bad": [CHAT, {"messages": 1}, BROKEN],
        "document": [{"text": "a"}],
        "title": [{"Title": "t", "Body": "a long text"}],
        "good": [CHAT] * 3,
        "many": [BROKEN] * first_rows.ROWS + [CHAT] * 50,
        "wrong": [{"messages": 1}],
    }
    paths = {name: str(write_lines(tmp_path / f"{name}.jsonl", rows[name])) for name in rows}
    for setting, kind, path, part in (
        ("data.sft_heldout", "chats", "document", "data.pretrain_heldout="),
        ("data.pretrain", "documents", "title", "reading.text_field=Body"),
        ("data.sft", "chats", "bad", r"2 of 3 .*bad\.jsonl:3: "),
        ("data.sft", "chats", "empty", "no rows"),
    ):
        with pytest.raises(UsageError, match=part):
            first_rows.check(setting, kind, [paths[path]], Reading())
    # What the stage counts is left to it.
    for names, fraction in (("many", 0.01), ("bad good", 0.01), ("bad", 0.8), ("wrong", 1)):
        files = [paths[name] for name in names.split()]
        first_rows.check("data.sft", "chats", files, Reading(rejected_fraction=fraction))


END = "not valid JSON: unexpected end of data"
NO_OBJECTS = [f"not a JSON object but {kind}" for kind in ("a list", "text", "a number", "null")]
KEPT: hostile_rows.Outcome = {"kept": 2}
KEPT_3: hostile_rows.Outcome = {"kept": 3, "skipped": {"duplicate": 2}}


def between(*lines: bytes) -> list[bytes]:
    return [FIRST, *lines, LAST]


COPIES = [FIRST, FIRST, b'{"id": 1, "text": "A first line."}']
TWICE = [b'{"text": "x", "text": "A first line."}', FIRST, b'{"text": "x", "text": null}', LAST]
# {name: (lines, outcome, numbers of the bad lines)}; which texts a document has: test_records.py
DOCUMENTS: dict[str, tuple[Sequence[bytes], hostile_rows.Outcome, list[int]]] = {
    "broken JSON": (between(b'{"text": "cut off in the mid'), bad(END), [2]),
    "invalid UTF-8": (between(b'{"text": "\xff"}'), bad(NOT_UTF8), [2]),
    "a BOM at the start": ([BOM + FIRST, LAST], KEPT, []),
    "a BOM in the middle, as of joined files": ([FIRST, BOM + FIRST, LAST], bad(MARK), [2]),
    "CRLF and blank lines": ([b"\r", FIRST + b"\r", b"\r", b" \t\r", LAST + b"\r"], KEPT, []),
    "no object": (between(b'["text"]', b'"a"', b"4", b"null"), bad(*NO_OBJECTS), [2, 3, 4, 5]),
    "a first line of NUL": ([bytes(3), FIRST, LAST], bad(NULS), [1]),
    "nothing": ([], {}, []),
    "duplicates": ([*COPIES, text("a first line."), LAST], KEPT_3, []),
    "U+2028 and U+0085": ([text("a\u2028b"), text("a\x85b")], KEPT, []),
    "a key twice": (TWICE, bad("'text' is null, not text", skipped={"duplicate": 1}), [3]),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_row_is_treated_by_its_rule(tmp_path: Path, recipe: BlockRecipe, name: str) -> None:
    lines, *expected = DOCUMENTS[name]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.gz"
    plain.write_bytes(b"\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes() + b"\n" * bool(lines), 1))
    assert outcome(plain, recipe) == outcome(packed, recipe, 1024) == tuple(expected)


@pytest.mark.parametrize(("is_damaged", "reason"), [(True, "is truncated"), (False, "cannot read")])
def test_an_unreadable_file_is_one_error_and_leaves_no_shards(
    tmp_path: Path, recipe: BlockRecipe, is_damaged: bool, reason: str
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    if is_damaged:
        path.write_bytes(gzip.compress(TEXT)[:-3000])
    with pytest.raises(DataError, match=f"{path}.*{reason}|{reason}.*{path}") as raised:
        build(path, recipe)
    assert isinstance(raised.value, CannotRead) != is_damaged
    assert not list(tmp_path.glob("shards-*/*/index.json"))
    (report,) = check([str(path)], hostile_rows.READING)
    assert report.error == str(raised.value)
