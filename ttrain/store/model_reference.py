"""A model that a name stands for: where its files lie, and what they are part of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ttrain.store import integrity
from ttrain.store.layout import MANIFEST, Artifact, read_manifest
from ttrain.store.weights import SECOND_HEAD, weights_digest

Run = Mapping[str, Any]  # a run's record


@dataclass(frozen=True)
class Reference:
    """A model that was found: `model` is its Hugging Face directory, or that of the base which `adapter` goes onto."""

    text: str  # as the user wrote it
    model: Path
    adapter: Path | None = None
    # What the adapter, or else the model, is part of; None for a directory from elsewhere
    artifact: Artifact | None = field(default=None, repr=False)
    run: Run | None = field(default=None, repr=False)  # the run that the name led to; None where it named none

    @property
    def directory(self) -> Path:
        """The files that make it what it is: the adapter's, where there is one, else the model's."""
        return self.adapter or self.model

    @property
    def tokenizer(self) -> Path:
        """The directory to take the tokenizer from: adapters of ours carry the one that they were trained with."""
        return self.directory if (self.directory / "tokenizer.json").is_file() else self.model

    @property
    def second_head(self) -> Path | None:
        """The head that predicts the token after the next, where the model's training kept it."""
        file = self.model / SECOND_HEAD
        return file if file.is_file() else None

    def verify(self) -> None:
        """Compare the files that lie in artifacts with their manifests, before the model is loaded. Raises DamagedFile.

        What belongs to no artifact was published by nobody, and is taken as it is.
        """
        for directory in dict.fromkeys((self.model, self.directory)):
            for root in directory.parents:
                if manifest := read_manifest(root / MANIFEST):
                    artifact = Artifact(manifest["stage"], manifest["key"], root, manifest)
                    integrity.verify_artifact(artifact, (directory.relative_to(root).as_posix(),))
                    break

    @property
    def base_digest(self) -> str:
        """Digest of the full model's weights, which an adapter is bound to. Reads the files unless a manifest knows it."""
        return weights_digest(self.model)
