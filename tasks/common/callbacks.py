"""Callbacks of a training stage: curves, log, guards, samples, machine metrics."""

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from ttrain.config import TaskConfig, Training, flatten
from ttrain.config.training import TRAINING_STAGES
from ttrain.core import extras
from ttrain.core.files import write_json
from ttrain.core.redact import masked
from ttrain.data.chat_templates import Message
from ttrain.data.encoder import Encoder
from ttrain.data.loader import Loader
from ttrain.errors import UsageError
from ttrain.evaluate import run, samples, statistics, suites
from ttrain.evaluate.items import Items, comparable
from ttrain.evaluate.results import Results
from ttrain.inference.loading import LoadedModel, causal_of, with_encoder
from ttrain.store.runs import read_rows
from ttrain.tasks.common.job import Figures, StageContext
from ttrain.tasks.shards import heldout_records
from ttrain.train.callbacks import (
    Callback,
    LogLines,
    MetricsFile,
    Perplexity,
    ProgressBar,
    installed_callbacks,
)
from ttrain.train.distributed import Ranks
from ttrain.train.guards import LossSpike, Overfit
from ttrain.train.monitor import PerformanceMonitor, flops_per_token, peak_flops
from ttrain.train.periodic_evaluation import PeriodicEvaluation, PeriodicSamples
from ttrain.train.trainer import QUICK
from ttrain.train.training_options import TrainerOptions

METRICS = "metrics.jsonl"  # under run/, as the next one
GUARDS = "guards.jsonl"

SAMPLE_TOKENS = 48
LEAST_CHANGE = 0.001  # nats per target
MOST_BYTES = 100_000  # of text, in addition to the limit of items: a document has any length
NAME = "model"  # of the one model in the results
RULE = statistics.Rule()

log = logging.getLogger("ttrain")


def training_callbacks(
    config: Training | TaskConfig,
    job: StageContext,
    loader: Loader,
    options: TrainerOptions,
    flops_per_token: float = 0.0,
) -> list[Callback]:
    """The callbacks that the runtime settings ask for and every training supports, in call order.

    `flops_per_token`: 0 if unknown; then MFU is not logged. Raises UsageError for a missing logger.
    """
    order = loader.order
    ranks = options.ranks
    callbacks: list[Callback] = [
        PerformanceMonitor(
            device=ranks.device,
            steps_per_epoch=order.rows / order.rows_per_step,
            flops_per_token=flops_per_token,
            peak_flops=peak_flops(options.precision) * ranks.world if flops_per_token else 0.0,
        ),
        MetricsFile(job.run_directory / METRICS),
        ProgressBar(
            job.progress,
            round(order.tokens_per_row * order.rows_per_step),
            "tokens" if isinstance(config, Training) else "rows",
        ),
        LogLines(),
        *make_loggers(job.runtime.loggers, job.run_directory, description(config, job.labels)),
    ]
    if job.runtime.guards == "warn":
        path = job.run_directory / GUARDS
        callbacks += [LossSpike(path), Overfit(path, order)]
    if ranks.first:
        callbacks += installed_callbacks(may_stop=isinstance(config, TaskConfig))
    return callbacks


def make_loggers(names: Iterable[str], directory: Path, description: Figures) -> list[Callback]:
    """A callback for each name, from its entry point. Raises UsageError for a missing one."""
    extras.check(names)
    points = entry_points(group="ttrain.loggers")
    return [points[name].load()(name, directory, description) for name in names]


def description(config: Training | TaskConfig, labels: Mapping[str, str]) -> Figures:
    """A training for loggers: project, group, kind, name and settings without secrets."""
    stage = labels.get("stage", "training")
    run_name = labels.get("run", "")
    return {
        "project": labels.get("experiment", "ttrain"),
        "group": run_name or None,
        "job_type": stage,
        "name": f"{stage} {run_name.rpartition('-')[2]}".strip(),
        "config": masked(
            {
                f"{config.prefix}{name}": value
                for name, value in flatten(config.model_dump(mode="json"))
            }
        ),
    }


def language_model_callbacks(
    config: Training,
    job: StageContext,
    loader: Loader,
    options: TrainerOptions,
    model: nn.Module,
    encoder: Encoder,
) -> list[Callback]:
    """The callbacks of a language model: also perplexity, samples and evaluations."""
    runtime = job.runtime
    callbacks = training_callbacks(
        config, job, loader, options, flops_per_token(model, config.row_length)
    )
    if (
        (runtime.sample_every_steps or runtime.eval_every_steps)
        and runtime.parallel == "fsdp"
        and options.ranks.world > 1
    ):
        raise UsageError(
            "runtime.sample_every_steps and runtime.eval_every_steps ask the model in "
            "training, but with "
            "runtime.parallel=fsdp no rank holds a whole one; set both to 0, or "
            "runtime.parallel=ddp"
        )
    if TRAINING_STAGES[config.section].rows != "pairs":  # whose loss is not a cross entropy
        callbacks.append(Perplexity())
    if runtime.sample_every_steps:
        prompts = sample_prompts(config, job, encoder)

        def write() -> list[dict[str, str]]:
            with generation_mode(model, encoder) as subject:
                return samples.continuations(subject, prompts, new_tokens=SAMPLE_TOKENS)

        callbacks.append(
            PeriodicSamples(
                job.run_directory / "samples", model, write, every=runtime.sample_every_steps
            )
        )
    if runtime.eval_every_steps:
        writers = [callback for callback in callbacks if callback.keeps_metrics]
        callbacks.append(
            PeriodicEvaluation(
                model,
                measure_of(config, job, model, encoder, options.ranks),
                writers,
                every=runtime.eval_every_steps,
            )
        )
    return callbacks


def sample_prompts(
    config: Training, job: StageContext, encoder: Encoder
) -> list[samples.SamplePrompt]:
    """The prompts of the settings, else from held-out rows; there may be none."""
    of_documents = TRAINING_STAGES[config.section].rows == "documents"
    if (texts := job.runtime.sample_prompts) is not None:
        return list(map(samples.SamplePrompt if of_documents else samples.question, texts))
    heldout = heldout_records(job.inputs["shards"])
    size = {"new_tokens": SAMPLE_TOKENS, "room": max(8, config.row_length - SAMPLE_TOKENS)}
    if of_documents:
        return samples.of_documents([record["text"] for record in heldout], encoder, **size)
    turns = (record.get("messages") or (*record["prompt"], *record["chosen"]) for record in heldout)
    return samples.of_chats(
        [tuple(map(Message.from_json, chat)) for chat in turns], encoder, **size
    )


def is_without_effect(curve: Path) -> bool:
    """Whether the quick validations end where they began: within their usual step, or 0.1 %.

    False for a curve without its first step. The last value is of all rows and not compared.
    """
    quick = [
        row
        for row in read_rows(curve)
        if row["metrics"].get(QUICK) is not None and "validation_loss" not in row["metrics"]
    ]
    if len(quick) < 3 or quick[0]["step"] != 0:
        return False
    values = [row["metrics"][QUICK] for row in quick]
    usual = median(abs(current - previous) for previous, current in pairwise(values))
    return bool(abs(values[-1] - values[0]) < max(LEAST_CHANGE, usual))


def measure_of(
    config: Training, job: StageContext, model: nn.Module, encoder: Encoder, ranks: Ranks
) -> Callable[[int], Mapping[str, float]]:
    """The function that `train.periodic_evaluation` calls. Reads all items; raises UsageError or
    DataError for bad ones.

    Each evaluation leaves `run/evaluations/step-00000100.json`, with the intervals of its figures.
    """
    items = read_items(config, job) if ranks.first else []

    def measure(step: int) -> Mapping[str, float]:
        with generation_mode(model, encoder) as subject:
            outcomes = run.ask(items, subject, lambda share: None)
        results = Results(outcomes, RULE)
        shown = [
            f"{outcome.task}/{outcome.primary.name} {results.cell(outcome.primary)}"
            for outcome in outcomes
        ]
        log.info("evaluation at step %d: %s", step, "  ".join(shown))
        directory = job.run_directory / "evaluations"
        directory.mkdir(exist_ok=True)
        write_json(directory / f"step-{step:08d}.json", results.to_json())
        return figures_of(results)

    return measure


def read_items(config: Training, job: StageContext) -> list[Items[Any]]:
    """The items of the suite that the settings name, at most `runtime.eval_limit` of each task.
    Tasks on held-out parts that are not the stage's own are left out.
    """
    part_name = TRAINING_STAGES[config.section].part
    full_suite = (
        suites.load(job.runtime.eval_suite) if job.runtime.eval_suite else suites.load_heldout()
    )
    suite = suites.at_most(
        suites.with_parts(full_suite, [part_name]),
        limit=job.runtime.eval_limit,
        max_bytes=MOST_BYTES,
    )
    log.info("evaluated on %s of %s", ", ".join(suite.suite.tasks), full_suite.name)
    return run.read([suite], {part_name: comparable(heldout_records(job.inputs["shards"]))})


def figures_of(results: Results) -> dict[str, float]:
    """Every metric as TASK/METRIC, and the primary one of a group as TASK/METRIC/KEY:VALUE; none
    without an item.
    """
    model_infix = f"/{NAME}"
    return {
        name.replace(model_infix, "", 1): value
        for name, value in results.metrics().items()
        if model_infix in name
    }


@contextlib.contextmanager
def generation_mode(model: Any, encoder: Encoder) -> Iterator[LoadedModel]:
    """Use the model in training for generation; afterwards its own generation settings, which are
    written beside its weights, are restored.
    """
    causal = causal_of(model)
    generation_config = causal.generation_config
    try:
        yield with_encoder(NAME, model, encoder, (encoder.bos_id,), can_chat=True)
    finally:
        vars(model).pop("generation_config")  # PEFT's has the one of the model within it
        causal.generation_config = generation_config
