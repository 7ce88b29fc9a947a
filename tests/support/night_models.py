"""Models and evaluations of a night, as its stages find them."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from ttrain.core.files import write_json
from ttrain.evaluate.task_result import LN2, ScoreTable

COUNT = 40  # held-out documents of each night


def write_model(directory: Path, **tensors: Tensor) -> Path:
    """A model whose config names its directory."""
    (directory / "model").mkdir(parents=True)
    save_file(tensors, directory / "model" / "model.safetensors")
    (directory / "model" / "config.json").write_text(json.dumps({"name": directory.name}))
    return directory


def write_evaluation(directory: Path, **bits: float) -> Path:
    """An evaluation of a base model with these bits a byte on the held-out documents of each night."""
    table, texts = ScoreTable(), [f"{night} {number}" for night in bits for number in range(COUNT)]
    table.part("documents", texts, [100] * len(texts))
    nats = [(100 * cost * LN2, 10) for cost in bits.values() for _ in range(COUNT)]
    directory.mkdir(parents=True)
    value = table.figure("bits_per_byte", "documents", "base", nats, per="bytes", factor=1 / LN2)
    table.write(directory)
    others = {"chat_loss_sft": 1.5} if directory.name == "of-champion" else {}  # of a whole set; candidates are base models
    write_json(directory / "evaluation.json", {"metrics": {"bits_per_byte": value, **others}})
    return directory
