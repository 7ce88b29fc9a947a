"""Stage `lora`: train an adapter on a frozen model for a domain."""

from pathlib import Path

from ttrain.config import Lora, Settings
from ttrain.config.training import NONE, TRAININGS
from ttrain.data.encoder import Encoder
from ttrain.model import adapters
from ttrain.store.model_files import ADAPTER, weights_digest
from ttrain.tasks import new_model
from ttrain.tasks.common import training
from ttrain.tasks.common.job import Figures, Inputs, StageContext


def run(settings: Settings, job: StageContext) -> Figures:
    """Train an adapter; leaves `adapter/` (PEFT), `checkpoints/` and the curves."""
    return training.run(settings, settings.lora, job, prepare)


def prepare(settings: Settings, inputs: Inputs, encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    return with_adapter(inputs["base"] / "model", settings.lora)


def with_adapter(base: Path, config: Lora) -> training.TrainableModel:
    """A new adapter on the frozen model in the directory `base`."""
    model = adapters.attach(adapters.load_quantized(base, config), config)
    held_in = None if config.quantize == "none" else config.quantize
    # the name for people, which reveals no path; what binds the adapter to its base is the digest
    start = config.start_from
    made_by = "new-model" if start == NONE else "base-model"
    name = f"ttrain-{start if start in TRAININGS else made_by}"
    own_files = adapters.files(model, base=name, base_digest=weights_digest(base), held_in=held_in)
    return training.TrainableModel(
        model,
        state=lambda: adapters.state(model),
        files={**own_files, **new_model.tokenizer_files(base)},
        directory="adapter",
        weights_file=ADAPTER,
    )
