"""Subjects of an evaluation, made of the tiny models that tests have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ttrain.data.encoder import Encoder
from ttrain.evaluate.evaluated_model import EvaluatedModel


def subject_of(model: nn.Module, encoder: Encoder, **changes: Any) -> EvaluatedModel:
    """The model as a subject; it generates by whole passes, without a cache."""
    values: dict[str, Any] = {
        "name": "tiny", "model": model.eval(), "encoder": encoder, "device": torch.device("cpu"),
        "begin_ids": (encoder.bos_id,), "stop_ids": (encoder.eos_id, encoder.end_id), "max_length": 128, "can_chat": True,
        "batch_tokens": 512, **changes,
    }  # fmt: skip
    values.setdefault("generate", lambda prompts, count: [_said(model, values, prompt, count) for prompt in prompts])
    return EvaluatedModel(**values)


def _said(model: nn.Module, values: dict[str, Any], prompt: Sequence[int], count: int) -> tuple[list[int], bool]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(min(count, values["max_length"] - len(prompt))):
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token in values["stop_ids"]:
                return ids[len(prompt) :], True
            ids.append(token)
    return ids[len(prompt) :], False
