"""Make small sets of shards, and read them back."""

import functools
import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.tiny_data import documents

from ttrain.config import Reading
from ttrain.core.hashing import sha256_file
from ttrain.data import blocks, sharding
from ttrain.data.blocks import BlockRecipe, DataFile
from ttrain.data.encoder import Encoder
from ttrain.data.pool import Processes
from ttrain.data.sharding import ShardSetResult, Work
from ttrain.data.shards import ShardSet

ALL = Reading(heldout_fraction=0.0)
BLOCK = 4096
opened = functools.cache(Encoder)


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write rows as JSON, and bytes as they are."""
    with path.open("wb") as file:
        for row in rows:
            is_raw = isinstance(row, bytes)
            file.write((row if is_raw else json.dumps(row, ensure_ascii=False).encode()) + b"\n")
    return path


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    return [{"text": f"{seed}.{n} {text}"} for n, text in enumerate(documents(count, seed))]


def make_or_die(*arguments: Any) -> tuple[int, Path, bool]:
    if multiprocessing.parent_process() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return blocks.make(*arguments)


def build(
    output: Path,
    files: Sequence[Path],
    recipe: BlockRecipe,
    reading: Reading = ALL,
    *,
    heldout: Sequence[Path] = (),
    block_bytes: int = BLOCK,
    pool: Any = None,
    **more: Any,
) -> ShardSetResult:
    recipe = replace(recipe, heldout_fraction=reading.heldout_fraction, seed=reading.seed)
    parts = {"train": files, **({"heldout": heldout} if heldout else {})}
    given = {name: [DataFile(str(path)) for path in paths] for name, paths in parts.items()}
    work = Work(output, given, recipe, reading, block_bytes, pool or Processes(1))
    return sharding.build(work, **more)


def digests(output: Path) -> dict[str, str]:
    paths = [path for part in ("train", "heldout") for path in sorted((output / part).iterdir())]
    return {f"{path.parent.name}/{path.name}": sha256_file(path) for path in paths}


def texts_in(output: Path, tokenizer: str | Path, part: str = "train") -> list[str]:
    encoder = opened(Path(tokenizer))
    shards = ShardSet(output / part)
    return [encoder.decode(shards.row(number)[0].tolist()) for number in range(len(shards))]
