"""Stage `evaluate`: bits per byte on held-out documents, losses on held-out chats and domain, samples, suites; one table."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import nn

from ttrain.config import TRAINING_STAGES, Evaluate, Runtime, Settings
from ttrain.config.training import BITS_PER_BYTE, PREFERENCE_ACCURACY
from ttrain.core.files import finite, write_json
from ttrain.data import chat, chat_templates, contamination
from ttrain.data.encoder import Encoder
from ttrain.data.preferences import Preference
from ttrain.data.records import LABELS
from ttrain.evaluate import baselines, perplexity, preferences, samples, statistics, suites, task_result
from ttrain.evaluate import items as items_of
from ttrain.evaluate import run as running
from ttrain.evaluate.items import Items
from ttrain.evaluate.preferences import PAIRS
from ttrain.evaluate.results import Results
from ttrain.evaluate.samples import SamplePrompt
from ttrain.evaluate.task_result import LN2, Metric, TaskResult
from ttrain.inference.evaluated_model import as_evaluated_model
from ttrain.inference.loading import with_tokenizer
from ttrain.model import adapters, factory
from ttrain.store.model_files import weights_digest
from ttrain.tasks import BASE_OF, heldout
from ttrain.tasks.common.job import Figures, Inputs, StageContext
from ttrain.tasks.shards import heldout_records, scored_documents
from ttrain.train import precision
from ttrain.train.distributed import Ranks, share_cores

Scores = dict[str, list[perplexity.Score]]  # of each record, by part
Data = Mapping[str, Sequence[perplexity.Tokens]]  # the records, by part
ItemsOfModels = dict[str, list[Items[Any]]]  # by model, or by suite
ROWS = {row.model: row for row in TRAINING_STAGES.values()}
METRICS = {row.part: row.metric for row in ROWS.values() if row.metric}  # by the held-out records that they are over
PART_NAMES = tuple(METRICS)
LOSSES = {row.part: row.loss for row in ROWS.values() if row.loss}
PARTS = len(PART_NAMES) + 1  # of a model's evaluation; the last one is its suites
log = logging.getLogger("ttrain")


@dataclass(frozen=True)
class HeldoutRecords:
    """The held-out records that models are scored on; `tokens`: those of each record, by part."""

    documents: list[dict[str, Any]]
    chats: dict[str, list[chat_templates.Messages]]  # by part
    pairs: list[Preference]
    tokens: Data

    @classmethod
    def read(cls, inputs: Inputs, settings: Evaluate, encoder: Encoder) -> HeldoutRecords:
        """Those parts that are among the inputs of the stage."""
        documents = _documents(inputs["documents"], settings.max_bytes) if "documents" in inputs else []
        chats = {name: _read_chats(inputs[name], settings.max_chats) for name in LOSSES if name in inputs}
        pairs = preferences.heldout_pairs(heldout_records(inputs[PAIRS]), settings.max_chats) if PAIRS in inputs else []
        texts = encoder.encode([record["text"] for record in documents])
        tokens: dict[str, Sequence[perplexity.Tokens]] = {"documents": [_document(encoder, ids) for ids in texts]}
        for name in LOSSES:
            tokens[name] = [chat.encode_chat(encoder, messages) for messages in chats.get(name, ())]
        tokens[PAIRS] = preferences.sequences(encoder, pairs)
        return cls(documents, chats, pairs, tokens)

    @property
    def texts(self) -> list[str]:
        """The documents' text."""
        return [record["text"] for record in self.documents]

    def prompts(self, settings: Evaluate, encoder: Encoder) -> list[SamplePrompt]:
        """What the models write samples for: what the settings name, else held-out documents and questions."""
        size = {"new_tokens": settings.new_tokens, "room": max(8, settings.row_length - settings.new_tokens)}
        chats = next((chats for chats in self.chats.values() if chats), [])
        return [
            *(
                samples.of_documents(self.texts, encoder, **size)
                if settings.documents is None
                else map(SamplePrompt, settings.documents)
            ),
            *(samples.of_chats(chats, encoder, **size) if settings.chats is None else map(samples.question, settings.chats)),
        ]

    def table(self) -> task_result.ScoreTable:
        """A table of all records, without scores."""
        table = task_result.ScoreTable()
        table.part("documents", self.texts)
        for name, chats in self.chats.items():
            table.part(name, [[(message.role, message.content) for message in messages] for messages in chats])
        if self.pairs:
            table.part(PAIRS, [pair.content().decode() for pair in self.pairs])
        return table

    def counts(self) -> dict[str, int]:
        """Records of each part, bytes, and tokens that are scored."""
        scored = {name: sum(sum(live) for _, live in records) for name, records in self.tokens.items()}
        counts = {name: len(records) for name, records in self.tokens.items() if name != PAIRS or records}
        counts |= {f"{loss.removesuffix('_loss')}_tokens": scored[name] for name, loss in LOSSES.items()}
        document_bytes = len("".join(self.texts).encode("utf-8"))
        return {**counts, "document_bytes": document_bytes, "document_tokens": scored["documents"]}


def run(config: Settings, job: StageContext) -> Figures:
    """Score those of base, SFT and LoRA model that exist on the same held-out rows, with names that depend on none of them.

    Writes `evaluation.json`, `samples.json` and `scores.json`, which has the sums of each record; with suites also
    `items.jsonl` with prompts and answers. Several ranks share the held-out rows, with the same scores; the first does the
    rest.
    """
    settings, ranks = config.evaluate, join_ranks(job.runtime)
    encoder = Encoder(job.inputs["base"] / "model")
    records = HeldoutRecords.read(job.inputs, settings, encoder)
    shared = _shared_scores(records.tokens, settings, job, ranks) if ranks.world > 1 else {}
    if not ranks.first:
        return {}
    compressed = baselines.bits_per_byte("".join(records.texts).encode("utf-8"))
    metrics = {BITS_PER_BYTE.of(name): value for name, value in compressed.items()}
    prompts = records.prompts(settings, encoder) if settings.new_tokens else []
    document_bytes = tuple(float(len(text.encode("utf-8"))) for text in records.texts)
    table, labels = records.table(), items_of.groups(records.documents, LABELS)[0]
    items_by_model, samples_by_model, outcomes = _read_items(settings, job), dict[str, Any](), list[TaskResult]()
    for number, name in enumerate(_models(job)):
        model = _load(name, job, ranks.device)
        scores = shared.get(name) or _scores(model, records.tokens, settings, job, number, ranks)
        metrics |= _heldout_metrics(table, name, scores, document_bytes, labels)
        subject = as_evaluated_model(with_tokenizer(name, model, job.inputs["base"] / "model"))
        samples_by_model[name] = [
            sample.to_json() for sample in samples.continuations(subject, prompts, new_tokens=settings.new_tokens)
        ]
        outcomes += running.ask(items_by_model[name], subject, _task_progress(job, number * PARTS + len(records.tokens)))
    for outcome in outcomes:
        table.outcome(outcome)
    rule, figures = statistics.Rule(settings.confidence, settings.resamples, settings.seed), table.metrics
    intervals = {name: statistics.interval(figure, rule) for name, figure in figures.items()}
    results = Results(outcomes, rule)
    evaluation: dict[str, Any] = {
        "metrics": {**metrics, **{name: value for name, value in results.metrics().items() if math.isfinite(value)}},
        "counts": {**records.counts(), **results.counts()},
        "intervals": {name: list(interval) for name, interval in intervals.items() if interval},
        "paired": _paired(figures, _models(job), rule),
    }
    if outcomes:
        evaluation["suites"] = results.to_json()
        lines = (orjson.dumps(row) + b"\n" for row in results.rows())
        (job.output / "items.jsonl").write_bytes(b"".join(lines))
    write_json(job.output / "evaluation.json", evaluation)
    write_json(job.output / "samples.json", samples_by_model)
    table.write(job.output)
    return {**evaluation, "samples": samples_by_model}


def _heldout_metrics(
    table: task_result.ScoreTable,
    model: str,
    scores: Scores,
    document_bytes: tuple[float, ...],
    labels: Mapping[str, Sequence[int]],
) -> dict[str, float]:
    """Add a model's scores to the table; its metrics over each part, and over the documents of each label."""
    metrics: dict[str, float] = {}
    for part_name, scored in scores.items():
        name = METRICS[part_name].of(model)
        if part_name == PAIRS:
            metrics |= _preference_metrics(table, model, scored)
            continue
        nats = tuple(score.nats for score in scored)
        sizes, factor, unit = tuple(float(score.tokens) for score in scored), 1.0, "nats per token"
        if part_name == BITS_PER_BYTE.records:
            sizes, factor, unit = document_bytes, 1 / LN2, "bits per byte"
        # In this order a sum has the same last digit as in every evaluation before.
        value = factor * sum(nats) / sum(sizes)
        metrics[name] = table.add(part_name, Metric(name, nats, sizes, False, unit, factor, recorded=value))
        if part_name == "documents":
            metrics |= table.groups(name, labels)
    return metrics


def _paired(
    figures: Mapping[str, task_result.Metric], models: Sequence[str], rule: statistics.Rule
) -> dict[str, dict[str, Any]]:
    """{metric: how the model compares with the one before it on the same held-out records}."""
    paired = {}
    for metric in METRICS.values():
        for earlier, later in pairwise(models):
            first, second = figures.get(metric.of(later)), figures.get(metric.of(earlier))
            if first and second and statistics.comparable(first, second):
                compared = asdict(statistics.compare(first, second, rule))
                paired[metric.of(later)] = {"against": earlier, **finite(compared)}
    return paired


def _preference_metrics(table: task_result.ScoreTable, model: str, scores: Sequence[perplexity.Score]) -> dict[str, float]:
    """Share of the pairs whose chosen answer the model prefers, and the mean margin in nats; each with its records."""
    compared = preferences.compare(scores)
    metrics = (
        task_result.mean(PREFERENCE_ACCURACY.of(model), (pair.preferred for pair in compared)),
        task_result.mean(f"preference_margin/{model}", (pair.margin for pair in compared), "nats"),
    )
    return {metric.name: table.add(PAIRS, metric) for metric in metrics}


def _read_items(settings: Evaluate, job: StageContext) -> ItemsOfModels:
    """The items of each model's suites; a suite of several models is read once."""
    heldout = {
        part_name: items_of.comparable(heldout_records(job.inputs[part_name]))
        for part_name in PART_NAMES
        if part_name in job.inputs
    }
    overlap_digests = {digest for part_name in heldout for digest in contamination.read_item_shares(job.inputs[part_name])}
    leave_out = settings.overlapping == "leave_out"
    read: ItemsOfModels = {
        suite: [
            running.mark_overlaps(items, overlap_digests, leave_out=leave_out)
            for items in running.read([suites.load(suite)], heldout)
        ]
        for suite in dict.fromkeys(suite for name in _models(job) for suite in settings.suites.of(name))
    }
    for line in items_of.lines([task_items for items in read.values() for task_items in items]):
        log.warning("%s", line)  # not among the results: they name paths of this machine
    return {name: [items for suite in settings.suites.of(name) for items in read[suite]] for name in _models(job)}


def _progress(job: StageContext, parts_done: int) -> Callable[[float, int], None]:
    """A callback that reports the progress within one part, as a share of all parts of all models."""
    return lambda done, total: job.progress.update(parts_done + done / max(1, total), len(_models(job)) * PARTS, "parts")


def _task_progress(job: StageContext, parts_done: int) -> Callable[[str, float, int], None]:
    """As `_progress`, for the tasks of suites, which also say their names."""
    progress = _progress(job, parts_done)
    return lambda task, done, total: progress(done, total)


def _documents(directory: Path, max_bytes: int) -> list[dict[str, Any]]:
    """The documents that are scored: of a set of several nights a share of each."""
    if not heldout.read_nights(directory):
        return scored_documents(heldout_records(directory), max_bytes)
    return [document for of_night in heldout.scored_by_night(directory, max_bytes) for document in of_night]


def _document(encoder: Encoder, ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """(ids, which are scored): all tokens of the text; the token that ends a document is not part of its bytes."""
    return [encoder.bos_id, *ids], [False] + [True] * len(ids)


def _read_chats(directory: Path, limit: int) -> list[chat_templates.Messages]:
    records = heldout_records(directory)[:limit]
    return [tuple(map(chat_templates.Message.from_json, record["messages"])) for record in records]


def _models(job: StageContext) -> list[str]:
    return [name for name in ROWS if name in job.inputs]


def _load(name: str, job: StageContext, device: torch.device) -> nn.Module:
    if ROWS[name].role != "adapter":
        model: nn.Module = factory.load(job.inputs[name] / "model")
    else:
        directory = job.inputs[name] / "adapter"
        bases = [job.inputs[model_name] / "model" for model_name in _models(job) if ROWS[model_name].role != "adapter"]
        bases += [job.inputs[own] / "model" for own in (f"{BASE_OF}{name}",) if own in job.inputs]
        digest = adapters.base_digest_of(directory)
        base = next((path for path in reversed(bases) if weights_digest(path) == digest), bases[-1])
        model = adapters.load(factory.load(base), directory, weights_digest(base))
    return model.to(device)


def join_ranks(runtime: Runtime) -> Ranks:
    """Join the other ranks on this machine, and share its cores with them."""
    device = precision.resolve_device(runtime.device, share_cores(runtime.threads))
    return Ranks.join(device, runtime.rank_timeout_seconds)


def _shared_scores(data: Data, settings: Evaluate, job: StageContext, ranks: Ranks) -> dict[str, Scores]:
    """Score every model with all ranks together; then each rank may end on its own, since samples and suites can take
    longer than a collective's timeout."""
    scores_by_model = {
        name: _scores(_load(name, job, ranks.device), data, settings, job, number, ranks)
        for number, name in enumerate(_models(job))
    }
    torch.set_num_threads(job.runtime.threads or os.cpu_count() or 1)
    return scores_by_model


def _scores(
    model: nn.Module,
    data: Data,
    settings: Evaluate,
    job: StageContext,
    number: int,
    ranks: Ranks,
) -> Scores:
    """Score of each record by part; a part without a token to score is left out. In fp32: no figure depends on the batch."""
    scores_by_part: Scores = {}
    for at, (part_name, sequences) in enumerate(data.items()):
        if any(any(live[1:]) for _, live in sequences):
            scores_by_part[part_name] = perplexity.score_each(
                model,
                sequences,
                length=settings.row_length,
                stride=settings.stride,
                device=ranks.device,
                progress=_progress(job, number * PARTS + at),
                ranks=ranks,
            )
    return scores_by_part
