"""A small chat model."""

from typing import Any

from ttrain.inference import gate_router
from ttrain.inference.chat import Chat
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling

SHORT = Sampling(max_tokens=6)


def chat_with(one: LoadedModel, **options: Any) -> Chat:
    return Chat(gate_router.single_model(one), options.pop("sampling", SHORT), **options)
