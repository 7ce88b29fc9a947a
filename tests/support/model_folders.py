"""Folders that look like a model's."""

from __future__ import annotations

import json
from pathlib import Path

from support.planned_homes import House

# --- which stages run, and their keys


def folder(house: House, name: str = "mine", positions: int = 1024) -> Path:
    """A folder like a model's, to those who only look at its files."""
    house.write(f"{name}/config.json", json.dumps({"max_position_embeddings": positions}))
    house.write(f"{name}/model.safetensors", "weights")
    return house.write(f"{name}/tokenizer.json", "{}").parent
