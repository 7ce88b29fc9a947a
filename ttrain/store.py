"""The store: artifacts by content key, work directories, locks; files and JSON only.

An artifact is a directory `store/<stage>/<key>` whose `manifest.json` was written last. Without a manifest it does not
exist. What lies under `run/` (logs, curves) and `checkpoints/` (to continue from) belongs to the artifact, but no other
stage reads it, so it does not count in the content digest.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ttrain.digests import DigestCache, digest_of
from ttrain.errors import ArtifactError, UsageError

FORMAT = 1
MANIFEST = "manifest.json"
PRIVATE = ("run", "checkpoints")


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
        chosen = [
            [name, files[name]["sha256"]]
            for name in sorted(files)
            if (
                name.split("/")[0] not in PRIVATE if not names else any(name == n or name.startswith(f"{n}/") for n in names)
            )
        ]
        return digest_of(chosen)


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


class Store:
    """The artifacts under one home."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.cache = DigestCache(root / "cache" / "digests.json")

    def path(self, stage: str, key: str) -> Path:
        """Where the artifact of this key lives, or would live."""
        return self.root / "store" / stage / key

    def work(self, stage: str, key: str) -> Path:
        """The work directory: the same key, the same directory, so that a rerun continues."""
        return self.root / "work" / stage / key

    def find(self, stage: str, key: str) -> Artifact | None:
        """The artifact, if it is there and undamaged."""
        artifact = self.read(self.path(stage, key))
        return artifact if artifact and not self.damage(artifact) else None

    def damage(self, artifact: Artifact) -> str | None:
        """The first file that is missing or differs from the manifest; None where all is well.

        Sizes and mtimes are compared, and the digest where the mtime differs (a copied home).
        """
        for name, entry in artifact.manifest["files"].items():
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
        paths = directory.iterdir() if directory.is_dir() else []
        found = [artifact for path in paths if (artifact := self.read(path))]
        return sorted(found, key=lambda artifact: artifact.manifest["published"], reverse=True)

    def everything(self) -> list[Artifact]:
        """All artifacts of all stages, newest first, damaged ones included."""
        found = [artifact for path in (self.root / "store").glob("*/*") if (artifact := self.read(path))]
        return sorted(found, key=lambda artifact: artifact.manifest["published"], reverse=True)

    def latest(self, stage: str) -> Artifact:
        """The newest undamaged artifact of a stage. Raises ArtifactError where there is none."""
        for artifact in self.artifacts(stage):
            if not self.damage(artifact):
                return artifact
        raise ArtifactError(f"stage {stage} has no artifact in {self.root / 'store'}; run `ttrain pipeline run full` first")

    @contextlib.contextmanager
    def lock(self, stage: str, key: str, waiting: Any = None) -> Iterator[None]:
        """One writer per key; released by the system when its process dies. `waiting()` is called once if it is taken."""
        with exclusive(self.root / "work" / stage / f"{key}.lock", waiting):
            yield

    def compare(self, artifact: Artifact, output: Path) -> Artifact | None:
        """The stored artifact, where a rebuilt output has the same content; None where it differs."""
        names = [path.relative_to(output).as_posix() for path in sorted(output.rglob("*")) if path.is_file()]
        public = [[name, self.cache.file(output / name)] for name in names if name.split("/")[0] not in PRIVATE]
        return artifact if digest_of(public) == artifact.content else None

    def publish(self, stage: str, key: str, output: Path, manifest: Mapping[str, Any]) -> Artifact:
        """Make `output` the artifact of this key: fsync, manifest last, one rename. One in its place is set aside."""
        files = {}
        for left in output.glob(f".{MANIFEST}.*.tmp"):  # by a process that was killed while it published
            left.unlink()
        for path in sorted(output.rglob("*")):
            if path.is_symlink():
                raise ArtifactError(f"stage {stage} left a symbolic link, {path}; an artifact holds plain files only")
            if path.is_file() and path != output / MANIFEST:
                fsync(path)
                stat = path.stat()
                name = path.relative_to(output).as_posix()
                files[name] = {"bytes": stat.st_size, "sha256": self.cache.file(path), "mtime_ns": stat.st_mtime_ns}
            elif path.is_dir():
                fsync(path)
        whole = {**manifest, "format": FORMAT, "stage": stage, "key": key, "published": time.time(), "files": files}
        write_json(output / MANIFEST, whole)
        destination = self.path(stage, key)
        destination.parent.mkdir(parents=True, exist_ok=True)
        if destination.exists():
            self.set_aside(stage, key)
        output.rename(destination)
        fsync(destination.parent)
        self.cache.save()
        return Artifact(stage, key, destination, whole)

    def set_aside(self, stage: str, key: str) -> Path:
        """Move an artifact out of the store; nothing is lost, and nothing finds it any more."""
        directory = self.root / "replaced" / stage
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"{key}-{time.time_ns()}"
        self.path(stage, key).rename(target)
        return target

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
    except OSError as error:
        error.filename = error.filename or str(path)  # what a full disk says of a descriptor names no file
        raise
    temporary.replace(path)
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
