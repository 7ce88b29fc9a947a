"""Reading input files: nothing is lost, changed or held in memory whole, and what is damaged says so with its name."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import lzma
import os
import tarfile
import zipfile
import zlib
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.packed_files import PACKS, Pack, zstd
from support.streamed_files import SMALL, TABLE, TEXT, read, table_bytes, written

from ttrain.data import decompress, streams
from ttrain.data.streams import CHUNK_BYTES
from ttrain.errors import DataError

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
    assert all(0 < len(piece) <= CHUNK_BYTES for piece in pieces)


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
    with pytest.raises(DataError, match="UTF-16"):
        streams.is_plain(str(written(tmp_path, SMALL.decode().encode("utf-16"))))


# --- cut and damaged


@pytest.mark.parametrize("ending", PACKS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1), members=st.integers(1, 3), border=st.booleans())
@example(share=0.0005, members=1, border=False)
@example(share=0.001, members=1, border=False)
def test_a_cut_archive_is_an_error_unless_whole_members_are_left(
    tmp_path: Path, ending: str, share: float, members: int, border: bool
) -> None:
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


class Failing(io.BytesIO):
    """A disk that fails after some bytes."""

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.tell() > 300_000:
            raise OSError(errno.EIO, "the disk is broken")
        return data


@pytest.mark.parametrize("pack", PACKS.values(), ids=list(PACKS))
def test_a_disk_that_fails_is_not_taken_for_a_damaged_archive(pack: Pack) -> None:
    data = pack(os.urandom(350_000))
    pieces = decompress.unpacked(Failing(data), data[:512])
    assert pieces is not None
    with pytest.raises(OSError, match="the disk is broken"):
        list(pieces)


def test_a_wrong_checksum_at_the_end_is_an_error_although_all_bytes_are_there(tmp_path: Path) -> None:
    for data in (gzip.compress(SMALL)[:-8] + bytes(4) + gzip.compress(SMALL)[-4:], ZSTD_SMALL[:-4] + bytes(4)):
        with pytest.raises(DataError, match="corrupt"):
            read(written(tmp_path, data))


def test_a_damaged_beginning_is_not_taken_for_text_where_the_name_says_archive(tmp_path: Path) -> None:
    for ending, pack in PACKS.items():
        with pytest.raises(DataError, match="corrupt"):
            read(written(tmp_path, b"X" + pack(SMALL)[1:], f"rows.jsonl.{ending}"))
        assert read(written(tmp_path, SMALL, f"rows.jsonl.{ending}")) == SMALL, "a wrong name alone does no harm"
        long = b'{"text":"' + "é".encode() * 400 + b'"}\n'
        assert read(written(tmp_path, long, f"rows.jsonl.{ending}")) == long, "a character across the end of the head"


def test_an_archive_that_asks_for_too_much_memory_is_told_from_a_damaged_one(tmp_path: Path) -> None:
    """The header of an xz block says with one byte, after 21 01, how large its dictionary is (xz format, 3.1 and 5.3.1)."""
    data = lzma.compress(SMALL)
    header = bytearray(data[12 : 12 + 4 * data[12]])
    header[header.index(b"\x21\x01") + 2] = 36  # 1 GiB
    patched = data[:12] + header + zlib.crc32(header).to_bytes(4, "little") + data[12 + len(header) + 4 :]
    with pytest.raises(DataError, match="smaller dictionary"):
        read(written(tmp_path, patched))


# --- what is no text


def test_zeros_within_text_are_left_to_its_lines(tmp_path: Path) -> None:
    for data in (b'{"text": "a\0b"}\n', b"\0\0\0\0\n", b"\0"):
        assert read(written(tmp_path, data)) == data


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
        read(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "device", "loop", "below a file"])
def test_what_is_no_regular_file_is_refused_by_name_and_never_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "rows.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path(os.devnull)
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "below a file":
        path = written(tmp_path, b"") / "rows.jsonl"
    for function in (streams.open_stream, streams.is_plain, streams.is_parquet, streams.parquet_groups, read):
        with pytest.raises(DataError, match="cannot read") as raised:
            function(str(path))
        assert str(path) in str(raised.value)
