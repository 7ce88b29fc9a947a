"""The plateau of `schedule.kind=infinite`: what another training continues, before the decay that ends in the model.

An artifact holds it as `plateau/`: weights and optimizer state, in the files of a checkpoint. The model beside it has been
annealed; a rate as high as the peak would raise its loss on what it has learnt (arXiv:2308.04014).
"""

from __future__ import annotations

import logging
from pathlib import Path

from ttrain.core.files import link_or_copy, remove_tree
from ttrain.store.model_files import PLATEAU
from ttrain.train.checkpoint import Snapshot
from ttrain.train.checkpoint_format import SAFETENSORS, list_checkpoints, read_tensors, step_of

log = logging.getLogger("ttrain")


def write(output: Path, step: int) -> bool:
    """Link the checkpoint of this step as `plateau/` of the output; False, with a warning, if there is none."""
    remove_tree(output / PLATEAU)
    source = next((path for path in list_checkpoints(output / "checkpoints") if step_of(path) == step), None)
    if source is None:
        log.warning("there is no checkpoint of step %d, the end of the plateau; a night will warm this model up again", step)
        return False
    (output / PLATEAU).mkdir()
    for path in source.glob(f"*{SAFETENSORS}"):
        link_or_copy(path, output / PLATEAU / path.name)
    return True


def read(directory: Path, weights_file: str) -> Snapshot:
    """Read the plateau of an artifact, as a snapshot at step 0. Raises ArtifactError that names the damaged file."""
    path = directory / PLATEAU
    return Snapshot(0, *read_tensors(path, [file.name for file in sorted(path.iterdir())], weights_file), {})
