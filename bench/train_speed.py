"""Tokens a second and memory of pretraining against other trainers, and runtime.tune=auto.

    python bench/train_speed.py [--size S] [--path FILE.jsonl]     about 35 minutes on two cores
    python bench/train_speed.py --size tiny --rounds 1 --sides plain,bare
    python bench/train_speed.py --only tune --size Q               1 minute

speed: S is a model of hidden size 512, Q the quickstart's, see SIZES in train_common.py. All sides
have AdamW, bf16 autocast over fp32 weights where the CPU has bf16 (else fp32), the same rows and
the same tokens a step. `plain` is `ttrain stage run pretrain` as it is: tracking, curves, log,
progress, checkpoints, documents kept apart by a mask; `compiled` has runtime.compile. `bare` is a
loop with the allocator setting and the same mask, `transformers` is transformers.Trainer (needs
`pip install accelerate`) as its users run it.

tune: seconds of a step with the rows_per_device that runtime.tune=auto chooses, against the fastest
of all sizes, measured once more in turns; without the optimizer, without compiling.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
import train_peers
from common import Cost, Table
from train_common import CORES, SIZES, Size

# Side, what it is compared with, and the least ratio of their tokens a second.
COMPARED = (("plain", "bare", 0.98), ("plain", "transformers", 1.15), ("compiled", "plain", 0))
MOST_MEMORY = 0.65
MOST_TUNED = 1.1
SIDES = ("plain", "compiled", "bare", "transformers")


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    train_common.options(parser)
    parser.add_argument("--size", choices=sorted(SIZES), default="S")
    parser.add_argument("--sides", default=",".join(SIDES), help="only these, with commas")


def compare_speed(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """All sides on the same rows."""
    name = options.size
    size = train_common.resized(SIZES[name], options.steps)
    # The plain stage comes first: it leaves the config.json of the model for the peers.
    chosen = {"plain", *options.sides.split(",")}
    if "transformers" in chosen and not common.has("accelerate"):
        chosen.remove("transformers")
    sides = sides_of(size, common.write_text(options, directory), directory)
    costs = table.interleave(
        {side: run for side, run in sides.items() if side in chosen}, options.rounds
    )
    rates = {side: train_common.median_rate(rounds, size) for side, rounds in costs.items()}
    memory = {side: common.median(rounds, "memory") for side, rounds in costs.items()}
    for side, rate in rates.items():
        print(f"  {name}, {side}: {rate:,.0f} tokens/s, largest process {memory[side]:,.0f} MB")
    for side, base, least in COMPARED:
        if side in rates and base in rates:
            table.ratio(f"{name}: tokens/s, {side}, {base}", rates[side], rates[base], least=least)
    if "transformers" in memory:
        label = f"{name}: MB of the process, plain, transformers"
        table.ratio(label, memory["plain"], memory["transformers"], most=MOST_MEMORY)


def sides_of(size: Size, text: Path, directory: Path) -> dict[str, Callable[[], Cost]]:
    """All sides, which get the same rows."""
    settings = [
        f"data.pretrain={text}",
        f"tokenizer.vocab_size={size.vocab_size}",
        *train_common.training("pretrain", size, size.steps),
    ]
    tokenizer, shards = train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
    rows = train_common.export("pretrain", directory, settings, shards, tokenizer)
    work = (rows, directory / "config", size.rows_per_step, size.steps)

    def ours(*changes: str) -> Cost:
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(directory / "inductor")}
        return train_common.stage("pretrain", directory, [*settings, *changes], **environment)

    def transformers() -> Cost:
        shutil.rmtree(directory / "transformers", ignore_errors=True)
        arguments = (*work, directory / "transformers", 1e-3, "constant_with_warmup")
        return common.measure(train_peers.train_with_transformers, *arguments)

    return {
        "plain": ours,
        "compiled": lambda: ours("runtime.compile=true"),
        "bare": lambda: common.measure(train_peers.train_bare, *work, **train_common.allocator()),
        "transformers": transformers,
    }


class RandomRows:
    """Rows of random ids in records of about 180 tokens."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def __len__(self) -> int:
        return 4096

    def batch(self, numbers: Any) -> Any:
        """The batch of rows that begin with the same number is the same."""
        records = max(1, round(self.size.row_length / 180))
        shape = (len(numbers), self.size.row_length)
        return train_common.random_batch(shape, records, self.size.vocab_size, seed=int(numbers[0]))


def compare_tuned(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """What the search finds, against all sizes."""
    name = options.size
    result = common.measure(search_sizes, name, options.rounds, **train_common.allocator()).result
    print(
        f"  {name}: rows_per_device={result['size']} after {result['seconds']:.0f} s; "
        f"the fastest is {result['best']}"
    )
    table.ratio(
        f"{name}: s of a step, tuned, the fastest size",
        result["tuned"],
        result["fastest"],
        most=MOST_TUNED,
    )


def search_sizes(name: str, rounds: str) -> dict[str, Any]:
    """Seconds of a step with what the search chose, and with the fastest of all sizes."""
    import torch

    from ttrain.config import Pretrain
    from ttrain.data.order import ShuffledOrder
    from ttrain.tasks.common import tuning
    from ttrain.train.distributed import Ranks
    from ttrain.train.language_modeling import LanguageModeling
    from ttrain.train.precision import resolve_precision

    torch.set_num_threads(CORES)
    size = SIZES[name]
    device = torch.device("cpu")
    rows = RandomRows(size)
    ranks = Ranks(0, 1, device)
    task = LanguageModeling(Pretrain(), train_common.random_model(size))
    order = ShuffledOrder(len(rows), size.rows_per_step, len(rows), 1)
    measure = partial(
        tuning.step_seconds, task, rows, order, resolve_precision("auto", device), ranks
    )
    began = time.monotonic()
    chosen = tuning.fastest(measure, order, ranks)
    seconds = time.monotonic() - began
    most = order.rows_per_step
    sizes = sorted({most, *(1 << power for power in range(most.bit_length()))})
    turns: dict[int, list[float]] = {each: [] for each in sizes}
    for _ in range(int(rounds)):
        for each, times in turns.items():
            times.append(measure(each))
    least = {each: min(times) for each, times in turns.items()}
    best = min(least, key=least.__getitem__)
    return {
        "size": chosen,
        "best": best,
        "tuned": least[chosen],
        "fastest": least[best],
        "seconds": seconds,
    }


if __name__ == "__main__":
    common.main(
        str(__doc__),
        {"speed": compare_speed, "tune": compare_tuned},
        default="speed",
        rounds=5,
        options=options,
    )
