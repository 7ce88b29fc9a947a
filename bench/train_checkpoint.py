"""The step that saves: how long training stands still, and how much slower the steps are while the writer writes.

    python bench/train_checkpoint.py [--megabytes 300 --rounds 7]

A Llama of hidden size 512 and AdamW, whose weights and optimizer state are as large as asked for. Theirs is `torch.save` of
the same and fsync, on the training thread. Each round trains, saves in both ways, and trains beside the writer; the table
holds medians. The first round is not counted: ours gets its memory in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common

ROUNDS = 7
MOST_STALL, MOST_SLOWDOWN = 0.15, 1.2
HIDDEN, INTERMEDIATE, VOCAB, STATE_BYTES = 512, 1408, 6400, 12  # fp32: weight, and two moments, of a parameter
STEPS_ALONE = 4


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=300, help="of weights and optimizer state")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--tokens", type=int, default=256, help="of a step")
    options = parser.parse_args()
    table = common.Table()
    with common.workplace() as directory:
        compare(options, directory, table)
    return int(table.failed)


def compare(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """Both ways to save, and the steps beside the writer."""
    import torch

    from ttrain.train.checkpoint import Checkpoints, SnapshotBuffers, needed_bytes

    model, optimizer = build(options.megabytes)
    ids = torch.randint(0, VOCAB, (1, options.tokens))

    def step() -> float:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    names = {parameter: name for name, parameter in model.named_parameters()}
    checkpoints, buffers = Checkpoints(directory / "ours", files=dict, keep=1), SnapshotBuffers()

    def ours(number: int) -> int:
        states = {f"{key}|{names[p]}": value for p, entries in optimizer.state.items() for key, value in entries.items()}
        snapshot = buffers.take(number, dict(model.named_parameters()), states, {})
        checkpoints.save(snapshot)
        return needed_bytes(snapshot)

    def theirs() -> None:
        with (directory / "theirs.pt").open("wb") as file:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
            file.flush()
            os.fsync(file.fileno())

    step()
    figures: dict[str, list[float]] = {name: [] for name in ("ours", "theirs", "alone", "beside", "durable")}
    size = 0
    for number in range(options.rounds + 1):
        found = {"alone": seconds(lambda: [step() for _ in range(STEPS_ALONE)]) / STEPS_ALONE}
        found["theirs"] = seconds(theirs)
        step()
        began = time.perf_counter()
        size = ours(number + 1)
        found["ours"] = time.perf_counter() - began
        found["beside"], found["durable"] = beside(checkpoints, step, began)
        for name in figures if number else ():
            figures[name].append(found[name])
    checkpoints.close()
    middle = {name: statistics.median(values) for name, values in figures.items()}
    print(f"{size / common.MEGABYTE:.0f} MB; durable after {middle['durable']:.2f} s; the trainer waited "
          f"{checkpoints.waited_seconds + buffers.waited_seconds:.2f} s for the writer")  # fmt: skip
    pairs = (("ms that training stands still, torch.save and fsync", "ours", "theirs", MOST_STALL),
             ("ms of a step, while the writer writes and without", "beside", "alone", MOST_SLOWDOWN))  # fmt: skip
    for what, mine, other, most in pairs:
        ratio = statistics.median(a / b for a, b in zip(figures[mine], figures[other], strict=True))
        table.add(what, f"{1000 * middle[mine]:.1f}", f"{1000 * middle[other]:.1f}", ratio, most=most)


def build(megabytes: int) -> tuple[Any, Any]:
    """A Llama with as many layers as make up the size, and its optimizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = 4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE
    layers = max(1, round((megabytes * common.MEGABYTE / STATE_BYTES - VOCAB * HIDDEN) / layer))
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def beside(checkpoints: Any, step: Callable[[], float], began: float) -> tuple[float, float]:
    """Seconds of a step while the writer writes (those that begin before it is done), and until the writer was done."""
    writing, spent = checkpoints.pending[-1], []
    ended: list[float] = []
    writing.add_done_callback(lambda _: ended.append(time.perf_counter()))
    while not writing.done() or not spent:
        spent.append(seconds(step))
    checkpoints.wait()
    return statistics.mean(spent), ended[0] - began


def seconds(work: Callable[[], Any]) -> float:
    """How long it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
