"""Compares files with their recorded digests before anything is computed from their bytes.

A small file is compared by its sha256, a large one by the digests of its pieces, on all cores (`piece_digests`). A digest is
remembered per file and boot of the machine (`cache/verified.json` in the home), so that a file costs one reading
after each start of the machine, and none where it was published since then.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.core.hashing import DigestCache
from ttrain.core.machine import usable_cores
from ttrain.core.piece_digests import DifferentBytes, pieces_of, verified_sha256
from ttrain.errors import ArtifactError, DamagedFile

if TYPE_CHECKING:
    from ttrain.store.layout import Artifact

SHARD = ".arrow"  # what `data.shards` compares with its index when a row of it is first asked for
CACHE = Path("cache", "verified.json")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
SAVE_SECONDS = 5.0  # between two writings of the cache, where files are verified one by one
_saved_at = 0.0
_memories: dict[Path, DigestCache] = {}  # by home


def verify_artifact(artifact: Artifact, names: tuple[str, ...] = ()) -> None:
    """Compare the named files (all that are not private, where none is named), but for shards and files that are not here.

    Raises DamagedFile for the first that differs from the manifest.
    """
    absent, entries = artifact.absent, artifact.manifest["files"]
    verify_entries(
        [
            (artifact.path / name, entries[name])
            for name in artifact.files_of(names)
            if name not in absent and not name.endswith(SHARD)
        ],
        home_of(artifact.path),
    )
    save()


def verify_files(files: Sequence[tuple[Path, str]], home: Path | None) -> None:
    """Compare files with their sha256, as `verify_entries` does."""
    verify_entries([(path, {"sha256": digest}) for path, digest in files], home)


def verify_entries(files: Sequence[tuple[Path, Mapping[str, Any]]], home: Path | None) -> None:
    """Compare files with their manifest entries, on all cores. What was verified since the machine started is not read.

    `home`: whose memory is asked; None: every file is read. Raises DamagedFile for one that differs or is missing, and
    ArtifactError for one that cannot be read.
    """
    small = [(path, entry) for path, entry in files if pieces_of(entry) is None]
    for path, entry in files:
        if pieces_of(entry) or len(small) == 1:
            _verify(path, entry, home)  # itself on all cores, where it has pieces
    if len(small) <= 1:
        return
    with ThreadPoolExecutor(min(usable_cores(), len(small)), "verify") as pool:  # hashing releases the interpreter's lock
        futures = [pool.submit(_verify, path, entry, home) for path, entry in small]
        try:
            for future in futures:
                future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def is_intact(path: Path, digest: str, home: Path | None) -> bool:
    """Whether the file is there and has this sha256."""
    try:
        verify_files([(path, digest)], home)
    except ArtifactError:
        return False
    return True


def difference(path: Path, entry: Mapping[str, Any], cache: DigestCache | None) -> str | None:
    """How a file differs from its manifest entry; None where it does not. Raises OSError where it cannot be read."""
    compute = partial(verified_sha256, entry=entry)
    try:
        actual = cache.file(path, compute) if cache else compute(path)
    except DifferentBytes as error:
        return str(error)
    return None if actual == entry["sha256"] else f"its sha256 is {actual}, but {entry['sha256']} was published"


def _verify(path: Path, entry: Mapping[str, Any], home: Path | None) -> None:
    fix = DamagedFile.fix if home else "make it again, or take it from a copy"
    try:
        problem = difference(path, entry, memory(home) if home else None)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing", path, fix) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}; see to the disk, and run the same command") from None
    if problem:
        raise DamagedFile(f"{path} is damaged: {problem}", path, fix)
    if home and time.monotonic() - _saved_at > SAVE_SECONDS:
        save()


# --- memory -------------------------------------------------------------------------------------------------------------


def memory(home: Path) -> DigestCache:
    """The digests of files that were read since the machine started."""
    if home not in _memories:
        _memories[home] = DigestCache(home / CACHE, boot=_boot())
    return _memories[home]


def save() -> None:
    """Write what was learnt, for other processes."""
    global _saved_at
    for cache in [*_memories.values()]:
        cache.save()
    _saved_at = time.monotonic()


def home_of(directory: Path) -> Path | None:
    """The home of an artifact, or of the output of a stage at work; None for a directory elsewhere.

    Of files elsewhere nothing is remembered.
    """
    if directory.name == "output" and (directory.parent / "job.json").is_file():
        directory = directory.parent
    elif not (directory / "manifest.json").is_file():
        return None
    return directory.parents[2] if len(directory.parents) > 2 and directory.parents[1].name in ("store", "work") else None


def _boot() -> str:
    """What is another one after each start of the machine; of each process, where the system does not say."""
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return uuid.uuid4().hex
