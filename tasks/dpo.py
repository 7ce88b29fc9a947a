"""Stage `dpo`: the fine-tuned model learns which of two answers is preferred."""

from dataclasses import replace
from functools import partial
from pathlib import Path

from ttrain.config import Settings
from ttrain.config.training import adapter_of
from ttrain.data.encoder import Encoder
from ttrain.data.loader import BatchSource
from ttrain.data.packing import Rows
from ttrain.model import adapters
from ttrain.store.model_files import weights_digest
from ttrain.tasks import lora, new_model
from ttrain.tasks.common import training
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.common.whole_model import whole_model
from ttrain.tasks.reference import ReferencedRows
from ttrain.train.preference_tuning import PreferenceTuning

task_of = PreferenceTuning.of

# directory beside `model/` where dpo.adapter is set; `adapter/` would mean that there is no whole
# model
ADAPTER = "lora"


def run(settings: Settings, job: StageContext) -> Figures:
    """Tune the model; leaves `model/`, with dpo.adapter also `lora/`, checkpoints and curves."""
    config = settings.dpo

    def batches(part: str, rows: Rows) -> BatchSource:
        return ReferencedRows(rows, job.inputs["reference"], part) if config.has_reference else rows

    figures = training.run(settings, config, job, prepare, task_of, batches)
    return {**figures, "answers" if config.loss == "kto" else "pairs": figures.pop("target_tokens")}


def prepare(settings: Settings, inputs: Inputs, encoder: Encoder) -> training.TrainableModel:
    """The model before its first step."""
    base = inputs["base"] / new_model.DIRECTORY
    adapter = adapter_of("dpo", settings)
    if adapter is None:
        return whole_model(new_model.load(base), base)
    return replace(lora.with_adapter(base, adapter), directory=ADAPTER, finish=partial(merge, base))


def merge(base: Path, output: Path) -> None:
    """Write `model/`: the base merged with the adapter of `lora/`."""
    adapted = adapters.load(new_model.load(base), output / ADAPTER, weights_digest(base))
    new_model.write(adapters.merge(adapted), base, output / new_model.DIRECTORY)
