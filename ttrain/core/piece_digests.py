"""Digests of a file as its manifest entry holds them: sha256 of the whole, and of a large file also of its pieces.

sha256 of a whole file is the work of one core: 2 GB take 5 s at 390 MB/s, which a CPU without instructions for it reaches.
Pieces are hashed on all cores, and by blake2b, which is 1.7 times as fast there. Both are made in one pass when the file is
published. Keys and contents of artifacts are made of the sha256 alone.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from ttrain.core.hashing import sha256_file
from ttrain.core.machine import usable_cores

PIECES = "pieces"  # in a manifest entry: {"bytes": of each piece but the last, "blake2b": [hex digest of each]}
LARGE_BYTES = 64 << 20  # files from this size on have pieces
PIECE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20  # read at once, by each thread that verifies
MEASURED_BYTES = 8 << 20  # read at once to publish; two threads wait for each other after each, which takes ms under load
DIGEST_BYTES = 32


class DifferentBytes(Exception):
    """The bytes of a file are not those of its manifest entry; the message says how."""


class Pieces(NamedTuple):
    """The pieces of a file: their size, the size of the file, and the digest of each."""

    piece_bytes: int
    file_bytes: int
    digests: tuple[str, ...]

    def range(self, number: int) -> tuple[int, int]:
        """(first byte, byte after the last) of a piece."""
        return number * self.piece_bytes, min((number + 1) * self.piece_bytes, self.file_bytes)


def measure(path: Path) -> dict[str, Any]:
    """{"sha256"} of a file, and "pieces" of a large one, by one reading. Raises OSError where it cannot be read."""
    if path.stat().st_size < LARGE_BYTES:
        return {"sha256": sha256_file(path)}
    whole, piece, digests = hashlib.sha256(), _piece_hash(), list[str]()
    buffer, remaining = memoryview(bytearray(MEASURED_BYTES)), PIECE_BYTES
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, "pieces") as pool:
        while size := file.readinto(buffer[: min(remaining, MEASURED_BYTES)]):
            chunk = buffer[:size]
            hashed = pool.submit(piece.update, chunk)  # beside the sha256, which takes longer
            whole.update(chunk)
            hashed.result()
            remaining -= size
            if not remaining:
                digests.append(piece.hexdigest())
                piece, remaining = _piece_hash(), PIECE_BYTES
    if remaining < PIECE_BYTES:
        digests.append(piece.hexdigest())
    return {"sha256": whole.hexdigest(), PIECES: {"bytes": PIECE_BYTES, "blake2b": digests}}


def verified_sha256(path: Path, entry: Mapping[str, Any]) -> str:
    """The sha256 of a file as it is now; where the entry has pieces, these are compared instead, on all cores.

    This alone decides how a file is compared with its manifest before something reads it. Raises DifferentBytes for a piece
    that differs, OSError where the file cannot be read.
    """
    pieces = pieces_of(entry)
    if pieces is None:
        return sha256_file(path)
    _compare(path, pieces)
    return str(entry["sha256"])


def pieces_of(entry: Mapping[str, Any]) -> Pieces | None:
    """The pieces that an entry lists; None where it has none, or where they do not cover the whole file."""
    try:
        piece_bytes, file_bytes = entry[PIECES]["bytes"], entry["bytes"]
        digests = tuple(map(str, entry[PIECES]["blake2b"]))
        is_whole = piece_bytes > 0 and 0 < len(digests) == -(-file_bytes // piece_bytes)
    except (KeyError, TypeError):
        return None
    return Pieces(int(piece_bytes), int(file_bytes), digests) if is_whole else None


def _compare(path: Path, pieces: Pieces) -> None:
    threads = min(usable_cores(), len(pieces.digests))
    buffers: SimpleQueue[memoryview] = SimpleQueue()
    for _ in range(threads):
        buffers.put(memoryview(bytearray(CHUNK_BYTES)))
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        size = os.fstat(descriptor).st_size
        if size != pieces.file_bytes:
            raise DifferentBytes(f"it has {size:,} bytes, but {pieces.file_bytes:,} were published")

        def digest(number: int) -> str:
            buffer = buffers.get()
            try:
                return _digest_of_range(descriptor, buffer, *pieces.range(number))
            finally:
                buffers.put(buffer)

        with ThreadPoolExecutor(threads, "verify") as pool:
            digests = pool.map(digest, range(len(pieces.digests)))
            for number, (actual, published) in enumerate(zip(digests, pieces.digests, strict=True)):
                if actual != published:
                    start, end = pieces.range(number)
                    pool.shutdown(wait=False, cancel_futures=True)
                    raise DifferentBytes(f"its bytes {start:,} to {end - 1:,} are not those that were published")
    finally:
        os.close(descriptor)


def _digest_of_range(descriptor: int, buffer: memoryview, start: int, end: int) -> str:
    """Digest of the bytes in a range, read into the buffer bit by bit. Raises DifferentBytes where the file ends before."""
    piece = _piece_hash()
    while start < end:
        size = os.preadv(descriptor, [buffer[: min(end - start, len(buffer))]], start)
        if not size:
            raise DifferentBytes(f"it ended at byte {start:,} while it was read")
        piece.update(buffer[:size])  # lets other threads run
        start += size
    return piece.hexdigest()


def _piece_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
