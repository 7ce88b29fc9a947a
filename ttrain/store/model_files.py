"""The weight files in a Hugging Face directory, and the digest that identifies them. No torch."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ttrain.core.hashing import digest_of, sha256_file
from ttrain.errors import ArtifactError, DamagedFile
from ttrain.store import integrity
from ttrain.store.layout import MANIFEST, AlteredManifest, Artifact, need_manifest
from ttrain.store.runs import RecordedRun

SUFFIX = ".safetensors"
MODEL = f"model{SUFFIX}"

ADAPTER = "adapter_model.safetensors"

ADAPTER_CONFIG = "adapter_config.json"  # of an adapter
BASE = "base.json"  # which base an adapter was trained on

# Directory of an artifact: weights and optimizer state before the decay of an infinite schedule
PLATEAU = "plateau"

SECOND_HEAD = "multi_token.safetensors"  # beside the model, never in it

INDEX_SUFFIX = ".index.json"  # what tells in which shard each tensor lies


def weight_files(directory: Path, name: str = MODEL) -> list[Path]:
    """The one file `name`, or the shards that its index lists, sorted. Raises ArtifactError."""
    single = directory / name
    index = directory / (name + INDEX_SUFFIX)
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ArtifactError(f"{directory} holds neither {name} nor {index.name}")
    return [directory / shard for shard in shard_names(index)]


def shard_names(index: Path) -> list[str]:
    """The sorted file names in an index, which must be existing files next to it.

    Raises ArtifactError: a name such as /dev/zero or ../other.bin would be opened by whoever trusts
    the index.
    """
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{index} is not an index of shards: {type(error).__name__}: {error}"
        ) from None
    for name in names:
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(SUFFIX):
            raise ArtifactError(
                f"{index} lists {name!r}, but must list names of {SUFFIX} files beside it; "
                "save the model again"
            )
        if not (index.parent / name).is_file():  # a pipe, too, would be waited for
            raise ArtifactError(f"{index} lists {name}, but {index.parent} holds no such file")
    return names


def weights_digest(
    directory: Path, *, name: str = MODEL, digest: Callable[[Path], str] = sha256_file
) -> str:
    """The sha256 of the one weights file, or of the names and digests of all shards.

    `digest` gives a file's sha256, such as from a cache or a manifest.
    """
    files = weight_files(directory, name)
    if len(files) == 1 and files[0].name == name:
        return digest(files[0])
    return digest_of([[file.name, digest(file)] for file in files])


@dataclass(frozen=True)
class Reference:
    """A model that a name led to: its directory, or its base's and that of the `adapter`."""

    text: str  # as the user wrote it
    model: Path
    adapter: Path | None = None
    # What the adapter, or else the model, is part of; None for a directory from elsewhere
    artifact: Artifact | None = field(default=None, repr=False)
    run: RecordedRun | None = field(
        default=None, repr=False
    )  # the run that the name led to; None where it named none

    @property
    def directory(self) -> Path:
        return self.adapter or self.model

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer: an adapter's own, if it has one."""
        return self.directory if (self.directory / "tokenizer.json").is_file() else self.model

    @property
    def second_head(self) -> Path | None:
        """The file of the head that predicts the token after the next, if there is one."""
        file = self.model / SECOND_HEAD
        return file if file.is_file() else None

    def verify(self) -> None:
        """Compare the files in artifacts with their manifests. Raises DamagedFile.

        Files outside of artifacts were never published and are not compared.
        """
        for directory in dict.fromkeys((self.model, self.directory)):
            for root in directory.parents:
                try:
                    manifest = need_manifest(root / MANIFEST)
                except AlteredManifest as error:
                    raise DamagedFile(f"{root / MANIFEST} {error}", root / MANIFEST) from None
                except (OSError, ValueError):
                    continue  # no artifact
                artifact = Artifact(manifest["stage"], manifest["key"], root, manifest)
                integrity.verify_artifact(artifact, (directory.relative_to(root).as_posix(),))
                break

    @property
    def base_digest(self) -> str:
        """Digest of the full model's weights, which an adapter is bound to."""
        return weights_digest(self.model)


def base_digest_of(adapter: Path) -> str | None:
    """Recorded digest of an adapter's base weights; None if PEFT alone made the adapter.

    Raises ArtifactError if the record is damaged.
    """
    path = adapter / BASE
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_bytes())["base_weights_sha256"])
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{path}, which names the adapter's base, is damaged: {error!r}"
        ) from None
