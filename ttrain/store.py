"""The store: artifacts by content key, work directories, locks; files and JSON only.

An artifact is a directory `store/<stage>/<key>` whose `manifest.json` was written last. Without a manifest it does not
exist. What lies under `run/` (logs, curves) and `checkpoints/` (to continue from) belongs to the artifact, but no other
stage reads it, so it does not count in the content digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ttrain.digests import DigestCache, digest_of, sha256_file
from ttrain.errors import ArtifactError, UsageError

FORMAT = 1
MANIFEST = "manifest.json"
LEFT_BY_A_KILL = re.compile(r"\..+\.\d+\.tmp")  # in the middle of `write_json`
PRIVATE = ("run", "checkpoints")
HOLDER = ".holder"  # beside a key's lock: which process has it
LATER_SECONDS = 1e-3  # by which an artifact is newer than the one before it, whatever the clock says


@dataclass(frozen=True)
class Artifact:
    """What a stage left behind."""

    stage: str
    key: str
    path: Path
    manifest: Mapping[str, Any]

    @property
    def content(self) -> str:
        """Digest of the files that other stages read."""
        return self.part(())

    @property
    def result(self) -> Mapping[str, Any]:
        """The typed figures that the stage returned."""
        result: Mapping[str, Any] = self.manifest["result"]
        return result

    def part(self, names: tuple[str, ...]) -> str:
        """Digest of the named files and directories; of all that are not private, where none is named."""
        files = self.manifest["files"]
        return digest_of([[name, files[name]["sha256"]] for name in self.files_of(names)])

    def files_of(self, names: tuple[str, ...]) -> list[str]:
        """The named files and those of the named directories; all that are not private, where none is named."""
        return [
            name
            for name in sorted(self.manifest["files"])
            if (
                name.split("/")[0] not in PRIVATE if not names else any(name == n or name.startswith(f"{n}/") for n in names)
            )
        ]

    @property
    def absent(self) -> frozenset[str]:
        """Files that were published, but stayed where this artifact was fetched from (`Store.complete`)."""
        return frozenset(self.manifest.get("absent", ()))


def home() -> Path:
    """Where everything lives: TTRAIN_HOME, else `artifacts` in the working directory."""
    return Path(os.environ.get("TTRAIN_HOME") or "artifacts").absolute()


def usable_home() -> Path:
    """The same, made if it is missing. Raises UsageError where nothing can be written there."""
    root = home()
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"TTRAIN_HOME is {root} but cannot be written: {error.strerror}; set TTRAIN_HOME to a directory of yours"
        ) from None
    return root


@contextlib.contextmanager
def exclusive(path: Path, waiting: Callable[[], object] | None = None) -> Iterator[None]:
    """One holder at a time; released by the system when its process dies. `waiting()` is called if it is taken."""
    import filelock

    path.parent.mkdir(parents=True, exist_ok=True)
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if waiting:
            waiting()
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class Elsewhere(Protocol):
    """Another place that holds artifacts by the same keys, such as the tracker."""

    def manifest(self, stage: str, key: str) -> Mapping[str, Any] | None:
        """The manifest of an artifact that is there as a whole; None where there is none, or where nobody answers."""

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        """Write one file of an artifact that `manifest` found. Raises ArtifactError where it cannot be had."""


class Store:
    """The artifacts under one home. What it lacks may be found `elsewhere`; a hit here asks nobody."""

    def __init__(self, root: Path, elsewhere: Elsewhere | None = None) -> None:
        self.root, self.elsewhere = root, elsewhere
        self.cache = DigestCache(root / "cache" / "digests.json")

    def path(self, stage: str, key: str) -> Path:
        """Where the artifact of this key lives, or would live."""
        return self.root / "store" / stage / key

    def work(self, stage: str, key: str) -> Path:
        """The work directory: the same key, the same directory, so that a rerun continues."""
        return self.root / "work" / stage / key

    def find(self, stage: str, key: str) -> Artifact | None:
        """The artifact, if it is there and undamaged. One that is elsewhere is found, too, with all its files absent."""
        path = self.path(stage, key)
        artifact = self.at(path)
        if artifact is None and self.elsewhere and (manifest := self.elsewhere.manifest(stage, key)):
            return Artifact(stage, key, path, {**manifest, "absent": sorted(manifest["files"])})
        return artifact if artifact and not self.damage(artifact) else None

    def complete(
        self, artifact: Artifact, names: tuple[str, ...] = (), said: Callable[[str], object] = lambda line: None
    ) -> Artifact:
        """The artifact with its named files here (all that are not private, where none is named); fetches absent ones.

        Raises ArtifactError where one cannot be had, or is not what was published.
        """
        if artifact.absent.isdisjoint(artifact.files_of(names)):
            if not (artifact.path / MANIFEST).is_file():  # cleaned away between the plan and now
                raise ArtifactError(f"{artifact.path} was removed a moment ago; run the same command again")
            return artifact
        from ttrain.fetching import fetch_absent

        return fetch_absent(self, artifact, names, said)

    def damage(self, artifact: Artifact) -> str | None:
        """The first file that is missing or differs from the manifest; None where all is well.

        Sizes and mtimes are compared, and the digest where the mtime differs (a copied home).
        """
        absent = artifact.absent
        for name, entry in artifact.manifest["files"].items():
            if name in absent:
                continue
            path = artifact.path / name
            try:
                stat = path.stat()
            except OSError:
                return f"{name} is missing"
            if stat.st_size != entry["bytes"]:
                return f"{name} has {stat.st_size} bytes where {entry['bytes']} were published"
            if stat.st_mtime_ns != entry["mtime_ns"] and self.cache.file(path) != entry["sha256"]:
                return f"{name} was altered after it was published"
        return None

    def artifacts(self, stage: str) -> list[Artifact]:
        """All artifacts of a stage, newest first, damaged ones included."""
        directory = self.root / "store" / stage
        return self._sorted(directory.iterdir() if directory.is_dir() else ())

    def everything(self) -> list[Artifact]:
        """All artifacts of all stages, newest first, damaged ones included."""
        return self._sorted((self.root / "store").glob("*/*"))

    def latest(self, stage: str) -> Artifact:
        """The newest undamaged artifact of a stage that is here as a whole. Raises ArtifactError where there is none."""
        found = self.artifacts(stage)
        for artifact in found:
            if artifact.absent.isdisjoint(artifact.files_of(())) and not self.damage(artifact):
                return artifact
        none = "no whole artifact" if found else "no artifact"
        shown = "; `ttrain artifacts list` shows what is damaged" if found else ""
        raise ArtifactError(
            f"stage {stage} has {none} in {self.root / 'store'}; run `ttrain pipeline run full` first{shown}"
        )

    @contextlib.contextmanager
    def lock(self, stage: str, key: str, waiting: Any = None) -> Iterator[None]:
        """One writer per key; released by the system when its process dies. `waiting()` is called once if it is taken.

        While it is held, the process is named beside it (`holder`), for those who wait.
        """
        path = self.root / "work" / stage / f"{key}.lock"
        with exclusive(path, waiting):
            named = path.with_suffix(HOLDER)
            half = named.with_name(f".{named.name}.{os.getpid()}.tmp")
            with contextlib.suppress(OSError):  # a full disk
                half.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf-8")
                half.replace(named)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    named.unlink(missing_ok=True)

    def is_locked(self, stage: str, key: str) -> bool:
        """Whether somebody has the key's lock at this moment."""
        import filelock

        path = self.root / "work" / stage / f"{key}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(path)
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            return True
        lock.release()
        return False

    def holder(self, stage: str, key: str) -> tuple[int, str] | None:
        """(process, host) that has the key's lock, as it says itself; None where nobody says so."""
        named = read_json(self.root / "work" / stage / f"{key}{HOLDER}")
        return (named["pid"], named["host"]) if isinstance(named, dict) else None

    def compare(self, artifact: Artifact, output: Path) -> Artifact | None:
        """The stored artifact, where a rebuilt output has the same content; None where it differs."""
        names = [path.relative_to(output).as_posix() for path in sorted(output.rglob("*")) if path.is_file()]
        public = [[name, sha256_file(output / name)] for name in names if name.split("/")[0] not in PRIVATE]
        return artifact if digest_of(public) == artifact.content else None

    def publish(self, stage: str, key: str, output: Path, manifest: Mapping[str, Any]) -> Artifact:
        """Make `output` the artifact of this key: fsync, manifest last, one rename. One in its place is set aside.

        "published" is the time, but later than that of every artifact of the stage, also where the clock was set back.
        """
        files = {}
        for path in output.rglob(".*.tmp"):
            if LEFT_BY_A_KILL.fullmatch(path.name):
                path.unlink()
        for path in sorted(output.rglob("*")):
            if path.is_symlink():
                raise ArtifactError(f"stage {stage} left a symbolic link, {path}; an artifact holds plain files only")
            if path.is_file() and path != output / MANIFEST:
                fsync(path)
                stat = path.stat()
                name = path.relative_to(output).as_posix()
                files[name] = {"bytes": stat.st_size, "sha256": sha256_file(path), "mtime_ns": stat.st_mtime_ns}
            elif path.is_dir():
                fsync(path)
        newest = max((artifact.manifest["published"] for artifact in self.artifacts(stage)), default=0.0)
        published = max(time.time(), newest + LATER_SECONDS)
        whole = {**manifest, "format": FORMAT, "stage": stage, "key": key, "published": published, "files": files}
        write_json(output / MANIFEST, whole)
        self.cache.save()
        return self._put(Artifact(stage, key, output, whole))

    def finish_publishing(self, stage: str, key: str) -> Artifact | None:
        """The artifact that lacked nothing but its place in the store when its process was killed; None where none does."""
        output = self.work(stage, key) / "output"
        artifact = self.read(output)
        if artifact is None or (artifact.manifest["stage"], artifact.manifest["key"]) != (stage, key):
            return None
        artifact = replace(artifact, stage=stage, key=key)
        return None if self.damage(artifact) else self._put(artifact)

    def _put(self, artifact: Artifact) -> Artifact:
        destination = self.path(artifact.stage, artifact.key)
        if not destination.parent.is_dir():
            destination.parent.mkdir(parents=True)
            for directory in (destination.parent.parent, self.root):  # the names of new directories, too
                fsync(directory)
        if destination.exists():
            self.set_aside(artifact.stage, artifact.key)
        artifact.path.rename(destination)
        fsync(destination.parent)
        return replace(artifact, path=destination)

    def set_aside(self, stage: str, key: str) -> Path:
        """Move an artifact out of the store; nothing is lost, and nothing finds it any more."""
        directory = self.root / "replaced" / stage
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"{key}-{time.time_ns()}"
        self.path(stage, key).rename(target)
        return target

    def _sorted(self, paths: Iterable[Path]) -> list[Artifact]:
        found = [artifact for path in paths if (artifact := self.at(path))]
        return sorted(found, key=lambda artifact: artifact.manifest["published"], reverse=True)

    def at(self, path: Path) -> Artifact | None:
        """The artifact of this place in the store, not one that was copied there from another key's."""
        artifact = self.read(path)
        named = artifact and (artifact.manifest["stage"], artifact.manifest["key"])
        return artifact if named == (path.parent.name, path.name) else None

    def read(self, path: Path) -> Artifact | None:
        """The artifact in a directory, whether undamaged or not; None where there is none."""
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
            return None
        return Artifact(path.parent.name, path.name, path, manifest)


def write_json(path: Path, value: object) -> None:
    """Write JSON so that a reader sees the old file or the whole new one, also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False).encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # what a full disk says of a descriptor names no file
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def read_json(path: Path) -> Any:
    """The value, or None where the file is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def remove_tree(path: Path) -> None:
    """Remove a directory: renamed first, so that no half of it is ever taken for the whole."""
    if not path.exists():
        return
    trash = path.with_name(f".trash-{path.name}-{time.time_ns()}")
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a directory, would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
