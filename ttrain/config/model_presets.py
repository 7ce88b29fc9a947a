"""Sizes of models by name. They are settings like any other: `model.preset` fills them in, and only they enter a key."""

from __future__ import annotations

from typing import Any

from ttrain.config.yaml_text import shown
from ttrain.errors import UsageError

# The name is the number of parameters of a llama with tied embeddings and this vocabulary (GPT-2's from 124m on, whose
# shapes 124m and 350m are). From 500m on a key is shared by several heads, which costs little and makes the cache smaller.
_COLUMNS = ("hidden_size", "layers", "heads", "kv_heads", "max_length")
_TABLE: dict[str, tuple[int, tuple[int, int, int, int | None, int]]] = {
    "1m": (2_048, (128, 4, 2, None, 1024)),
    "5m": (4_096, (256, 5, 4, None, 1024)),
    "10m": (8_192, (320, 6, 5, None, 1024)),
    "25m": (8_192, (448, 9, 7, None, 2048)),
    "50m": (16_384, (512, 13, 8, None, 2048)),
    "124m": (50_257, (768, 12, 12, None, 2048)),
    "350m": (50_257, (1024, 24, 16, None, 2048)),
    "500m": (50_257, (1280, 25, 20, 5, 4096)),
    "1b": (50_257, (2048, 20, 16, 4, 4096)),
}


def names() -> list[str]:
    """Presets, the smallest first."""
    return list(_TABLE)


def vocab_size_of(name: object) -> int:
    """The vocabulary that the preset's name was counted with. Raises UsageError for a name that does not exist."""
    return _found(name)[0]


def sizes_of(name: object) -> dict[str, Any]:
    """Settings of `model` that a preset stands for, without `model.`. Raises UsageError for a name that does not exist.

    The widths that follow from others are set back to empty, so that a weaker layer's do not stay beside the new sizes.
    """
    return {**dict(zip(_COLUMNS, _found(name)[1], strict=True)), "intermediate_size": None}


def _found(name: object) -> tuple[int, tuple[int, int, int, int | None, int]]:
    if not isinstance(name, str) or name.lower() not in _TABLE:
        raise UsageError(f"model.preset is {shown(name)} but must be one of: {', '.join(_TABLE)}")
    return _TABLE[name.lower()]
