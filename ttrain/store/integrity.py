"""Compare files with their recorded digests before anything is computed from their bytes.

A digest is remembered per file and boot of the machine (`cache/verified.json`), so a file is read
once after each boot.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ttrain.core.hashing import DigestCache, sha256_file
from ttrain.core.machine import usable_cores
from ttrain.errors import ArtifactError, DamagedFile

if TYPE_CHECKING:
    from ttrain.store.layout import Artifact


SHARD = ".arrow"  # not verified here: `data.shards` checks a shard when its first row is read

CACHE = Path("cache", "verified.json")

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_memories: dict[Path, DigestCache] = {}  # by home


def problems(artifact: Artifact, cache: DigestCache | None = None) -> Iterator[str]:
    """What is wrong with an artifact's present files: missing, or of another size or content.

    With a cache, a file that has the size and mtime of its manifest entry is not read.
    """
    digest_of = cache.file if cache else sha256_file
    for name in sorted(artifact.manifest["files"].keys() - artifact.absent):
        path = artifact.path / name
        entry = artifact.manifest["files"][name]
        try:
            stat = path.stat()
            is_read = cache is None or stat.st_mtime_ns != entry["mtime_ns"]
            if stat.st_size != entry["bytes"]:
                yield f"{name} has {stat.st_size} bytes where {entry['bytes']} were published"
            elif is_read and digest_of(path) != entry["sha256"]:
                yield f"{name} was altered after it was published"
        except FileNotFoundError:
            yield f"{name} is missing"
        except OSError as error:
            yield f"{name} cannot be read: {error.strerror}"


def verify_artifact(artifact: Artifact, names: tuple[str, ...] = ()) -> None:
    """Compare the named files (default: all that are not private), except shards and absent ones.

    Raises DamagedFile for the first that differs from the manifest.
    """
    absent = artifact.absent
    entries = artifact.manifest["files"]
    compared = (
        name for name in artifact.files_of(names) if name not in absent and not name.endswith(SHARD)
    )
    verify_files(
        [(artifact.path / name, entries[name]["sha256"]) for name in compared],
        home_of(artifact.path),
    )


def verify_files(files: Sequence[tuple[Path, str]], home: Path | None) -> None:
    """Compare files with their sha256, on all cores.

    `home`: its cache of verified files is used; None: every file is read. Raises DamagedFile for
    a missing or different file, ArtifactError for an unreadable one.
    """
    with ThreadPoolExecutor(
        usable_cores(), "verify"
    ) as pool:  # hashing releases the interpreter's lock
        for _ in pool.map(lambda file: _verify(file[0], file[1], home), files):
            pass
    save()


def is_intact(path: Path, digest: str, home: Path | None) -> bool:
    try:
        _verify(path, digest, home)
    except ArtifactError:
        return False
    return True


def _verify(path: Path, digest: str, home: Path | None) -> None:
    fix = DamagedFile.fix if home else "make it again, or take it from a copy"
    try:
        actual = memory(home).file(path) if home else sha256_file(path)
    except FileNotFoundError:
        raise DamagedFile(f"{path} is missing", path, fix) from None
    except OSError as error:
        raise ArtifactError(
            f"{path} cannot be read: {error.strerror}; check the disk, and run the same command"
        ) from None
    if actual != digest:
        raise DamagedFile(
            f"{path} is damaged: its sha256 is {actual}, but {digest} was published", path, fix
        )


def memory(home: Path) -> DigestCache:
    """The digests of files that were read since the machine started."""
    if home not in _memories:
        _memories[home] = DigestCache(home / CACHE, boot=_boot())
    return _memories[home]


def save() -> None:
    for cache in [*_memories.values()]:
        cache.save()


def home_of(directory: Path) -> Path | None:
    """The home of an artifact, or of the output of a stage at work; None for other directories."""
    if directory.name == "output" and (directory.parent / "job.json").is_file():
        directory = directory.parent
    elif not (directory / "manifest.json").is_file():
        return None
    return (
        directory.parents[2]
        if len(directory.parents) > 2 and directory.parents[1].name in ("store", "work")
        else None
    )


def _boot() -> str:
    # Changes with each start of the machine; with each process if the system has no such id
    try:
        return BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return uuid.uuid4().hex
