"""Models to evaluate, made of the tiny models that tests have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ttrain.data.encoder import Encoder
from ttrain.inference.generate import Completion
from ttrain.inference.loading import LoadedModel

Said = list[tuple[list[int], bool]]


class Uniform(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, 1)
        self.shapes: list[tuple[int, int]] = []

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        self.shapes.append((input_ids.shape[0], input_ids.shape[1]))
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.embedding.num_embeddings))


@dataclass(frozen=True, eq=False)
class Subject(LoadedModel):
    """A model that says what `said` returns, which gets the longest prompt first."""

    said: Callable[[Sequence[Sequence[int]], int], Said] = lambda prompts, count: [
        ([], True) for _ in prompts
    ]

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *unused: Any
    ) -> list[Completion]:
        order = sorted(range(len(prompts)), key=lambda number: -len(prompts[number]))
        answers = self.said([prompts[number] for number in order], new_tokens)
        by_number = dict(zip(order, answers, strict=True))
        return [Completion(*by_number[number], 0.0) for number in range(len(prompts))]


def subject_of(model: Any, encoder: Encoder, **changes: Any) -> Subject:
    values: dict[str, Any] = {
        "name": "tiny",
        "model": model.eval(),
        "encoder": encoder,
        "begin_ids": (encoder.bos_id,),
        "stop_ids": (encoder.eos_id, encoder.end_id),
        "max_length": 128,
        "can_chat": True,
        "batch_tokens": 512,
    }
    return Subject(**{**values, **changes})


def quiet(done: int, total: int) -> None: ...
