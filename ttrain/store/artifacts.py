"""The store: artifacts by content key, work directories, locks; files and JSON only.

An artifact is a directory `store/<stage>/<key>` whose `manifest.json` was written last; without it
there is no artifact. Files under `run/` and `checkpoints/` are read by no other stage, so they do
not count in the content digest.
"""

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ttrain.core.files import (
    INTERRUPTED_WRITE,
    JsonDict,
    JsonObject,
    Taken,
    exclusive,
    fsync,
    read_object,
    refuse,
    remove_tree,
    write_json,
)
from ttrain.core.hashing import DigestCache, digest_of, sha256_file
from ttrain.core.text import format_size
from ttrain.errors import ArtifactError, DamagedFile, NothingBuilt
from ttrain.store import integrity
from ttrain.store.layout import (
    FORMAT,
    MANIFEST,
    PRIVATE,
    Artifact,
    Elsewhere,
    Manifest,
    need_manifest,
    read_manifest,
    write_manifest,
)

SHOWN_KEY = 12  # characters of a key that a person reads
SHOWN_DAMAGES = 3  # damaged artifacts that a message names
# {STAGE/KEY: time of publication} of artifacts that must not be fetched from elsewhere
DISTRUSTED = "distrusted.json"
HOLDER = ".holder"  # beside a key's lock: which process has it


class ArtifactStore:
    """The artifacts under one home; those that it lacks may be found `elsewhere`."""

    def __init__(self, root: Path, elsewhere: Elsewhere | None = None) -> None:
        self.root = root
        self.elsewhere = elsewhere
        self.cache = DigestCache(root / "cache" / "digests.json")

    def path(self, stage: str, key: str) -> Path:
        return self.root / "store" / stage / key

    def work(self, stage: str, key: str) -> Path:
        """The work directory, where a rerun of this key continues."""
        return self.root / "work" / stage / key

    def find(self, stage: str, key: str) -> Artifact | None:
        """The undamaged artifact, or one from elsewhere with all its files absent.

        A damaged artifact is not replaced by a remote copy, which commands that read the store
        alone would never see.
        """
        path = self.path(stage, key)
        artifact = self.at(path)
        if (
            artifact is None
            and not path.is_dir()
            and (manifest := self.manifest_elsewhere(stage, key))
        ):
            return Artifact(stage, key, path, {**manifest, "absent": sorted(manifest["files"])})
        return artifact if artifact and not self.damage(artifact) else None

    def input_of(self, artifact: Artifact | None, name: str) -> Artifact | None:
        """The named input that an artifact was made from; None if it has none or it was removed."""
        entry = artifact.manifest["inputs"].get(name) if artifact else None
        return self.find(entry["stage"], entry["key"]) if entry else None

    def manifest_elsewhere(self, stage: str, key: str) -> JsonObject | None:
        """The manifest of a key elsewhere, unless it is distrusted here."""
        manifest = self.elsewhere.manifest(stage, key) if self.elsewhere else None
        distrusted = (
            read_object(self.root / DISTRUSTED).get(f"{stage}/{key}", 0.0) if manifest else 0.0
        )
        return manifest if manifest and manifest["published"] > distrusted else None

    def complete(
        self,
        artifact: Artifact,
        names: tuple[str, ...] = (),
        report: Callable[[str], object] = lambda line: None,
    ) -> Artifact:
        """Fetch the artifact's absent files of these names (default: all that are not private).

        Raises ArtifactError if a file is missing, or is not what was published.
        """
        stage = artifact.stage
        key = artifact.key
        missing = artifact.lacking(names)
        if not missing:
            if not (
                artifact.path / MANIFEST
            ).is_file():  # removed by `clean` between the plan and now
                raise ArtifactError(
                    f"{artifact.path} was removed a moment ago; run the same command again"
                )
            return artifact
        if self.elsewhere is None:
            raise ArtifactError(
                f"the artifact {stage} {key[:SHOWN_KEY]} in {self.root} lacks {missing[0]}, which "
                f"stayed in MLflow, and tracking is off; try tracking.enabled=true, or "
                f"`ttrain pipeline rerun {stage}` to build it again"
            )
        waiting = f"another run is at work on {stage}; waiting to fetch its files"
        with self.lock(stage, key, waiting=lambda: report(waiting)):
            present = self.at(
                artifact.path
            )  # another stage, thread or run may have fetched some of it
            artifact = present or artifact
            missing = artifact.lacking(names)
            if not missing:
                return artifact
            size = format_size(sum(artifact.manifest["files"][name]["bytes"] for name in missing))
            report(f"fetching {len(missing)} files of {stage} ({size})")
            directory = artifact.path if present else self.work(stage, f"{key}.fetch")
            parts = self.work(stage, f"{key}.part")  # of files that are not whole
            parts.mkdir(parents=True, exist_ok=True)
            for name in missing:
                _fetch(self.elsewhere, artifact, name, directory / name, parts / "file")
            manifest = {**artifact.manifest, "absent": sorted(artifact.absent.difference(missing))}
            write_json(parts / "file", manifest)
            (parts / "file").replace(directory / MANIFEST)
            remove_tree(parts)
            fetched = replace(artifact, path=directory, manifest=manifest)
            return fetched if present else self._put(fetched)

    def damage(self, artifact: Artifact) -> str | None:
        """The first file that is missing or differs from the manifest; None if there is none.

        Compares sizes and mtimes, and digests where the mtime differs (a copied home).
        """
        return next(integrity.problems(artifact, self.cache), None)

    def artifacts(self, stage: str = "*") -> list[Artifact]:
        """All artifacts of a stage, or of all, newest first, damaged ones included."""
        return sorted(
            filter(None, map(self.at, self._places(stage))),
            key=lambda artifact: artifact.manifest["published"],
            reverse=True,
        )

    def made_from(self, artifact: Artifact, stage: str) -> list[Artifact]:
        """The artifacts of a stage that have this one as an input, newest first."""
        source = (artifact.stage, artifact.key)

        def reads_source(candidate: Artifact) -> bool:
            return any(
                (used["stage"], used["key"]) == source
                for used in candidate.manifest["inputs"].values()
            )

        return list(filter(reads_source, self.artifacts(stage)))

    def unreadable(self, stage: str = "*") -> dict[Path, str]:
        """Directories of artifacts that have no valid manifest, and why."""
        return {path: why for path in self._places(stage) if (why := self.manifest_problem(path))}

    def _places(self, stage: str) -> list[Path]:
        return sorted((self.root / "store").glob(f"{stage}/[!.]*"))

    def manifest_problem(self, path: Path) -> str | None:
        """Why a directory has no valid manifest; None if it has one, or does not exist."""
        if not path.is_dir():
            return None
        try:
            manifest = need_manifest(path / MANIFEST)
        except FileNotFoundError:
            return f"{MANIFEST} is missing"
        except OSError as error:
            return f"{MANIFEST} cannot be read: {error}"
        except ValueError as error:
            return f"{MANIFEST} {error}"
        is_its_own = (manifest["stage"], manifest["key"]) == (path.parent.name, path.name)
        return (
            None if is_its_own else f"{MANIFEST} is that of {manifest['stage']} {manifest['key']}"
        )

    def damage_at(self, path: Path) -> str | None:
        """The damage of the artifact at this path, or of its manifest; None if there is none."""
        artifact = self.at(path)
        return self.damage(artifact) if artifact else self.manifest_problem(path)

    def damaged(self, stage: str = "*") -> dict[Path, str]:
        return {path: why for path in self._places(stage) if (why := self.damage_at(path))}

    def latest(self, stage: str) -> Artifact:
        """The newest undamaged artifact of a stage that has all its files. Raises ArtifactError."""
        artifacts = self.artifacts(stage)
        for artifact in artifacts:
            if not artifact.lacking(()) and not self.damage(artifact):
                return artifact
        problem, kind = (
            ("no whole artifact", ArtifactError) if artifacts else ("no artifact", NothingBuilt)
        )
        raise kind(f"stage {stage} has {problem} in {self.root / 'store'}; {self.advice(stage)}")

    def advice(self, stage: str = "*") -> str:
        """What to do if no artifact of a stage, or of any, can be used; names the damaged ones."""
        damaged = [
            f"{path.parent.name} {path.name[:SHOWN_KEY]} is damaged: {why}"
            for path, why in self.damaged(stage).items()
        ]
        if damaged:
            return f"{'; '.join(damaged[:SHOWN_DAMAGES])}; {DamagedFile.fix}"
        from ttrain.config import (
            TRAINING_STAGES,
        )  # 0.2 s, which commands that read the store alone need not take

        row = TRAINING_STAGES.get(stage)
        data = f", with files in data.{stage}" if row and row.role != "base" else ""
        return f"run `ttrain pipeline run full` first{data}"

    @contextlib.contextmanager
    def lock(self, stage: str, key: str, waiting: Any = None) -> Iterator[None]:
        """One writer per key; the system releases the lock when its process dies.

        `waiting()` is called once if the lock is taken. The process is recorded for `holder`.
        """
        path = self.root / "work" / stage / f"{key}.lock"
        with exclusive(path, waiting):
            holder_file = path.with_suffix(HOLDER)
            with contextlib.suppress(OSError):  # a full disk
                holder_file.write_text(
                    json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf-8"
                )
            try:
                yield
            finally:
                holder_file.unlink(missing_ok=True)

    def holder(self, stage: str, key: str) -> tuple[int, str] | None:
        """(process, host) that holds the key's lock; None if none is recorded."""
        record = read_object(self.root / "work" / stage / f"{key}{HOLDER}")
        return (record["pid"], record["host"]) if record else None

    def is_locked(self, stage: str, key: str) -> bool:
        with (
            contextlib.suppress(Taken),
            exclusive(self.root / "work" / stage / f"{key}.lock", refuse),
        ):
            return False
        return True

    def compare(self, artifact: Artifact, output: Path) -> Artifact | None:
        """The stored artifact if a rebuilt output has the same content; None if it differs."""
        names = [
            path.relative_to(output).as_posix()
            for path in sorted(output.rglob("*"))
            if path.is_file()
        ]
        public = [
            [name, sha256_file(output / name)]
            for name in names
            if name.split("/")[0] not in PRIVATE
        ]
        return artifact if digest_of(public) == artifact.content else None

    def publish(self, stage: str, key: str, output: Path, manifest: Manifest) -> Artifact:
        """Make `output` the artifact of this key: fsync, manifest last, one rename.

        An artifact in its place is set aside.
        """
        files = dict[str, JsonDict]()
        stats = dict[str, os.stat_result]()
        for path in output.rglob(".*.tmp"):
            if INTERRUPTED_WRITE.fullmatch(path.name):
                path.unlink()
        for path in sorted(output.rglob("*")):
            if path.is_symlink():
                raise ArtifactError(
                    f"stage {stage} left a symbolic link, {path}; "
                    "an artifact holds plain files only"
                )
            if path.is_file() and path != output / MANIFEST:
                fsync(path)
                stat = path.stat()
                name = path.relative_to(output).as_posix()
                stats[name] = stat
                files[name] = {
                    "bytes": stat.st_size,
                    "mtime_ns": stat.st_mtime_ns,
                    "sha256": sha256_file(path),
                }
            elif path.is_dir():
                fsync(path)
        facts = {
            "format": FORMAT,
            "stage": stage,
            "key": key,
            "published": time.time(),
            "files": files,
        }
        whole = write_manifest(output, {**manifest, **facts})
        artifact = self._put(Artifact(stage, key, output, whole))
        for name, stat in stats.items():  # a stage that reads this at once need not hash it again
            integrity.memory(self.root).learn(artifact.path / name, files[name]["sha256"], stat)
        integrity.save()
        return artifact

    def finish_publishing(self, stage: str, key: str) -> Artifact | None:
        """Publish an output that lacks only its rename after a kill; None if there is none."""
        output = self.work(stage, key) / "output"
        manifest = read_manifest(output / MANIFEST)
        if manifest is None or (manifest["stage"], manifest["key"]) != (stage, key):
            return None
        artifact = Artifact(stage, key, output, manifest)
        return None if self.damage(artifact) else self._put(artifact)

    def _put(self, artifact: Artifact) -> Artifact:
        destination = self.path(artifact.stage, artifact.key)
        if not destination.parent.is_dir():
            destination.parent.mkdir(parents=True)
            for directory in (
                destination.parent.parent,
                self.root,
            ):  # the names of new directories, too
                fsync(directory)
        if destination.exists():
            self.set_aside(artifact.stage, artifact.key)
        artifact.path.rename(destination)
        fsync(destination.parent)
        return replace(artifact, path=destination)

    def set_aside(self, stage: str, key: str) -> Path:
        directory = self.root / "replaced" / stage
        directory.mkdir(parents=True, exist_ok=True)
        target = directory / f"{key}-{time.time_ns()}"
        self.path(stage, key).rename(target)
        return target

    def set_damaged_aside(self, path: Path, artifact: Artifact | None = None) -> bool:
        """Move a damaged artifact out of the store, so that the next run builds it again.

        `artifact`: as it was when the damage was found; None if its manifest cannot be read.
        Returns whether this call moved it. Artifacts made from it stay: each stage verifies what it
        reads.
        """
        stage = path.parent.name
        key = path.name
        present = self.at(path)
        if artifact and present and present.manifest["published"] != artifact.manifest["published"]:
            return False  # it was rebuilt meanwhile
        files = [artifact.path / name for name in artifact.files_of(())] if artifact else []
        # hard-linked elsewhere, such as in MLflow's folder, and thus damaged there too
        if artifact and any(file.stat().st_nlink > 1 for file in files if file.exists()):
            with exclusive(self.root / f"{DISTRUSTED}.lock"):
                entries = read_object(self.root / DISTRUSTED)
                write_json(
                    self.root / DISTRUSTED,
                    {**entries, f"{stage}/{key}": artifact.manifest["published"]},
                )
        try:
            self.set_aside(stage, key)
        except FileNotFoundError:  # another run has already moved it
            return False
        return True

    def at(self, path: Path) -> Artifact | None:
        """The artifact at this path, damaged or not; None if it was copied from another key's."""
        artifact = self.read(path)
        identity = artifact and (artifact.manifest["stage"], artifact.manifest["key"])
        return artifact if identity == (path.parent.name, path.name) else None

    def read(self, path: Path) -> Artifact | None:
        """The artifact in any directory; None if there is none."""
        manifest = read_manifest(path / MANIFEST)
        return Artifact(path.parent.name, path.name, path, manifest) if manifest else None


def _fetch(elsewhere: Elsewhere, artifact: Artifact, name: str, target: Path, part: Path) -> None:
    entry = artifact.manifest["files"][name]
    if target.is_file() and sha256_file(target) == entry["sha256"]:
        return
    part.unlink(missing_ok=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    elsewhere.fetch(artifact.stage, artifact.key, name, part)
    if sha256_file(part) != entry["sha256"]:
        part.unlink()
        raise ArtifactError(
            f"{name} of {artifact.stage} {artifact.key[:SHOWN_KEY]}, as MLflow has it, is not "
            f"what was published; build it again: `ttrain pipeline rerun {artifact.stage}`"
        )
    fsync(part)
    os.utime(part, ns=(entry["mtime_ns"], entry["mtime_ns"]))  # so that a hit costs a stat
    part.replace(target)
