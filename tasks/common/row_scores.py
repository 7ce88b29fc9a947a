"""Scores of rows by a model, in files of so many rows: a killed pass keeps its finished files."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from ttrain.core.files import write_bytes
from ttrain.tasks.common.job import StageContext
from ttrain.train.distributed import Ranks

Scores = Mapping[str, npt.NDArray[Any]]


def write_scores(
    directory: Path,
    rows: range,
    block_rows: int,
    score: Callable[[range], Scores],
    job: StageContext,
    ranks: Ranks,
) -> None:
    """Write the scores of each block of rows as a file; blocks are dealt to the ranks in turn.

    `score` gets at most `runtime.rows_per_device` rows.
    """
    directory.mkdir(parents=True, exist_ok=True)
    size = job.runtime.rows_per_device
    for number, first in enumerate(range(0, len(rows), block_rows)):
        job.progress.update(first, len(rows), "rows")
        path = directory / f"{number:06}.safetensors"
        if number % ranks.world != ranks.rank or path.exists():
            continue
        block = rows[first : first + block_rows]
        parts = [score(block[at : at + size]) for at in range(0, len(block), size)]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        write_bytes(path, save(joined))
    job.progress.update(len(rows), len(rows), "rows")
