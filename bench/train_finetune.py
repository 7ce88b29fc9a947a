"""Fine-tuning on packed chats against padded ones: useful tokens a second.

    python bench/train_finetune.py [--path FILE.jsonl]          about 10 minutes on two cores
    python bench/train_finetune.py --rounds 1 --steps 4         a quick try, 2 minutes

The model has hidden size 256 and 4 layers, rows have 512 tokens. Chats are cut out of the text,
with log-normal lengths. A useful token is one of a chat, whether learnt or context; padding is not.
Ours is `ttrain stage run sft`, as it is. The peers are bare loops with the allocator setting of the
stage, the same model, optimizer and pieces of chats, shuffled, 8 in a micro-batch, padded to the
longest of all or of the micro-batch. They accumulate as many micro-batches as make a step of about
as many chats as ours has.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
import train_peers
from common import Cost, Table
from train_common import Size

LEAST_OF_PADDED = {"maximum": 3.0, "dynamic": 1.9}
LEAST_FILL = 0.99
SIZE = Size(256, 4, 512, rows_per_step=8, warmup_steps=4, measured_steps=20)
CHATS_PER_BATCH = 8
STEPS_SHARE = {"maximum": 1 / 6, "dynamic": 1 / 3}  # of our steps: theirs take longer
CHATS = 8000
MEDIAN_CHARACTERS = 400
SIGMA = 0.8
QUESTION_FRACTION = 0.3
CHARACTERS = (60, 2000)


def compare_sft(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Interleaved rounds; in each round the padded sides take other chats."""
    size = train_common.resized(SIZE, options.steps)
    chats = directory / "chats.jsonl"
    texts = directory / "texts.jsonl"
    write_chats(common.write_text(options, directory), chats, texts)
    # A base of one step: its weights do not change how fast the next stage is.
    settings = [
        f"data.pretrain={texts}",
        f"data.sft={chats}",
        f"tokenizer.vocab_size={size.vocab_size}",
        *train_common.training("pretrain", size, 1),
        *train_common.training("sft", size, size.steps),
    ]
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
        accumulated = max(
            1, round(size.rows_per_step * packed["pieces"] / packed["rows"] / CHATS_PER_BATCH)
        )
        steps = max(2, round(size.steps * STEPS_SHARE[width]))
        work = (rows, directory / "config", CHATS_PER_BATCH, accumulated, steps, width, next(seeds))
        return common.measure(train_peers.train_padded, *work, **train_common.allocator())

    sides = {
        "packed": train_packed,
        **{width: partial(train_padded, width) for width in STEPS_SHARE},
    }
    costs = table.interleave(sides, options.rounds)
    fill = 1 - packed["pad_fraction"]
    ours = train_common.median_rate(costs["packed"], size) * fill
    table.value("sft: fraction of useful tokens in packed rows", fill, least=LEAST_FILL)
    for side, least in LEAST_OF_PADDED.items():
        theirs = statistics.median(map(padded_rate, costs[side]))
        table.ratio(f"sft: useful tokens/s, packed, {side} padding", ours, theirs, least=least)


def padded_rate(cost: Cost) -> float:
    """Useful tokens a second after the first third of the steps."""
    stamps = cost.result["stamps"]
    useful = cost.result["useful"]
    first = max(1, len(stamps) // 3)
    return sum(useful[first:]) / (stamps[-1][1] - stamps[first - 1][1])


def write_chats(documents: Path, chats: Path, texts: Path) -> None:
    """Chats of a question and an answer cut out of the documents, and their text alone."""
    import numpy as np

    generator = np.random.default_rng(1)
    text = "\n".join(common.read_texts(documents))
    lengths = (
        np.exp(generator.normal(np.log(MEDIAN_CHARACTERS), SIGMA, CHATS))
        .clip(*CHARACTERS)
        .astype(int)
    )
    with chats.open("w") as file, texts.open("w") as text_file:
        for length in lengths.tolist():
            start = int(generator.integers(0, len(text) - length))
            middle = start + int(QUESTION_FRACTION * length)
            turns = {
                "user": text[start:middle].strip() or "?",
                "assistant": text[middle : start + length].strip() or "?",
            }
            messages = [{"role": role, "content": content} for role, content in turns.items()]
            file.write(json.dumps({"messages": messages}) + "\n")
            text_file.write(json.dumps({"text": "\n".join(turns.values())}) + "\n")


if __name__ == "__main__":
    common.main(str(__doc__), {"sft": compare_sft}, options=train_common.options)
