"""`runtime.tune=auto` of a stage: the settings of `runtime` that are fastest here, measured or remembered."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import cuda

from ttrain.config import Runtime
from ttrain.core.machine import VERSION, processor, versions
from ttrain.data.loader import Order
from ttrain.data.packing import Rows
from ttrain.model.factory import count_parameters
from ttrain.stages.job import StageContext
from ttrain.stages.trainable_model import compiles
from ttrain.store.tunings import Choice
from ttrain.train import tuning
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import default_chunk_tokens
from ttrain.train.precision import Precision

TUNED = tuple(field.name for field in fields(Choice))
SHAPE = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "num_experts", "num_local_experts",
)  # fmt: skip
SETTINGS = (
    "rows_per_device", "attention", "loss_chunk_tokens", "compile", "gradient_checkpointing", "memory_limit_gb", "threads",
)  # fmt: skip
LIBRARIES = ("torch", "transformers", "peft")

log = logging.getLogger("ttrain")


def tuned(
    task: LanguageModeling, rows: Rows, order: Order, job: StageContext, ranks: Ranks, precision: Precision
) -> Runtime:
    """The stage's runtime settings; with `tune=auto` those that are fastest here, as which the task is configured too.

    Every axis changes the order of sums, and so the last bits of the weights: in deterministic mode nothing is tuned.
    """
    runtime = job.runtime
    if runtime.tune == "off" or order.steps == 0:
        return runtime
    if reason := _reason_against(runtime, ranks):
        log.warning("runtime.tune is auto, but nothing is tuned: %s", reason)
        return runtime
    rows_of_a_rank = -(-order.rows_per_step // ranks.world)
    chunk_tokens = runtime.loss_chunk_tokens
    start = Choice(
        min(runtime.rows_per_device, rows_of_a_rank),
        "masked" if runtime.attention == "masked" else "records",
        default_chunk_tokens(ranks.device) if chunk_tokens is None else chunk_tokens,
        compiles(runtime, ranks.device, rows, order.steps),
    )
    values = {
        "attention": runtime.attention != "auto",
        "loss_chunk_tokens": chunk_tokens is not None,
        "compile": runtime.compile is not None or rows.trimmed,
    }
    fixed = frozenset(name for name, is_fixed in values.items() if is_fixed)
    axes = tuning.axes_of(start, fixed=fixed, rows=rows_of_a_rank, row_length=rows.row_length)
    choice = tuning.tune(
        tuning.Subject(task, rows, order, precision, ranks),
        start,
        axes,
        _described(task, rows, order, runtime, ranks, precision),
        home=job.home,
        stop=job.stop_requested,
    )
    task.build_model().configure(choice.loss_chunk_tokens, choice.attention)
    return runtime.model_copy(update=vars(choice))


def _reason_against(runtime: Runtime, ranks: Ranks) -> str | None:
    """Why nothing can be tuned, with the setting to change."""
    if runtime.deterministic:
        return "each choice would change the last bits of the weights; set runtime.deterministic=false"
    if runtime.parallel == "fsdp" and ranks.world > 1:
        return "a model that is sharded cannot be measured on one rank; set runtime.parallel=ddp"
    if runtime.reduction == "tree":
        return "runtime.reduction is tree, which promises equal bits; set runtime.reduction=fast"
    return None


def _described(
    task: LanguageModeling, rows: Rows, order: Order, runtime: Runtime, ranks: Ranks, precision: Precision
) -> Mapping[str, Any]:
    """All on which the fastest choice depends, as JSON: another machine, shape, version or setting is measured anew."""
    module = task.build_model()
    causal: Any = module.causal
    installed = versions()
    is_cuda = ranks.device.type == "cuda"
    return {
        "processor": processor(),
        "device": cuda.get_device_name(ranks.device) if is_cuda else ranks.device.type,
        "ranks": ranks.world,
        "versions": {"ttrain": VERSION, **{name: installed.get(name) for name in LIBRARIES}},
        "model": type(causal).__name__,
        "shape": {name: value for name in SHAPE if isinstance(value := getattr(causal.config, name, None), int)},
        "parameters": count_parameters(module),
        "trained": count_parameters(module, trained=True),
        "row_length": rows.row_length,
        "trimmed": rows.trimmed,
        "rows_per_step": order.rows_per_step,
        "steps": 1 << order.steps.bit_length(),  # about: whether compiling pays
        "precision": precision.word,
        "settings": {name: getattr(runtime, name) for name in SETTINGS},
    }
