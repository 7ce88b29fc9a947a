"""Stage `evaluate`: bits per byte on held-out documents, losses on held-out chats and domain, samples, suites; one table."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch
from torch import nn

from ttrain.config import Evaluate, EvaluateConfig, Runtime
from ttrain.core.files import write_json
from ttrain.data import chat, chat_templates, contamination
from ttrain.data.encoder import Encoder
from ttrain.data.sources import LABELS
from ttrain.evaluate import baselines, greedy_samples, item_notes, perplexity, scores, statistics, suites
from ttrain.evaluate import contamination as contaminated
from ttrain.evaluate import items as items_of
from ttrain.evaluate import run as running
from ttrain.evaluate.items import Items
from ttrain.evaluate.results import Results
from ttrain.evaluate.task_result import LN2, Outcome
from ttrain.inference.evaluated_model import subject_of
from ttrain.inference.loading import speaker_of
from ttrain.model import adapters, factory
from ttrain.stages.job import Job
from ttrain.stages.shards import heldout_records
from ttrain.store.weights import weights_digest
from ttrain.train import precision
from ttrain.train.distributed import Ranks

Sequences = list[tuple[list[int], list[bool]]]
MODELS = ("base", "sft", "lora")
PART_NAMES = ("documents", "chats", "domain")
PARTS = len(PART_NAMES) + 1  # of a model's evaluation; the last one is its suites
LOSSES = {"chats": "chat_loss", "domain": "domain_loss"}
log = logging.getLogger("ttrain")


def run(config: EvaluateConfig, job: Job) -> dict[str, Any]:
    """Score what there is of base, SFT and LoRA model on the same held-out rows, under the same names whatever is missing.

    Leaves `evaluation.json`, `samples.json` and `scores.json`, which has the sums of each record; where there are suites,
    `items.jsonl` with what was asked and what was said. Where there are several ranks they share the held-out rows, with the
    same scores; the first does the rest.
    """
    settings, ranks = config.evaluate, _join(job.runtime)
    device = ranks.device
    encoder = Encoder(job.inputs["base"] / "model")
    documents = _documents(job.inputs["documents"], settings.max_bytes) if "documents" in job.inputs else []
    texts = [record["text"] for record in documents]
    talks = {part: _talks(job.inputs[part], settings.max_chats) for part in ("chats", "domain") if part in job.inputs}
    data = {"documents": [_document(encoder, ids) for ids in encoder.encode(texts)]}
    for part in ("chats", "domain"):
        data[part] = [chat.encode_chat(encoder, messages) for messages in talks.get(part, ())]
    shared = _shared_scores(data, settings, job, ranks) if ranks.world > 1 else {}
    if not ranks.first:
        return {}
    sizes = [len(text.encode("utf-8")) for text in texts]
    table = scores.Table()
    table.part("documents", texts, sizes)
    for part, said in talks.items():
        table.part(part, [[(message.role, message.content) for message in messages] for messages in said])
    metrics: dict[str, float] = {
        f"bits_per_byte_{name}": value for name, value in baselines.bits_per_byte("".join(texts).encode("utf-8")).items()
    }
    spoken: dict[str, Any] = {}
    asked, outcomes, labels = _asked(settings, job), list[Outcome](), items_of.groups(documents, LABELS)
    for number, name in enumerate(_models(job)):
        model = _load(name, job, device)
        of_rows = shared.get(name) or _scores(model, data, settings, job, number, ranks)
        for part, scored in of_rows.items():
            if part == "documents":
                metric, per, factor = "bits_per_byte" if name == "base" else f"bits_per_byte_{name}", "bytes", 1 / LN2
            else:
                metric, per, factor = f"{LOSSES[part]}_{name}", "tokens", 1.0
            metrics[metric] = table.figure(metric, part, name, scored, per=per, factor=factor)
            if part == "documents":
                metrics |= table.groups(metric, labels)
        spoken[name] = _samples(model, encoder, settings, device)
        if asked[name]:
            subject = subject_of(speaker_of(name, model, job.inputs["base"] / "model"))
            outcomes += running.ask(asked[name], subject, partial(_told, _progress(job, number * PARTS + len(data))))
    for outcome in outcomes:
        table.outcome(outcome)
    rule = statistics.Rule(settings.confidence, settings.resamples, settings.seed)
    intervals = {name: statistics.interval(figure, rule) for name, figure in table.figures().items()}
    results = Results(outcomes, rule)
    metrics |= {name: value for name, value in results.metrics().items() if math.isfinite(value)}
    counts = {
        "documents": len(texts),
        "document_bytes": sum(sizes),
        "document_tokens": sum(sum(live) for _, live in data["documents"]),
        "chats": len(data["chats"]),
        "chat_tokens": sum(sum(live) for _, live in data["chats"]),
        "domain": len(data["domain"]),
        "domain_tokens": sum(sum(live) for _, live in data["domain"]),
        **results.counts(),
    }
    told: dict[str, Any] = {"metrics": metrics, "counts": counts}
    told["intervals"] = {name: list(found) for name, found in intervals.items() if found}
    if outcomes:
        told["suites"] = results.to_json()
        lines = (orjson.dumps(row) + b"\n" for row in results.rows())
        (job.output / "items.jsonl").write_bytes(b"".join(lines))
    write_json(job.output / "evaluation.json", told)
    write_json(job.output / "samples.json", spoken)
    table.write(job.output)
    return {**told, "samples": spoken}


def _asked(settings: Evaluate, job: Job) -> dict[str, list[Items[Any]]]:
    """The items of each model's suites; what several models are asked is read once."""
    heldout = {part: heldout_records(job.inputs[part]) for part in PART_NAMES if part in job.inputs}
    known = {digest for part in heldout for digest in contamination.known(job.inputs[part])}
    leave_out = settings.overlapping == "leave_out"
    read: dict[str, list[Items[Any]]] = {}
    found: dict[str, list[Items[Any]]] = {}
    for name in _models(job):
        for suite in settings.suites.of(name):
            if suite not in read:
                items = running.read([suites.load(suite)], heldout)
                read[suite] = [contaminated.marked(one, known, leave_out=leave_out) for one in items]
        found[name] = [items for suite in settings.suites.of(name) for items in read[suite]]
    for line in item_notes.lines([one for items in read.values() for one in items]):
        log.warning("%s", line)  # not among the results: they name places of this machine
    return found


def _told(progress: Callable[[float, int], None], task: str, done: float, total: int) -> None:
    progress(done, total)


def _progress(job: Job, place: int) -> Callable[[float, int], None]:
    """Of one of the parts of all models."""
    return lambda done, total: job.progress.update(place + done / max(1, total), len(_models(job)) * PARTS, "parts")


def _documents(directory: Path, max_bytes: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    size = 0
    for record in heldout_records(directory):
        size += len(record["text"].encode("utf-8"))
        if found and size > max_bytes:
            break
        found.append(record)
    return found


def _document(encoder: Encoder, ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The text's own tokens are scored, from the first one on; the token that ends a document is not part of its bytes."""
    return [encoder.bos_id, *ids], [False] + [True] * len(ids)


def _talks(directory: Path, limit: int) -> list[chat_templates.Messages]:
    records = heldout_records(directory)[:limit]
    return [tuple(map(chat_templates.Message.from_json, record["messages"])) for record in records]


def _models(job: Job) -> list[str]:
    return [name for name in MODELS if name in job.inputs]


def _load(name: str, job: Job, device: torch.device) -> nn.Module:
    if name != "lora":
        model: nn.Module = factory.load(job.inputs[name] / "model")
    else:
        base = job.inputs["sft" if "sft" in job.inputs else "base"] / "model"
        model = adapters.load(factory.load(base), job.inputs["lora"] / "adapter", weights_digest(base))
    return model.to(device)


def _join(runtime: Runtime) -> Ranks:
    """The other ranks on this machine, which share its cores."""
    here, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(runtime.threads or max(1, (os.cpu_count() or 1) // here))
    return Ranks.join(precision.resolve_device(runtime.device, local))


def _shared_scores(
    data: dict[str, Sequences], settings: Evaluate, job: Job, ranks: Ranks
) -> dict[str, dict[str, list[perplexity.Score]]]:
    """The scores of every model by all ranks together, after which each may end when it likes: samples and suites can take
    longer than a collective waits."""
    found = {
        name: _scores(_load(name, job, ranks.device), data, settings, job, number, ranks)
        for number, name in enumerate(_models(job))
    }
    if ranks.watch:
        ranks.watch.close()
    torch.set_num_threads(job.runtime.threads or os.cpu_count() or 1)
    return found


def _scores(
    model: nn.Module, data: dict[str, Sequences], settings: Evaluate, job: Job, number: int, ranks: Ranks
) -> dict[str, list[perplexity.Score]]:
    """Score of each record by part; a part without a token to score is left out. In fp32: no figure depends on the batch."""
    found: dict[str, list[perplexity.Score]] = {}
    for at, (part, sequences) in enumerate(data.items()):
        if any(any(live[1:]) for _, live in sequences):
            found[part] = perplexity.score_each(
                model,
                sequences,
                length=settings.row_length,
                stride=settings.stride,
                autocast=precision.resolve("fp32", ranks.device).autocast,
                device=ranks.device,
                progress=_progress(job, number * PARTS + at),
                ranks=ranks,
            )
    return found


def _samples(model: nn.Module, encoder: Encoder, settings: Evaluate, device: torch.device) -> list[dict[str, str]]:
    stops = [encoder.eos_id, encoder.end_id]
    said = []
    for prompt, ids in _prompts(encoder, settings):
        tokens = greedy_samples.greedy(model, ids, new_tokens=settings.new_tokens, stop_ids=stops, device=device)
        said.append({"prompt": prompt, "answer": encoder.decode(tokens)})
    return said


def _prompts(encoder: Encoder, settings: Evaluate) -> Iterable[tuple[str, list[int]]]:
    if not settings.new_tokens:
        return
    for text in settings.documents:
        yield text, [encoder.bos_id, *encoder.encode([text])[0]]
    for text in settings.chats:
        yield text, chat.prompt_ids(encoder, (chat_templates.Message("user", text),))
