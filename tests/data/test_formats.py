"""Files that are not JSON Lines: read where that is possible, else named for what they are, with a command that works."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ttrain.config import Reading
from ttrain.data import formats, locations, records
from ttrain.data.check import Report, check, kind_of
from ttrain.data.formats import Format, as_json_lines, format_of
from ttrain.data.records import Tally, TextDocument, document_parser, read
from ttrain.data.sharding import Here
from ttrain.errors import DataError

TEXTS = ("他是这里的一个人，我们不在。", 'A "quoted"\nline, with a comma.', "Last.")
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS)
CSV = "id,text\n" + "".join('1,"{}"\n'.format(text.replace('"', '""')) for text in TEXTS)
READING = Reading(heldout_fraction=0.0, rejected_fraction=0.0)


def report_on(path: Path, reading: Reading = READING) -> Report:
    (report,) = check([str(path)], reading, pool=Here())
    return report


def texts_of(path: Path, text_field: str = "text") -> list[str]:
    tally = Tally()
    found = list(read([str(path)], document_parser(text_field), tally, 1 << 20, text_field))
    assert tally.rows == tally.kept == len(found), tally.to_json()
    return [record.text for record in found if isinstance(record, TextDocument)]


# --- named, with the command

NAMED: dict[str, tuple[str, bytes, str, Sequence[str]]] = {
    "pretty-printed": (
        "rows.json", "".join(json.dumps({"text": text}, indent=2) + "\n" for text in TEXTS).encode(),
        "is pretty-printed, not one JSON object a line", TEXTS,
    ),
    "CSV": ("rows.csv", CSV.encode(), "is CSV or plain text, not JSON Lines", TEXTS),
    "CSV with a mark and CRLF": ("rows.csv", b"\xef\xbb\xbfid,text\r\n1,a\r\n2,b\r\n", "is CSV", ["a", "b"]),
    "CSV by its content": ("rows.data", CSV.encode(), "is CSV or plain text, not JSON Lines", TEXTS),
    "CSV with semicolons by its name": ("rows.csv", b'id;text\n1;"a;b, c"\n2;"d\n;e"\n', "is CSV", ["a;b, c", "d\n;e"]),
    "CSV with tabs by its name": ("rows.csv", b'id\ttext\n1\t"a\tb"\n2\tc\n', "is CSV", ["a\tb", "c"]),
    "CSV with semicolons and rows of any length": ("rows.csv", b"id;text\n1;a,b\n2;c;3\n", "is CSV", ["a,b", "c"]),
    "CSV with commas in its cells": ("rows.csv", b'"text";"n,m"\n"a, b";"1,5"\n"c, d";"2,5"\n', "is CSV", ["a, b", "c, d"]),
    "TSV": ("rows.tsv", b"id\ttext\n1\ta\n2\tb\n", "is CSV or plain text, not JSON Lines", ["a", "b"]),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_what_is_not_json_lines_is_named_and_the_advised_command_works(tmp_path: Path, case: str) -> None:
    name, data, says, texts = NAMED[case]
    directory = tmp_path / "it's here $HOME"
    directory.mkdir()
    path = directory / name
    path.write_bytes(data)
    report = report_on(path)
    assert report.error is not None
    assert re.search(f"^{re.escape(str(path))} {says}", report.error)
    advised = re.search(r"run `(.*)`", report.error, flags=re.DOTALL)
    assert advised, report.error
    programs = [words.split()[0] for words in advised[1].split(" | ")]
    if missing := [program for program in programs if not shutil.which(program)]:
        pytest.skip(f"{missing[0]} is not installed")
    subprocess.run(advised[1], shell=True, check=True, timeout=60)
    (converted,) = [other for other in directory.iterdir() if other != path]
    assert texts_of(converted) == list(texts)
    assert report_on(converted).error is None


def test_nul_bytes_are_called_no_encoding(tmp_path: Path) -> None:
    """Three of them before a newline look like UTF-32 to whoever counts zeros alone."""
    path = tmp_path / "rows.jsonl"
    for nuls in (1, 2, 3, 4, 8):
        path.write_bytes(bytes(nuls) + b"\n" + LINES.encode())
        report = report_on(path)
        assert report.tally.rejected == {records.NULS: 1}
        assert report.tally.kept == len(TEXTS)


def test_text_in_another_encoding_is_rejected_with_a_line_that_names_iconv(tmp_path: Path) -> None:
    encodings = ("latin-1", "gb18030", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be")
    for encoding in encodings:
        path = tmp_path / encoding
        path.write_bytes('{"text": "é"}\n'.encode(encoding))
        report = report_on(path)
        assert report.tally.kept == 0, encoding
        assert report.error and f"{path}:1: not valid UTF-8" in report.error and "iconv" in report.error
    path = tmp_path / "a.txt"
    path.write_bytes("é".encode("latin-1"))
    assert report_on(path).tally.rejected == {records.NOT_UTF8: 1}
    path.write_bytes("text".encode("utf-16-le"))
    assert "iconv" in (report_on(path).error or "")


def test_prose_of_another_name_is_refused_and_read_as_txt(tmp_path: Path) -> None:
    for name in ("notes.md", "notes.txt"):
        (tmp_path / name).write_text("# A note\n\nNot JSON.\n")
    assert "name a text .txt" in (report_on(tmp_path / "notes.md").error or "")
    assert texts_of(tmp_path / "notes.txt") == ["# A note\n\nNot JSON.\n"]


def test_a_bad_first_line_costs_that_line_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for first in ('{"text": "cut off', "broken", "[broken", '[{"a": 1}]', "{", "{\n", "1", "[]", "name, text", "}"):
        path.write_text(f"{first}\n{LINES}", encoding="utf-8")
        report = report_on(path)
        assert (report.tally.kept, report.tally.rejected.total()) == (len(TEXTS), 1), first


# --- JSON arrays


def cut(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    pieces, at, number = [], 0, 0
    while at < len(data):
        size = sizes[number % len(sizes)]
        pieces.append(data[at : at + size])
        at, number = at + size, number + 1
    return pieces


JSON = st.recursive(
    st.sampled_from(['"', "\\", "\\\\", '\\"', "a,b", "[", "]}", "{", "\n", "é中", None, True, 1, -1.5e3, [], {}]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(['"k"', "\\", "a]", "b"]), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["text", "x\\", '"']), JSON, max_size=3), max_size=6),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    ascii_only=st.booleans(),
)
@example(rows=[{"text": "\\"}, {"x\\": '\\"'}], sizes=[1], indent=None, ascii_only=True)
def test_the_elements_of_an_array_are_its_lines_wherever_pieces_are_cut(
    rows: list[Any], sizes: list[int], indent: int | None, ascii_only: bool
) -> None:
    data = f" {json.dumps(rows, indent=indent, ensure_ascii=ascii_only)}\r\n ".encode()
    lines = b"".join(as_json_lines(cut(data, sizes), Format.ARRAY, "rows.json", "text"))
    assert [json.loads(line) for line in lines.splitlines()] == rows
    if rows:
        assert format_of(data.strip(), "rows.json") is Format.ARRAY


def test_the_elements_of_an_array_stay_as_they_are_written(tmp_path: Path) -> None:
    rows = [
        b'{"n":98765432109876543210, "x": 1.10}',
        b'{"n":1,"n":2}',
        b'{"t":"\xff"}',
        b'{"d":' + b"[" * 500 + b"]" * 500 + b"}",
    ]
    data = b"[\n" + b" ,\r\n".join(rows) + b"]"
    assert b"".join(as_json_lines([data], Format.ARRAY, "rows.json", "text")).splitlines() == rows


@pytest.mark.parametrize(
    ("name", "indent"), [("rows.json", 1), ("rows.jsonl", None), ("rows.json.gz", None), ("rows.txt", 1)]
)
def test_an_array_is_read_as_json_lines_are(tmp_path: Path, name: str, indent: int | None) -> None:
    path, rows = tmp_path / name, [{"text": text} for text in TEXTS]
    data = json.dumps(rows, indent=indent).encode()
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert texts_of(path) == list(TEXTS) and report_on(path).error is None
    path.write_text(json.dumps([*rows, 3, {"text": 4}, {"txt": 5}], indent=indent))
    report = report_on(path)
    assert (report.tally.rows, report.tally.kept) == (6, 3)
    assert [line.split(":")[1] for line in report.tally.first_rejected] == ["4", "5", "6"], "numbered by element"


def test_an_array_that_is_cut_or_followed_by_something_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "rows.json", json.dumps([{"text": text} for text in TEXTS], indent=1)
    for size in range(whole.index("{") + 12, len(whole), 3):
        path.write_text(whole[:size], encoding="utf-8")
        assert f"{path} is truncated or corrupt: the JSON array" in (report_on(path).error or ""), whole[:size]
    path.write_text(whole + "\n[]", encoding="utf-8")
    assert f"{path} has more after the JSON array that it begins with, at character {len(whole)}" in (
        report_on(path).error or ""
    )
    path.write_bytes(b'[{"text": "a"},\n{"text": "b\nc"}]')
    assert "Invalid control character" in (report_on(path).error or "")


def test_an_array_that_is_too_large_to_be_read_whole_names_jq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "ARRAY_BYTES", 10)
    with pytest.raises(DataError, match=r"more than 1 GiB; run `jq -c '\.\[\]' < rows.json > rows.converted.jsonl`"):
        list(as_json_lines([b'[{"text":', b'"a"}]'], Format.ARRAY, "rows.json", "text"))


# --- documents in .txt files


def test_a_txt_file_is_one_document_to_the_byte(tmp_path: Path) -> None:
    for number, text in enumerate(
        (TEXTS[0], " \r\n\t\\ \\n \x01\x1f\x7f\u2028 'x' {", "{not JSON}", "[1] A footnote.", "1")
    ):
        path = tmp_path / f"{number}.txt"
        path.write_bytes(text.encode())
        packed = tmp_path / f"{number}.txt.gz"
        packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))
        assert texts_of(path) == texts_of(packed) == texts_of(path, "body") == [text]
        assert report_on(path).to_json() == {**report_on(packed).to_json(), "file": str(path)}
        assert kind_of(str(path), 1 << 20) == "documents"


def test_a_txt_file_without_text_is_skipped_and_what_is_too_long_or_no_text_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for blank in (b"", b" \n", b"\xef\xbb\xbf"):
        path.write_bytes(blank)
        assert report_on(path).tally.skipped == {"empty text": 1}
    path.write_bytes(b"a" * 5000 + b"\n")
    small = READING.model_copy(update={"max_line_bytes": 5000})
    assert report_on(path, small).tally.rejected == {records.TOO_LONG.format(5000): 1}
    assert report_on(path).error is None
    path.write_bytes(b"a" * 2_000_000 + b"\xff")
    assert report_on(path).tally.rejected == {records.NOT_UTF8: 1}
    path.write_bytes(b"a" * 2_000_000 + b"\0a")
    assert f"{path} is binary, not text: its byte 2000000 is NUL; leave it out" in (report_on(path).error or "")


def test_a_folder_of_texts_is_documents_unless_it_holds_rows(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.txt", "deep/a.txt.gz", ".hidden.txt", "c.md"):
        (tmp_path / name).write_bytes(gzip.compress(b"a") if name.endswith("gz") else b"b")
    expected = [str(tmp_path / name) for name in ("b.txt", "deep/a.txt.gz")]
    assert locations.expand([str(tmp_path)], "FILE") == expected
    (tmp_path / "deep/rows.jsonl").write_text(LINES, encoding="utf-8")
    (tmp_path / "rows.txt").write_text(LINES, encoding="utf-8")
    assert texts_of(tmp_path / "rows.txt") == list(TEXTS), "JSON Lines of that name are rows"
    assert locations.expand([str(tmp_path)], "FILE") == [str(tmp_path / "deep/rows.jsonl")], "a licence is no document"
    assert locations.expand([str(tmp_path), str(tmp_path / "b*.txt")], "FILE")[1:] == [str(tmp_path / "b.txt")]
