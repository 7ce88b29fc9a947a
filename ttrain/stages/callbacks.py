"""What watches a training stage: curves, log, guards, samples, figures of the machine. None of it moves a weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from ttrain.config import Pretrain, Runtime, TaskConfig, Training, flatten
from ttrain.data import chat, chat_templates
from ttrain.data.encoder import Encoder
from ttrain.data.loader import Loader
from ttrain.data.packing import Rows
from ttrain.errors import UsageError
from ttrain.evaluate import greedy_samples
from ttrain.loggers.callback import Loggers
from ttrain.stages.job import Job
from ttrain.train.callbacks import Callback, LogLines, MetricsFile, Perplexity, ProgressBar
from ttrain.train.distributed import Ranks
from ttrain.train.flops import flops_per_token, peak_flops
from ttrain.train.guards import guards
from ttrain.train.monitor import PerformanceMonitor
from ttrain.train.periodic_evaluation import Evaluations
from ttrain.train.periodic_samples import Samples
from ttrain.train.precision import Precision
from ttrain.train.trainer import QUICK

METRICS, GUARDS = "metrics.jsonl", "guards.jsonl"  # under run/
SAMPLE_TOKENS = 48
LEAST_CHANGE = 0.001  # nats per target


def watchers(
    config: Training | TaskConfig, job: Job, *, loader: Loader, ranks: Ranks, precision: Precision, filled: float = 1.0,
    flops_per_token: float = 0.0,
) -> list[Callback]:  # fmt: skip
    """What any training can have of what the runtime settings ask for, in the order in which it is told things.

    `filled`: share of `tokens_per_step` that is computed. `flops_per_token`: 0 where it is not known, and no MFU is told.
    Raises UsageError where something cannot be had.
    """
    run = job.run_directory
    found: list[Callback] = [
        PerformanceMonitor(
            config.tokens_per_step * filled,
            device=ranks.device,
            steps_per_epoch=loader.order.rows / loader.order.rows_per_step,
            flops_per_token=flops_per_token,
            peak_flops=(lambda: peak_flops(precision) * ranks.world) if flops_per_token else None,
        ),
        MetricsFile(run / METRICS),
        ProgressBar(job.progress, config.tokens_per_step, "tokens" if isinstance(config, Training) else "rows"),
        LogLines(),
    ]
    if job.runtime.loggers:
        found.append(Loggers(job.runtime.loggers, run, description(config, job.labels)))
    if job.runtime.guards == "warn":
        found += guards(run / GUARDS, loader)
    return found


def description(config: Training | TaskConfig, labels: Mapping[str, str]) -> dict[str, Any]:
    """What loggers show of a training: project, group, kind and name, and its settings without what looks secret."""
    from ttrain.core.redact import masked

    stage, run = labels.get("stage", "training"), labels.get("run", "")
    settings = flatten(config.model_dump(mode="json"))
    return {
        "project": labels.get("experiment", "ttrain"),
        "group": run or None,
        "kind": stage,
        "name": f"{stage} {run.rpartition('-')[2]}".strip(),
        "config": masked({f"{config.prefix}{name}": value for name, value in settings}),
    }


def language_watchers(
    config: Training, job: Job, *, model: nn.Module, loader: Loader, ranks: Ranks, precision: Precision, rows: Rows,
    encoder: Encoder,
) -> list[Callback]:  # fmt: skip
    """The same for a language model, with its perplexity and, where asked for, what it writes."""
    share = float(rows.lengths().mean()) / rows.row_length if rows.trimmed else 1.0
    flops = flops_per_token(model, config.row_length)
    found = watchers(config, job, loader=loader, ranks=ranks, precision=precision, filled=share, flops_per_token=flops)
    found.append(Perplexity())
    every = job.runtime.sample_every_steps
    if every:
        write = sampler(model, encoder, job.runtime, ranks, documents=isinstance(config, Pretrain))
        found.append(Samples(job.run_directory / "samples", model, write, every=every))
    if job.runtime.eval_every_steps:
        found.append(_evaluations(config, job, model, encoder, ranks, found))
    return found


def _evaluations(
    config: Training, job: Job, model: nn.Module, encoder: Encoder, ranks: Ranks, others: Sequence[Callback]
) -> Evaluations:
    from ttrain.stages import periodic_evaluation  # loads what no other training needs

    return Evaluations(
        model,
        periodic_evaluation.measure_of(config, job, model, encoder, ranks),
        [callback for callback in others if isinstance(callback, MetricsFile | Loggers)],
        every=job.runtime.eval_every_steps,
        tokens_per_step=config.tokens_per_step,
    )


def sampler(
    model: nn.Module, encoder: Encoder, runtime: Runtime, ranks: Ranks, *, documents: bool
) -> Callable[[], Sequence[tuple[str, str]]]:
    """Writes the most likely answer to each prompt: what follows in a document, or what an assistant says."""
    if runtime.parallel == "fsdp" and ranks.world > 1:
        raise UsageError(
            f"runtime.sample_every_steps is {runtime.sample_every_steps}, but with runtime.parallel=fsdp no rank holds a "
            f"whole model that could write; set runtime.sample_every_steps=0, or runtime.parallel=ddp"
        )
    stops = [encoder.eos_id, encoder.end_id]

    def write() -> list[tuple[str, str]]:
        said = []
        for prompt in runtime.sample_prompts:
            ids = chat.prompt_ids(encoder, (chat_templates.Message("user", prompt),))
            if documents:
                ids = [encoder.bos_id, *map(int, encoder.encode([prompt])[0])]
            tokens = greedy_samples.greedy(model, ids, new_tokens=SAMPLE_TOKENS, stop_ids=stops, device=ranks.device)
            said.append((prompt, encoder.decode(tokens)))
        return said

    return write


def is_without_effect(curve: Path) -> bool:
    """Whether the quick validations of a stage end where they began: nearer than two that follow each other usually are, or
    by less than 0.1 % of the perplexity. Only of a stage whose curve has its beginning."""
    from ttrain.store.metric_rows import read_rows

    losses = [(row["step"], row["metrics"][QUICK]) for row in read_rows(curve) if row["metrics"].get(QUICK) is not None]
    if len(losses) < 3 or losses[0][0] != 0:
        return False
    values = [loss for _, loss in losses]
    usual = median(abs(after - before) for before, after in pairwise(values))
    return bool(abs(values[-1] - values[0]) < max(LEAST_CHANGE, usual))
