"""Stage `pretrain`: a new model, or one that exists, learns documents."""

from __future__ import annotations

from ttrain.config import PretrainConfig, flatten
from ttrain.data.encoder import Encoder
from ttrain.model import multi_token
from ttrain.tasks import new_model
from ttrain.tasks.common import training
from ttrain.tasks.common.job import Figures, Inputs, StageContext


def run(config: PretrainConfig, job: StageContext) -> Figures:
    """Train a new model, or the base where there is one; leaves `model/` (Hugging Face), `checkpoints/` and the curves."""
    return training.run(config, config.pretrain, job, prepare)


def prepare(config: PretrainConfig, inputs: Inputs, encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    base = inputs.get("base")
    model = (
        new_model.load(base / new_model.DIRECTORY) if base else new_model.new(config.model, encoder, config.pretrain.seed)
    )
    if base and config.model.multi_token is not None:
        multi_token.attach(model, config.model.multi_token, config.pretrain.seed)
    identity = {} if base else dict(flatten(config.model.model_dump(mode="json"), "model."))
    return training.whole_model(model, inputs["tokenizer"], identity)
