"""Fine-tuning: packed chats against padded ones, and LoRA steps against full fine-tuning.

    python bench/train_finetune.py [--path FILE.jsonl]                 about 20 minutes on two cores
    python bench/train_finetune.py --only sft --rounds 1 --steps 4     a quick try, 2 minutes
    python bench/train_finetune.py --only lora --rounds 1 --steps 2 --tokens 1024

sft: the model has hidden size 256 and 4 layers, rows have 512 tokens. Chats are cut out of the text, with log-normal
lengths. A useful token is one of a chat, whether learnt or context; padding is not. Ours is `ttrain
stage run sft`, as it is. The peers are bare loops with the allocator setting of the stage, the same model, optimizer and
pieces of chats, shuffled, 8 in a micro-batch, padded to the longest of all or of the micro-batch. They accumulate as many
micro-batches as make a step of about as many chats as ours has.

lora: hidden 512, 8 layers, sequence 512, bf16 autocast, all linear layers, rank 16. A step is one micro-batch of random
tokens in records of 180, the clip and fused AdamW. LoRA and full fine-tuning take turns in one process, step by step, with
the allocator setting of a training stage.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
import train_peers
from common import Cost, Table
from train_common import ROW_LENGTH, Size

LEAST_OF_PADDED = {"maximum": 3.0, "dynamic": 1.9}
LEAST_FILL, LEAST_LORA = 0.99, 1.1
SIZE = Size(256, 4, 512, rows_per_step=8, warmup_steps=4, measured_steps=20)
CHATS_PER_BATCH = 8
STEPS_SHARE = {"maximum": 1 / 6, "dynamic": 1 / 3}  # of our steps: theirs take longer
CHATS, MEDIAN_CHARACTERS, SIGMA, QUESTION_FRACTION, CHARACTERS = 8000, 400, 0.8, 0.3, (60, 2000)
LORA_STEPS = 5


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    train_common.options(parser)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step of the LoRA sides")


def compare_sft(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Interleaved rounds; in each round the padded sides take other chats."""
    size = train_common.resized(SIZE, options.steps)
    chats, texts = directory / "chats.jsonl", directory / "texts.jsonl"
    write_chats(common.write_text(options, directory), chats, texts)
    # A base of one step: its weights do not change how fast the next stage is.
    settings = [f"data.pretrain={texts}", f"data.sft={chats}", f"tokenizer.vocab_size={size.vocab_size}",
                *train_common.training("pretrain", size, 1), *train_common.training("sft", size, size.steps)]  # fmt: skip
    names = ("tokenizer", "shards-pretrain", "shards-sft", "pretrain")
    tokenizer, _, shards, _ = train_common.artifacts(directory, settings, *names)
    rows = train_common.export("sft", directory, [*settings, "sft.packing=none"], shards, tokenizer)
    packed: dict[str, Any] = {}  # how the stage packs the chats
    seeds = itertools.count()

    def train_packed() -> Cost:
        cost = train_common.stage("sft", directory, settings)
        packed.update(cost.result["manifest"]["rows"])
        return cost

    def train_padded(width: str) -> Cost:
        accumulated = max(1, round(size.rows_per_step * packed["pieces"] / packed["rows"] / CHATS_PER_BATCH))
        steps = max(2, round(size.steps * STEPS_SHARE[width]))
        work = (rows, directory / "config", CHATS_PER_BATCH, accumulated, steps, width, next(seeds))
        return common.measure(train_peers.train_padded, *work, **train_common.allocator())

    sides = {"packed": train_packed, **{width: partial(train_padded, width) for width in STEPS_SHARE}}
    costs = table.interleave(sides, options.rounds)
    fill = 1 - packed["pad_fraction"]
    ours = train_common.median_rate(costs["packed"], size) * fill
    table.value("sft: fraction of useful tokens in packed rows", fill, least=LEAST_FILL)
    for side, least in LEAST_OF_PADDED.items():
        tokens, positions = (sum(sum(cost.result[name]) for cost in costs[side]) for name in ("useful", "positions"))
        print(f"  padding to the {side} length: {tokens / positions:.3f} of the positions useful")
        theirs = statistics.median(map(padded_rate, costs[side]))
        table.ratio(f"sft: useful tokens/s, packed, {side} padding", ours, theirs, least=least)


def padded_rate(cost: Cost) -> float:
    """Useful tokens a second after the first third of the steps."""
    stamps, useful = cost.result["stamps"], cost.result["useful"]
    first = max(1, len(stamps) // 3)
    return sum(useful[first * cost.result["accumulated"] :]) / (stamps[-1][1] - stamps[first - 1][1])


def write_chats(documents: Path, chats: Path, texts: Path) -> None:
    """Chats of a question and an answer cut out of the documents, and their text alone."""
    import numpy as np

    generator = np.random.default_rng(1)
    text = "\n".join(common.read_texts(documents))
    lengths = np.exp(generator.normal(np.log(MEDIAN_CHARACTERS), SIGMA, CHATS)).clip(*CHARACTERS).astype(int)
    with chats.open("w") as file, texts.open("w") as text_file:
        for length in lengths.tolist():
            start = int(generator.integers(0, len(text) - length))
            middle = start + int(QUESTION_FRACTION * length)
            turns = {"user": text[start:middle].strip() or "?", "assistant": text[middle : start + length].strip() or "?"}
            messages = [{"role": role, "content": content} for role, content in turns.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
            text_file.write(json.dumps({"text": "\n".join(turns.values())}) + "\n")


def compare_lora(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Steps of both sides in one process a round."""
    arguments, environment = (options.tokens, options.steps or LORA_STEPS), train_common.allocator()
    costs = table.interleave({"lora": lambda: common.measure(time_steps, *arguments, **environment)}, options.rounds)["lora"]
    rates = (options.tokens / common.median(costs, side) for side in ("lora", "full"))
    table.ratio("lora: tokens/s, LoRA, full fine-tuning", *rates, least=LEAST_LORA)


def time_steps(tokens: str, steps: str) -> dict[str, float]:
    """Median seconds of a step of each side."""
    sides = {side: partial(common.timed, build_step(side, int(tokens))) for side in ("lora", "full")}
    return {side: common.median(costs, "wall") for side, costs in common.interleave(sides, int(steps), warmups=1).items()}


def build_step(side: str, tokens: int) -> Callable[[], None]:
    """The training step of a side."""
    import torch

    from ttrain.config import Lora
    from ttrain.model import adapters
    from ttrain.train.language_modeling import LanguageModeling

    model = train_common.random_model(512, 8, ROW_LENGTH)
    batch = train_common.random_batch(tokens)
    task = LanguageModeling(Lora(), adapters.attach(model, Lora()) if side == "lora" else model)
    module = task.build_model().train()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.train_step(module, batch, torch.device("cpu")).total
        (loss / tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    common.main(str(__doc__), {"sft": compare_sft, "lora": compare_lora}, options=options)
