"""Read text and rows from local or remote input files, unpacked by their first bytes, not by their names.

Pieces and batches are bounded, so memory is too. A file that is cut, damaged or not UTF-8 raises a DataError with its
name, and is never taken for a shorter file.
"""

from __future__ import annotations

import codecs
import io
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ttrain.data import decompress, formats, locations, remote
from ttrain.data.formats import Format
from ttrain.data.remote import RemoteFile, reason
from ttrain.errors import CannotRead, DataError

CHUNK_BYTES = decompress.PIECE_BYTES
HEAD_BYTES = 512
BATCH_ROWS, BATCH_BYTES = 1024, 8 << 20
REMOTE_BUFFER_BYTES = 8 << 20  # of every column, one request each
PARQUET_MAGIC = b"PAR1"
FETCH_AGAIN = "fetch or compress it again"
OTHER_FORMATS = {
    PARQUET_MAGIC: ("a parquet file", "unpack it"),
    b"ARROW1": ("an Arrow file", "write it as parquet"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"PK\x05\x06": ("an empty zip archive", "fetch it again"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"\x04\x22\x4d\x18": ("an lz4 archive", "unpack it"),
    b"version https://git-lfs": ("a pointer of Git LFS", "run `git lfs pull` where it was cloned"),
    b"<!DOCTYPE html": ("a web page", "name the file that the page links to, not the page"),
    b"<html": ("a web page", "name the file that the page links to, not the page"),
}
TAR_PLACE, TAR_MAGIC = 257, b"ustar"


@contextmanager
def data_errors(location: str) -> Iterator[None]:
    """Raise an error of the file system as DataError, which names the location."""
    try:
        yield
    except OSError as error:
        raise CannotRead(f"cannot read {location}: {error.strerror or error}") from None


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


def open_stream(location: str) -> BinaryIO:
    """Open the stored bytes as a seekable stream. Raises DataError if they cannot be read."""
    path = local_file(location)
    with data_errors(location):
        return path.open("rb") if path else io.BufferedReader(RemoteFile(location), CHUNK_BYTES)


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
    if kind := locations.irregular_kind(mode):
        raise CannotRead(f"cannot read {location}: it is {kind}; name a file")
    return path


def is_parquet(location: str) -> bool:
    """Whether the file begins like a parquet file."""
    return _head(location).startswith(PARQUET_MAGIC)


def is_plain(location: str) -> bool:
    """Whether it is a local file of uncompressed JSON Lines, any part of which can be read by its offset.

    Raises DataError if it is neither that nor a format that `json_lines` reads.
    """
    if locations.is_remote(location):
        return False
    head = _head(location, formats.HEAD_BYTES)
    if decompress.is_packed(head):
        return False
    _check_text(head[:HEAD_BYTES], location, head)
    return formats.format_of(head[_mark_bytes(head) :], location, lambda: head) is Format.LINES


def json_lines(location: str, text_field: str) -> Iterator[bytes]:
    """The text as JSON Lines, in bounded pieces: as it is, or converted from a JSON array or a `.txt` file.

    A `.txt` file is a row with `text_field` only. Raises DataError like `chunks`, and for text of another format.
    """
    pieces = chunks(location)
    beginning = _beginning(pieces, formats.HEAD_BYTES)
    form = formats.format_of(beginning[: formats.HEAD_BYTES], location, lambda: _head(location))
    yield from formats.as_json_lines(itertools.chain([beginning] if beginning else [], pieces), form, location, text_field)


def _beginning(pieces: Iterator[bytes], size: int) -> bytes:
    """The first pieces, joined: at least `size` bytes, if there are as many."""
    beginning = bytearray()
    for piece in pieces:
        beginning += piece
        if len(beginning) >= size:
            break
    return bytes(beginning)


def _head(location: str, size: int = HEAD_BYTES) -> bytes:
    with data_errors(location), open_stream(location) as stream:
        return stream.read(size)


def chunks(location: str) -> Iterator[bytes]:
    """The text, decompressed, without the mark at its very start, in pieces of at most `CHUNK_BYTES`.

    Raises DataError for a file that is cut, damaged, of another format or encoding, or cannot be read.
    """
    try:
        with data_errors(location), open_stream(location) as stream:
            head = stream.read(HEAD_BYTES)
            size = 0 if locations.is_remote(location) else stream.seek(0, io.SEEK_END)
            stream.seek(0)
            pieces = decompress.unpacked(stream, head)
            if pieces is None:
                _check_text(head, location, head)
                stream.seek(_mark_bytes(head))
                while piece := stream.read(CHUNK_BYTES):
                    yield piece
                if stream.tell() < size:
                    raise EOFError("it became shorter while it was read")
            else:
                yield from _text(pieces, location, head)
    except EOFError as error:
        raise DataError(f"{location} is truncated: {error}; {FETCH_AGAIN}") from None
    except ValueError as error:
        fix = (
            "compress it again with a smaller dictionary, without --long" if "memory" in str(error).lower() else FETCH_AGAIN
        )
        raise DataError(f"{location} is corrupt or cannot be unpacked: {error}; {fix}") from None


def _text(pieces: Iterator[bytes], location: str, stored_head: bytes) -> Iterator[bytes]:
    beginning = _beginning(pieces, HEAD_BYTES)
    _check_text(beginning, location, stored_head, in_archive=True)
    for at in range(_mark_bytes(beginning), len(beginning), CHUNK_BYTES):
        yield beginning[at : at + CHUNK_BYTES]
    yield from pieces


def _mark_bytes(head: bytes) -> int:
    return len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0


def _check_text(head: bytes, location: str, stored_head: bytes, *, in_archive: bool = False) -> None:
    """Raise DataError if the first bytes show that this is not UTF-8 text."""
    inside = "holds" if in_archive else "is"
    formats.check_encoding(head, location, lambda: stored_head)
    for magic, (format_name, fix) in OTHER_FORMATS.items():
        if head.startswith(magic):
            raise DataError(f"{location} {inside} {format_name}, not lines of text; {fix}")
    if head[TAR_PLACE:].startswith(TAR_MAGIC):
        raise DataError(f"{location} {inside} a tar archive, not lines of text; unpack it")
    if in_archive and decompress.is_packed(head):
        raise DataError(f"{location} is compressed twice; unpack it once")
    is_cut_magic = bool(head) and any(magic.startswith(head) for magic in decompress.MAGICS)
    if not in_archive and location.endswith(locations.PACKED) and (is_cut_magic or formats.is_binary(head)):
        raise DataError(f"{location} is corrupt: its first bytes match neither its extension nor text; {FETCH_AGAIN}")


def parquet_groups(location: str) -> list[tuple[int, int]]:
    """(rows, bytes before compression) of every row group."""
    with _parquet(location) as file:
        return _groups_of(file)


def parquet_rows(location: str, first_group: int, last_group: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number in the file, from 1; the row) of the groups `first_group` to `last_group`, the latter not included.

    Text that is not UTF-8 becomes None, so that only its row is rejected. At most `BATCH_ROWS` rows are in memory, fewer
    where they are large, and some megabytes of each column.
    """
    with _parquet(location) as file:
        groups = _groups_of(file)
        number = end = sum(rows for rows, _ in groups[:first_group])
        for group, (rows, group_bytes) in enumerate(groups[first_group:last_group], start=first_group):
            end += rows
            batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES // max(1, group_bytes // max(1, rows))))
            for batch in file.iter_batches(batch_rows, row_groups=[group], use_threads=False):
                for row in _values(batch):
                    number += 1
                    yield number, row
            if number != end:  # the checksum of a page leaves out its header
                raise DataError(f"{location} is corrupt: the row count of a group is wrong; fetch it again")


@contextmanager
def _parquet(location: str) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    path = local_file(location)
    source = str(path) if path else io.BufferedReader(RemoteFile(location, in_parts=True), CHUNK_BYTES)
    # Through a buffer, a column of a row group is read page by page: 19 MB instead of 209 MB for a group of 200 MB.
    buffer_bytes = CHUNK_BYTES if path else REMOTE_BUFFER_BYTES
    try:
        with ParquetFile(source, buffer_size=buffer_bytes, pre_buffer=False, page_checksum_verification=True) as file:
            if sum(rows for rows, _ in _groups_of(file)) != file.metadata.num_rows:
                raise DataError(f"{location} is corrupt: the row counts of its groups do not add up; fetch it again")
            yield file
    except MemoryError:  # Arrow's memory errors are a subclass
        raise
    except (pa.ArrowException, OSError, ValueError) as error:  # ValueError if a name is not UTF-8
        raise DataError(f"{location} is truncated or corrupt: {reason(error)}; fetch it again") from None
    finally:
        if not isinstance(source, str):
            source.close()


def _groups_of(file: Any) -> list[tuple[int, int]]:
    """(rows, bytes before compression) of every row group."""
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    return [(group.num_rows, group.total_byte_size) for group in groups]


def _values(batch: Any) -> Any:
    """The rows of a batch, each as an object."""
    try:
        # Asked for maps as objects, Arrow takes five times as long.
        return batch.to_pylist(maps_as_pydicts="lossy" if "map<" in str(batch.schema) else None)
    except UnicodeDecodeError:
        return [{name: _value(batch[name][row]) for name in batch.schema.names} for row in range(batch.num_rows)]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py(maps_as_pydicts="lossy")
    except UnicodeDecodeError:
        return None
