"""Whether a training has the rows of at least one step: known once its shards exist, before anything trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ttrain.config import Training
from ttrain.core.files import read_json


def check(config: Training, shards: Path, tokenizer: Path) -> None:
    """Raise TooFewRows where the shards give fewer rows than one step takes, as the stage itself would, minutes later.

    Rows are packed only where the index leaves it open: the shards of most trainings hold thousands of steps.
    """
    index = read_json(shards / "train" / "index.json")
    if isinstance(index, dict) and _has_a_step(index, config):
        return
    from ttrain.data.encoder import Encoder
    from ttrain.stages import rows

    rows.order_of(config, rows.open_rows(shards / "train", Encoder(tokenizer, fast=False), config))


def _has_a_step(index: dict[str, Any], config: Training) -> bool:
    """Whether the tokens to learn fill the rows of a step by their number alone, which is at most as many as rows hold."""
    if config.mask_intervals:
        return False
    learnable = index["live_tokens"] if index["kind"] == "chats" else index["tokens"] - index["rows"]
    return bool(learnable >= config.tokens_per_step)
