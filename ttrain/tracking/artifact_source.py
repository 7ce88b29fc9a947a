"""Artifacts by stage and key from a shared MLflow: the files of finished runs.

The home's own MLflow is not queried, since it is a view of the home. A server that does not answer
is queried once and then no more: the pipeline builds what it cannot fetch.
"""

import logging
import shutil
import tempfile
from pathlib import Path

from ttrain.config import Settings
from ttrain.core.files import JsonObject, temporary_directory
from ttrain.core.redact import without_user
from ttrain.errors import ArtifactError
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import MANIFEST, Artifact, Manifest, need_manifest
from ttrain.tracking.client import first_line, own_uri
from ttrain.tracking.mlflow_mirror import Mirror

log = logging.getLogger("ttrain")

CANDIDATES = 5  # runs that may hold a key: more than one where it was built on two machines


class MlflowArtifacts:
    """Artifacts of one MLflow experiment, or of all; a `ttrain.store.layout.Elsewhere`.

    Each key is looked up once; MLflow is loaded at the first one that the store lacks.
    """

    def __init__(self, home: Path, experiment: str | None = None) -> None:
        self._mirror = Mirror(home)
        self._experiment = experiment
        self._server = without_user(self._mirror.uri)
        self._is_silent = self._mirror.uri == own_uri(home)
        self._found: dict[tuple[str, str], tuple[str, Manifest] | None] = {}

    def manifest(self, stage: str, key: str) -> JsonObject | None:
        """The manifest of a complete artifact in MLflow; None if there is none, or no answer."""
        found = self._find(stage, key)
        return found[1] if found else None

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        """Write one file of the artifact to `to`. Raises ArtifactError."""
        found = self._find(stage, key)
        if found is None:
            raise ArtifactError(
                f"MLflow at {self._server} does not hold {stage} {key[:12]}; run its pipeline again"
            )
        try:
            with tempfile.TemporaryDirectory(dir=to.parent) as folder:
                shutil.move(
                    self._mirror.client.download_artifacts(found[0], f"{stage}/{name}", folder), to
                )
        except Exception as error:
            raise ArtifactError(
                f"{name} of {stage} {key[:12]} cannot be fetched from MLflow at {self._server}: "
                f"{first_line(error)}"
            ) from None

    def _find(self, stage: str, key: str) -> tuple[str, Manifest] | None:
        if (stage, key) not in self._found:
            manifests = (
                (run_id, self._whole(run_id, stage)) for run_id in self._finished(stage, key)
            )
            self._found[stage, key] = next(
                ((run_id, whole) for run_id, whole in manifests if whole), None
            )
        return self._found[stage, key]

    def _whole(self, run_id: str, stage: str) -> Manifest | None:
        try:
            with temporary_directory("tracking") as folder:
                path = self._mirror.client.download_artifacts(
                    run_id, f"{stage}/{MANIFEST}", str(folder)
                )
                manifest = need_manifest(Path(path))
            sizes = dict(self._mirror.sizes(run_id, stage))
        except Exception as error:  # MLflow may raise anything
            log.debug("%s of run %s: %s", MANIFEST, run_id, error)
            return None
        is_whole = all(
            sizes.get(f"{stage}/{name}") == manifest["files"][name]["bytes"]
            for name in Artifact(stage, "", Path(), manifest).files_of(())
        )
        return manifest if is_whole else None

    def _finished(self, stage: str, key: str) -> list[str]:
        if self._is_silent:
            return []
        query = (
            f"tags.`ttrain.key` = '{key}' AND tags.`ttrain.stage` = '{stage}' "
            "AND attributes.status = 'FINISHED'"
        )
        try:
            client = self._mirror.client
            name = self._experiment
            known = [client.get_experiment_by_name(name)] if name else client.search_experiments()
            found = client.search_runs(
                [one.experiment_id for one in known if one],
                query,
                order_by=["attributes.end_time DESC"],  # the newest first
                max_results=CANDIDATES,
            )
            return [run.info.run_id for run in found]
        except Exception as error:  # the only cost is to build again
            self._is_silent = True
            log.warning(
                "MLflow at %s cannot be queried for artifacts: %s", self._server, first_line(error)
            )
            return []


def store_of(home: Path, settings: Settings) -> ArtifactStore:
    """The store of a home, with missing artifacts from MLflow if tracking is enabled."""
    tracking = settings.tracking
    return ArtifactStore(
        home, MlflowArtifacts(home, tracking.experiment) if tracking.enabled else None
    )
