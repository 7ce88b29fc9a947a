"""Memory and speed of a training step with a large vocabulary: loss in chunks against all logits at once.

    python bench/train_loss.py                                  about 8 minutes on two cores: vocabulary 32,000, sequence 512
    python bench/train_loss.py --tokens 2048 --rounds 1         a quick try

The model is S (hidden 512, 8 layers), in bf16 autocast, one micro-batch of random tokens in records of 180. The plain
side is transformers' model with all logits of the micro-batch and torch's cross entropy; ours comes with its parts one
after the other, and with gradient checkpointing. Each side is a process of its own, with the allocator setting of a
training stage, but for the peak: there freed memory goes back at once, so that the peak is what the step needs.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common
import train_common

VOCAB_SIZE, ROW_LENGTH, RECORD = 32_000, 512, 180
STEPS = 4
MOST_MEMORY = 0.65
SIDES = {
    "plain": "all logits, transformers' layers",
    "chunked": "loss in chunks",
    "ours": "and attention in blocks, fused layers",
    "checkpointed": "and gradient checkpointing",
}


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = train_common.parser(__doc__)
    options.add_argument("--tokens", type=int, default=4096, help="of a micro-batch")
    options.add_argument("--vocabulary", type=int, default=VOCAB_SIZE)
    chosen = options.parse_args()
    table = common.Table()

    def run(side: str, **environment: str) -> common.Cost:
        return train_common.side(__file__, "step", side, chosen.tokens, chosen.vocabulary, **environment)

    timed = common.interleave(
        {side: lambda side=side: run(side, **train_common.allocator()) for side in SIDES}, chosen.rounds
    )
    peaks = {side: [run(side, GLIBC_TUNABLES="glibc.malloc.mmap_threshold=131072")] for side in SIDES}
    plain = common.median(timed["plain"], "seconds"), common.median(peaks["plain"], "grown")
    for side, what in list(SIDES.items())[1:]:
        ours = common.median(timed[side], "seconds"), common.median(peaks[side], "grown")
        table.add(
            f"tokens/s, {what}", f"{chosen.tokens / ours[0]:,.0f}", f"{chosen.tokens / plain[0]:,.0f}", plain[0] / ours[0]
        )
        most = MOST_MEMORY if side == "ours" else None
        table.add(f"MB of a step, {what}", f"{ours[1]:,.0f}", f"{plain[1]:,.0f}", ours[1] / plain[1], most=most)
    train_common.write_json(chosen.json, table, {**timed, **{f"{side}, memory": costs for side, costs in peaks.items()}})
    return int(table.failed)


def side_step(side: str, tokens: str, vocabulary: str) -> dict[str, Any]:
    """Seconds of a forward and backward pass, and MB that the process grows by in them."""
    import torch

    from ttrain.config import Model, Pretrain
    from ttrain.model import factory
    from ttrain.train import kernels, language_modeling
    from ttrain.train.precision import resolve_precision

    device = torch.device("cpu")
    config = Model(hidden_size=512, layers=8, heads=8, max_length=ROW_LENGTH)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    model = factory.build(config, vocab_size=int(vocabulary), ids=ids, stop_ids=[2], seed=1)
    if side in ("plain", "chunked"):
        kernels.block_arguments = lambda model, segments: {}
        language_modeling.fuse = lambda model: None
    task = language_modeling.LanguageModeling(
        Pretrain(), model, chunk_tokens=0 if side == "plain" else None, gradient_checkpointing=side == "checkpointed"
    )
    module = task.build_model().train()
    batch = random_batch(int(tokens), int(vocabulary))
    autocast = resolve_precision("bf16", device).autocast
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)  # every later micro-batch finds gradients to add to
    before, seconds = resident(), []
    for _ in range(STEPS):
        began = time.perf_counter()
        with autocast():
            loss = task.train_step(module, batch, device)
        loss.total.backward()
        seconds.append(time.perf_counter() - began)
    return {"seconds": statistics.median(seconds[1:]), "grown": peak() - before}


def random_batch(tokens: int, vocabulary: int) -> Any:
    """Rows of random ids, in records."""
    import numpy as np

    from ttrain.data.packing import Batch

    shape = (tokens // ROW_LENGTH, ROW_LENGTH)
    ids = np.random.default_rng(0).integers(3, vocabulary, shape)
    places = np.broadcast_to(np.arange(ROW_LENGTH), shape)
    return Batch(ids, ids.copy(), places % RECORD, places // RECORD)


def resident() -> float:
    """MB of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / common.MEGABYTE


def peak() -> float:
    """MB of this process at its largest."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / common.MEGABYTE


if __name__ == "__main__" and not common.requested_side({"step": side_step}):
    sys.exit(main())
