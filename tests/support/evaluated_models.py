"""Subjects of an evaluation, made of the tiny models that tests have."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ttrain.data.encoder import Encoder
from ttrain.evaluate.evaluated_model import EvaluatedModel


class Uniform(nn.Module):
    """Finds every one of `vocab` tokens equally likely; notes the shapes that it is given."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding, self.shapes = nn.Embedding(vocab, 1), list[tuple[int, int]]()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.embedding.num_embeddings))


def subject_of(model: nn.Module, encoder: Encoder, **changes: Any) -> EvaluatedModel:
    values: dict[str, Any] = {
        "name": "tiny", "model": model.eval(), "encoder": encoder, "device": torch.device("cpu"),
        "begin_ids": (encoder.bos_id,), "max_length": 128, "can_chat": True,
        "batch_tokens": 512, **changes,
    }  # fmt: skip
    values.setdefault("generate", lambda prompts, count: [_said(model, values, prompt, count) for prompt in prompts])
    return EvaluatedModel(**values)


def _said(model: nn.Module, values: dict[str, Any], prompt: Sequence[int], count: int) -> tuple[list[int], bool]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(min(count, values["max_length"] - len(prompt))):
            token = int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax())
            if token in (values["encoder"].eos_id, values["encoder"].end_id):
                return ids[len(prompt) :], True
            ids.append(token)
    return ids[len(prompt) :], False
