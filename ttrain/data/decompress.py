"""gzip, bzip2, xz and zstd, told by what a file begins with: all members or frames of it, in bounded pieces."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

PIECE_BYTES = 1 << 20  # what one step gives at most, so that a megabyte of packed zeros never becomes a gigabyte in memory
INPUT_BYTES = 1 << 18  # on 52 MB of text zlib itself does 273 MB/s from such pieces, gzip.GzipFile around it 223 MB/s
XZ_MEMORY_BYTES = 1 << 28  # xz -9 needs 65 MiB; a file may ask for 4 GiB
MAGICS = GZIP, BZIP2, XZ, ZSTD = b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")  # a zstd frame that is to be skipped (RFC 8878, 3.1.2)


class _Decoder(Protocol):
    """One member: the common part of `bz2.BZ2Decompressor` and `lzma.LZMADecompressor`."""

    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Gunzip:
    """One member of a gzip file; its checksum and length are checked by zlib."""

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
    """What the archive that begins with `head` holds, in pieces of at most `PIECE_BYTES`; None where it is no archive.

    The iterator raises EOFError where the archive is cut and ValueError where it is damaged, after what it could unpack.
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


def _members(stream: BinaryIO, new_decoder: Callable[[], _Decoder]) -> Iterator[bytes]:
    """Members one after the other; zeros between and behind them are padding, and anything else there is damage."""
    data = stream.read(INPUT_BYTES)
    while data:
        decoder = new_decoder()
        while not decoder.eof:
            if decoder.needs_input and not data:
                data = stream.read(INPUT_BYTES)
                if not data:
                    raise EOFError("it ends within its compressed data")
            piece, data = _step(decoder, data), b""
            if piece:
                yield piece
        data = decoder.unused_data.lstrip(b"\0")
        while not data and (more := stream.read(INPUT_BYTES)):
            data = more.lstrip(b"\0")


def _step(decoder: _Decoder, data: bytes) -> bytes:
    try:
        return decoder.decompress(data, PIECE_BYTES)
    except Exception as error:  # zlib.error, lzma.LZMAError, and OSError of bz2
        raise ValueError(str(error)) from None


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    """All frames of a zstd file, by pyarrow, which reports a cut one at its end only, after all that it could unpack."""
    import pyarrow as pa

    source = _Watched(stream)
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


class _Watched:
    """A stream that remembers whether reading it failed, to tell that from a damaged archive."""

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
