"""JSON Lines in, records out; every bad line is counted, kept aside with `file:line` and reason, and never a traceback.

Only `\\n` ends a line (a carriage return before it is white space to JSON, and U+2028 is an ordinary character). Compression
is found by the first bytes, not by the name.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

import orjson

from ttrain.errors import DataError

GZIP_MAGIC = b"\x1f\x8b"
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
UTF8_BOM = b"\xef\xbb\xbf"
UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
CHUNK_BYTES = 1 << 20


@dataclass
class Tally:
    """What became of the rows: rows = kept + skipped + rejected, each by a named rule."""

    rows: int = 0
    kept: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    keys_seen: Counter[str] = field(default_factory=Counter)
    first_rejected: str = ""
    quarantine: IO[str] | None = None

    def reject(self, path: str, line: int, reason: str) -> None:
        """Count a bad row and write it to the quarantine."""
        self.rejected[reason] += 1
        self.first_rejected = self.first_rejected or f"{path}:{line}: {reason}"
        if self.quarantine:
            self.quarantine.write(json.dumps({"file": path, "line": line, "reason": reason}, ensure_ascii=False) + "\n")

    def to_json(self) -> dict[str, Any]:
        """Counts for the manifest and the summary."""
        return {"rows": self.rows, "kept": self.kept, "skipped": dict(self.skipped), "rejected": dict(self.rejected)}

    def check(self, setting: str, limit: float, wanted: str) -> None:
        """Raise DataError where nothing was kept, or where more than the share `limit` of the rows is bad."""
        seen = ", ".join(key for key, _ in self.keys_seen.most_common(8)) or "none"
        bad = self.rejected.total()
        if bad > limit * self.rows:
            raise DataError(
                f"{setting}: {bad} of {self.rows} rows are bad, more than reading.rejected_fraction={limit}; "
                f"the first is {self.first_rejected}. ttrain looked for {wanted}; keys seen: {seen}"
            )
        if not self.kept:
            skipped = "".join(f"; {count} skipped: {rule}" for rule, count in self.skipped.items())
            raise DataError(
                f"{setting}: no rows are left of {self.rows}{skipped}. ttrain looked for {wanted}; keys seen: {seen}"
            )


def records(paths: Sequence[str], tally: Tally, max_line_bytes: int) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(path, line number from 1, JSON object) of every good line of every file; blank lines do not count as rows.

    Raises DataError for a file that is truncated, corrupt, unreadable or in another encoding.
    """
    for path in paths:
        for number, line in _lines(path, max_line_bytes):
            if line is not None and not line.strip():
                continue
            tally.rows += 1
            if line is None:
                tally.reject(path, number, f"line longer than reading.max_line_bytes={max_line_bytes}")
                continue
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                tally.reject(path, number, _reason(line, str(error)))
                continue
            if not isinstance(value, dict):
                tally.reject(path, number, f"not a JSON object but {type(value).__name__}")
                continue
            if len(tally.keys_seen) < 1000:
                tally.keys_seen.update(key[:40] for key in value)
            yield path, number, value


def _reason(line: bytes, error: str) -> str:
    try:
        line.decode("utf-8")
    except UnicodeDecodeError:
        return "not valid UTF-8"
    return f"not valid JSON: {error.split(': line')[0]}"


def _lines(path: str, max_line_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Lines without their end; None stands for one that is too long. Memory: one line and one chunk."""
    number, pending, too_long = 1, bytearray(), False
    for chunk in _chunks(path):
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            pending += piece
            yield number, None if too_long or len(pending) > max_line_bytes else bytes(pending)
            number, too_long = number + 1, False
            pending.clear()
        pending += pieces[-1]
        if len(pending) > max_line_bytes:
            too_long = True
            pending.clear()
    if pending or too_long:
        yield number, None if too_long else bytes(pending)


def _chunks(path: str) -> Iterator[bytes]:
    try:
        with Path(path).open("rb") as raw:
            head = raw.read(4)
            if head[:2] in UTF16_BOMS:
                raise DataError(f"{path} is UTF-16, but ttrain reads UTF-8; convert it with `iconv -f utf-16 -t utf-8`")
            raw.seek(0)
            stream = _decompressed(raw, head, path)
            first = True
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk.removeprefix(UTF8_BOM) if first else chunk
                first = False
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        kind = "truncated" if isinstance(error, EOFError) else "corrupt"
        raise DataError(f"{path} is {kind}: {error}; fetch or compress it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _decompressed(raw: BinaryIO, head: bytes, path: str) -> BinaryIO:
    if head[:2] == GZIP_MAGIC:
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if head == ZSTD_MAGIC:
        return io.BufferedReader(_ZstdReader(raw, path), CHUNK_BYTES)
    return raw


class _ZstdReader(io.RawIOBase):
    """All frames of a zstd file through pyarrow; a cut one is an error, which pyarrow itself reports only at its end."""

    def __init__(self, raw: BinaryIO, path: str) -> None:
        import pyarrow as pa

        self._stream = pa.CompressedInputStream(raw, "zstd")
        self._path = path

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            kind = "truncated" if "trunc" in str(error).lower() else "corrupt"
            raise DataError(f"{self._path} is {kind}: {error}; fetch or compress it again") from None
        buffer[: len(data)] = data
        return len(data)
