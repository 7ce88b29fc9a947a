"""Fine-tuning: packed chats against padded ones, LoRA steps against full fine-tuning, preference tuning against TRL.

    python bench/train_finetune.py [--path FILE.jsonl]                 about 20 minutes on two cores
    python bench/train_finetune.py --only sft --rounds 1 --steps 4     a quick try, 2 minutes
    python bench/train_finetune.py --only lora --rounds 1 --steps 2 --tokens 1024
    taskset -c 1 python bench/train_finetune.py --only dpo             with trl, on one core

sft: the model has hidden size 256 and 4 layers, rows have 512 tokens. Chats are cut out of the text, with log-normal
lengths. A useful token is one of a chat, whether learnt or context; padding is not. Ours is `ttrain
stage run sft`, as it is. The peers are bare loops with the allocator setting of the stage, the same model, optimizer and
pieces of chats, shuffled, 8 in a micro-batch, padded to the longest of all or of the micro-batch. They accumulate as many
micro-batches as make a step of about as many chats as ours has.

lora: hidden 512, 8 layers, sequence 512, bf16 autocast, all linear layers, rank 16. A step is one micro-batch of random
tokens in records of 180, the clip and fused AdamW. LoRA and full fine-tuning take turns in one process, step by step, with
the allocator setting of a training stage.

dpo: hidden 128 with a vocabulary of 2,048 (the quickstart's model), then hidden 256; 4 layers, rows of 512 tokens, bf16,
the loss `dpo` with beta 0.1, all weights. Pairs are cut out of the text: a prompt and two answers, each with a log-normal
length. Both sides learn the same pairs once, from the same weights, about as many in a step, with the reference's
log-probabilities computed before. Ours is the stage `dpo`, run in a process of the command; theirs is `trl.DPOTrainer` with
the fastest of several micro-batches, shuffled or grouped by length (its padding_free is not available any more). Seconds
are those of the steps after the first tenth. With `taskset -c 1` both have one core, and CPU seconds count on a busy
machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
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
DPO_SIZES = {
    "quickstart": Size(128, 4, 512, rows_per_step=8, warmup_steps=4, measured_steps=36, vocab_size=2048),
    "hidden-256": Size(256, 4, 512, rows_per_step=8, warmup_steps=4, measured_steps=16),
}
LEAST_OF_TRL, BETA, PAIRS_PER_STEP = 1.5, 0.1, 13
PROMPT_CHARACTERS, ANSWER_CHARACTERS = 300, 200  # medians of the pairs; all that is longer than a row is left out
TRL_CHOICES = tuple(itertools.product((2, 4, 13), ("random", "group_by_length")))


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


def compare_dpo(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Both sizes over the same text."""
    if common.has("trl"):
        text = common.write_text(options, directory)
        for name, size in DPO_SIZES.items():
            _compare_tuning(name, train_common.resized(size, options.steps), options.rounds, text, directory / name, table)


def _compare_tuning(name: str, size: Size, rounds: int, text: Path, root: Path, table: Table) -> None:
    """The two sides take turns in a process of each round; the first one finds the fastest micro-batch of TRL."""
    root.mkdir()
    pairs, texts = root / "pairs.jsonl", root / "texts.jsonl"
    write_pairs(text, size.steps * PAIRS_PER_STEP, pairs, texts)
    # A base of one step: its weights do not change how fast the next stage is.
    settings = [f"data.pretrain={texts}", f"data.dpo={pairs}", "reading.heldout_fraction=0.05",
                f"tokenizer.vocab_size={size.vocab_size}", *train_common.training("pretrain", size, 1),
                *train_common.training("dpo", size, 1), "dpo.tokens=null", "dpo.epochs=1", "dpo.start_from=pretrain",
                f"dpo.beta={BETA}", "dpo.dropped_fraction=1", f"runtime.threads={len(os.sched_getaffinity(0))}"]  # fmt: skip
    names = ("tokenizer", "shards-pretrain", "shards-dpo", "pretrain", "reference")
    _, _, shards, base, reference = train_common.artifacts(root, settings, *names)
    exported = common.measure(export_pairs, json.dumps(settings), shards, base, root / "tokens.jsonl").result
    pairs_per_step = round(exported["pairs"] / exported["rows"] * size.rows_per_step)
    print(f"  dpo, {name}: {exported}, {pairs_per_step} pairs a step")

    def take_turns(count: int, *choices: tuple[int, str]) -> Cost:
        work = (json.dumps(settings), base, shards, reference, root, count, pairs_per_step, json.dumps(choices))
        return common.measure(tune_in_turns, *work, **train_common.allocator())

    rates = [pair_rate(stamps, 2) for stamps in take_turns(exported["pairs"] // 3, *TRL_CHOICES).result["theirs"]]
    for (pairs_per_batch, sampling), rate in zip(TRL_CHOICES, rates, strict=True):
        print(f"  dpo, {name}: trl, {pairs_per_batch} pairs a micro-batch, {sampling}: {rate:.1f} pairs/CPU s")
    best = TRL_CHOICES[rates.index(max(rates))]
    costs = table.interleave({"turns": partial(take_turns, exported["pairs"], best)}, rounds, group=f"dpo {name} ")["turns"]
    for unit, clock in (("s", 1), ("CPU s", 2)):
        ours, theirs = ([pair_rate(cost.result[side][0], clock) for cost in costs] for side in ("ours", "theirs"))
        ratio = statistics.median(our / their for our, their in zip(ours, theirs, strict=True))
        medians = statistics.median(ours), statistics.median(theirs)
        table.ratio(f"dpo, {name}: pairs/{unit}, trl.DPOTrainer", *medians, value=ratio, least=LEAST_OF_TRL)


def pair_rate(stamps: Sequence[Sequence[float]], clock: int) -> float:
    """Pairs a second after the first tenth of the steps; clock 1 is that of the wall, 2 that of the CPU."""
    first, last = stamps[len(stamps) // 10], stamps[-1]
    return float((last[0] - first[0]) / (last[clock] - first[clock]))


def write_pairs(documents: Path, count: int, pairs: Path, texts: Path) -> None:
    """Pairs of a prompt and two answers cut out of the documents, and their text alone."""
    import numpy as np

    generator = np.random.default_rng(2)
    text = "\n".join(common.read_texts(documents))
    medians = np.array([PROMPT_CHARACTERS, ANSWER_CHARACTERS, ANSWER_CHARACTERS])
    lengths = (medians * np.exp(SIGMA * generator.normal(size=(count, 3)))).clip(20, 4 * medians).astype(int)
    with pairs.open("w") as file, texts.open("w") as text_file:
        for row in lengths.tolist():
            starts = generator.integers(0, len(text) - max(row), 3).tolist()
            parts = [text[start : start + length].strip() or "?" for start, length in zip(starts, row, strict=True)]
            file.write(json.dumps(dict(zip(("prompt", "chosen", "rejected"), parts, strict=True))) + "\n")
            text_file.write(json.dumps({"text": "\n".join(parts)}) + "\n")


def export_pairs(settings: str, shards: str, base: str, output: str) -> dict[str, Any]:
    """Write the tokens of all pairs that the stage learns, for the other side; returns how many pairs and rows there are."""
    from ttrain.config.loading import load
    from ttrain.data.encoder import Encoder
    from ttrain.data.preferences import CHOSEN, PROMPT, REJECTED
    from ttrain.stages.rows import open_rows

    rows: Any = open_rows(
        Path(shards) / "train", Encoder(Path(base) / "model", fast=False), load(json.loads(settings)).settings.dpo
    )
    counts = rows.counts()
    lengths = []
    with Path(output).open("w") as file:
        for record in rows._records.tolist():
            ids, _, parts, _ = rows.shards.preference(record)
            prompt, chosen, rejected = (ids[parts == part].tolist() for part in (PROMPT, CHOSEN, REJECTED))
            pair = {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
            lengths.append([len(part) for part in pair.values()])
            file.write(json.dumps({**pair, "length": len(prompt) + max(len(chosen), len(rejected))}) + "\n")
    figures = {name: counts[name] for name in ("pairs", "rows", "fill", "too_long_dropped")}
    return {**figures, "median_tokens": [int(statistics.median(part)) for part in zip(*lengths, strict=True)]}


def tune_in_turns(
    settings: str, base: str, shards: str, reference: str, root: str, pairs: str, pairs_per_step: str, choices: str
) -> dict[str, Any]:
    """The stamps of both sides, one after the other: of ours, and of `trl.DPOTrainer` with each choice of a micro-batch."""
    chosen = [(size, max(1, round(int(pairs_per_step) / size)), sampling) for size, sampling in json.loads(choices)]
    theirs = partial(train_peers.train_with_trl, f"{root}/tokens.jsonl", f"{base}/model", f"{root}/trl")
    with tempfile.TemporaryDirectory(dir=root) as output:
        ours = [tune(settings, base, shards, reference, output)]
    return {"ours": ours, "theirs": [theirs(*choice, int(pairs), BETA)["stamps"] for choice in chosen]}


def tune(settings: str, base: str, shards: str, reference: str, output: str) -> list[tuple[float, ...]]:
    """The stage `dpo` in this process; a stamp is (pairs that are learnt, wall time, CPU seconds), of each micro-batch."""
    import torch

    from ttrain.config import TRAINING_CONFIGS
    from ttrain.config.loading import load
    from ttrain.core.files import ProgressWriter
    from ttrain.stages import dpo
    from ttrain.stages.job import StageContext

    stamps: list[tuple[float, ...]] = []
    task_of = dpo.task_of

    def stamped(*arguments: Any) -> Any:
        task = task_of(*arguments)
        train_step, learnt = task.train_step, [0]

        def step(model: Any, batch: Any, device: Any) -> Any:
            if torch.is_grad_enabled():  # no validation
                stamps.append((learnt[0], time.time(), time.process_time()))
                learnt[0] += len(batch.answer_ids_A) // 2
            return train_step(model, batch, device)

        task.train_step = step
        return task

    loaded = load(json.loads(settings)).settings
    inputs = {"base": Path(base), "shards": Path(shards), "reference": Path(reference)}
    job = StageContext(inputs, {}, {}, Path(output), loaded.runtime, ProgressWriter(None), lambda: False)
    dpo.task_of = stamped
    try:
        dpo.run(TRAINING_CONFIGS["dpo"](dpo=loaded.dpo), job)
    finally:
        dpo.task_of = task_of
    return stamps


if __name__ == "__main__":
    common.main(str(__doc__), {"sft": compare_sft, "lora": compare_lora, "dpo": compare_dpo}, options=options)
