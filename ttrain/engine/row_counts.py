"""The number of rows in the shards of a training: enough for a step, and for rules of `auto`."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ttrain.config import Settings, Training, rules
from ttrain.core.files import read_object
from ttrain.engine.graph import Planned
from ttrain.store.results import TrainingResult
from ttrain.tasks import SHARDS, TOKENIZER

MANY_ROWS = 1 << 40  # of which `auto` makes what it makes of all sets that are large enough


def check(config: Training, shards: Path, tokenizer: Path) -> None:
    """Raise TooFewRows if the shards have fewer rows than a step, before the stage starts.

    Rows are packed only if the index leaves it open.
    """
    index = read_object(shards / "train" / "index.json")
    if index and not config.mask_intervals:
        # each row holds up to `row_length` tokens
        trained = (
            index["live_tokens"]
            if index["kind"] != "documents"
            else index["tokens"] - index["rows"]
        )
        least = trained // config.row_length
        usual = config.resolved(MANY_ROWS)
        if least >= usual.rows_per_step and (
            not config.automatic or config.resolved(least) == usual
        ):
            return
    from ttrain.tasks.common import rows

    opened = _open_rows(config, shards, tokenizer)
    rows.order_of(config.resolved(opened.epoch), opened)


def rules_of_rows(
    settings: Settings, stages: Iterable[Planned], *, packs: bool = False
) -> dict[str, rules.Rule]:
    """The rules of the trainings whose batch or passes depend on their rows.

    The value is `auto` unless the stage is in the store, or its shards are and `packs`, which loads
    the libraries for it.
    """
    found: dict[str, rules.Rule] = {}
    artifacts = {planned.stage.name: planned.artifact for planned in stages}
    for name in settings.trainings:
        config: Training = getattr(settings, name)
        trained = artifacts.get(name)
        values = config.replaced(TrainingResult.of(trained.result).by_rule) if trained else config
        shards = artifacts.get(SHARDS[name].name)
        tokenizer = artifacts.get(TOKENIZER.name)
        if (
            packs
            and values.automatic
            and shards
            and tokenizer
            and not (shards.absent or tokenizer.absent)
        ):
            values = values.resolved(_open_rows(values, shards.path, tokenizer.path).epoch)
        reasons = config.by_rows.reasons(config.row_length)
        for key in config.automatic:
            found[f"{name}.{key}"] = rules.Rule(getattr(values, key), reasons[key])
    return found


def _open_rows(config: Training, shards: Path, tokenizer: Path) -> Any:
    from ttrain.data.encoder import Encoder
    from ttrain.tasks.common import rows

    return rows.open_rows(shards / "train", Encoder(tokenizer, fast=False), config)
