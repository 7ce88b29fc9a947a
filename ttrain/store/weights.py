"""The weights in a Hugging Face directory, as files: which they are, and the digest that names them. Loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ttrain.core.files import parse_json
from ttrain.core.hashing import digest_of, sha256_file
from ttrain.errors import ArtifactError

MODEL = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
SECOND_HEAD = "multi_token.safetensors"  # beside the model, never in it
INDEX_SUFFIX = ".index.json"  # what tells in which shard each tensor lies


def weight_files(directory: Path, name: str = MODEL) -> list[Path]:
    """The one file `name`, or the shards that its index lists, in the order of their names.

    Raises ArtifactError where there is neither, where a shard is missing, or where the index is none.
    """
    single, index = directory / name, directory / (name + INDEX_SUFFIX)
    if single.is_file():
        return [single]
    try:
        names = sorted(set(parse_json(index.read_bytes())["weight_map"].values()))
    except FileNotFoundError:
        raise ArtifactError(f"{directory} holds neither {name} nor {index.name}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(f"{index} is no index of shards: {type(error).__name__}: {error}") from None
    files = [directory / shard for shard in names]
    for file in files:
        if file.parent != directory or not file.is_file():
            raise ArtifactError(f"{index} lists {file.name}, but {directory} holds no such file")
    return files


def weights_digest(directory: Path, *, name: str = MODEL, digest: Callable[[Path], str] = sha256_file) -> str:
    """What names these weights: the sha256 of the one file, or of the names and digests of all shards.

    `digest` gives a file's sha256, from a cache or a manifest where the bytes were read before.
    """
    files = weight_files(directory, name)
    if len(files) == 1 and files[0].name == name:
        return digest(files[0])
    return digest_of([[file.name, digest(file)] for file in files])
