"""Read files as JSON Lines through fsspec, unpacked by the endings of their names, in bounded pieces."""

from __future__ import annotations

import codecs
import enum
import itertools
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from ttrain.core.text import first_line
from ttrain.data import locations, remote
from ttrain.errors import CannotRead, DataError, TTrainError

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # of a text, from which its format is told
ARRAY_BYTES = 1 << 30  # an array is read whole
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
READ_ERRORS = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
_SPACE = b" \t\r\n"
_VALUE_LINE = re.compile(rb"^[ \t]*[{\[]", re.MULTILINE)


class Format(enum.Enum):
    LINES = enum.auto()  # JSON Lines, good or bad: every line is judged on its own
    ARRAY = enum.auto()  # one JSON array, over any number of lines
    DOCUMENT = enum.auto()  # a `.txt` file: all of it is one text


@contextmanager
def noting_faults(location: str) -> Iterator[None]:
    """Raise a library's error as DataError with the location; CannotRead if the bytes may be good."""
    try:
        yield
    except CannotRead:
        raise
    except DataError as error:
        error.files = (location,)
        raise
    except Exception as error:
        is_remote = locations.is_remote(location)
        if isinstance(error, TTrainError) or not (is_remote or isinstance(error, READ_ERRORS)):
            raise
        if is_remote or getattr(error, "errno", None):  # of the network or the disk
            raise CannotRead(f"cannot read {location}: {remote.reason(error)}") from None
        reason = first_line(error)
        raise DataError(f"{location} is truncated or corrupt: {reason}; fetch or write it again", [location]) from None


def local_file(location: str) -> Path | None:
    """Local path of the file, fetched from the Hub if necessary; None for a URL."""
    if location.startswith(remote.PREFIX):
        return remote.fetch(location)
    return None if locations.is_remote(location) else locations.local_path(location)


@contextmanager
def opened(location: str) -> Iterator[BinaryIO]:
    """The unpacked bytes of a file, to read from the front."""
    compression = _compression(location)
    path = local_file(location)
    if path and not compression:
        with path.open("rb") as file:
            yield file
        return
    import fsspec

    url = location if path is None else str(path)
    options = remote.options(url) if path is None else {}
    with fsspec.open(url, "rb", compression=compression, **options) as stream:
        yield stream


def _compression(location: str) -> str | None:
    """How fsspec unpacks a file of this name."""
    if not locations.name(location).endswith(locations.PACKED):
        return None
    from fsspec.compression import register_compression
    from fsspec.utils import infer_compression

    register_compression("zstd", _open_zstd, "zst", force=True)
    return infer_compression(locations.name(location))  # type: ignore[no-any-return]


def _open_zstd(stream: BinaryIO, mode: str) -> Any:
    """Unpack with pyarrow: fsspec has no zstd before Python 3.14."""
    import pyarrow as pa

    return pa.CompressedInputStream(pa.PythonFile(stream, mode), "zstd")


def is_parquet(location: str) -> bool:
    """Whether it is a parquet file by its first bytes, or of a URL by its name."""
    path = local_file(location)
    if path is None:
        return locations.name(location).endswith(".parquet")
    with noting_faults(location), path.open("rb") as file:
        return file.read(4) == b"PAR1"


def is_plain(location: str) -> bool:
    """Whether it is a local file of JSON Lines in UTF-8, any part of which can be read by offset.

    Raises DataError if it is neither that nor a format that `json_lines` reads.
    """
    if locations.is_remote(location) or _compression(location):
        return False
    with opened(location) as stream:
        head = stream.read(HEAD_BYTES)
    if head.startswith(UTF16):
        return False
    return format_of(head.removeprefix(codecs.BOM_UTF8), location) is Format.LINES


def chunks(location: str) -> Iterator[bytes]:
    """The text in UTF-8, unpacked, without its byte order mark, in bounded pieces."""
    with opened(location) as stream:
        piece = stream.read(CHUNK_BYTES)
        # Half of a pair of surrogates stays one, which costs its row.
        decoder = codecs.getincrementaldecoder("utf-16")("surrogatepass")
        is_utf16 = piece.startswith(UTF16)
        piece = piece.removeprefix(codecs.BOM_UTF8)
        while piece:
            yield decoder.decode(piece).encode("utf-8", "surrogatepass") if is_utf16 else piece
            piece = stream.read(CHUNK_BYTES)
        decoder.decode(b"", final=True)


def json_lines(location: str, text_field: str) -> Iterator[bytes]:
    """The text as JSON Lines: an element of an array, or all of a `.txt` file, is a line.

    A `.txt` file is a row with `text_field` only.
    """
    pieces = chunks(location)
    beginning = next(pieces, b"")
    form = format_of(beginning[:HEAD_BYTES], location)
    pieces = itertools.chain([beginning], pieces)
    if form is Format.ARRAY:
        return _array_lines(pieces, location)
    if form is Format.DOCUMENT:
        return _document_line(pieces, location, text_field)
    return pieces


def format_of(head: bytes, location: str) -> Format:
    """The format of a text by its first `HEAD_BYTES`, without a byte order mark.

    Raises DataError if the whole text is something else; a bad first line is rejected alone.
    """
    start = head.lstrip(_SPACE)
    first, _, others = start.partition(b"\n")
    if locations.is_text(location) and not start.startswith((b'{"', b"[{")):
        return Format.DOCUMENT
    if start.startswith(b"["):
        is_row = first.rstrip().endswith(b"]") and others.strip()
        return Format.LINES if is_row else Format.ARRAY
    if first.rstrip() == b"{" and others.lstrip().startswith(b'"'):
        raise DataError(f"{location} is pretty-printed, not one JSON object a line; run `{_converted(location, '.')}`")
    if start and b"\0" not in head and not _VALUE_LINE.search(head):
        raise DataError(
            f"{location} is CSV or plain text, not JSON Lines; "
            "name a text .txt, or write a table's rows as JSON objects, one a line"
        )
    return Format.LINES


def _document_line(pieces: Iterator[bytes], location: str, text_field: str) -> Iterator[bytes]:
    yield b"{" + json.dumps(text_field, ensure_ascii=False).encode() + b':"'
    for piece in pieces:
        if b"\0" in piece:
            raise DataError(
                f"{location} is binary, or text in another encoding: it has NUL bytes; "
                "leave it out, or convert it with iconv"
            )
        text = piece.decode("utf-8", "surrogateescape")  # a piece may end within a character
        yield json.dumps(text, ensure_ascii=False)[1:-1].encode("utf-8", "surrogateescape")
    yield b'"}\n'


def _array_lines(pieces: Iterator[bytes], location: str) -> Iterator[bytes]:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > ARRAY_BYTES:
            command = _converted(location, ".[]")
            raise DataError(f"{location} is one JSON array of more than 1 GiB; run `{command}`")
    for element in orjson.loads(data):
        yield orjson.dumps(element) + b"\n"


def _converted(location: str, jq_filter: str) -> str:
    """The command that writes a file as JSON Lines."""
    source = shlex.quote(locations.name(location))
    return f"jq -c '{jq_filter}' < {source} > converted.jsonl"
