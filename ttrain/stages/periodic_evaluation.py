"""The suite that a training is evaluated on as it goes: which tasks, with how many items, on the model as it is now."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
from torch import nn

from ttrain.config import Lora, Pretrain, Training
from ttrain.config.suite import HELDOUT
from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.evaluate import run, statistics, suites
from ttrain.evaluate.items import Items
from ttrain.evaluate.results import Results
from ttrain.inference.evaluated_model import subject_of
from ttrain.inference.loading import Speaker, speaking
from ttrain.stages.job import Job
from ttrain.stages.shards import heldout_records
from ttrain.train.distributed import Ranks

log = logging.getLogger("ttrain")
MOST_BYTES = 100_000  # of text, beside the limit of items: a document has any length
NAME = "model"  # of the one model in the results
RULE = statistics.Rule()


def measure_of(
    config: Training, job: Job, model: nn.Module, encoder: Encoder, ranks: Ranks
) -> Callable[[int], Mapping[str, float]]:
    """What `train.evaluations` asks for. Reads all items now; raises UsageError and DataError for what cannot be asked.

    Each evaluation leaves `run/evaluations/step-00000100.json`, with the intervals of its figures.
    """
    runtime = job.runtime
    if runtime.parallel == "fsdp" and ranks.world > 1:
        raise UsageError(
            f"runtime.eval_every_steps is {runtime.eval_every_steps}, but with runtime.parallel=fsdp no rank holds a whole "
            f"model that could be asked; set runtime.eval_every_steps=0, or runtime.parallel=ddp"
        )
    items = asked(config, job) if ranks.first else []

    def measure(step: int) -> Mapping[str, float]:
        with spoken_to(model, encoder) as speaker:
            outcomes = run.ask(items, subject_of(speaker), lambda task, done, total: None)
        results = Results(outcomes, RULE)
        log.info("evaluation at step %d: %s", step, "  ".join(map(results.line, outcomes)))
        directory = job.run_directory / "evaluations"
        directory.mkdir(exist_ok=True)
        path = directory / f"step-{step:08d}.json"
        temporary = path.with_suffix(".tmp")  # it is read while training goes on
        temporary.write_bytes(orjson.dumps(results.to_json(), option=orjson.OPT_INDENT_2))
        temporary.replace(path)
        return figures_of(results)

    return measure


def asked(config: Training, job: Job) -> list[Items[Any]]:
    """The items of the suite that the settings name, at most `runtime.eval_limit` of each task. Of what a pipeline holds out
    a stage has its own part: tasks about another one are left out."""
    part = "documents" if isinstance(config, Pretrain) else "domain" if isinstance(config, Lora) else "chats"
    named = suites.load(job.runtime.eval_suite or HELDOUT)
    suite = suites.at_most(suites.within(named, [part]), job.runtime.eval_limit, MOST_BYTES)
    log.info("evaluated on %s of %s", ", ".join(suite.suite.tasks), named.name)
    return run.read([suite], {part: heldout_records(job.inputs["shards"])})


def figures_of(results: Results) -> dict[str, float]:
    """Every figure as TASK/FIGURE, and the primary one of a group as TASK/FIGURE/KEY:VALUE; without those of no item."""
    own = f"/{NAME}"
    found = {name.replace(own, "", 1): value for name, value in results.metrics().items() if own in name}
    return {name: value for name, value in found.items() if math.isfinite(value)}


@contextlib.contextmanager
def spoken_to(model: Any, encoder: Encoder) -> Iterator[Speaker]:
    """The model that is training as one that is talked to; afterwards it has its own generation settings again, which go
    into the files beside its weights."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = causal.generation_config
    try:
        yield speaking(NAME, model, encoder, (encoder.bos_id,), can_chat=True)
    finally:
        vars(model).pop("generation_config")  # PEFT's has the one of the model within it
        causal.generation_config = own
