"""Read files as JSON Lines through fsspec, decompressed by their names, in bounded pieces."""

import codecs
import contextlib
import datetime
import decimal
import itertools
import json
import lzma
import re
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import orjson

from ttrain.core.text import first_line
from ttrain.data import locations
from ttrain.errors import CannotRead, DataError, TTrainError

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16  # of a text, from which its format is told
WHOLE_BYTES = 1 << 30  # an array and a `.txt` file are read whole
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Of damaged bytes, beside Arrow's.
READ_ERRORS = (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error)
_VALUE_LINE = re.compile(rb"^[ \t]*[{\[]", re.MULTILINE)

BATCH_ROWS = 64  # read together; a row may have megabytes
BUFFER_BYTES = 1 << 20  # a column is read by pages: 19 MB instead of 209 for a group of 200 MB


@contextlib.contextmanager
def noting_faults(location: str) -> Iterator[None]:
    """Raise a library's error as DataError, or as CannotRead if the bytes may be good."""
    try:
        yield
    except TTrainError:
        raise
    except Exception as error:  # every file system has errors of its own
        # Of the network or the disk.
        if locations.is_remote(location) or getattr(error, "errno", None):
            raise CannotRead(f"cannot read {location}: {locations.reason(error)}") from None
        import pyarrow as pa

        if isinstance(error, MemoryError) or not isinstance(
            error, (*READ_ERRORS, pa.ArrowException)
        ):
            raise
        raise DataError(
            f"{location} is truncated or corrupt: {first_line(error)}; fetch or write it again",
            [location],
        ) from error


def stored(location: str) -> BinaryIO:
    """The opened file, not decompressed; one of the Hub is fetched first."""
    if location.startswith(locations.HUB):
        return locations.fetch(location).open("rb")
    if locations.is_remote(location):
        files, path = locations.filesystem(location)
        return cast("BinaryIO", files.open(path, "rb"))
    return locations.local_path(location).open("rb")


def is_parquet(location: str) -> bool:
    """Whether it is a parquet file, by its first bytes, or of a URL by its name."""
    if locations.is_remote(location) and not location.startswith(locations.HUB):
        return locations.name(location).endswith(".parquet")
    with noting_faults(location), stored(location) as file:
        return file.read(4) == b"PAR1"


def is_plain(location: str) -> bool:
    """Whether it is a local file of JSON Lines in UTF-8, which can be read by offset.

    Raises DataError if it is no format that `json_lines` reads.
    """
    if locations.is_remote(location) or locations.name(location).endswith(locations.PACKED):
        return False
    with stored(location) as stream:
        head = stream.read(HEAD_BYTES)
    return (
        not head.startswith(UTF16)
        and format_of(head.removeprefix(codecs.BOM_UTF8), location) == "lines"
    )


def chunks(location: str) -> Iterator[bytes]:
    """The text in UTF-8, unpacked, without its byte order mark, in bounded pieces."""
    with stored(location) as packed:
        name = locations.name(location)
        if name.endswith(".zst"):  # fsspec has no zstd before Python 3.14
            import pyarrow as pa

            stream = pa.CompressedInputStream(packed, "zstd")
        else:
            from fsspec.compression import compr
            from fsspec.utils import infer_compression

            stream = compr[infer_compression(name)](packed, mode="rb")
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
    """The text as JSON Lines; an array has a line per element, a `.txt` file is one line."""
    pieces = chunks(location)
    beginning = next(pieces, b"")
    form = format_of(beginning[:HEAD_BYTES], location)
    pieces = itertools.chain([beginning], pieces)
    if form == "lines":
        yield from pieces
        return
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > WHOLE_BYTES:
            raise DataError(
                f"{location} is one value of more than 1 GiB; split it, "
                "an array with `jq -c '.[]'`",
                [location],
            )
    if form == "array":
        yield from (orjson.dumps(element) + b"\n" for element in orjson.loads(data))
    elif b"\0" in data:
        raise DataError(
            f"{location} has NUL bytes, as a binary file or UTF-16 has; convert it with iconv",
            [location],
        )
    else:
        row = {text_field: data.decode("utf-8", "surrogateescape")}
        yield json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogateescape") + b"\n"


def format_of(head: bytes, location: str) -> str:
    """The format of a text by its first `HEAD_BYTES`: "lines", "array" or "text".

    Raises DataError for another format; a bad first line is rejected alone.
    """
    start = head.lstrip(b" \t\r\n")
    first, _, others = start.partition(b"\n")
    if locations.is_text(location) and not start.startswith((b'{"', b"[{")):
        return "text"
    if start.startswith(b"["):
        return "lines" if first.rstrip().endswith(b"]") and others.strip() else "array"
    if first.rstrip() == b"{" and others.lstrip().startswith(b'"'):
        raise DataError(
            f"{location} is pretty-printed, not JSON Lines; `jq -c '.' FILE` writes one row a line",
            [location],
        )
    if start and b"\0" not in head and not _VALUE_LINE.search(head):
        raise DataError(
            f"{location} is CSV or plain text, not JSON Lines; write rows as JSON objects, "
            "one a line, or name a text .txt",
            [location],
        )
    return "lines"


# --- parquet


def row_groups(location: str) -> list[tuple[int, int]]:
    """(rows, bytes before compression) of every row group of a parquet file."""
    with _parquet(location) as file:
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        return [(group.num_rows, group.total_byte_size) for group in groups]


def parquet_lines(
    location: str, first_group: int, last_group: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """(number from 1, JSON) of the rows of these groups, without the last group."""
    with _parquet(location) as file:
        groups = range(file.num_row_groups)
        before = sum(file.metadata.row_group(group).num_rows for group in groups[:first_group])
        # Asked for maps as objects, Arrow takes five times as long.
        maps = "lossy" if "map<" in str(file.schema_arrow) else None
        batches = file.iter_batches(
            BATCH_ROWS, row_groups=groups[first_group:last_group], use_threads=False
        )
        rows = (row for batch in batches for row in batch.to_pylist(maps_as_pydicts=maps))
        for number, row in enumerate(rows, before + 1):
            # A null column is a key that the row lacks; a row of nulls says what is null.
            present = {name: value for name, value in row.items() if value is not None}
            # A map may have numbers as keys.
            yield (
                number,
                orjson.dumps(present or row, default=_as_json, option=orjson.OPT_NON_STR_KEYS),
            )


@contextlib.contextmanager
def _parquet(location: str) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    with (
        stored(location) as file,
        ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False) as opened,
    ):
        yield opened


def _as_json(value: object) -> object:
    if isinstance(value, datetime.date | datetime.time):  # of nanoseconds it is pandas' own kind
        return value.isoformat()
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode("utf-8")
    return orjson.Fragment(format(value, "f")) if isinstance(value, decimal.Decimal) else None
