"""Parquet rows, and files behind URLs: broken connections, failing servers, damaged pages."""

from __future__ import annotations

import gzip
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq
from support.packed_files import PEAK
from support.paths import ROOT
from support.streamed_files import SMALL, TABLE, TEXT, read, table_bytes, written
from support.web import Site, served

from ttrain.data import remote, streams
from ttrain.errors import DataError


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty server; what fails is tried again at once."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.0, 0.0, 0.0))
    with served(Site({})) as opened:
        yield opened


# --- URLs


def test_files_behind_urls_of_any_kind_are_read(tmp_path: Path, site: Site) -> None:
    packed = gzip.compress(TEXT)
    site.files = {"/rows.jsonl.gz": packed}
    fsspec.filesystem("memory").pipe("/streams/rows.jsonl.gz", packed)
    path = written(tmp_path, packed)
    for location in (f"{site.url}/rows.jsonl.gz", "memory://streams/rows.jsonl.gz", f"file://{path}", f"local://{path}"):
        assert read(location) == TEXT
        with streams.open_stream(location) as stream:
            assert stream.read(100) == packed[:100]
            assert stream.seek(50) == 50
            assert stream.read() == packed[50:], "as it is stored"
    site.files = {"/a b.jsonl": TEXT}
    site.asked.clear()
    assert read(f"{site.url}/a%20b.jsonl?key=1") == TEXT
    assert site.requests("GET") == [("/a b.jsonl", "")], "one request for its bytes"


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_connection_is_taken_up_where_it_broke(site: Site, ranges: bool) -> None:
    data = gzip.compress(TEXT, 1)
    site.files, site.ranges = {"/rows": data}, ranges
    third = len(data) // 3
    site.breaks = [third, third if ranges else 2 * third]
    assert read(f"{site.url}/rows") == TEXT
    assert [wanted for _, wanted in site.requests("GET")] == ["", f"bytes={third}-", f"bytes={2 * third}-"]


def test_an_archive_that_its_server_calls_an_encoding_is_read_as_it_is_stored(site: Site) -> None:
    data = gzip.compress(TEXT, 1)
    site.files, site.encoding = {"/rows.jsonl.gz": data}, "gzip"
    site.breaks = [len(data), len(data) // 3]  # the first request looks for its size, which the header of an encoding hides
    assert read(f"{site.url}/rows.jsonl.gz") == TEXT
    assert site.requests("GET")[-1] == ("/rows.jsonl.gz", f"bytes={len(data) // 3}-")


def test_a_server_that_fails_for_a_while_is_asked_again_and_one_that_always_fails_is_an_error(site: Site) -> None:
    site.files = {"/rows.jsonl": SMALL}
    site.statuses = [503, 503, 500, 502, 429, 408]  # each time the two requests for its size, too
    assert read(f"{site.url}/rows.jsonl") == SMALL
    site.asked.clear()
    site.breaks = [0] * 100
    with pytest.raises(DataError) as raised:
        read(f"{site.url}/rows.jsonl")
    assert f"{site.url}/rows.jsonl" in str(raised.value)
    assert len(site.requests("GET")) == 4, "once, and three times more"


@pytest.mark.parametrize(("status", "says"), [(404, "no such file"), (403, "403")])
def test_a_refusal_is_told_at_once(site: Site, status: int, says: str) -> None:
    site.statuses = [status] * 100
    with pytest.raises(DataError, match=says) as raised:
        read(f"{site.url}/rows.jsonl")
    assert f"{site.url}/rows.jsonl" in str(raised.value)
    assert len(site.requests("HEAD")) == 1


def test_a_server_that_is_gone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSES_SECONDS", (0.0,))
    with served(Site({})) as site:
        pass
    with pytest.raises(DataError, match="connect"):
        read(f"{site.url}/rows.jsonl")


def test_a_file_that_changes_between_two_parts_is_not_put_together(site: Site) -> None:
    site.files, site.breaks = {"/rows.jsonl": TEXT}, [1_500_000]
    with pytest.raises(DataError, match="changed while it was read"):
        for _ in streams.chunks(f"{site.url}/rows.jsonl"):
            site.files["/rows.jsonl"] = TEXT[::-1]


# --- parquet


def test_parquet_rows_are_numbered_through_the_file_and_come_by_group(tmp_path: Path) -> None:
    nested = [{"messages": [{"role": "user", "content": None}], "x": None}, {"messages": [], "x": 1.5}]
    path = str(written(tmp_path, table_bytes(pa.Table.from_pylist(nested))))
    assert list(streams.parquet_rows(path, 0, 1)) == [(1, nested[0]), (2, nested[1])]
    path = str(written(tmp_path, table_bytes(TABLE, row_group_size=1000), "no ending"))
    assert streams.is_parquet(path)
    groups = streams.parquet_groups(path)
    assert [rows for rows, _ in groups] == [1000, 1000, 500]
    assert all(size > 1000 for _, size in groups)
    rows = list(streams.parquet_rows(path, 0, 3))
    assert [number for number, _ in rows] == list(range(1, 2501))
    assert [row for _, row in rows] == TABLE.to_pylist()
    assert list(streams.parquet_rows(path, 1, 2)) == rows[1000:2000]
    assert list(streams.parquet_rows(path, 1, 1)) == []
    assert next(streams.parquet_rows(path, 2, 3)) == rows[2000]


def test_a_file_of_text_is_no_parquet(tmp_path: Path) -> None:
    for data in (SMALL, b"", b"PAR", gzip.compress(SMALL)):
        assert not streams.is_parquet(str(written(tmp_path, data)))


def test_text_of_parquet_that_is_no_utf8_costs_its_value_alone(tmp_path: Path) -> None:
    text = pa.array([b"before", b"\xff", b"after"]).view(pa.string())
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), pa.array([b"a", b"\xff", b"c"]).view(pa.string()))
    path = str(written(tmp_path, table_bytes(pa.table({"text": text, "list": nested}))))
    assert [row["text"] for _, row in streams.parquet_rows(path, 0, 1)] == ["before", None, "after"]
    assert [row["list"] for _, row in streams.parquet_rows(path, 0, 1)] == [["a"], None, ["c"]]


def parquet_rows(path: str) -> list[dict[str, Any]]:
    return [row for _, row in streams.parquet_rows(path, 0, len(streams.parquet_groups(path)))]


PARQUET = table_bytes(TABLE, row_group_size=1000, write_page_checksum=True)
FOOTER = int.from_bytes(PARQUET[-8:-4], "little")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), is_cut=st.booleans())
def test_cut_or_damaged_parquet_is_a_data_error(tmp_path: Path, place: float, bit: int, is_cut: bool) -> None:
    """What a flip in the footer changes (the name of a column, say) is not covered by a checksum, that in a page is."""
    data = bytearray(PARQUET)
    at = int(place * len(data))
    if is_cut:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    path = str(written(tmp_path, bytes(data)))
    try:
        rows = parquet_rows(path)
        assert rows == TABLE.to_pylist() or at > len(data) - 8 - FOOTER
        assert not is_cut
    except DataError as error:
        assert path in str(error)


def test_a_page_whose_header_one_bit_alters_is_missed(tmp_path: Path) -> None:
    """The header is in no checksum, and a page of an unknown kind is passed over, with a thousand rows."""
    data = bytearray(PARQUET)
    kind = pq.ParquetFile(io.BytesIO(PARQUET)).metadata.row_group(0).column(0).data_page_offset + 1
    data[kind] ^= 1
    with pytest.raises(DataError, match="the row count of a group is wrong"):
        parquet_rows(str(written(tmp_path, bytes(data))))


def test_parquet_that_counts_its_rows_wrongly_is_a_data_error(tmp_path: Path) -> None:
    """In the footer 3000 is written as 16 f0 2e: for the file, for the column (which nobody minds), for the group."""
    data = table_bytes(pa.table({"n": list(range(3000))}), use_dictionary=False, store_schema=False)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    right, wrong = b"\x16\xf0\x2e", b"\x16\xf0\x2d"
    parts = data[footer:].split(right)
    assert len(parts) == 4
    for place in (1, 3):
        altered = right.join(parts[:place]) + wrong + right.join(parts[place:])
        with pytest.raises(DataError, match="corrupt"):
            parquet_rows(str(written(tmp_path, data[:footer] + altered)))


MEMORY = f"""{PEAK}
path, count = sys.argv[1], 0
for _ in streams.parquet_rows(path, 0, 1):
    break
before = peak()
for _, row in streams.parquet_rows(path, 1, 2):
    count += len(row["text"])
print(count, peak() - before)
"""


def test_a_large_group_of_parquet_costs_no_memory(tmp_path: Path) -> None:
    rows, size = 60, 1_000_000
    half = os.urandom(size // 2).hex()
    texts = pa.array([f"{n:08}{half[8:]}" for n in range(rows)])
    path = tmp_path / "large.parquet"
    options = {"use_dictionary": False, "compression": "none", "write_batch_size": 1}  # so that pages are of a megabyte
    with pq.ParquetWriter(path, pa.schema({"text": pa.string()}), **options) as writer:
        writer.write_table(pa.table({"text": texts[:1]}))
        writer.write_table(pa.table({"text": texts}))
    command = [sys.executable, "-c", MEMORY, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    count, more_kib = map(int, done.stdout.split())
    assert count == rows * size
    assert more_kib < 50 << 10


def test_parquet_over_http_is_read_by_parts_and_refused_where_the_server_gives_none(site: Site) -> None:
    wide = pa.table({"text": TABLE["text"], "noise": [os.urandom(2000) for _ in range(2500)]})
    site.files = {"/rows.parquet": table_bytes(wide, row_group_size=500)}
    location = f"{site.url}/rows.parquet"
    assert streams.is_parquet(location)
    site.asked.clear()
    site.breaks = [10, 10]
    texts = [(number, row["text"]) for number, row in streams.parquet_rows(location, 1, 2)]
    assert texts == [(n + 1, f"row {n}") for n in range(500, 1000)]
    spans = [wanted.removeprefix("bytes=").split("-") for _, wanted in site.requests("GET")]
    assert sum(int(last) - int(first) for first, last in spans) < 0.6 * len(site.files["/rows.parquet"])
    site.ranges = False
    with pytest.raises(DataError, match="whole files only") as raised:
        parquet_rows(location)
    assert location in str(raised.value)
