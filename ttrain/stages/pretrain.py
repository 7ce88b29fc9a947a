"""Stage `pretrain`: a new model learns documents."""

from __future__ import annotations

from typing import Any

from ttrain.config import PretrainConfig
from ttrain.data import chat
from ttrain.data.tokenizer import Encoder
from ttrain.job import Job
from ttrain.model import factory
from ttrain.stages import training


def run(config: PretrainConfig, job: Job) -> dict[str, Any]:
    """Train a freshly initialised model; leaves `model/` (Hugging Face), `checkpoints/` and the curves."""
    ranks = training.start(job.runtime)
    encoder = Encoder(job.inputs["tokenizer"])
    ids = {
        "bos_token_id": encoder.special(chat.BOS),
        "eos_token_id": encoder.special(chat.EOS),
        "pad_token_id": encoder.special(chat.PAD),
    }
    stops = [encoder.special(chat.EOS), encoder.special(chat.END)]
    model = factory.build(config.model, vocab_size=len(encoder), ids=ids, stop_ids=stops, seed=config.pretrain.seed)
    trained = training.Trained(
        model,
        state=lambda: factory.state(model),
        load=lambda weights: factory.load_state(model, weights),
        files={**factory.files(model), **training.tokenizer_files(job.inputs["tokenizer"])},
    )
    return training.fit(config.pretrain, trained, job, ranks, encoder)
