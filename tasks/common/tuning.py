"""`runtime.tune=auto` of a stage: the rows of a micro-batch that are fastest, measured once."""

import logging
from pathlib import Path

import torch

from ttrain.config import Runtime
from ttrain.core.files import PRIVATE_FILE, read_object, write_json
from ttrain.core.hashing import digest_of
from ttrain.core.machine import processor, versions
from ttrain.data.order import Order
from ttrain.data.packing import Rows
from ttrain.model.factory import count_parameters
from ttrain.tasks.common.job import StageContext
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.micro_batches import fastest, step_seconds
from ttrain.train.precision import Precision

FILE = Path("cache", "tuning.json")  # in the home: {digest of what was measured: rows_per_device}
SETTINGS = {
    "attention",
    "loss_chunk_tokens",
    "compile",
    "gradient_checkpointing",
    "memory_limit_gb",
    "threads",
}

log = logging.getLogger("ttrain")


def tuned(
    task: LanguageModeling,
    rows: Rows,
    order: Order,
    job: StageContext,
    ranks: Ranks,
    precision: Precision,
) -> Runtime:
    """The stage's runtime settings; with `tune=auto` with the `rows_per_device` that is fastest
    here.

    It changes the order of sums, and so the last bits of the weights: not in deterministic mode.
    """
    runtime = job.runtime
    if runtime.tune == "off" or order.steps == 0:
        return runtime
    if runtime.deterministic or (runtime.parallel == "fsdp" and ranks.world > 1):
        log.warning(
            "runtime.tune is auto, but nothing is tuned: it would change the last bits of the "
            "weights, "
            "and shards of a model cannot be measured; "
            "set runtime.deterministic=false runtime.parallel=ddp"
        )
        return runtime
    model = task.build_model()
    # Another machine, shape, version or setting is measured again.
    key = digest_of(
        [
            processor(),
            torch.cuda.get_device_name(ranks.device)
            if ranks.device.type == "cuda"
            else ranks.device.type,
            ranks.world,
            versions(),
            precision.word,
            type(model.causal).__name__,
            [count_parameters(model), count_parameters(model, trained=True)],
            [rows.row_length, order.rows_per_step],
            runtime.model_dump(mode="json", include=SETTINGS),
        ]
    )
    path = job.home / FILE if job.home and ranks.first else None
    remembered = read_object(path) if path else {}
    rows_per_device = int(ranks.sum([float(remembered.get(key, 0))])[0])
    if not rows_per_device:
        rows_per_device = fastest(
            lambda size: step_seconds(task, rows, order, precision, ranks, size), order, ranks
        )
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, {**remembered, key: rows_per_device}, PRIVATE_FILE)
    log.info("tuning: rows_per_device=%d", rows_per_device)
    return runtime.model_copy(update={"rows_per_device": rows_per_device})
