"""Stage `evaluate`: bits per byte on held-out documents, losses on held-out chats and domain, samples; one table."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ttrain.config import Evaluate, EvaluateConfig
from ttrain.data import chat
from ttrain.data.encoder import Encoder
from ttrain.evaluate import baselines, perplexity, samples, scores
from ttrain.job import Job
from ttrain.model import adapters, factory
from ttrain.stages.shards import heldout_records
from ttrain.store import write_json
from ttrain.train import precision
from ttrain.weights import weights_digest

Sequences = list[tuple[list[int], list[bool]]]
MODELS = ("base", "sft", "lora")
LOSSES = {"chats": "chat_loss", "domain": "domain_loss"}
LN2 = 0.6931471805599453


def run(config: EvaluateConfig, job: Job) -> dict[str, Any]:
    """Score what there is of base, SFT and LoRA model on the same held-out rows, under the same names whatever is missing.

    Leaves `evaluation.json`, `samples.json` and `scores.json`, which has the sums of each record.
    """
    torch.set_num_threads(job.runtime.threads or os.cpu_count() or 1)
    settings = config.evaluate
    device = precision.resolve_device(job.runtime.device)
    encoder = Encoder(job.inputs["base"] / "model")
    texts = _texts(job.inputs["documents"], settings.max_bytes) if "documents" in job.inputs else []
    talks = {part: _talks(job.inputs[part], settings.max_chats) for part in ("chats", "domain") if part in job.inputs}
    data = {"documents": [_document(encoder, ids) for ids in encoder.encode(texts)]}
    for part in ("chats", "domain"):
        data[part] = [chat.encode_chat(encoder, messages) for messages in talks.get(part, ())]
    sizes = [len(text.encode("utf-8")) for text in texts]
    table = scores.Table()
    table.part("documents", texts, sizes)
    for part, said in talks.items():
        table.part(part, [[(message.role, message.content) for message in messages] for messages in said])
    metrics: dict[str, float] = {
        f"bits_per_byte_{name}": value for name, value in baselines.bits_per_byte("".join(texts).encode("utf-8")).items()
    }
    spoken: dict[str, Any] = {}
    for number, name in enumerate(_models(job)):
        model = _load(name, job, device)
        for part, scored in _scores(model, data, settings, job, number, device).items():
            if part == "documents":
                metric, per, factor = "bits_per_byte" if name == "base" else f"bits_per_byte_{name}", "bytes", 1 / LN2
            else:
                metric, per, factor = f"{LOSSES[part]}_{name}", "tokens", 1.0
            metrics[metric] = table.figure(metric, part, name, scored, per=per, factor=factor)
        spoken[name] = _samples(model, encoder, settings, device)
    counts = {
        "documents": len(texts),
        "document_bytes": sum(sizes),
        "document_tokens": sum(sum(live) for _, live in data["documents"]),
        "chats": len(data["chats"]),
        "chat_tokens": sum(sum(live) for _, live in data["chats"]),
        "domain": len(data["domain"]),
        "domain_tokens": sum(sum(live) for _, live in data["domain"]),
    }
    write_json(job.output / "evaluation.json", {"metrics": metrics, "counts": counts})
    write_json(job.output / "samples.json", spoken)
    table.write(job.output)
    return {"metrics": metrics, "counts": counts, "samples": spoken}


def _texts(directory: Path, max_bytes: int) -> list[str]:
    texts: list[str] = []
    size = 0
    for record in heldout_records(directory):
        size += len(record["text"].encode("utf-8"))
        if texts and size > max_bytes:
            break
        texts.append(record["text"])
    return texts


def _document(encoder: Encoder, ids: Sequence[int]) -> tuple[list[int], list[bool]]:
    """The text's own tokens are scored, from the first one on; the token that ends a document is not part of its bytes."""
    return [encoder.bos_id, *ids], [False] + [True] * len(ids)


def _talks(directory: Path, limit: int) -> list[chat.Messages]:
    records = heldout_records(directory)[:limit]
    return [tuple(chat.Message(turn["role"], turn["content"]) for turn in record["messages"]) for record in records]


def _models(job: Job) -> list[str]:
    return [name for name in MODELS if name in job.inputs]


def _load(name: str, job: Job, device: torch.device) -> nn.Module:
    if name != "lora":
        model: nn.Module = factory.load(job.inputs[name] / "model")
    else:
        base = job.inputs["sft" if "sft" in job.inputs else "base"] / "model"
        model = adapters.load(factory.load(base), job.inputs["lora"] / "adapter", weights_digest(base))
    return model.to(device)


def _scores(
    model: nn.Module, data: dict[str, Sequences], settings: Evaluate, job: Job, number: int, device: torch.device
) -> dict[str, list[perplexity.Score]]:
    """Score of each record by part; a part without a token to score is left out. In fp32: no figure depends on the batch."""
    found: dict[str, list[perplexity.Score]] = {}
    for at, (part, sequences) in enumerate(data.items()):
        place = number * len(data) + at

        def progress(done: int, total: int, place: int = place) -> None:
            job.progress.update(place + done / total, len(_models(job)) * len(data), "parts")

        if any(any(live[1:]) for _, live in sequences):
            found[part] = perplexity.score_each(
                model,
                sequences,
                length=settings.row_length,
                stride=settings.stride,
                autocast=precision.resolve("fp32", device).autocast,
                device=device,
                progress=progress,
            )
    return found


def _samples(model: nn.Module, encoder: Encoder, settings: Evaluate, device: torch.device) -> list[dict[str, str]]:
    stops = [encoder.eos_id, encoder.end_id]
    said = []
    for prompt, ids in _prompts(encoder, settings):
        tokens = samples.greedy(model, ids, new_tokens=settings.new_tokens, stop_ids=stops, device=device)
        said.append({"prompt": prompt, "answer": encoder.decode(tokens)})
    return said


def _prompts(encoder: Encoder, settings: Evaluate) -> Iterable[tuple[str, list[int]]]:
    if not settings.new_tokens:
        return
    for text in settings.documents:
        yield text, [encoder.bos_id, *encoder.encode([text])[0]]
    for text in settings.chats:
        yield text, chat.prompt_ids(encoder, (chat.Message("user", text),))
