"""Brings files of artifacts into this store that lie elsewhere: only those that are read, checked, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.digests import sha256_file
from ttrain.errors import ArtifactError
from ttrain.store import MANIFEST, Artifact, Elsewhere, Store, fsync, remove_tree, write_json

if TYPE_CHECKING:
    from ttrain.config import Settings

MEGABYTE = 1_000_000


class InTracker:
    """What MLflow holds of one experiment (None: of all); a `ttrain.store.Elsewhere`, loaded at the first key that the
    store lacks."""

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._home, self._experiment = home, experiment

    def manifest(self, stage: str, key: str) -> Mapping[str, Any] | None:
        return self._tracked.manifest(stage, key)

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        self._tracked.fetch(stage, key, name, to)

    @cached_property
    def _tracked(self) -> Elsewhere:
        from ttrain.tracking.fetching import Tracked

        return Tracked(self._home, self._experiment)


def store_of(home: Path, settings: Settings) -> Store:
    """The store of a home; what it lacks is looked for in MLflow, where that is told of runs."""
    tracking = settings.tracking
    return Store(home, InTracker(home, tracking.experiment) if tracking.enabled else None)


def fetch_absent(
    store: Store, artifact: Artifact, names: tuple[str, ...], said: Callable[[str], object] = lambda line: None
) -> Artifact:
    """The artifact, in the store, with all its files under `names` (none: all that are not private).

    They are fetched beside the store under the key's lock, compared with the manifest, and moved into their place; then
    the manifest says so. A kill leaves whole files, which the next try takes. Raises ArtifactError.
    """
    stage, key = artifact.stage, artifact.key
    if store.elsewhere is None:
        raise ArtifactError(
            f"the artifact {stage} {key[:12]} in {store.root} lacks {_lacking(artifact, names)[0]}, which stayed in MLflow, "
            f"and tracking is off; try tracking.enabled=true, or `ttrain pipeline rerun {stage}` to build it again"
        )
    with store.lock(stage, key, waiting=lambda: said(f"another run is at work on {stage}; waiting to fetch its files")):
        there = store.at(store.path(stage, key))  # another stage, thread or run may have fetched some of it
        artifact = there or artifact
        missing = _lacking(artifact, names)
        if not missing:
            return artifact
        sizes = artifact.manifest["files"]
        size = sum(sizes[name]["bytes"] for name in missing) / MEGABYTE
        said(f"fetching {len(missing)} files of {stage} ({size:.1f} MB)")
        part = store.work(stage, key).with_name(f"{key}.fetch")
        for name in missing:
            _fetch(store.elsewhere, artifact, name, part / name)
        manifest = {**artifact.manifest, "absent": sorted(artifact.absent.difference(missing))}
        if there:
            for left in there.path.glob(f".{MANIFEST}.*.tmp"):  # by a process that was killed while it fetched
                left.unlink()
            _add(part, there.path, missing)
            write_json(there.path / MANIFEST, manifest)
            remove_tree(part)
        else:
            _keep_only(part, missing)
            write_json(part / MANIFEST, manifest)
            artifact.path.parent.mkdir(parents=True, exist_ok=True)
            if artifact.path.exists():  # what has no manifest, or another key's
                store.set_aside(stage, key)
            part.rename(artifact.path)
            fsync(artifact.path.parent)
    return Artifact(stage, key, artifact.path, manifest)


def _lacking(artifact: Artifact, names: tuple[str, ...]) -> list[str]:
    absent = artifact.absent
    return [name for name in artifact.files_of(names) if name in absent]


def _fetch(elsewhere: Elsewhere, artifact: Artifact, name: str, target: Path) -> None:
    """One file, with the bytes and the mtime of the manifest. One that an earlier try has fetched is taken."""
    entry = artifact.manifest["files"][name]
    stamp = (entry["mtime_ns"], entry["mtime_ns"])  # so that a hit costs a stat
    if target.is_file() and target.stat().st_size == entry["bytes"] and sha256_file(target) == entry["sha256"]:
        os.utime(target, ns=stamp)
        return
    half = target.with_name(f".{target.name}.part")
    half.parent.mkdir(parents=True, exist_ok=True)
    half.unlink(missing_ok=True)
    elsewhere.fetch(artifact.stage, artifact.key, name, half)
    size = half.stat().st_size
    if size != entry["bytes"] or sha256_file(half) != entry["sha256"]:
        half.unlink()
        raise ArtifactError(
            f"{name} of {artifact.stage} {artifact.key[:12]}, as MLflow has it, is not what was published "
            f"({size} bytes, {entry['bytes']} were published); build it again: `ttrain pipeline rerun {artifact.stage}`"
        )
    os.utime(half, ns=stamp)
    half.replace(target)


def _add(part: Path, directory: Path, names: Iterable[str]) -> None:
    """Move fetched files into an artifact whose manifest does not count them as here yet."""
    for name in names:
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        fsync(part / name)
        (part / name).replace(target)
        fsync(target.parent)


def _keep_only(directory: Path, names: Iterable[str]) -> None:
    """Make a directory fit to be an artifact: what an earlier try wanted beside these files is removed, the rest is safe."""
    wanted = {directory / name for name in names}
    for path in directory.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
        else:
            fsync(path)
