"""Artifacts by stage and key from a shared MLflow: the files of finished runs, whose tags name both.

The home's own MLflow is not asked, since it is a view of the home. A server that does not answer
is queried once and then no more: the pipeline builds what it cannot fetch.
"""

import logging
import shutil
import tempfile
from functools import cached_property
from pathlib import Path

from ttrain.config import Settings
from ttrain.core.files import JsonObject, temporary_directory
from ttrain.core.redact import without_user
from ttrain.errors import ArtifactError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Artifact, Manifest, need_manifest
from ttrain.tracking.client import first_line, own_uri, tracking_uri
from ttrain.tracking.mlflow_mirror import Mirror

log = logging.getLogger("ttrain")

CANDIDATES = 5  # runs that may hold a key: more than one where it was built on two machines


class MlflowArtifacts:
    """Artifacts of one MLflow experiment, or of all; a `ttrain.store.layout.Elsewhere`.

    Each key is looked up once; MLflow is loaded at the first one that the store lacks.
    """

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._home, self._experiment = home.resolve(), experiment
        self._server = without_user(tracking_uri(self._home))
        self._is_silent = tracking_uri(self._home) == own_uri(self._home)
        self._found: dict[tuple[str, str], tuple[str, Manifest] | None] = {}

    def manifest(self, stage: str, key: str) -> JsonObject | None:
        """The manifest of a whole artifact in MLflow; None if it has none, or does not answer."""
        found = self._find(stage, key)
        return found[1] if found else None

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        """Write one file of the artifact to `to`. Raises ArtifactError."""
        found = self._find(stage, key)
        if found is None:
            raise ArtifactError(f"MLflow at {self._server} does not hold {stage} {key[:12]}; run its pipeline again")
        try:
            self._download(found[0], f"{stage}/{name}", to)
        except Exception as error:
            raise ArtifactError(
                f"{name} of {stage} {key[:12]} cannot be fetched from MLflow at {self._server}: {first_line(error)}"
            ) from None

    def _find(self, stage: str, key: str) -> tuple[str, Manifest] | None:
        """(run in MLflow, manifest) of the newest whole artifact of that key."""
        if (stage, key) not in self._found:
            finished = self._finished(f"tags.`ttrain.key` = '{key}' AND tags.`ttrain.stage` = '{stage}'")
            manifests = ((run_id, self._whole(run_id, stage)) for run_id in finished)
            self._found[stage, key] = next(((run_id, whole) for run_id, whole in manifests if whole), None)
        return self._found[stage, key]

    def _whole(self, run_id: str, stage: str) -> Manifest | None:
        """The manifest of a run's artifact, if MLflow has all its public files."""
        try:
            with temporary_directory("tracking") as folder:
                self._download(run_id, f"{stage}/{MANIFEST}", folder / MANIFEST)
                manifest = need_manifest(folder / MANIFEST)
            sizes = dict(self._mirror.sizes(run_id, stage))
        except Exception as error:  # MLflow may raise anything
            log.debug("%s of run %s: %s", MANIFEST, run_id, error)
            return None
        names = Artifact(stage, "", Path(), manifest).files_of(())
        is_whole = all(sizes.get(f"{stage}/{name}") == manifest["files"][name]["bytes"] for name in names)
        return manifest if is_whole else None

    def _finished(self, query: str) -> list[str]:
        """The finished runs that match a query in MLflow's language, newest first; none if it is silent."""
        if self._is_silent:
            return []
        try:
            client, name = self._mirror.client, self._experiment
            known = [client.get_experiment_by_name(name)] if name else client.search_experiments()
            experiments = [one.experiment_id for one in known if one]
            query, newest = f"{query} AND attributes.status = 'FINISHED'", ["attributes.end_time DESC"]
            found = client.search_runs(experiments, query, order_by=newest, max_results=CANDIDATES)
            return [run.info.run_id for run in found]
        except Exception as error:  # the only cost is to build again
            self._is_silent = True
            log.warning("MLflow at %s cannot be queried for artifacts: %s", self._server, first_line(error))
            return []

    @cached_property
    def _mirror(self) -> Mirror:
        return Mirror(self._home)

    def _download(self, run_id: str, path: str, to: Path) -> None:
        with tempfile.TemporaryDirectory(dir=to.parent) as folder:
            shutil.move(self._mirror.client.download_artifacts(run_id, path, folder), to)


def store_of(home: Path, settings: Settings) -> ArtifactStore:
    """The store of a home; if tracking is enabled, missing artifacts are looked up in MLflow."""
    tracking = settings.tracking
    return ArtifactStore(home, MlflowArtifacts(home, tracking.experiment) if tracking.enabled else None)
