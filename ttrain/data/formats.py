"""Tell JSON Lines, one JSON array of objects and a `.txt` document apart, and read the last two as JSON Lines."""

from __future__ import annotations

import enum
import json
import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import PurePosixPath

from ttrain.data import locations
from ttrain.errors import DataError

HEAD_BYTES = 1 << 16  # of a text, from which its format is told
ARRAY_BYTES = 1 << 30  # an array is read whole
OTHER_FORMATS = {
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"), ("compressed twice", "unpack it once")),
    b"PAR1": ("a parquet file", "unpack it"),
    b"ARROW1": ("an Arrow file", "write it as parquet"),
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"7z\xbc\xaf\x27\x1c": ("a 7z archive", "unpack it"),
    b"\x04\x22\x4d\x18": ("an lz4 archive", "unpack it"),
    b"version https://git-lfs": ("a pointer of Git LFS", "run `git lfs pull` where it was cloned"),
    b"<!DOCTYPE html": ("a web page", "name the file that the page links to, not the page"),
    b"<html": ("a web page", "name the file that the page links to, not the page"),
}
TAR_PLACE = 257
TAR_MAGIC = b"ustar"
_SPACE = b" \t\r\n"
_OBJECT = re.compile(rb'\{\s*["}]')
_ARRAY = re.compile(rb"\[\s*(?:" + _OBJECT.pattern + rb"|\])")
_PRETTY = re.compile(rb'\{[ \t]*\r?\n\s*"')  # a brace alone is not a row of JSON Lines
_VALUE_LINE = re.compile(rb"^[ \t]*[{\[]", re.MULTILINE)
_BLANK = re.compile(r"[ \t\r\n]*")
_SEPARATOR = re.compile(r"[ \t\r\n]*(?:,[ \t\r\n]*|(?=\]))")
_ESCAPED = re.compile(rb'[\x00-\x1f"\\]')
_ESCAPES = {bytes([code]): json.dumps(chr(code))[1:-1].encode() for code in (*range(32), ord('"'), ord("\\"))}
_FROM_CSV = (
    'import csv,json,sys;sys.stdin.reconfigure(encoding="utf-8-sig",newline="");'
    '[print(json.dumps(row)) for row in csv.DictReader(sys.stdin,delimiter="{}")]'
)


class Format(enum.Enum):
    LINES = enum.auto()  # JSON Lines, good or bad: every line is judged on its own
    ARRAY = enum.auto()  # one JSON array of objects, over any number of lines
    DOCUMENT = enum.auto()  # a `.txt` file: all of it is one text


def format_of(head: bytes, location: str) -> Format:
    """The format of a text by its first `HEAD_BYTES`, without a byte order mark.

    Raises DataError if the whole text is something else; a bad first line is rejected alone.
    """
    for magic, (name, fix) in OTHER_FORMATS.items():
        if head.startswith(magic):
            raise DataError(f"{location} is {name}, not lines of text; {fix}")
    if head[TAR_PLACE:].startswith(TAR_MAGIC):
        raise DataError(f"{location} is a tar archive, not lines of text; unpack it")
    start = head.lstrip(_SPACE)
    if _ARRAY.match(start):
        first, _, others = start.partition(b"\n")
        is_row = first.rstrip().endswith(b"]") and others.strip()
        return Format.LINES if is_row else Format.ARRAY
    if _PRETTY.match(start):
        command = f"jq -c . {_names(location)}"
        raise DataError(f"{location} is pretty-printed, not one JSON object a line; run `{command}`")
    if _OBJECT.match(start):
        return Format.LINES
    if locations.is_text(location):
        return Format.DOCUMENT
    if start and b"\0" not in head and not _VALUE_LINE.search(head):
        header = start.partition(b"\n")[0]
        delimiter = max((";", "\\t", ","), key=lambda sign: header.count(sign.replace("\\t", "\t").encode()))
        command = f"python3 -c {shlex.quote(_FROM_CSV.format(delimiter))} {_names(location)}"
        raise DataError(f"{location} is CSV or plain text, not JSON Lines; name a text .txt, or run `{command}` for a table")
    return Format.LINES


def as_json_lines(pieces: Iterable[bytes], form: Format, location: str, text_field: str) -> Iterator[bytes]:
    """The pieces of a text as JSON Lines: an element of an array, or a whole document, is a line.

    A document is the value of `text_field`. Raises DataError for a cut array or a binary document.
    """
    if form is Format.ARRAY:
        return _array_lines(pieces, location)
    if form is Format.DOCUMENT:
        return _document_line(pieces, location, text_field)
    return iter(pieces)


def _document_line(pieces: Iterable[bytes], location: str, text_field: str) -> Iterator[bytes]:
    yield b"{" + json.dumps(text_field, ensure_ascii=False).encode() + b':"'
    offset = 0
    for piece in pieces:
        if b"\0" in piece:
            raise DataError(
                f"{location} is binary, not text: its byte {offset + piece.index(0)} is NUL; leave it out, "
                "or convert it with iconv if it is text in another encoding"
            )
        yield _ESCAPED.sub(lambda match: _ESCAPES[match[0]], piece)
        offset += len(piece)
    yield b'"}\n'


def _array_lines(pieces: Iterable[bytes], location: str) -> Iterator[bytes]:
    """Each element as it is written, so that numbers and keys stay what they are in JSON Lines."""
    data = bytearray()
    for piece in pieces:
        data += piece
        if len(data) > ARRAY_BYTES:
            command = f"jq -c '.[]' {_names(location)}"
            raise DataError(f"{location} is one JSON array of more than 1 GiB; run `{command}`")
    text = data.decode("utf-8", "surrogateescape")  # bytes that are not UTF-8 cost their row alone
    del data
    decoder = json.JSONDecoder()
    at = _BLANK.match(text, text.index("[") + 1).end()  # type: ignore[union-attr]
    while not text.startswith("]", at):
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise _damaged(location, error) from None
        separator = _SEPARATOR.match(text, end)
        if separator is None:
            raise _damaged(location, f"no comma or bracket follows its character {end}")
        line = text[at:end].replace("\n", " ").encode("utf-8", "surrogateescape")
        yield line + b"\n"
        at = separator.end()
    if text[at + 1 :].strip():
        raise DataError(
            f"{location} has more after the JSON array that it begins with, at character {at + 1}; "
            "write one array, or one JSON object a line"
        )


def _damaged(location: str, reason: object) -> DataError:
    return DataError(
        f"{location} is truncated or corrupt: the JSON array that it begins with breaks off: {reason}; "
        "fetch or write it again"
    )


def _names(location: str) -> str:
    """How a shell reads the file, and writes one beside it."""
    path = PurePosixPath(locations.name(location))
    if not locations.is_remote(location):
        path = PurePosixPath(locations.local_path(location))
    target = path.with_name(f"{path.stem}.converted.jsonl")
    return f"< {shlex.quote(str(path))} > {shlex.quote(str(target))}"
