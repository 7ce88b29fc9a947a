"""Decompress gzip, bzip2, xz and zstd, recognised by their first bytes: all members or frames, in bounded pieces."""

from __future__ import annotations

import codecs
import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from bz2 import BZ2Decompressor
    from lzma import LZMADecompressor

PIECE_BYTES = 1 << 20  # most output of one step, so that a megabyte of packed zeros never becomes a gigabyte in memory

INPUT_BYTES = 1 << 18  # on 52 MB of text zlib itself does 273 MB/s from such pieces, gzip.GzipFile around it 223 MB/s

XZ_MEMORY_BYTES = 1 << 28  # xz -9 needs 65 MiB; a file may ask for 4 GiB

MAGICS = GZIP, BZIP2, XZ, ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"

_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a zstd frame that is to be skipped (RFC 8878, 3.1.2)


class _Gunzip:
    """Decoder of one member of a gzip file, as those of bz2 and lzma; zlib checks its checksum and length."""

    def __init__(self) -> None:
        self._inner = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._inner.eof

    @property
    def needs_input(self) -> bool:
        return not self._inner.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        return self._inner.unused_data

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._inner.decompress(self._inner.unconsumed_tail or data, max_length)


def is_packed(head: bytes) -> bool:
    """Whether the first bytes are those of an archive that `unpacked` reads."""
    return head.startswith(MAGICS) or bool(_SKIPPABLE.match(head))


def unpacked(stream: BinaryIO, head: bytes) -> Iterator[bytes] | None:
    """Decompress the archive that begins with `head`, in pieces of at most `PIECE_BYTES`; None if it is not an archive.

    After what it could unpack, the iterator raises EOFError if the archive is cut, and ValueError if it is damaged.
    Errors of the stream itself pass through.
    """
    if head.startswith(GZIP):
        return _members(stream, _Gunzip)
    if head.startswith(BZIP2):
        import bz2

        return _members(stream, bz2.BZ2Decompressor)
    if head.startswith(XZ):
        import lzma

        return _members(stream, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_MEMORY_BYTES))
    return _frames(stream) if is_packed(head) else None


def _members(stream: BinaryIO, new_decoder: Callable[[], _Gunzip | BZ2Decompressor | LZMADecompressor]) -> Iterator[bytes]:
    """Decompress all members; zeros between and after them are padding, and anything else there is damage."""
    data = stream.read(INPUT_BYTES)
    while data:
        decoder = new_decoder()
        while not decoder.eof:
            if decoder.needs_input and not data:
                data = stream.read(INPUT_BYTES)
                if not data:
                    raise EOFError("it ends within its compressed data")
            try:
                piece = decoder.decompress(data, PIECE_BYTES)
            except Exception as error:  # zlib.error, lzma.LZMAError, and OSError of bz2
                raise ValueError(str(error)) from None
            data = b""
            if piece:
                yield piece
        data = decoder.unused_data.lstrip(b"\0")
        while not data and (chunk := stream.read(INPUT_BYTES)):
            data = chunk.lstrip(b"\0")


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    """Decompress all frames of a zstd file with pyarrow, which reports a cut only at the end, after all it could unpack."""
    import pyarrow as pa

    source = _ErrorTrackingStream(stream)
    try:
        unpacking = pa.CompressedInputStream(pa.PythonFile(source, "r"), "zstd")
        while piece := unpacking.read(PIECE_BYTES):
            yield piece
    except OSError as error:
        if source.failed:
            raise
        if "truncated" in str(error).lower():
            raise EOFError("it ends within its compressed data") from None
        raise ValueError(str(error)) from None


class _ErrorTrackingStream:
    """A stream that remembers whether reading it failed, to distinguish that from a damaged archive."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.failed = False

    @property
    def closed(self) -> bool:
        return self._stream.closed

    def read(self, size: int = -1) -> Any:
        self.failed = True
        data = self._stream.read(size)
        self.failed = False
        return data

    def close(self) -> None:
        return


# The 32-bit marks first: one of them begins like a 16-bit one.
MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16",
}  # fmt: skip
# A text that begins with two ASCII characters, as JSON does, shows its encoding by which of its first four bytes are zero
# (RFC 4627, section 3).
ZEROS = {"000x": "UTF-32BE", "0x0x": "UTF-16BE", "x000": "UTF-32LE", "x0x0": "UTF-16LE"}
# The characters that make up a fifth of running Chinese text: random bytes, and other languages' encodings, lack them.
FREQUENT = frozenset("，。的一是不了在人有我他这为之大来以个中上们到说国和地也子时道出而要于就下得可你年生")

FREQUENT_SHARE, GB2312_SHARE = 0.05, 0.9


def is_utf8(head: bytes) -> bool:
    """Whether the bytes are UTF-8; a character may be cut at their end."""
    return _decoded(head, "utf-8") is not None


def wide_encoding(head: bytes) -> str | None:
    """The name of UTF-16 or UTF-32, with a byte order mark or without; None if the bytes do not decode as such text."""
    for mark, name in MARKS.items():
        if head.startswith(mark) and _is_text(_decoded(head, name)):
            return name
    name = ZEROS.get("".join("x" if byte else "0" for byte in head[:4]), "")
    return name if name and _is_text(_decoded(head, name)) else None


def is_gb18030(head: bytes) -> bool:
    """Whether bytes that are not UTF-8 are Chinese in GB18030 (or its parts, GBK and GB2312)."""
    text = _decoded(head, "gb18030")
    if not _is_text(text):
        return False
    wide = [character for character in text or "" if not character.isascii()]
    common = sum(bool(character.encode("gb2312", "ignore")) for character in wide)
    frequent = sum(character in FREQUENT for character in wide)
    return bool(wide) and common >= GB2312_SHARE * len(wide) and frequent >= FREQUENT_SHARE * len(wide)


def _decoded(head: bytes, encoding: str) -> str | None:
    try:
        return codecs.getincrementaldecoder(encoding)().decode(head)
    except UnicodeDecodeError:
        return None


def _is_text(text: str | None) -> bool:
    return bool(text and "\0" not in text and not text.isspace())
