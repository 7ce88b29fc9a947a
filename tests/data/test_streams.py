"""Reading input files: nothing is lost or held in memory at once, and damage is named by file."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pytest
from support.streamed_files import SMALL, TABLE, TEXT, read, table_bytes, written
from support.web import Site

from ttrain.data import streams
from ttrain.errors import CannotRead, DataError

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
    text = "他🏽\n" * 400_000 + "half a pair: \ud83d\n"
    data = (text if encoding == "utf-16" else f"\ufeff{text}").encode(encoding, "surrogatepass")
    assert read(written(tmp_path, data)) == text.encode("utf-8", "surrogatepass")
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


def test_errors_of_arrow_name_the_file_and_a_bug_does_not() -> None:
    with pytest.raises(DataError) as risen, streams.noting_faults("rows.parquet"):
        raise pa.ArrowKeyError("no column")
    assert risen.value.files == ("rows.parquet",)
    with pytest.raises(KeyError), streams.noting_faults("rows.parquet"):
        raise KeyError("ours")


def test_a_text_file_is_one_row_to_the_byte(tmp_path: Path) -> None:
    text = 'A "quote" \\ and\r\n\t世界\x01' * 100_000
    (line,) = lines_of(written(tmp_path, text.encode(), "a.txt"))
    assert orjson.loads(line) == {"text": text}
    rows = lines_of(written(tmp_path, SMALL, "a.txt"))
    assert rows == SMALL.splitlines(), "rows with another name"


def test_other_formats_are_refused_with_a_fix(tmp_path: Path) -> None:
    for name, data, fix in (
        ("a.txt", "ab".encode("utf-16-le"), "iconv"),
        ("rows.jsonl", b"id,text\n1,a\n", r"\.txt"),
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


def test_a_refusal_and_a_server_that_is_gone_are_no_damaged_file(site: Site) -> None:
    site.statuses = [503] * 100
    for server, reason in ((site.url, "503"), ("http://127.0.0.1:1", "connect")):
        url = f"{server}/rows.jsonl"
        with pytest.raises(CannotRead, match=reason), streams.noting_faults(url):
            read(url)


def rows_in(path: str, *groups: int) -> list[tuple[int, dict[str, Any]]]:
    return [(number, orjson.loads(line)) for number, line in streams.parquet_lines(path, *groups)]


def test_parquet_rows_are_numbered_through_the_file_and_come_by_group(tmp_path: Path) -> None:
    assert not streams.is_parquet(str(written(tmp_path, b"PAR")))
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
