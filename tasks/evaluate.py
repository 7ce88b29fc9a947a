"""Stage `evaluate`: every model on held-out records and suites, samples, one table of metrics."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import orjson
import torch

from ttrain.config import TRAINING_STAGES, Evaluate, Runtime, Settings
from ttrain.config.evaluate import ChatsTask, PairsTask, RecordsTask, TextTask
from ttrain.config.training import BITS_PER_BYTE
from ttrain.core.files import finite, write_json
from ttrain.data import contamination
from ttrain.data.encoder import Encoder
from ttrain.evaluate import run as running
from ttrain.evaluate import samples, statistics, suites
from ttrain.evaluate.items import Items, SuiteFiles, comparable, notes_on
from ttrain.evaluate.results import Results
from ttrain.evaluate.task_result import Metric, TaskResult, write_scores
from ttrain.inference.loading import LoadedModel, with_tokenizer
from ttrain.model import adapters, factory
from ttrain.store.model_files import base_digest_of, weights_digest
from ttrain.tasks import BASE_OF, heldout
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.shards import heldout_records, scored_documents
from ttrain.train import precision
from ttrain.train.distributed import Ranks, share_cores

ROWS = {row.model: row for row in TRAINING_STAGES.values()}
PARTS = {
    row.part: row for row in ROWS.values()
}  # held-out records, and the stage whose metric is over them
METRICS = {row.part: row.metric for row in ROWS.values()}
SPECS: dict[str, type[RecordsTask]] = {
    "documents": TextTask,
    "chats": ChatsTask,
    "pairs": PairsTask,
}
log = logging.getLogger("ttrain")


def run(config: Settings, job: StageContext) -> Figures:
    """Score the models that exist on the same held-out rows.

    Writes `evaluation.json`, `scores.json` (sums of each record) and, with suites, `items.jsonl`.
    Several ranks share the held-out rows, with the same scores; the first does the rest.
    """
    settings = config.evaluate
    ranks = join_ranks(job.runtime)
    held_out = heldout_items(job.inputs, settings)
    shared: dict[str, list[TaskResult]] = {}
    if ranks.world > 1:
        shared = {
            name: running.ask(
                held_out, _load(name, job, ranks.device, ranks), _progress(job, name, 0)
            )
            for name in _models(job)
        }
        # Then each rank may end: samples and suites can outlast a collective's timeout.
        torch.set_num_threads(job.runtime.threads or os.cpu_count() or 1)
    if not ranks.first:
        return {}
    prompts = (
        _prompts(held_out, settings, Encoder(job.inputs["base"] / "model"))
        if settings.new_tokens
        else []
    )
    suite_items = _suite_items(settings, job)
    recorded: dict[str, Metric] = {}
    counts = {part: 0 for part in PARTS if part != "pairs"}
    samples_by_model: dict[str, Any] = {}
    outcomes: list[TaskResult] = []
    for name in _models(job):
        subject = _load(name, job, ranks.device)
        for result in shared.get(name) or running.ask(held_out, subject, _progress(job, name, 0)):
            recorded |= result.recorded(_names(result, name), BITS_PER_BYTE.of(""))
            counts |= _counts(result)
        samples_by_model[name] = samples.continuations(
            subject, prompts, new_tokens=settings.new_tokens
        )
        outcomes += running.ask(suite_items[name], subject, _progress(job, name, 1))
    rule = statistics.Rule(settings.confidence, settings.resamples, settings.seed)
    results = Results(outcomes, rule)
    metrics = {name: metric.value for name, metric in recorded.items()} | results.metrics()
    recorded |= results.recorded()
    intervals = {name: statistics.interval(metric, rule) for name, metric in recorded.items()}
    evaluation: dict[str, Any] = {
        "metrics": metrics,
        "counts": {**counts, **results.counts()},
        "intervals": {name: list(interval) for name, interval in intervals.items() if interval},
        "paired": _paired(recorded, _models(job), rule),
        "samples": samples_by_model,
    }
    if outcomes:
        evaluation["suites"] = results.to_json()
        (job.output / "items.jsonl").write_bytes(
            b"".join(orjson.dumps(row) + b"\n" for row in results.rows())
        )
    write_json(job.output / "evaluation.json", evaluation)
    write_scores(job.output, recorded.values())
    return evaluation


# --- held-out records -----------------------------------------------------------------------------


def heldout_items(inputs: Inputs, settings: Evaluate) -> list[Items[Any]]:
    """The held-out records among the inputs of the stage, as tasks that are named after their
    parts.
    """
    tasks: list[Items[Any]] = []
    for part, row in PARTS.items():
        if part not in inputs:
            continue
        records = list(heldout_records(inputs[part]))
        own: dict[str, Any] = {}
        if row.rows != "documents":
            records = comparable(records)[: settings.max_chats]
            own = {"file": part, **({"answers": 0} if row.rows == "chats" else {})}
        elif not heldout.read_nights(
            inputs[part]
        ):  # of a set of several nights, each brought its share
            records = scored_documents(records, settings.max_bytes)
        if records:
            spec = SPECS[row.rows].model_validate(
                {**settings.model_dump(include={"row_length", "stride"}), **own}
            )
            tasks.append(
                running.functions_of(spec)[0](part, spec, SuiteFiles(Path(), {part: records}))
            )
    return tasks


def _names(result: TaskResult, model: str) -> dict[str, str]:
    # The metrics of a part that are recorded, by their names in its result.
    margin = {"margin": f"preference_margin/{model}"}
    return {
        result.primary.name: METRICS[result.task].of(model),
        **(margin if result.items.spec.kind == "pairs" else {}),
    }


def _counts(result: TaskResult) -> dict[str, int]:
    sizes = {metric.name: int(sum(metric.sizes)) for metric in result.figures if not metric.group}
    counts = {result.task: len(result.items.digests)}
    if result.items.spec.kind == "text":
        counts |= {"document_bytes": sizes["bits_per_byte"], "document_tokens": sizes["loss"]}
    if result.items.spec.kind == "chats":
        counts[f"{PARTS[result.task].loss.removesuffix('_loss')}_tokens"] = sizes["loss"]
    return counts


def _prompts(
    held_out: list[Items[Any]], settings: Evaluate, encoder: Encoder
) -> list[samples.SamplePrompt]:
    size = {
        "new_tokens": settings.new_tokens,
        "room": max(8, settings.row_length - settings.new_tokens),
    }
    items = {
        task.spec.kind: task.items for task in reversed(held_out)
    }  # of the first part of each kind
    return [
        *(
            samples.of_documents(items.get("text", ()), encoder, **size)
            if settings.documents is None
            else map(samples.SamplePrompt, settings.documents)
        ),
        *(
            samples.of_chats(items.get("chats", ()), encoder, **size)
            if settings.chats is None
            else map(samples.question, settings.chats)
        ),
    ]


# --- the figures ----------------------------------------------------------------------------------


def _paired(
    figures: Mapping[str, Metric], models: list[str], rule: statistics.Rule
) -> dict[str, dict[str, Any]]:
    # {metric: how the model compares with the one before it on the same held-out records}.
    paired = {}
    for metric, (earlier, later) in product(METRICS.values(), pairwise(models)):
        first = figures.get(metric.of(later))
        second = figures.get(metric.of(earlier))
        if first and second and statistics.comparable(first, second):
            paired[first.name] = {
                "against": earlier,
                **finite(asdict(statistics.compare(first, second, rule))),
            }
    return paired


def _suite_items(settings: Evaluate, job: StageContext) -> dict[str, list[Items[Any]]]:
    # A suite of several models is read once.
    inputs = {part: job.inputs[part] for part in PARTS if part in job.inputs}
    records = {part: comparable(heldout_records(directory)) for part, directory in inputs.items()}
    overlaps = {
        digest
        for directory in inputs.values()
        for digest in contamination.read_item_shares(directory)
    }
    by_suite: dict[str, list[Items[Any]]] = {}
    for suite in dict.fromkeys(
        suite for name in _models(job) for suite in settings.suites.of(name)
    ):
        read = running.read([suites.load(suite)], records)
        by_suite[suite] = [running.mark_overlaps(items, overlaps) for items in read]
        for line in notes_on(read):
            log.warning("%s", line)  # not among the results: they name paths of this machine
    by_model = {}
    for name in _models(job):
        by_model[name] = [items for suite in settings.suites.of(name) for items in by_suite[suite]]
    return by_model


# --- the models -----------------------------------------------------------------------------------


def _models(job: StageContext) -> list[str]:
    return [name for name in ROWS if name in job.inputs]


def _progress(job: StageContext, model: str, half: int) -> Callable[[float], None]:
    # A callback that reports the progress within one model's held-out records, or within its
    # suites.
    models = _models(job)
    done_before = 2 * models.index(model) + half
    return lambda share: job.progress.update(done_before + share, 2 * len(models), "parts")


def _load(
    name: str, job: StageContext, device: torch.device, ranks: Ranks | None = None
) -> LoadedModel:
    model: Any
    if ROWS[name].role == "adapter":
        directory = job.inputs[name] / "adapter"
        bases = [
            job.inputs[model] / "model" for model in _models(job) if ROWS[model].role != "adapter"
        ]
        bases += [job.inputs[own] / "model" for own in (f"{BASE_OF}{name}",) if own in job.inputs]
        digest = base_digest_of(directory)
        base = next((path for path in reversed(bases) if weights_digest(path) == digest), bases[-1])
        model = adapters.load(factory.load(base), directory, weights_digest(base))
    else:
        model = factory.load(job.inputs[name] / "model")
    return replace(
        with_tokenizer(name, model.to(device), job.inputs["base"] / "model"), ranks=ranks
    )


def join_ranks(runtime: Runtime) -> Ranks:
    """Join the other ranks on this machine, and share its cores with them."""
    return Ranks.join(
        precision.resolve_device(runtime.device, share_cores(runtime.threads)),
        runtime.rank_timeout_seconds,
    )
