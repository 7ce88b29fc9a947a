"""Reading input files: nothing is lost, changed or held in memory whole, and what is damaged says so with its name.

Parquet rows, and files behind URLs.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq
from support.packed_files import PACKS, PEAK, Pack, zstd
from support.paths import ROOT
from support.streamed_files import SMALL, TABLE, TEXT, read, table_bytes, written
from support.web import Site

from ttrain.data import parquet, streams
from ttrain.errors import CannotRead, DataError

# SMALL as the zstd command packs it, with its checksum, which pyarrow does not write.
ZSTD_SMALL = bytes.fromhex(
    "28b52ffd0468850100d87b2274657874223a2230227d0a3132333435363738393131227d0a0ba810"
    "f0fa3bb023eb109684781c861154704d0622bb2725"
)
SKIPPABLE = b"\x53\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"aside"


# --- whole files


@pytest.mark.parametrize(
    "data",
    [
        TEXT,
        gzip.compress(TEXT, 1),
        gzip.compress(TEXT[:999], 1) + gzip.compress(b"") + gzip.compress(TEXT[999:], 1),
        gzip.compress(TEXT[:999]) + bytes(700_000) + gzip.compress(TEXT[999:], 1) + bytes(512),
        bz2.compress(TEXT[:999]) + bz2.compress(TEXT[999:], 1),
        lzma.compress(TEXT[:999]) + bytes(8) + lzma.compress(TEXT[999:], preset=0) + bytes(4),
        zstd(TEXT),
        SKIPPABLE + zstd(TEXT[:999]) + SKIPPABLE + zstd(b"") + zstd(TEXT[999:]) + SKIPPABLE,
    ],
    ids=["plain", "gzip", "members", "padded members", "bzip2", "xz", "zstd", "frames"],
)
def test_every_member_and_frame_arrives_in_bounded_pieces_whatever_the_name(tmp_path: Path, data: bytes) -> None:
    pieces = list(streams.chunks(str(written(tmp_path, data, "文件 名 (1) #%20.zst"))))
    assert b"".join(pieces) == TEXT
    assert all(pieces)
    assert len(pieces) > 1 and max(map(len, pieces)) < len(TEXT)


def test_a_mark_is_left_out_at_the_very_start_only(tmp_path: Path) -> None:
    text = "\ufeffa\ufeffb\n".encode()
    one_byte_a_member = b"".join(gzip.compress(text[n : n + 1]) for n in range(len(text)))
    for data in (text, bz2.compress(text), zstd(text), one_byte_a_member):
        assert read(written(tmp_path, data)).decode() == "a\ufeffb\n"


def test_nothing_is_no_piece(tmp_path: Path) -> None:
    for data in (b"", gzip.compress(b""), zstd(b""), SKIPPABLE, bz2.compress(b"")):
        assert list(streams.chunks(str(written(tmp_path, data, "empty.jsonl.gz")))) == []


def test_plain_is_said_of_uncompressed_text_on_this_machine_alone(tmp_path: Path) -> None:
    assert streams.is_plain(str(written(tmp_path, SMALL)))
    assert streams.is_plain(f"file://{written(tmp_path, b'')}")
    assert not any(streams.is_plain(str(written(tmp_path, pack(SMALL)))) for pack in PACKS.values())
    assert not streams.is_plain("memory://rows.jsonl")
    assert not streams.is_plain(str(written(tmp_path, SMALL.decode().encode("utf-16"))))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_with_its_mark_is_read_as_utf_8(tmp_path: Path, encoding: str) -> None:
    text = "他🏽\n" * 400_000 + "half a pair: \ud83d\n"
    data = (text if encoding == "utf-16" else f"\ufeff{text}").encode(encoding, "surrogatepass")
    for packed in (data, gzip.compress(data, 1)):
        assert read(written(tmp_path, packed)) == text.encode("utf-8", "surrogatepass")
    with pytest.raises(DataError, match="truncated"):
        read(written(tmp_path, data[:-1]))


# --- cut and damaged


@pytest.mark.parametrize("ending", PACKS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), members=st.integers(1, 3), border=st.booleans())
@example(share=0.0005, members=1, border=False)
@example(share=0.001, members=1, border=False)
def test_a_cut_archive_is_an_error(tmp_path: Path, ending: str, share: float, members: int, border: bool) -> None:
    packed = [PACKS[ending](TEXT[n * 9000 : n * 9000 + 9000]) for n in range(members)]
    borders = [sum(map(len, packed[:n])) for n in range(members + 1)]
    size = borders[-1]
    cut = borders[int(share * members)] if border else int(share * size)
    path = written(tmp_path, b"".join(packed)[:cut], f"rows.jsonl.{ending}")
    if cut in borders:
        assert read(path) == TEXT[: 9000 * borders.index(cut)]
    else:
        with pytest.raises(DataError) as raised:
            read(path)
        assert str(path) in str(raised.value)
        assert "truncated" in str(raised.value) or cut < 6, "too little to tell what it is"


@pytest.mark.parametrize(
    ("data", "ending"),
    [(gzip.compress(SMALL), "gz"), (bz2.compress(SMALL), "bz2"), (lzma.compress(SMALL), "xz"), (ZSTD_SMALL, "zst")],
    ids=["gz", "bz2", "xz", "zst"],
)
def test_any_flipped_byte_is_an_error_or_changes_nothing(tmp_path: Path, data: bytes, ending: str) -> None:
    assert read(written(tmp_path, data)) == SMALL
    path, refused = tmp_path / f"rows.jsonl.{ending}", 0
    for flip in range(2 * len(data)):
        flipped = bytearray(data)
        flipped[flip // 2] ^= (1, 0xFF)[flip % 2]
        path.write_bytes(flipped)
        try:
            assert read(path) == SMALL
        except DataError as error:
            assert str(path) in str(error)
            refused += 1
    assert refused > 0.8 * 2 * len(data), "most bytes matter"


@pytest.mark.parametrize("pack", PACKS.values(), ids=list(PACKS))
def test_what_follows_an_archive_and_is_none_is_an_error(tmp_path: Path, pack: Pack) -> None:
    for garbage in (b"garbage", b"\x1f", b"\n", bytes(3) + b"x", b"\x1f\x8b"):
        with pytest.raises(DataError, match=r"corrupt|truncated"):
            read(written(tmp_path, pack(SMALL) + garbage))


def test_a_wrong_checksum_at_the_end_is_an_error_although_all_bytes_are_there(tmp_path: Path) -> None:
    for data in (gzip.compress(SMALL)[:-8] + bytes(4) + gzip.compress(SMALL)[-4:], ZSTD_SMALL[:-4] + bytes(4)):
        with pytest.raises(DataError, match="corrupt"):
            read(written(tmp_path, data))


def test_a_damaged_beginning_is_not_taken_for_text_where_the_name_says_archive(tmp_path: Path) -> None:
    for ending, pack in PACKS.items():
        with pytest.raises(DataError, match="corrupt"):
            read(written(tmp_path, b"X" + pack(SMALL)[1:], f"rows.jsonl.{ending}"))
        assert read(written(tmp_path, SMALL, f"rows.jsonl.{ending}")) == SMALL, "a wrong name alone does no harm"


# --- what is no text


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("rows.jsonl", SMALL)
    return buffer.getvalue()


def tarred() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as file:
        member = tarfile.TarInfo("rows.jsonl")
        member.size = len(SMALL)
        file.addfile(member, io.BytesIO(SMALL))
    return buffer.getvalue()


def arrow_bytes(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (zipped(), "zip archive"),
        (tarred(), "tar archive"),
        (table_bytes(TABLE), "parquet"),
        (arrow_bytes(TABLE), "Arrow"),
        (b"\x04\x22\x4d\x18" + bytes(20), "lz4"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
        (b"<!DOCTYPE html>\n<html></html>\n", "web page"),
        (gzip.compress(gzip.compress(SMALL)), "compressed twice"),
    ],
    ids=["zip", "tar", "parquet", "arrow", "lz4", "lfs", "html", "twice"],
)
def test_another_format_is_named_instead_of_read_as_lines(tmp_path: Path, data: bytes, what: str) -> None:
    path = written(tmp_path, data)
    with pytest.raises(DataError, match=what) as raised:
        list(streams.json_lines(str(path), "text"))
    assert str(path) in str(raised.value)


NOT_FILES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None, "folder": Path.mkdir, "pipe": os.mkfifo, "loop": lambda path: path.symlink_to(path),
    "device": lambda path: path.symlink_to(os.devnull),
}  # fmt: skip


@pytest.mark.parametrize("make", NOT_FILES.values(), ids=NOT_FILES)
def test_what_is_not_a_regular_file_is_refused_by_name(tmp_path: Path, make: Callable[[Path], object]) -> None:
    path = tmp_path / "rows.jsonl"
    make(path)
    for function in (streams.open_stream, streams.is_plain, streams.is_parquet, parquet.groups, read):
        with pytest.raises(DataError, match="cannot read") as raised:
            function(str(path))
        assert str(path) in str(raised.value)


# --- files behind URLs


def test_files_behind_urls_of_any_kind_are_read(tmp_path: Path, site: Site) -> None:
    packed = gzip.compress(TEXT)
    site.files = {"/rows.jsonl.gz": packed}
    fsspec.filesystem("memory").pipe("/streams/rows.jsonl.gz", packed)
    path = written(tmp_path, packed)
    for location in (f"{site.url}/rows.jsonl.gz", "memory://streams/rows.jsonl.gz", f"file://{path}", f"local://{path}"):
        assert read(location) == TEXT
        with streams.open_stream(location) as stream:
            assert stream.read(100) == packed[:100]
            assert stream.read() == packed[100:], "as it is stored"
    site.files = {"/a b.jsonl": TEXT}
    site.asked.clear()
    assert read(f"{site.url}/a%20b.jsonl?key=1") == TEXT
    assert site.requests("GET") == [("/a b.jsonl", "")], "one request for its bytes"


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd], ids=["plain", "gzip", "zstd"])
def test_a_broken_connection_is_an_error_and_no_shorter_file_nor_a_damaged_one(site: Site, pack: Pack) -> None:
    data = pack(TEXT)
    site.files, site.breaks = {"/rows": data}, [len(data) // 3]
    with pytest.raises(CannotRead, match=f"cannot read {site.url}/rows"):
        read(f"{site.url}/rows")


def test_an_archive_that_its_server_calls_an_encoding_is_read_as_it_is_stored(site: Site) -> None:
    site.files, site.encoding = {"/rows.jsonl.gz": gzip.compress(TEXT, 1)}, "gzip"
    assert read(f"{site.url}/rows.jsonl.gz") == TEXT


def test_a_refusal_a_failure_and_a_server_that_is_gone_are_told_apart(site: Site) -> None:
    for status, reason in ((404, "no such file"), (403, "403"), (503, "503")):
        site.statuses = [status] * 100
        with pytest.raises(CannotRead, match=reason) as raised:
            read(f"{site.url}/rows.jsonl")
        assert f"{site.url}/rows.jsonl" in str(raised.value)
    with pytest.raises(CannotRead, match="connect"):
        read("http://127.0.0.1:1/rows.jsonl")


# --- parquet


def rows_in(path: str, first_group: int, last_group: int) -> list[tuple[int, dict[str, Any]]]:
    lines = parquet.lines(path, first_group, last_group)
    return [(number, orjson.loads(line)) for number, line in lines]


def test_parquet_rows_are_numbered_through_the_file_and_come_by_group(tmp_path: Path) -> None:
    for data in (SMALL, b"", b"PAR", gzip.compress(SMALL)):
        assert not streams.is_parquet(str(written(tmp_path, data)))
    nested = [{"messages": [{"role": "user", "content": None}], "x": None}, {"messages": [], "x": 1.5}]
    path = str(written(tmp_path, table_bytes(pa.Table.from_pylist(nested))))
    assert rows_in(path, 0, 1) == [(1, {"messages": nested[0]["messages"]}), (2, nested[1])]
    path = str(written(tmp_path, table_bytes(TABLE, row_group_size=1000), "no ending"))
    assert streams.is_parquet(path)
    groups = parquet.groups(path)
    assert [rows for rows, _ in groups] == [1000, 1000, 500] and all(size > 1000 for _, size in groups)
    rows = rows_in(path, 0, 3)
    assert rows == list(enumerate(TABLE.to_pylist(), start=1))
    assert rows_in(path, 1, 2) == rows[1000:2000]
    assert rows_in(path, 1, 1) == []
    assert rows_in(path, 2, 3) == rows[2000:]


def test_text_of_parquet_that_is_no_utf8_costs_its_value_alone(tmp_path: Path) -> None:
    text = pa.array([b"before", b"\xff", b"after"]).view(pa.string())
    nested = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3]), pa.array([b"a", b"\xff", b"c"]).view(pa.string()))
    path = str(written(tmp_path, table_bytes(pa.table({"text": text, "list": nested}))))
    assert [row.get("text") for _, row in rows_in(path, 0, 1)] == ["before", None, "after"]
    assert [row.get("list") for _, row in rows_in(path, 0, 1)] == [["a"], None, ["c"]]


def parquet_rows(path: str) -> list[dict[str, Any]]:
    return [row for _, row in rows_in(path, 0, len(parquet.groups(path)))]


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
from ttrain.data import parquet
path, count = sys.argv[1], 0
for _ in parquet.lines(path, 0, 1):
    break
before = peak()
for _, line in parquet.lines(path, 1, 2):
    count += len(line) - len('{{"text":""}}')
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


def test_parquet_over_http_is_read_by_parts(site: Site) -> None:
    site.files = {"/rows.parquet": table_bytes(TABLE, row_group_size=500)}
    location = f"{site.url}/rows.parquet"
    assert streams.is_parquet(location)
    texts = [(number, row["text"]) for number, row in rows_in(location, 1, 2)]
    assert texts == [(n + 1, f"row {n}") for n in range(500, 1000)]
