"""Reading files, also bad ones: nothing is lost, damage is named, and each row has its rule."""

import bz2
import gzip
import itertools
import json
import lzma
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import hostile_rows
from support.hostile_rows import BOM, FIRST, LAST, MARK, bad, build, json_error, outcome, text
from support.streamed_files import SMALL, TABLE, TEXT, read, table_bytes, written
from support.web import Site

from ttrain.config import Reading, Runtime, Settings
from ttrain.core.files import ProgressWriter
from ttrain.data import first_rows, json_rows, records, streams
from ttrain.data.blocks import BlockRecipe
from ttrain.data.check import check
from ttrain.data.json_rows import NOT_UTF8, NULS, Tally, lines
from ttrain.data.pool import Processes
from ttrain.data.records import Kind, parse_conversation
from ttrain.errors import CannotRead, DataError, UsageError
from ttrain.tasks import shards
from ttrain.tasks.common.job import StageContext

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
    for error in (MemoryError(), pa.ArrowMemoryError()):
        with pytest.raises(MemoryError), streams.noting_faults("rows.parquet"):
            raise error


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


def test_a_map_of_parquet_gives_the_arguments_of_json(tmp_path: Path) -> None:
    arguments = pa.map_(pa.string(), pa.int64())
    call = pa.struct([("name", pa.string()), ("arguments", arguments)])
    turn = pa.struct([("role", pa.string()), ("tool_calls", pa.list_(call))])
    calls = [{"name": "f", "arguments": [("n", 1), ("b", None)]}]
    messages = [[{"role": "assistant", "tool_calls": calls}]]
    pq.write_table(pa.table({"messages": pa.array(messages, pa.list_(turn))}), tmp_path / "a")
    (chat,) = records.read([str(tmp_path / "a")], parse_conversation, Tally(), 1 << 20)
    assert '"arguments": {"n": 1}}' in chat.to_json()["messages"][0]["content"]


DOCUMENT, CHAT = {"text": "a"}, {"question": "q", "answer": "a"}


def rows_file(path: Path, *rows: dict[str, Any] | str) -> str:
    text = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(text) + "\n")
    return str(path)


def error_of(setting: str, kind: Kind, *files: str) -> str:
    with pytest.raises(UsageError) as error:
        first_rows.check(setting, kind, files, Reading())
    return str(error.value)


def test_rows_of_another_kind_are_refused_with_the_setting_that_takes_them(tmp_path: Path) -> None:
    path = rows_file(tmp_path / "my.jsonl", "", CHAT, CHAT)
    message = error_of("data.pretrain", "documents", path)
    assert f"needs documents, but {path}:2 is a chat (keys: question, answer)" in message
    assert f"write data.sft={path}" in message
    path = rows_file(tmp_path / "my.jsonl", DOCUMENT)
    assert f"data.pretrain_heldout={path}" in error_of("data.sft_heldout", "chats", path)
    path = rows_file(tmp_path / "a.jsonl", {"Title": "t", "Body": "a long text"})
    message = error_of("data.pretrain", "documents", path)
    assert f"{path}:1 is none" in message and "(keys: Title, Body)" in message
    assert "reading.text_field=Body" in message


def test_a_few_rows_that_are_mostly_bad_or_none_are_refused(tmp_path: Path) -> None:
    empty = rows_file(tmp_path / "b.jsonl")
    bad = rows_file(tmp_path / "a.jsonl", CHAT, {"messages": 1}, "{broken")
    message = error_of("data.sft", "chats", bad)
    assert message.startswith(f"data.sft is {bad}, 2 of 3 rows are bad, such as {bad}:3: ")
    assert f"data.sft is {empty}, which has no rows" in error_of("data.sft", "chats", empty)
    first_rows.check("data.sft", "chats", [bad], Reading(rejected_fraction=0.8))
    good = rows_file(tmp_path / "good.jsonl", *[CHAT] * 3)
    many = rows_file(tmp_path / "many.jsonl", *["{broken"] * first_rows.ROWS, *[CHAT] * 50)
    for files in ([many], [bad, good], [empty, many]):
        first_rows.check("data.sft", "chats", files, Reading())
    # What the stage counts is left to it.
    rows = [[CHAT, DOCUMENT, "{broken"], ["{broken"], [], [{"text": " "}], [{"text": 1}]]
    files = [rows_file(tmp_path / f"{number}.jsonl", *part) for number, part in enumerate(rows)]
    tolerant = Reading(rejected_fraction=1)
    first_rows.check("data.pretrain", "documents", files, tolerant)
    rated = rows_file(tmp_path / "rated.jsonl", {"prompt": "q", "completion": "a", "label": 1})
    first_rows.check("data.dpo", "pairs", [rated], tolerant)
    wrong = rows_file(tmp_path / "wrong.jsonl", {"messages": 1})
    first_rows.check("data.sft", "chats", [wrong], tolerant)


CONTENT = json_error("unexpected content after document")
INFINITE = json_error("number is infinity when parsed as double")
DEEP = json_error("depth limit exceeded")
END = json_error("unexpected end of data")
NO_OBJECTS = [f"not a JSON object but {kind}" for kind in ("a list", "text", "a number", "null")]
KEPT: hostile_rows.Outcome = {"kept": 2}
LARGE = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(10_000))
GOOD_FILE = FIRST + b"\n" + LAST + b"\n"


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
    "duplicates": (
        [*COPIES, text("a first line."), text("A first line. "), LAST],
        {"kept": 4, "skipped": {"duplicate": 2}},
        [],
    ),
    "U+2028 and U+0085": ([text("a\u2028b"), text("a\x85b")], KEPT, []),
    "a key twice": (TWICE, bad("'text' is null, not text", skipped={"duplicate": 1}), [3]),
    "numbers beyond every type": (
        between(b'{"text": "a", "x": 1e400}', b'{"text": "b", "x": %s}' % (b"9" * 30)),
        bad(INFINITE, kept=3),
        [2],
    ),
    "nested too deep": (between(b'{"x": ' + b"[" * 9000 + b"]" * 9000 + b"}"), bad(DEEP), [2]),
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
        (report,) = check([str(path)], hostile_rows.READING, kind=kind)
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


def test_a_line_that_is_too_long_counts_whatever_it_begins_with(tmp_path: Path) -> None:
    tally, path = Tally(), written(tmp_path, b" " * 99 + b'{"text": "x"}\n \n{"text": "x"}')
    assert len(list(json_rows.read([str(path)], tally, 50))) == 1
    assert (tally.rows, tally.rejected.total(), tally.lines) == (2, 1, 3)
