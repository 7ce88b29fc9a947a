"""Read runs and files that are not in the home, by MLflow's client; and artifacts by stage and key: the files of finished
child runs, whose tags name both.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from typing import Any

from ttrain.core.files import JsonObject, parse_object, temporary_directory
from ttrain.core.redact import without_user
from ttrain.errors import ArtifactError
from ttrain.store.layout import MANIFEST, Artifact, Manifest, read_manifest
from ttrain.tracking.calls import Tags, all_pages, first_line
from ttrain.tracking.client import tracking_uri
from ttrain.tracking.database import database_of
from ttrain.tracking.tracker import open_reader
from ttrain.tracking.uploads import local_path, place_file

log = logging.getLogger("ttrain")

CANDIDATES = 5  # runs that may hold a key: more than one where it was forced, or built on two machines


RUNS_PER_PAGE, RUNS_PER_QUERY = 1000, 100


@dataclass(frozen=True)
class StoredRun:
    """One MLflow run as it is stored."""

    run_id: str
    name: str
    status: str  # RUNNING, FINISHED, FAILED, KILLED
    started: float  # seconds since 1970
    ended: float | None
    artifact_uri: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]  # last values
    tags: Tags  # "" for one that the run does not have
    data: Mapping[str, str]  # digest and counts of each data set that it read, by name


class MlflowSource:
    """Read-only access to one MLflow, or to one experiment. Raises MLflow's errors; a silent server costs one probe."""

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._store, self._experiment = open_reader(home), experiment

    def runs(self, ids: Iterable[str]) -> dict[str, StoredRun]:
        """The existing runs with these ids, without deleted ones, by id."""
        run_ids = [*dict.fromkeys(ids)]
        batches = [run_ids[start : start + RUNS_PER_QUERY] for start in range(0, len(run_ids), RUNS_PER_QUERY)]
        queries = ("attributes.run_id IN ({})".format(", ".join(f"'{run_id}'" for run_id in batch)) for batch in batches)
        return {run.run_id: run for query in queries for run in self.search(query)}

    def with_tags(self, key: str, values: Iterable[str]) -> list[StoredRun]:
        """The runs whose tag has one of these values, the newest first."""
        # MLflow's filter language cannot escape a quote, and no value of ttrain contains one
        queries = (f"tags.`{key}` = '{value}'" for value in dict.fromkeys(values) if "'" not in value)
        return sorted((run for query in queries for run in self.search(query)), key=lambda run: run.started, reverse=True)

    def history(self, run_id: str, metric: str) -> list[tuple[int, int, float]]:
        """(step, milliseconds since 1970, value) of a metric, as logged; from all pages."""
        points = self._call("get_metric_history", run_id, metric)
        return sorted((point.step, point.timestamp, point.value) for point in points)

    def curves(self, run_id: str) -> list[str]:
        """Names of the metrics that were logged at a step; the metrics of a whole run are at step 0."""
        metrics = self._call("get_run", run_id).data.to_proto().metrics
        return sorted(metric.key for metric in metrics if metric.step > 0)

    def text(self, run_id: str, path: str) -> str:
        """The text of one of the run's files."""
        with temporary_directory("tracking") as folder:
            return self.download(run_id, path, str(folder)).read_text(encoding="utf-8", errors="replace")

    def download(self, run_id: str, path: str, folder: str) -> Path:
        """Write one of the run's files below a folder; return its path there."""
        return Path(self._call("download_artifacts", run_id, path, folder))

    def files(self, run_id: str, under: str) -> dict[str, int]:
        """Bytes of the run's files below a directory, by path."""
        sizes: dict[str, int] = {}
        for entry in self._call("list_artifacts", run_id, under or None):
            sizes |= self.files(run_id, entry.path) if entry.is_dir else {entry.path: entry.file_size}
        return sizes

    def search(self, query: str) -> list[StoredRun]:
        """The runs that match a query in MLflow's language, without deleted ones."""
        if not self._experiments:
            return []
        page = partial(self._store.client.search_runs, self._experiments, query, max_results=RUNS_PER_PAGE)
        return [_stored_run(run) for run in self._answer(lambda: all_pages(page))]

    @cached_property
    def _experiments(self) -> list[str]:
        name = self._experiment
        answer = [self._call("get_experiment_by_name", name)] if name else self._call("search_experiments")
        return [experiment.experiment_id for experiment in answer if experiment]

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._answer(lambda: getattr(self._store.client, method)(*arguments))

    def _answer(self, action: Callable[[], Any]) -> Any:
        answer, error = self._store.caller.try_call(action)
        if error is not None:
            raise error
        return answer


def _stored_run(run: Any) -> StoredRun:
    info, data = run.info, run.data
    datasets = [entry.dataset for entry in (run.inputs.dataset_inputs if run.inputs else ())]
    return StoredRun(
        info.run_id,
        info.run_name or "",
        info.status,
        (info.start_time or 0) / 1000,
        info.end_time / 1000 if info.end_time else None,
        info.artifact_uri,
        dict(data.params),
        dict(data.metrics),
        defaultdict(str, data.tags),
        {dataset.name: f"{dataset.digest} {_counts_in(dataset.profile or '')}".strip() for dataset in datasets},
    )


def _counts_in(profile: str) -> str:
    return ", ".join(f"{name} {count}" for name, count in parse_object(profile).items())


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

    def find_keys(self, stage: str | None, prefix: str) -> list[tuple[str, str]]:
        """(stage, key) of the finished runs whose keys start with `prefix`, in hex; [] if MLflow does not answer."""
        try:
            runs = self._finished(f"tags.`ttrain.key` LIKE '{prefix}%'") if self._may_hold(stage, prefix) else []
        except Exception as error:
            self._mark_silent(error)
            return []
        pairs = {(run.tags["ttrain.stage"], run.tags["ttrain.key"]) for run in runs}
        return sorted(pair for pair in pairs if stage in (None, pair[0]))

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
        if self._is_silent or self._uri != f"sqlite:///{database_of(self._home)}":
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
        runs = self._source.search(f"{query} AND attributes.status = 'FINISHED'")
        return sorted(runs, key=lambda run: run.ended or 0.0, reverse=True)

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
        listed = self._source.files(match.run_id, stage)
        return {path.removeprefix(f"{stage}/"): size for path, size in listed.items()}

    def _download(self, run_id: str, path: str, to: Path) -> None:
        with tempfile.TemporaryDirectory(dir=to.parent) as folder:
            shutil.move(self._source.download(run_id, path, folder), to)


def _is_whole(manifest: Manifest, stage: str, key: str, sizes: Mapping[str, int]) -> bool:
    """Whether a foreign manifest has only relative paths, and all its public files are present.

    `sizes`: bytes of each file of the artifact.
    """
    names = Artifact(stage, key, Path(), manifest).files_of(())
    if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in names):
        return False
    return all(sizes.get(str(PurePosixPath(name))) == manifest["files"][name]["bytes"] for name in names)
