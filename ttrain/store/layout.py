"""The home directory, its artifacts and their manifests."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ttrain.core.files import JsonDict, JsonObject, need_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.errors import TTrainError, UsageError, is_disk_full

FORMAT = 1

Manifest = JsonObject


MANIFEST = "manifest.json"


OWN_DIGEST = "manifest_sha256"  # in a manifest: of all else in it


PRIVATE = ("run", "checkpoints")

JOB = "job.json"  # in a work directory: what the process of the stage is to do
TRACKED = "tracking.json"  # there: the tracked run and ttrain's run that work there


@dataclass(frozen=True)
class Artifact:
    """The published output of a stage."""

    stage: str
    key: str
    path: Path
    manifest: Manifest

    @property
    def content(self) -> str:
        """Digest of the files that other stages read."""
        return self.part(())

    @property
    def result(self) -> JsonObject:
        result: JsonObject = self.manifest["result"]
        return result

    @property
    def provenance(self) -> JsonObject:
        """What is recorded of its making and is in no key: run, settings, versions, machine."""
        provenance: JsonObject = self.manifest.get("provenance", {})
        return provenance

    def part(self, names: tuple[str, ...]) -> str:
        """Digest of the named files and directories (default: all that are not private)."""
        files = self.manifest["files"]
        return digest_of([[name, files[name]["sha256"]] for name in self.files_of(names)])

    def files_of(self, names: tuple[str, ...]) -> list[str]:
        """The files with these names or in these directories (default: all not private)."""
        files = sorted(self.manifest["files"])
        if not names:
            return [file for file in files if file.split("/")[0] not in PRIVATE]
        directories = tuple(f"{name}/" for name in names)
        return [file for file in files if file in names or file.startswith(directories)]

    @property
    def absent(self) -> frozenset[str]:
        """Files that were published but not fetched (`ArtifactStore.complete`)."""
        return frozenset(self.manifest.get("absent", ()))

    def lacking(self, names: tuple[str, ...]) -> list[str]:
        """The absent files among those of these names."""
        absent = self.absent
        return [name for name in self.files_of(names) if name in absent]


Artifacts = Mapping[str, Artifact]  # by stage, by the name of an input, or by key


def home() -> Path:
    """The home directory: TTRAIN_HOME, else `artifacts` in the working directory."""
    return Path(os.environ.get("TTRAIN_HOME") or "artifacts").absolute()


def usable_home(root: Path | None = None) -> Path:
    """The home, created if needed. Raises UsageError if it cannot be written.

    A full disk raises TTrainError.
    """
    root = home() if root is None else root
    try:
        root.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=root).close()
    except OSError as error:
        kind = TTrainError if is_disk_full(error) else UsageError
        raise kind(
            f"TTRAIN_HOME is {root} but cannot be written: {error.strerror}; free some space, or "
            f"set TTRAIN_HOME to a directory of yours"
        ) from None
    return root


class Elsewhere(Protocol):
    """Another place that has artifacts by the same keys, such as a shared MLflow."""

    def manifest(self, stage: str, key: str) -> JsonObject | None:
        """The manifest of a complete artifact; None if there is none, or no answer."""

    def fetch(self, stage: str, key: str, name: str, to: Path) -> None:
        """Write one file of an artifact that `manifest` found. Raises ArtifactError."""


class AlteredManifest(ValueError):
    """A manifest that is not what was written."""


def read_manifest(path: Path) -> JsonDict | None:
    """The manifest; None if it is missing, unreadable, altered or of another version."""
    try:
        return need_manifest(path)
    except (OSError, ValueError):
        return None


def need_manifest(path: Path) -> JsonDict:
    """The manifest, exactly as written. Raises OSError if it is unreadable, else ValueError."""
    try:
        manifest = need_object(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"cannot be read: {error}") from None
    if manifest.get("format") != FORMAT or OWN_DIGEST not in manifest:
        raise ValueError("is not one that this version of ttrain writes")
    if manifest[OWN_DIGEST] != _manifest_digest(manifest):
        raise AlteredManifest("was altered after it was written")
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> JsonDict:
    """Write an artifact's manifest with its own digest in it, and return it."""
    plain = json.loads(json.dumps(manifest))  # as a reader gets it: keys are strings
    sealed = {**plain, OWN_DIGEST: _manifest_digest(plain)}
    write_json(directory / MANIFEST, sealed)
    return sealed


def _manifest_digest(manifest: Manifest) -> str:
    # Which files were fetched since ("absent") is not part of what was published
    published = {
        name: value for name, value in manifest.items() if name not in (OWN_DIGEST, "absent")
    }
    text = json.dumps(published, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
