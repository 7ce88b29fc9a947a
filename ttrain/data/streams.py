"""Read files as JSON Lines through fsspec, unpacked by the endings of their names, in bounded pieces."""

from __future__ import annotations

import codecs
import itertools
import json
import lzma
import re
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Literal

import orjson

from ttrain.core.text import first_line
from ttrain.data import locations, remote
from ttrain.errors import CannotRead, DataError, TTrainError

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # of a text, from which its format is told
WHOLE_BYTES = 1 << 30  # an array and a `.txt` file are read whole
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
READ_ERRORS = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
_VALUE_LINE = re.compile(rb"^[ \t]*[{\[]", re.MULTILINE)


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
    return not head.startswith(UTF16) and format_of(head.removeprefix(codecs.BOM_UTF8), location) == "lines"


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
    if form == "lines":
        yield from pieces
    elif form == "array":
        for element in orjson.loads(_whole(pieces, location, f"run `{_converted(location, '.[]')}`")):
            yield orjson.dumps(element) + b"\n"
    else:
        data = _whole(pieces, location, "split it")
        if b"\0" in data:
            reason = "is binary, or text in another encoding: it has NUL bytes; leave it out, or convert it with iconv"
            raise DataError(f"{location} {reason}")
        row = {text_field: data.decode("utf-8", "surrogateescape")}
        yield json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"


def format_of(head: bytes, location: str) -> Literal["lines", "array", "text"]:
    """The format of a text by its first `HEAD_BYTES`, without a byte order mark.

    Raises DataError if the whole text is something else; a bad first line is rejected alone.
    """
    start = head.lstrip(b" \t\r\n")
    first, _, others = start.partition(b"\n")
    if locations.is_text(location) and not start.startswith((b'{"', b"[{")):
        return "text"
    if start.startswith(b"["):
        is_row = first.rstrip().endswith(b"]") and others.strip()
        return "lines" if is_row else "array"
    if first.rstrip() == b"{" and others.lstrip().startswith(b'"'):
        raise DataError(f"{location} is pretty-printed, not one JSON object a line; run `{_converted(location, '.')}`")
    if start and b"\0" not in head and not _VALUE_LINE.search(head):
        raise DataError(
            f"{location} is CSV or plain text, not JSON Lines; "
            "name a text .txt, or write a table's rows as JSON objects, one a line"
        )
    return "lines"


def _whole(pieces: Iterator[bytes], location: str, fix: str) -> bytearray:
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > WHOLE_BYTES:
            raise DataError(f"{location} is one value of more than 1 GiB; {fix}")
    return data


def _converted(location: str, jq_filter: str) -> str:
    """The command that writes a file as JSON Lines."""
    source = shlex.quote(locations.name(location))
    return f"jq -c '{jq_filter}' < {source} > converted.jsonl"
