"""Tokens a second and memory of a pretraining stage against other trainers, and what runtime.tune=auto finds.

    python bench/train_speed.py [--size S] [--path FILE.jsonl]     about 25 minutes on two cores: S 19, T 5
    python bench/train_speed.py --only speed --size tiny --rounds 1 --sides plain,bare
    python bench/train_speed.py --only tune [--size Q]                    4 minutes

speed: S and T are models of hidden size 512 and 256, Q is the quickstart's, see SIZES in train_common.py. All sides have
AdamW, bf16 autocast over fp32 weights where the CPU has bf16 (else fp32), the same rows and the same tokens a step. `plain`
is `ttrain stage run pretrain` as it is: tracking, curves, log, progress, checkpoints (on T every 20 steps, five times as
often as by default), documents kept apart by a mask; `ranks` is one rank a core, `compiled` has
runtime.compile. `bare` is a loop with the allocator setting and the same mask, `transformers` is
transformers.Trainer (needs `pip install accelerate`) as its users run it, `peak` the fastest matmul in the same number
format. On T, plain and bare alone are compared.

tune: seconds of a step with what runtime.tune=auto chooses within its minute, against the fastest of all choices, both
measured once more in turns; without the optimizer, without compiling.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import common
import train_common
import train_peers
from common import Cost, Costs, Table
from train_common import CORES, SIZES, Size

LEAST_BARE, LEAST_TRANSFORMERS, LEAST_RANKS, LEAST_FLOPS, MOST_MEMORY = 0.98, 1.15, 1.1, 0.55, 0.65
MOST_TUNED = 1.03
SIDES = ("plain", "ranks", "compiled", "bare", "transformers", "peak")
T_SIDES = ("plain", "bare")


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    train_common.options(parser)
    parser.add_argument("--size", choices=sorted(SIZES), help="only this one; default: S and T")
    parser.add_argument("--sides", help=f"only these, with commas: {', '.join(SIDES)}")


def compare_speed(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """All sides on the same rows, for each size."""
    text = common.write_text(options, directory)
    for name in [options.size] if options.size else ["S", "T"]:
        size = train_common.resized(SIZES[name], options.steps)
        settings = [f"data.pretrain={text}", f"tokenizer.vocab_size={size.vocab_size}"]
        inputs = train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
        add_lines(name, size, run_sides(name, size, options, directory, settings, inputs, table), table)


def run_sides(
    name: str,
    size: Size,
    options: argparse.Namespace,
    directory: Path,
    settings: Sequence[str],
    inputs: Sequence[str],
    table: Table,
) -> Costs:
    """All sides of a size, interleaved."""
    settings = [*settings, *train_common.training("pretrain", size, size.steps)]
    tokenizer, shards = inputs
    rows = train_common.export("pretrain", directory, settings, shards, tokenizer)
    work = (rows, directory / "config", size.rows_per_step, size.steps)
    ranks = [f"runtime.devices={CORES}", f"runtime.rows_per_device={max(1, size.rows_per_step // CORES)}"]

    def ours(*changes: str) -> Cost:
        compiler_cache = str(directory / f"inductor-{name}")
        return train_common.stage("pretrain", directory, [*settings, *changes], TORCHINDUCTOR_CACHE_DIR=compiler_cache)

    def transformers() -> Cost:
        shutil.rmtree(directory / "transformers", ignore_errors=True)
        arguments = (*work, directory / "transformers", 1e-3, "constant_with_warmup")
        return common.measure(train_peers.train_with_transformers, *arguments)

    sides: dict[str, Callable[[], Cost]] = {
        "plain": ours,
        "ranks": lambda: ours(*ranks),
        "compiled": lambda: ours("runtime.compile=true"),
        "bare": lambda: common.measure(train_peers.train_bare, *work, **train_common.allocator()),
        "transformers": transformers,
        "peak": lambda: common.measure(train_peers.matmul_peak),
    }
    # The plain stage comes first: it leaves the config.json of the model for the peers.
    chosen = {"plain", *(options.sides.split(",") if options.sides else T_SIDES if name == "T" else SIDES)}
    if "transformers" in chosen and not common.has("accelerate"):
        chosen.remove("transformers")
    return table.interleave({side: sides[side] for side in SIDES if side in chosen}, options.rounds, group=f"{name} ")


def add_lines(name: str, size: Size, costs: Costs, table: Table) -> None:
    """The lines of one size."""
    rates = {side: train_common.median_rate(rounds, size) for side, rounds in costs.items() if side != "peak"}
    memory = {side: common.median(rounds, "memory") for side, rounds in costs.items()}
    for side, rate in rates.items():
        values = sorted(train_common.rate(cost, size) for cost in costs[side])
        print(f"  {name}, {side}: {rate:,.0f} tokens/s ({values[0]:,.0f} to {values[-1]:,.0f} in {len(values)} rounds), "
              f"largest process {memory[side]:,.0f} MB")  # fmt: skip
    for side, base, least in (
        ("plain", "bare", LEAST_BARE), ("plain", "transformers", LEAST_TRANSFORMERS), ("ranks", "plain", LEAST_RANKS),
        ("compiled", "plain", 0),
    ):  # fmt: skip
        if side in rates and base in rates:
            table.ratio(f"{name}: tokens/s, {side}, {base}", rates[side], rates[base], least=least)
    if "transformers" in memory:
        label = f"{name}: MB of the process, plain, transformers"
        table.ratio(label, memory["plain"], memory["transformers"], most=MOST_MEMORY)
    if "peak" in costs:
        peak = common.median(costs["peak"], "flops") / 1e9
        for side in [side for side in ("plain", "bare", "transformers") if side in rates]:
            least = LEAST_FLOPS if side == "plain" else 0
            flops = rates[side] * size.flops_per_token / 1e9
            table.ratio(f"{name}: GFLOP/s, {side}, matmul", flops, peak, least=least)


class RandomRows:
    """Rows of random ids in records, by number."""

    def __init__(self, length: int, vocab_size: int) -> None:
        self.length, self.vocab_size = length, vocab_size

    def __len__(self) -> int:
        return 4096

    def batch(self, numbers: Any) -> Any:
        """Rows of the same number are the same."""
        import numpy as np

        from ttrain.data.packing import Batch

        ids = np.stack([np.random.default_rng(int(row)).integers(3, self.vocab_size, self.length) for row in numbers])
        places = np.broadcast_to(np.arange(self.length), ids.shape)
        every = train_common.RECORD_TOKENS
        return Batch(ids, ids.copy(), places % every, places // every)


def compare_tuned(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """What the search finds, against all choices."""
    name = options.size or "T"
    cost = common.measure(search_choices, name, options.rounds, **train_common.allocator())
    result = cost.result
    print(f"  {name}: {result['choice']} after {result['seconds']:.0f} s; of {result['choices']} choices the fastest is "
          f"{result['best']}; the settings take {result['start']:.3f} s a step")  # fmt: skip
    table.ratio(f"{name}: s of a step, tuned, the fastest choice", result["tuned"], result["fastest"], most=MOST_TUNED)


def search_choices(name: str, rounds: str) -> dict[str, Any]:
    """Seconds of a step of the settings, of what the search chose, and of the fastest of all choices."""
    import torch

    from ttrain.config import Pretrain
    from ttrain.data.loader import ShuffledOrder
    from ttrain.store.tunings import Choice
    from ttrain.train import tuning
    from ttrain.train.distributed import Ranks
    from ttrain.train.language_modeling import LanguageModeling
    from ttrain.train.precision import resolve_precision

    torch.set_num_threads(CORES)
    size, device = SIZES[name], torch.device("cpu")
    rows = RandomRows(size.row_length, size.vocab_size)
    model = train_common.random_model(size.hidden, size.layers, size.row_length, vocab_size=size.vocab_size)
    subject = tuning.Subject(
        LanguageModeling(Pretrain(), model), rows, ShuffledOrder(len(rows), size.rows_per_step, len(rows), 1),
        resolve_precision("auto", device), Ranks(0, 1, device),
    )  # fmt: skip
    start = Choice(size.rows_per_step, "records", 512, False)
    axes = tuning.axes_of(start, fixed=frozenset({"compile"}), rows=size.rows_per_step, row_length=size.row_length)
    began = time.monotonic()
    choice = tuning.tune(subject, start, axes, {}, home=None, stop=lambda: False)
    seconds = time.monotonic() - began
    names = [axis.name for axis in axes]
    choices = [replace(start, **dict(zip(names, values, strict=True))) for values in product(*(a.values for a in axes))]
    taken = {one: subject.seconds_of_a_step(one) for one in choices}
    best = min(taken, key=taken.__getitem__)
    turns: dict[Choice, list[float]] = {one: [] for one in (start, choice, best)}
    for _ in range(int(rounds)):
        for one, times in turns.items():
            times.append(subject.seconds_of_a_step(one))
    figures = {label: min(turns[one]) for label, one in (("start", start), ("tuned", choice), ("fastest", best))}
    return {**figures, "choice": str(choice), "best": str(best), "choices": len(choices), "seconds": seconds}


if __name__ == "__main__":
    common.main(str(__doc__), {"speed": compare_speed, "tune": compare_tuned}, default="speed", rounds=5, options=options)
