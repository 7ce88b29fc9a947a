"""JSON Lines: what ends a line, what a bad one costs; parquet gives the same rows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.streamed_files import written

from ttrain.data import json_rows
from ttrain.data.json_rows import Tally, lines
from ttrain.data.records import parse_conversation, read

LIMIT = 9 << 20


@pytest.mark.parametrize(("end", "extra"), [*itertools.product((b"\n", b""), (0, 1))])
def test_the_limit_of_a_line_is_exact(tmp_path: Path, end: bytes, extra: int) -> None:
    line = b'{"text": "xxxx"}'
    tally, path = Tally(), written(tmp_path, line + end)
    rows = list(json_rows.read([str(path)], tally, len(line) - extra))
    assert (len(rows), tally.rejected.total()) == (1 - extra, extra)


def test_a_line_that_is_too_long_counts_whatever_it_begins_with(tmp_path: Path) -> None:
    tally, path = Tally(), written(tmp_path, b" " * 99 + b'{"text": "x"}\n \n{"text": "x"}')
    assert len(list(json_rows.read([str(path)], tally, 50))) == 1
    assert (tally.rows, tally.rejected.total(), tally.lines) == (2, 1, 3)


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


@pytest.mark.parametrize(
    ("kind", "value", "arguments"),
    [
        (pa.map_(pa.string(), pa.int64()), [("n", 1), ("b", None)], "1"),
        (pa.struct([("n", pa.timestamp("s"))]), {"n": 1}, '"1970-01-01T00:00:01"'),
    ],
)
def test_parquet_arguments_are_as_in_json(
    tmp_path: Path, kind: pa.DataType, value: Any, arguments: str
) -> None:
    call = pa.struct([("name", pa.string()), ("arguments", kind)])
    turn = pa.struct([("role", pa.string()), ("tool_calls", pa.list_(call))])
    messages = [[{"role": "assistant", "tool_calls": [{"name": "f", "arguments": value}]}]]
    pq.write_table(pa.table({"messages": pa.array(messages, pa.list_(turn))}), tmp_path / "a")
    (chat,) = read([str(tmp_path / "a")], parse_conversation, Tally(), LIMIT)
    assert f'"arguments": {{"n": {arguments}}}}}' in chat.to_json()["messages"][0]["content"]
