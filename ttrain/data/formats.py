"""Detect the format of a text, JSON Lines, one JSON array of objects or a document, and convert the last two to JSON Lines.

Anything else is a DataError that names its format and the command that converts it.
"""

from __future__ import annotations

import contextlib
import csv
import enum
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

import orjson

from ttrain.data import decompress, locations
from ttrain.errors import DataError

HEAD_BYTES = 1 << 16  # of a text, from which its format is detected
CSV_RECORDS = 20
DELIMITERS = (",", "\t", ";")
CSV_NAMES = {".csv": ",", ".tsv": "\t"}
UNPACK = {decompress.GZIP: "gzip", decompress.BZIP2: "bzip2", decompress.XZ: "xz", decompress.ZSTD: "zstd"}
_SPACE = b" \t\r\n"
_STRING = rb'"(?:[^"\\\r\n]|\\.)*+"'
_OBJECT = re.compile(rb"\{\s*(?:" + _STRING + rb"\s*:|\})")
_ARRAY = re.compile(rb"\[\s*(?:" + _OBJECT.pattern + rb"|\])")
_OPEN_OBJECT = re.compile(rb"\{[ \t]*[\r\n]\s*" + _STRING + rb"\s*:")  # a brace alone is not a row of JSON Lines
_VALUE_LINE = re.compile(rb"^[ \t]*[{\[]", re.MULTILINE)
_ESCAPED = re.compile(rb'[\x00-\x1f"\\]')
_ESCAPES = {bytes([code]): json.dumps(chr(code))[1:-1].encode() for code in (*range(32), ord('"'), ord("\\"))}


ReadStored = Callable[[], bytes]  # gives the first bytes of a file as it is stored, which show whether it is an archive


class Problem(NamedTuple):
    """What is wrong with a whole text, and the program that makes a file with this ending of it."""

    description: str
    program: str
    ending: str = ".jsonl"


class Format(enum.Enum):
    LINES = enum.auto()  # JSON Lines, good or bad: every line is judged on its own
    ARRAY = enum.auto()  # one JSON array of objects, over any number of lines
    DOCUMENT = enum.auto()  # a `.txt` file: all of it is one text


def check_encoding(head: bytes, location: str, read_stored: ReadStored) -> None:
    """Raise DataError if the first bytes of a text are in another encoding than UTF-8."""
    encoding = decompress.wide_encoding(head)
    if encoding is None and not decompress.is_utf8(head) and decompress.is_gb18030(head):
        encoding = "GB18030"
    if encoding:
        ending = ".txt" if _is_named_text(location) else ".jsonl"
        problem = Problem(f"is {encoding}, but ttrain reads UTF-8", f"iconv -f {encoding} -t UTF-8", ending)
        raise _refused(problem, location, read_stored)


def format_of(head: bytes, location: str, read_stored: ReadStored) -> Format:
    """The format of a text by its first `HEAD_BYTES`, without a byte order mark.

    Raises DataError if the whole text is something else; a bad first line is rejected alone.
    """
    check_encoding(head, location, read_stored)
    start = head.lstrip(_SPACE)
    if _ARRAY.match(start):
        first, _, remainder = start.partition(b"\n")
        return Format.LINES if remainder.strip() and _is_json(first) else Format.ARRAY
    if _OBJECT.match(start):
        if problem := _problem_of_lines(start):
            raise _refused(problem, location, read_stored)
        return Format.LINES
    if _is_named_text(location):
        return Format.DOCUMENT
    first = start.partition(b"\n")[0]
    is_text = start.startswith(b'"') and _suffix(location) not in CSV_NAMES  # where tables have names in quotes
    if not start or is_text or _VALUE_LINE.search(head) or _is_json(first) or is_binary(head):
        return Format.LINES
    raise _refused(_problem_of_text(start, _suffix(location)), location, read_stored)


def as_json_lines(pieces: Iterable[bytes], form: Format, location: str, text_field: str) -> Iterator[bytes]:
    """Convert the pieces of a text to JSON Lines: each element of an array, or a whole document, becomes a line.

    A document is the value of `text_field`. Raises DataError if an array is cut, or a document is binary.
    """
    if form is Format.ARRAY:
        return _array_lines(pieces, location)
    return _document_line(pieces, location, text_field) if form is Format.DOCUMENT else iter(pieces)


def _document_line(pieces: Iterable[bytes], location: str, text_field: str) -> Iterator[bytes]:
    yield b"{" + orjson.dumps(text_field) + b':"'
    offset = 0
    for piece in pieces:
        if b"\0" in piece:
            raise DataError(f"{location} is binary, not text: its byte {offset + piece.index(0)} is NUL; leave it out")
        yield _ESCAPED.sub(lambda match: _ESCAPES[match[0]], piece)
        offset += len(piece)
    yield b'"}\n'


_LETTERS = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'  # of a string
# The rest of a string, whether it ends there, and a backslash that the end of the piece cuts from the escaped character.
_REST = re.compile(_LETTERS + rb'(?P<end>")?(?P<cut>\\)?', re.DOTALL)
# Whole strings and the text between them, up to the next structural character: between elements, and within them.
_BETWEEN, _WITHIN = (
    re.compile(rb"(?:[^" + signs + rb']++|"' + _LETTERS + rb'"' + innermost + rb")*+", re.DOTALL)
    for signs, innermost in ((rb'"{}\[\],', b""), (rb'"{}\[\]', rb'|\[[^"{}\[\]]*+\]|\{[^"{}\[\]]*+\}'))
)
_OPENINGS, _CLOSINGS = re.compile(rb"[{\[]++"), re.compile(rb"[}\]]++")
_NEWLINE_TO_RETURN = bytes.maketrans(b"\n", b"\r")  # white space outside of strings, and as wrong within them


def _array_lines(pieces: Iterable[bytes], location: str) -> Iterator[bytes]:
    """The same text byte for byte, except that newlines stand exactly in place of the commas between elements."""
    depth, in_string, escaped, offset = 0, False, False, 0
    for piece in pieces:
        out, at = bytearray(piece.translate(_NEWLINE_TO_RETURN)), 0
        while at < len(piece):
            if in_string:
                at, escaped = at + escaped, False
                match = _REST.match(piece, at)
                assert match is not None, "it matches the empty string too"
                at, in_string, escaped = match.end(), not match["end"], bool(match["cut"]) and not match["end"]
                if match["end"]:
                    at = match.end("end")
                continue
            skipped = (_BETWEEN if depth < 2 else _WITHIN).match(piece, at)
            assert skipped is not None, "it matches the empty string too"
            end = skipped.end()
            if depth < 0 and piece[at : end + 1].strip():
                raise DataError(
                    f"{location} has more after the JSON array that it begins with, at byte {offset + at}; write one array, "
                    "or one JSON object a line"
                )
            if end == len(piece):
                break
            at, sign = end + 1, piece[end : end + 1]
            if sign == b'"':  # of a string that continues in the next piece
                in_string = True
            elif openings := _OPENINGS.match(piece, end):
                if depth == 0:
                    out[end] = ord(" ")
                at, depth = openings.end(), depth + len(openings[0])
            elif sign == b"," or (sign == b"]" and depth == 1):
                out[at - 1] = ord("\n")
                depth = -1 if sign == b"]" else depth
            elif depth > 1 and (closings := _CLOSINGS.match(piece, end)):
                count = min(len(closings[0]), depth - 1)
                at, depth = end + count, depth - count
        yield bytes(out)
        offset += len(piece)
    if depth >= 0:
        raise DataError(
            f"{location} is truncated: the JSON array that it begins with is not closed; fetch or write it again"
        )


def _problem_of_lines(start: bytes) -> Problem | None:
    """What is wrong where objects span several lines, or lines do not end with a newline."""
    first, _, remainder = start.partition(b"\r")
    if b"\n" not in start and remainder.strip() and _is_json(first):
        return Problem("ends its lines with a carriage return alone, but ttrain reads newlines", "tr '\\r' '\\n'")
    if _OPEN_OBJECT.match(start) or _is_spread(start):
        return Problem("is pretty-printed JSON, but ttrain reads one JSON object a line", "jq -c .")
    return None


def _is_spread(start: bytes) -> bool:
    """Whether the first JSON value spans several lines."""
    first = start.partition(b"\n")[0]
    if len(first) == len(start) or _is_json(first):
        return False
    try:
        _, end = json.JSONDecoder().raw_decode(start.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return False
    return end > len(first.decode("utf-8", "replace"))


def _problem_of_text(start: bytes, suffix: str) -> Problem:
    """What a text without JSON is."""
    delimiter = _delimiter(start, CSV_NAMES.get(suffix))
    if delimiter is None:
        return Problem("is plain text, not JSON Lines; to read all of it as one document, name it .txt", "cat", ".txt")
    reader = "sys.stdin" if delimiter == "," else f'sys.stdin,delimiter="{delimiter}"'.replace("\t", "\\t")
    program = (
        'import csv,json,sys;sys.stdin.reconfigure(encoding="utf-8-sig",newline="");csv.field_size_limit(2**31-1);'
        f"[print(json.dumps(row)) for row in csv.DictReader({reader})]"
    )
    description = "is tab-separated values, not JSON Lines" if delimiter == "\t" else "is CSV, not JSON Lines"
    return Problem(description, f"python3 -c {shlex.quote(program)}")


def _delimiter(start: bytes, usual: str | None) -> str | None:
    """The delimiter of a table with a header: the one that gives all complete rows the same number of values, the most if
    several do; None for prose. A file named as a table, with its `usual` delimiter, may have rows of any length: then the
    delimiter that gives its header the most names."""
    lines = start.decode("utf-8", "replace").splitlines(keepends=True)
    lines = lines[:-1] if len(start) >= HEAD_BYTES - len(_SPACE) else lines
    candidates = {usual: (False, 1)} if usual else {}  # whether its rows are even, and the values of its header
    for delimiter in DELIMITERS:
        rows: list[list[str]] = []
        with contextlib.suppress(csv.Error):  # the last record may be cut
            rows.extend(itertools.islice(csv.reader(lines, delimiter=delimiter, strict=True), CSV_RECORDS))
        sizes = {len(row) for row in rows if row}
        is_even = len(rows) > 1 and len(sizes) == 1 and min(sizes) > 1 and all(name.strip() for name in rows[0])
        if is_even or (usual and rows):
            candidates[delimiter] = max((is_even, len(rows[0])), candidates.get(delimiter, (False, 0)))
    return max(candidates, key=candidates.__getitem__) if candidates else None


def _refused(problem: Problem, location: str, read_stored: ReadStored) -> DataError:
    """The error for a text, with the shell command that pipes it through the program into a new file."""
    is_remote = locations.is_remote(location)
    source = locations.name(location) if is_remote else str(locations.local_path(location))
    source = f"./{source}" if source.startswith("-") else source
    stored = read_stored()
    target = shlex.quote(str(PurePosixPath(source).with_name(f"{_stem(source)}.converted{problem.ending}")))
    packer = next((packer for magic, packer in UNPACK.items() if stored.startswith(magic)), None)
    quoted = shlex.quote(source)
    read = f"{packer} -dc {quoted} | {problem.program}" if packer else f"{problem.program} < {quoted}"
    run = "download it, then run" if is_remote else "run"
    return DataError(f"{location} {problem.description}; {run} `{read} > {target}`")


def _stem(location: str) -> str:
    name = PurePosixPath(locations.name(location)).name
    for endings in (locations.PACKED, (".jsonl", ".ndjson", ".json", ".txt", *CSV_NAMES)):
        name = next((name.removesuffix(ending) for ending in endings if name.lower().endswith(ending)), name)
    return name or "data"


def _suffix(location: str) -> str:
    """The file extension, without that of a compression format."""
    path = PurePosixPath(locations.name(location).lower())
    return path.with_suffix("").suffix if path.suffix in locations.PACKED else path.suffix


def _is_named_text(location: str) -> bool:
    return _suffix(location) == ".txt"


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True


def is_binary(head: bytes) -> bool:
    """Whether it contains control characters, or is not UTF-8."""
    return not decompress.is_utf8(head) or any(byte < 32 and byte not in b"\t\n\r\f" for byte in head)
