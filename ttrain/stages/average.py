"""Stage `average`: the weights of a night averaged with the champion's.

A training that goes on from a model stays in one basin of the loss with it, so that the weights between the two are a model
as well; they keep more of what the champion knew (arXiv:2203.05482, 2109.01903).
"""

from __future__ import annotations

import shutil

import torch
from torch import Tensor

from ttrain.config import AverageConfig
from ttrain.errors import ArtifactError
from ttrain.stages.job import Figures, StageContext
from ttrain.stages.new_model import DIRECTORY
from ttrain.train.checkpoint_format import SAFETENSORS, load_tensors, write_weights


def run(config: AverageConfig, job: StageContext) -> Figures:
    """Write `model/`: of each tensor this share of the champion's and the rest of the night's; returns the counts.

    A tensor that the champion does not have, as a new second head, and numbers that are no weights stay the night's.
    """
    share = config.nightly.average
    assert share is not None, "the recipe has this stage where there is a share"
    night, champion, output = (path / DIRECTORY for path in (job.inputs["night"], job.inputs["champion"], job.output))
    output.mkdir(parents=True, exist_ok=True)
    averaged = unchanged = 0
    for file in sorted(path for path in night.iterdir() if path.is_file()):
        if file.suffix != SAFETENSORS:
            shutil.copyfile(file, output / file.name)
            continue
        tensors = load_tensors(file)
        champion_tensors = load_tensors(champion / file.name) if (champion / file.name).exists() else {}
        mixed = {name: average(tensor, champion_tensors.get(name), share, name) for name, tensor in tensors.items()}
        kept = sum(mixed[name] is tensor for name, tensor in tensors.items())
        averaged, unchanged = averaged + len(tensors) - kept, unchanged + kept
        write_weights(output / file.name, mixed)
    return {"share": share, "averaged_tensors": averaged, "kept_tensors": unchanged}


def average(tensor: Tensor, champion: Tensor | None, share: float, name: str = "") -> Tensor:
    """This share of the second tensor and the rest of the first, computed in fp32; the first itself where there is no second
    or it holds no weights. Raises ArtifactError for another shape."""
    if champion is None or not tensor.is_floating_point():
        return tensor
    if tensor.shape != champion.shape:
        raise ArtifactError(
            f"nightly.average cannot average {name}: it is {list(tensor.shape)} in the night's model and "
            f"{list(champion.shape)} in the champion's; set nightly.average= (empty) for this night"
        )
    return torch.lerp(tensor.float(), champion.float(), share).to(tensor.dtype)
