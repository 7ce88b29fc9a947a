"""Stage `sft`: train the base model on chats; only the assistant's tokens count."""

from ttrain.config import Settings
from ttrain.data.encoder import Encoder
from ttrain.tasks import new_model
from ttrain.tasks.common import training
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.common.whole_model import whole_model


def run(settings: Settings, job: StageContext) -> Figures:
    """Train all weights on chats; leaves `model/` (Hugging Face), `checkpoints/` and the curves."""
    return training.run(settings, settings.sft, job, prepare)


def prepare(settings: Settings, inputs: Inputs, encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    base = inputs["base"] / new_model.DIRECTORY
    return whole_model(new_model.load(base), base)
