"""Stage `pretrain`: train a new or an existing model on documents.

A night's also reads `replay` and the champion's `plateau`.
"""

from ttrain.config import Settings, flatten
from ttrain.data.encoder import Encoder
from ttrain.data.loader import BatchSource
from ttrain.data.packing import Rows
from ttrain.model import multi_token
from ttrain.tasks import new_model
from ttrain.tasks.common import training
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.common.whole_model import whole_model
from ttrain.train.teacher import TaughtRows


def run(settings: Settings, job: StageContext) -> Figures:
    """Train a new model, or the base if there is one; leaves `model/` and `checkpoints/`."""
    config = settings.pretrain

    def batches(part: str, rows: Rows) -> BatchSource:
        teacher = job.inputs.get("teacher") if part == "train" else None
        return TaughtRows(rows, teacher, config.teacher_weight) if teacher else rows

    return training.run(settings, config, job, prepare, batches=batches)


def prepare(settings: Settings, inputs: Inputs, encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    base = inputs.get("base")
    seed = settings.pretrain.seed
    if base is None:
        identity = dict(flatten(settings.model.model_dump(mode="json"), "model."))
        model = new_model.new(settings.model, encoder, seed)
        return whole_model(model, inputs["tokenizer"], identity)
    model = new_model.load(base / new_model.DIRECTORY)
    if settings.model.multi_token is not None:
        multi_token.attach(model, settings.model.multi_token, seed)
    return whole_model(model, inputs["tokenizer"])
