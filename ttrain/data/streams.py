"""Read text from local or remote files, unpacked by their first bytes, not by their names.

Pieces are bounded, so memory is too. A file that is cut or damaged raises a DataError with its name,
and is never taken for a shorter file: `bz2.BZ2File` and `lzma.LZMAFile`, which fsspec uses, leave out
a member that is damaged, and what follows it, without an error.
"""

from __future__ import annotations

import bz2
import codecs
import io
import itertools
import lzma
import os
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ttrain.data import formats, locations, remote
from ttrain.data.formats import Format
from ttrain.errors import CannotRead, DataError, TTrainError

CHUNK_BYTES = 1 << 20
PACKED_BYTES = 1 << 13  # read at once: gzip unpacks them to at most 8 MiB
DECODERS: dict[bytes, Callable[[], Any]] = {
    b"\x1f\x8b": partial(zlib.decompressobj, wbits=zlib.MAX_WBITS | 16),
    b"BZh": bz2.BZ2Decompressor,
    b"\xfd7zXZ\0": lzma.LZMADecompressor,
}
ZSTD = (b"\xb5\x2f\xfd", b"\x2a\x4d\x18")  # bytes 1 to 3 of a frame, and of one that is to be skipped
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
FETCH_AGAIN = "fetch or compress it again"


@contextmanager
def data_errors(location: str) -> Iterator[None]:
    """Raise an error of the file system as DataError, which names the location."""
    try:
        yield
    except Exception as error:
        # File systems behind URLs have errors of their own.
        is_of_files = isinstance(error, OSError) or locations.is_remote(location)
        if isinstance(error, TTrainError) or not is_of_files:
            raise
        raise CannotRead(f"cannot read {location}: {remote.reason(error)}") from None


@contextmanager
def noting_faults(location: str) -> Iterator[None]:
    """Note the location on a DataError that is about the bytes of this file."""
    try:
        yield
    except CannotRead:
        raise
    except DataError as error:
        error.files = (location,)
        raise


def open_stream(location: str) -> io.BufferedReader:
    """Open the stored bytes, to read from the front. Raises DataError if they cannot be read."""
    path = local_file(location)
    with data_errors(location):
        return path.open("rb") if path else io.BufferedReader(remote.open_file(location), CHUNK_BYTES)


def local_file(location: str) -> Path | None:
    """Local path of the file, fetched from the Hub if necessary; None for a URL.

    Raises DataError if it is not a regular file: opening a pipe would wait for its writer for ever.
    """
    if location.startswith(remote.PREFIX):
        path = remote.fetch(location)
    elif locations.is_remote(location):
        return None
    else:
        path = locations.local_path(location)
    with data_errors(location):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise CannotRead(f"cannot read {location}: it is a folder, a pipe or a device; name a file")
    return path


def is_parquet(location: str) -> bool:
    """Whether the file begins like a parquet file."""
    return _head(location).startswith(b"PAR1")


def is_plain(location: str) -> bool:
    """Whether it is a local file of JSON Lines in UTF-8, any part of which can be read by its offset.

    Raises DataError if it is neither that nor a format that `json_lines` reads.
    """
    if locations.is_remote(location):
        return False
    head = _head(location)
    if is_packed(head) or head.startswith(UTF16) or _is_damaged_archive(head, location):
        return False
    return formats.format_of(head.removeprefix(codecs.BOM_UTF8), location) is Format.LINES


def json_lines(location: str, text_field: str) -> Iterator[bytes]:
    """The text as JSON Lines, as it is, or converted from a JSON array or a `.txt` file.

    A `.txt` file is a row with `text_field` only. Raises DataError like `chunks`, and for text of
    another format.
    """
    pieces = chunks(location)
    beginning = next(pieces, b"")
    form = formats.format_of(beginning[: formats.HEAD_BYTES], location)
    whole = itertools.chain([beginning], pieces)
    yield from formats.as_json_lines(whole, form, location, text_field)


def _head(location: str) -> bytes:
    with data_errors(location), open_stream(location) as stream:
        return stream.read(formats.HEAD_BYTES)


def chunks(location: str) -> Iterator[bytes]:
    """The text in UTF-8, unpacked, without the mark at its very start, in bounded pieces.

    The first one has at least `formats.HEAD_BYTES`, if the text has as many. Raises DataError for a
    file that is cut or damaged, or cannot be read.
    """
    with data_errors(location), open_stream(location) as stream:
        pieces = _unpacked(stream, location)
        beginning = bytearray()
        while len(beginning) < formats.HEAD_BYTES and (piece := next(pieces, b"")):
            beginning += piece
        if beginning.startswith(UTF16) and not beginning.startswith(codecs.BOM_UTF32_LE):
            yield from _from_utf16(itertools.chain([bytes(beginning)], pieces), location)
            return
        if text := bytes(beginning).removeprefix(codecs.BOM_UTF8):
            yield text
        yield from pieces


def _from_utf16(pieces: Iterator[bytes], location: str) -> Iterator[bytes]:
    """The same text in UTF-8; half of a pair of surrogates stays one, which costs its row."""
    decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
    for piece in pieces:
        yield decoder.decode(piece).encode("utf-8", "surrogatepass")
    if decoder.getstate()[0]:
        raise DataError(f"{location} is truncated: it ends within a character; {FETCH_AGAIN}")


def is_packed(head: bytes) -> bool:
    """Whether the first bytes are those of an archive that is unpacked."""
    return head.startswith(tuple(DECODERS)) or head[1:4] in ZSTD


def _is_damaged_archive(head: bytes, location: str) -> bool:
    """Whether the first bytes are neither an archive's, as its name says, nor those of JSON."""
    is_json = head.removeprefix(codecs.BOM_UTF8).lstrip().startswith((b"{", b"["))
    return location.endswith(locations.PACKED) and bool(head) and not is_json


def _unpacked(stream: io.BufferedReader, location: str) -> Iterator[bytes]:
    head = stream.peek()
    if head[1:4] in ZSTD:
        return _frames(stream, location)
    for magic, new_decoder in DECODERS.items():
        if head.startswith(magic):
            return _members(stream, location, new_decoder)
    if _is_damaged_archive(head, location):
        raise DataError(f"{location} is corrupt: it begins neither like an archive nor like JSON; {FETCH_AGAIN}")
    return _plain(stream, location)


def _plain(stream: io.BufferedReader, location: str) -> Iterator[bytes]:
    missing = 0 if locations.is_remote(location) else os.fstat(stream.fileno()).st_size
    while piece := stream.read(CHUNK_BYTES):
        missing -= len(piece)
        yield piece
    if missing > 0:
        raise DataError(f"{location} is truncated: it became shorter while it was read; {FETCH_AGAIN}")


def _members(stream: io.BufferedReader, location: str, new_decoder: Callable[[], Any]) -> Iterator[bytes]:
    """Unpack all members. Zeros after a member are padding; anything else there is damage."""
    decoder = new_decoder()
    while data := stream.read(PACKED_BYTES):
        while data:
            if decoder.eof:
                data = data.lstrip(b"\0")
                if not data:
                    break
                decoder = new_decoder()
            try:
                piece = decoder.decompress(data)
            except (zlib.error, lzma.LZMAError, OSError) as error:  # the last is of bz2
                raise DataError(f"{location} is corrupt: {error}; {FETCH_AGAIN}") from None
            if piece:
                yield piece
            data = decoder.unused_data
    if not decoder.eof:
        raise DataError(f"{location} is truncated: it ends within its compressed data; {FETCH_AGAIN}")


def _frames(stream: io.BufferedReader, location: str) -> Iterator[bytes]:
    """Unpack all frames of a zstd file with pyarrow: Python has no zstd before 3.14."""
    import pyarrow as pa

    try:
        unpacking = pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd")
        while piece := unpacking.read(CHUNK_BYTES):
            yield piece
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise
        raise DataError(f"{location} is truncated or corrupt: {error}; {FETCH_AGAIN}") from None
