"""Compares files with their recorded digests before anything is computed from their bytes.

A small file is compared by its sha256, a large one by the digests of its pieces, on all cores (`piece_digests`). A digest is
remembered per file and boot of the machine (`cache/verified.json` in the home), so that a file costs one reading
after each start of the machine, and none where it was published since then.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.core.files import JsonDict, JsonObject
from ttrain.core.hashing import DigestCache, sha256_file
from ttrain.core.machine import usable_cores
from ttrain.errors import ArtifactError, DamagedFile

if TYPE_CHECKING:
    from ttrain.store.layout import Artifact


SHARD = ".arrow"  # what `data.shards` compares with its index when a row of it is first asked for

CACHE = Path("cache", "verified.json")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_memories: dict[Path, DigestCache] = {}  # by home


def verify_artifact(artifact: Artifact, names: tuple[str, ...] = ()) -> None:
    """Compare the named files (all that are not private, where none is named), but for shards and files that are not here.

    Raises DamagedFile for the first that differs from the manifest.
    """
    absent, entries = artifact.absent, artifact.manifest["files"]
    compared = (name for name in artifact.files_of(names) if name not in absent and not name.endswith(SHARD))
    verify_entries([(artifact.path / name, entries[name]) for name in compared], home_of(artifact.path))
    save()


def verify_files(files: Sequence[tuple[Path, str]], home: Path | None) -> None:
    """Compare files with their sha256, as `verify_entries` does."""
    verify_entries([(path, {"sha256": digest}) for path, digest in files], home)
    save()


def verify_entries(files: Sequence[tuple[Path, JsonObject]], home: Path | None) -> None:
    """Compare files with their manifest entries, on all cores. What was verified since the machine started is not read.

    `home`: whose memory is used; None: every file is read. Raises DamagedFile for one that differs or is missing, and
    ArtifactError for one that cannot be read.
    """
    small = []
    for path, entry in files:
        if pieces_of(entry):
            _verify(path, entry, home)  # itself on all cores
        else:
            small.append((path, entry))
    with ThreadPoolExecutor(usable_cores(), "verify") as pool:  # hashing releases the interpreter's lock
        for _ in pool.map(lambda file: _verify(file[0], file[1], home), small):
            pass


def is_intact(path: Path, digest: str, home: Path | None) -> bool:
    """Whether the file is there and has this sha256."""
    try:
        _verify(path, {"sha256": digest}, home)
    except ArtifactError:
        return False
    return True


def difference(path: Path, entry: JsonObject, cache: DigestCache | None) -> str | None:
    """How a file differs from its manifest entry; None where it does not. Raises OSError where it cannot be read."""
    compute = partial(verified_sha256, entry=entry)
    try:
        actual = cache.file(path, compute) if cache else compute(path)
    except DifferentBytes as error:
        return str(error)
    return None if actual == entry["sha256"] else f"its sha256 is {actual}, but {entry['sha256']} was published"


def _verify(path: Path, entry: JsonObject, home: Path | None) -> None:
    fix = DamagedFile.fix if home else "make it again, or take it from a copy"
    try:
        problem = difference(path, entry, memory(home) if home else None)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing", path, fix) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}; check the disk, and run the same command") from None
    if problem:
        raise DamagedFile(f"{path} is damaged: {problem}", path, fix)


# --- memory -------------------------------------------------------------------------------------------------------------
def memory(home: Path) -> DigestCache:
    """The digests of files that were read since the machine started."""
    if home not in _memories:
        _memories[home] = DigestCache(home / CACHE, boot=_boot())
    return _memories[home]


def save() -> None:
    """Write what was learnt, for other processes."""
    for cache in [*_memories.values()]:
        cache.save()


def home_of(directory: Path) -> Path | None:
    """The home of an artifact, or of the output of a stage at work; None for a directory elsewhere.

    Files elsewhere are not remembered.
    """
    if directory.name == "output" and (directory.parent / "job.json").is_file():
        directory = directory.parent
    elif not (directory / "manifest.json").is_file():
        return None
    return directory.parents[2] if len(directory.parents) > 2 and directory.parents[1].name in ("store", "work") else None


def _boot() -> str:
    """An id that changes with each start of the machine; with each process, where the system has none."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return uuid.uuid4().hex


PIECES = "pieces"  # in a manifest entry: {"bytes": of each piece but the last, "blake2b": [hex digest of each]}
LARGE_BYTES = 64 << 20  # files from this size on have pieces
PIECE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20  # read at once, by each thread that verifies
MEASURED_BYTES = 8 << 20  # read at once to publish; two threads wait for each other after each, which takes ms under load
DIGEST_BYTES = 32


class DifferentBytes(Exception):
    """The bytes of a file are not those of its manifest entry; the message says how."""


def measure(path: Path) -> JsonDict:
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


def verified_sha256(path: Path, entry: JsonObject) -> str:
    """The sha256 of a file as it is now; where the entry has pieces, these are compared instead, on all cores.

    This alone decides how a file is compared with its manifest before something reads it. Raises DifferentBytes for a piece
    that differs, OSError where the file cannot be read.
    """
    pieces = pieces_of(entry)
    if not pieces:
        return sha256_file(path)
    with path.open("rb") as file, ThreadPoolExecutor(usable_cores(), "verify") as pool:
        size = os.fstat(file.fileno()).st_size
        if size != entry["bytes"]:
            raise DifferentBytes(f"it has {size:,} bytes, but {entry['bytes']:,} were published")
        digests = pool.map(partial(_digest_of_range, file.fileno()), [(start, end) for start, end, _ in pieces])
        for (start, end, published), actual in zip(pieces, digests, strict=True):
            if actual != published:
                pool.shutdown(cancel_futures=True)
                raise DifferentBytes(f"its bytes {start:,} to {end - 1:,} are not those that were published")
    return str(entry["sha256"])


def pieces_of(entry: JsonObject) -> list[tuple[int, int, str]]:
    """(first byte, byte after the last, digest) of each piece; none where the entry lists none for the whole file."""
    pieces = entry.get(PIECES) or {}
    size, digests = pieces.get("bytes"), pieces.get("blake2b", ())
    if not isinstance(size, int) or size <= 0 or len(digests) != -(-entry["bytes"] // size):
        return []
    starts = range(0, entry["bytes"], size)
    return [(start, min(start + size, entry["bytes"]), digest) for start, digest in zip(starts, digests, strict=True)]


def _digest_of_range(descriptor: int, piece: tuple[int, int]) -> str:
    """Digest of the bytes in a range, read bit by bit. Raises DifferentBytes where the file ends before."""
    start, end = piece
    digest = _piece_hash()
    while start < end:
        chunk = os.pread(descriptor, min(end - start, CHUNK_BYTES), start)
        if not chunk:
            raise DifferentBytes(f"it ended at byte {start:,} while it was read")
        digest.update(chunk)  # lets other threads run
        start += len(chunk)
    return digest.hexdigest()


def _piece_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
