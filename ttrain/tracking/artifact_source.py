"""Artifacts by stage and key from MLflow: the files of finished runs of stages, whose tags name both.

MLflow is asked through its client. For the home's own database that is done only if its files, which lie in the home,
have the key: so a miss loads no MLflow (1.5 s of imports). A server that does not answer is queried once and then no
more: the pipeline builds what it cannot fetch.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

from ttrain.config import Settings
from ttrain.core.files import JsonObject, temporary_directory
from ttrain.core.redact import without_user
from ttrain.errors import ArtifactError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Artifact, Manifest, read_manifest
from ttrain.tracking.client import database_of, first_line, local_path, own_uri, tracking_uri
from ttrain.tracking.mirror import Mirror, place_file
from ttrain.tracking.registered import all_pages

log = logging.getLogger("ttrain")

CANDIDATES = 5  # runs that may hold a key: more than one where it was forced, or built on two machines


@dataclass(frozen=True)
class StoredRun:
    """One finished MLflow run as it is stored."""

    run_id: str
    ended: float  # seconds since 1970
    artifact_uri: str
    tags: Mapping[str, str]


class MlflowSource:
    """Read-only access to the finished runs and files of one MLflow, or of one experiment. Raises MLflow's errors."""

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self.mirror, self._experiment = Mirror(home), experiment

    def finished(self, query: str) -> list[StoredRun]:
        """The finished runs that match a query in MLflow's language, the newest first."""
        query = f"{query} AND attributes.status = 'FINISHED'"
        entities = all_pages(partial(self.mirror.call, "search_runs", self._experiments, query)) if self._experiments else []
        listed = [
            StoredRun(run.info.run_id, (run.info.end_time or 0) / 1000, run.info.artifact_uri, dict(run.data.tags))
            for run in entities
        ]
        return sorted(listed, key=lambda run: run.ended, reverse=True)

    @cached_property
    def _experiments(self) -> list[str]:
        name = self._experiment
        experiments = [self.mirror.call("get_experiment_by_name", name)] if name else self.mirror.call("search_experiments")
        return [experiment.experiment_id for experiment in experiments if experiment]


class LocalCopies:
    """Directories `mlflow/artifacts/RUN_ID/artifacts/STAGE` of a home; each is listed once."""

    def __init__(self, home: Path) -> None:
        self._root = home / "mlflow" / "artifacts"

    @property
    def is_empty(self) -> bool:
        """Whether no run has files in the home: if it has a database, the files are elsewhere."""
        return not self._by_stage

    def find(self, stage: str | None, key: str) -> list[Path]:
        """The directories whose manifest holds this key, or the beginning of one, newest first; for None, of all stages."""
        stages = [stage] if stage else [*self._by_stage]
        matches = (path for name in stages for path in self._by_stage.get(name, ()) if f'"{key}' in _manifest_text(path))
        return sorted(matches, key=lambda path: (path / MANIFEST).stat().st_mtime, reverse=True)

    @cached_property
    def _by_stage(self) -> dict[str, list[Path]]:
        directories: dict[str, list[Path]] = defaultdict(list)
        for path in self._runs(self._root):
            for stage in _names(path / "artifacts"):
                directories[stage].append(path / "artifacts" / stage)
        return dict(directories)

    def _runs(self, root: Path) -> Iterator[Path]:
        """The directories of runs; those that a server of this home logged lie one level deeper, by experiment."""
        for name in _names(root):
            yield from (root / name / run for run in _names(root / name)) if len(name) < 32 else [root / name]


def _manifest_text(directory: Path) -> str:
    with contextlib.suppress(OSError):
        return (directory / MANIFEST).read_text(encoding="utf-8", errors="replace")
    return ""


def _names(directory: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return [path.name for path in directory.iterdir()]
    return []


@dataclass(frozen=True)
class TrackedArtifact:
    """An artifact in MLflow: the run, its directory if that is on a disk of this machine, and the manifest."""

    run_id: str
    directory: Path | None
    manifest: Manifest


class MlflowArtifacts:
    """Artifacts of one MLflow experiment, or of all of them; a `ttrain.store.layout.Elsewhere`.

    Each key is looked up once.
    """

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._home, self._experiment = home.resolve(), experiment
        self._uri = tracking_uri(self._home)
        self._found: dict[tuple[str, str], TrackedArtifact | None] = {}
        self._lock = threading.Lock()
        self._is_silent = False

    def manifest(self, stage: str, key: str) -> JsonObject | None:
        """The manifest of a whole artifact in MLflow; None if MLflow has none, or does not answer."""
        artifact = self._find(stage, key)
        return artifact.manifest if artifact else None

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        """Write one file of the artifact to `to`; linked if it is big and on the same disk. Raises ArtifactError."""
        artifact = self._find(stage, key)
        if artifact is None:
            raise ArtifactError(
                f"MLflow at {without_user(self._uri)} does not hold {stage} {key[:12]}; run its pipeline again"
            )
        try:
            if artifact.directory:
                place_file(artifact.directory / name, to)
            else:
                self._download(artifact.run_id, f"{stage}/{name}", to)
        except OSError:
            raise  # a full disk is not MLflow's fault
        except Exception as error:
            server = f"MLflow at {without_user(self._uri)}"
            raise ArtifactError(
                f"{name} of {stage} {key[:12]} cannot be fetched from {server}: {first_line(error)}"
            ) from None

    def recorded(self, stage: str, key: str) -> JsonObject | None:
        """The manifest that a finished run left, even if other files of the artifact are gone."""
        return next((artifact.manifest for artifact in self._candidates(stage, key)), None)

    def _find(self, stage: str, key: str) -> TrackedArtifact | None:
        with self._lock:
            if (stage, key) not in self._found:
                self._found[stage, key] = next(self._search(stage, key), None)
            return self._found[stage, key]

    def _search(self, stage: str, key: str) -> Iterator[TrackedArtifact]:
        """Whole artifacts of that key, newest first."""
        for match in self._candidates(stage, key):
            try:
                if _is_whole(match.manifest, stage, key, self._sizes(match, stage)):
                    yield match
            except Exception as error:
                self._mark_silent(error)
                return

    def _candidates(self, stage: str, key: str) -> Iterator[TrackedArtifact]:
        """Artifacts whose manifest has that key, newest first."""
        if not self._may_hold(stage, key):
            return
        try:
            for run in self._finished(f"tags.`ttrain.key` = '{key}' AND tags.`ttrain.stage` = '{stage}'")[:CANDIDATES]:
                root = local_path(run.artifact_uri)
                directory = root / stage if root else None
                manifest = self._manifest_of(run.run_id, stage, directory)
                if manifest and (manifest.get("stage"), manifest.get("key")) == (stage, key):
                    yield TrackedArtifact(run.run_id, directory, manifest)
        except Exception as error:  # MLflow may raise anything, and the only cost is to build again
            self._mark_silent(error)

    def _may_hold(self, stage: str | None, key: str) -> bool:
        """Whether to ask MLflow: it answers, and the home's own has files of that key, or keeps its files elsewhere."""
        if self._is_silent or self._uri != own_uri(self._home):
            return not self._is_silent
        return database_of(self._home).exists() and (self._copies.is_empty or bool(self._copies.find(stage, key)))

    @cached_property
    def _copies(self) -> LocalCopies:
        return LocalCopies(self._home)

    def _mark_silent(self, error: Exception) -> None:
        self._is_silent = True
        log.warning("MLflow at %s cannot be queried for artifacts: %s", without_user(self._uri), first_line(error))

    def _finished(self, query: str) -> list[StoredRun]:
        """Finished runs, the newest first."""
        return self._source.finished(query)

    @cached_property
    def _source(self) -> MlflowSource:
        """MLflow, opened at the first key that is not here; a server's health is checked first."""
        return MlflowSource(self._home, self._experiment)

    def _manifest_of(self, run_id: str, stage: str, directory: Path | None) -> Any:
        """The manifest in a run; None if there is none that this version reads."""
        with temporary_directory("tracking") as folder:
            path = directory / MANIFEST if directory else folder / MANIFEST
            try:
                if directory is None:
                    self._download(run_id, f"{stage}/{MANIFEST}", path)
            except Exception as error:
                log.debug("%s of run %s: %s", MANIFEST, run_id, error)
                return None
            return read_manifest(path)

    def _sizes(self, match: TrackedArtifact, stage: str) -> dict[str, int]:
        """Bytes of each file of the artifact, by its path there."""
        root = match.directory
        if root:
            return {path.relative_to(root).as_posix(): path.stat().st_size for path in root.rglob("*") if path.is_file()}
        listed = self._source.mirror.sizes(match.run_id, stage)
        return {path.removeprefix(f"{stage}/"): size for path, size in listed}

    def _download(self, run_id: str, path: str, to: Path) -> None:
        with tempfile.TemporaryDirectory(dir=to.parent) as folder:
            shutil.move(self._source.mirror.call("download_artifacts", run_id, path, folder), to)


def _is_whole(manifest: Manifest, stage: str, key: str, sizes: Mapping[str, int]) -> bool:
    """Whether a foreign manifest has only relative paths, and all its public files are present.

    `sizes`: bytes of each file of the artifact.
    """
    names = Artifact(stage, key, Path(), manifest).files_of(())
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in names):
        return False
    return all(sizes.get(str(PurePosixPath(name))) == manifest["files"][name]["bytes"] for name in names)


def store_of(home: Path, settings: Settings) -> ArtifactStore:
    """The store of a home; if tracking is enabled, missing artifacts are looked up in MLflow."""
    tracking = settings.tracking
    return ArtifactStore(home, MlflowArtifacts(home, tracking.experiment) if tracking.enabled else None)
