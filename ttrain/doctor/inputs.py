"""What a stage reads: artifacts of the store. A base that is not trained yet has random weights."""

import random
import string
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from ttrain.config import Settings
from ttrain.config.training import NONE, TRAINING_STAGES, TRAININGS
from ttrain.core.files import ProgressWriter
from ttrain.data import tokenizer
from ttrain.engine.graph import Plan, Planned
from ttrain.engine.planner import no_stage
from ttrain.store import name_syntax
from ttrain.tasks import EXISTING_MODEL, NEW_MODEL, SHARDS, TOKENIZER
from ttrain.tasks.common.job import StageContext

RANDOM_WORDS = 30_000


def missing_data(stage: str, plan: Plan) -> list[Planned]:
    """The stages before any training that a stage reads and the store lacks, in order.

    Raises UsageError if there is no such stage, or it is not part of the pipeline.
    """
    if stage not in TRAININGS:
        raise name_syntax.unknown("training stage", stage, TRAININGS)
    if stage not in plan.settings.trainings:
        raise no_stage(stage, plan.settings.trainings, plan.settings)
    base = [EXISTING_MODEL.name] if plan.settings.existing_model else []
    read = {TOKENIZER.name, SHARDS[stage].name, *base}
    waiting = [each for each in plan.stages if each.state == "run"]
    missing = [each.stage.name for each in waiting if each.stage.name in read]
    needed = frozenset().union(*map(plan.graph.needed_by, missing))
    return [each for each in waiting if each.stage.name in needed]


def paths_of(
    stage: str, settings: Settings, artifacts: Mapping[str, Path], directory: Path
) -> tuple[dict[str, Path], bool]:
    """(directories that a stage reads, whether its base is a trained model).

    `artifacts`: directories of those that are in the store, by stage. What no run has made is made
    under `directory`: a base of random weights, a tokenizer of random words. Shards are left out.
    """
    start = settings.starts[stage]
    made_up = directory / TOKENIZER.name
    paths = {"tokenizer": artifacts.get(TOKENIZER.name, made_up)}
    if paths["tokenizer"] == made_up and not made_up.exists():
        vocab_size = settings.tokenizer.vocab_size
        tokenizer.save(tokenizer.train(random_words(vocab_size), vocab_size), made_up)
    if shards := artifacts.get(SHARDS[stage].name):
        paths["shards"] = shards
    base = artifacts.get(start) or artifacts.get(EXISTING_MODEL.name)
    if base:
        return {**paths, "base": base}, True
    if start == NONE and TRAINING_STAGES[stage].role == "base":
        return paths, False
    job = StageContext(
        {"tokenizer": paths["tokenizer"]},
        {},
        NEW_MODEL.arguments,
        directory / NEW_MODEL.name,
        settings.runtime,
        ProgressWriter(None),
        lambda: False,
    )
    import_module(NEW_MODEL.module).run(Settings.rebuilt(NEW_MODEL.part_of(settings)), job)
    return {**paths, "base": job.output}, False


def random_words(vocab_size: int) -> list[str]:
    """Words of which a tokenizer of so many tokens can be trained, in seconds."""
    chance = random.Random(1)
    words = max(RANDOM_WORDS, vocab_size)
    return [" ".join("".join(chance.choices(string.ascii_letters, k=6)) for _ in range(words))]
