"""Tokens a second and peak memory of a pretraining stage, against a bare loop, `transformers.Trainer` and `litgpt`.

    python bench/train_speed.py [--size S] [--path FILE.jsonl]          about 22 minutes on two cores: S 17, T 5
    python bench/train_speed.py --size tiny --rounds 1                  a quick try, 3 minutes

S and T are models of hidden size 512 and 256, see SIZES in train_common.py. `transformers.Trainer` needs `pip install
accelerate`, and `litgpt` an environment of its own, for it wants older libraries: `--litgpt-python` names its interpreter. A
side that cannot be had is left out, and the run says so.

All sides have AdamW, bf16 autocast over fp32 weights, the same rows and the same tokens a step. Ours is `ttrain stage run
pretrain` as it is: tracking, curves, log, progress, checkpoints (on T every 20 steps, five times as often as by default;
on S none falls into the few steps that are measured) and documents kept apart by a mask. The bare loop has the allocator
setting and the same mask, or, for comparison, none. The peers run as their users run them: no mask, no allocator setting.
Which way of running ours is fastest on S (compiled, a rank a core, both, neither) is tried in the first round; the later
rounds repeat that one, the plain one and the one with ranks.
"""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common
import train_common
from train_common import CORES, PEERS, SIZES, Size

LEAST_BARE, LEAST_TRANSFORMERS, LEAST_LITGPT, LEAST_RANKS, LEAST_FLOPS, MOST_MEMORY = 0.98, 1.15, 1.05, 1.1, 0.55, 0.65
PLAIN, RANKS, COMPILED, BOTH = "plain", f"{CORES} ranks", "compiled", f"compiled, {CORES} ranks"
Costs = dict[str, list[common.Cost]]


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    parser = train_common.parser(__doc__)
    parser.add_argument("--size", choices=sorted(SIZES), help="only this one; default: S and T")
    parser.add_argument("--litgpt-python", default=sys.executable, help="interpreter with litgpt; default: this one")
    parser.add_argument(
        "--sides", help="only these, with commas: variants of ours, bare, causal, transformers, litgpt, peak"
    )
    options = parser.parse_args()
    table, costs = common.Table(), Costs()
    with common.workplace() as directory:
        material = common.material(options, directory)
        settings = [f"data.pretrain={material}", f"tokenizer.vocab_size={train_common.VOCAB_SIZE}"]
        tokenizer, shards = (
            train_common.stage(name, directory, settings, keep=True).found["artifact"]
            for name in ("tokenizer", "shards-pretrain")
        )
        for name in [options.size] if options.size else ["S", "T"]:
            size = SIZES[name]
            if options.steps:
                size = dataclasses.replace(size, measured_steps=options.steps)
            found = measured(name, size, options, directory, settings, shards, tokenizer)
            report(name, size, found, table)
            costs |= {f"{name} {side}": rounds for side, rounds in found.items()}
    train_common.write_json(options.json, table, costs)
    return int(table.failed)


def measured(
    name: str, size: Size, options: Any, directory: Path, settings: Sequence[str], shards: str, tokenizer: str
) -> Costs:
    """All sides, interleaved; ours come first in a round, since they leave the model's config.json for the others."""
    steps = size.warmup_steps + size.measured_steps
    settings = [*settings, *train_common.training("pretrain", size, steps)]
    rows = train_common.export("pretrain", directory, settings, shards, tokenizer)
    everything = (rows, directory / "config", size.rows_per_step, steps)
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(directory / f"inductor-{name}")}

    def bare(attention: str) -> common.Cost:
        return train_common.side(PEERS, "bare", *everything, attention, **train_common.allocator())

    def peer(side: str, *arguments: object, python: str = sys.executable, **environment: str) -> common.Cost:
        output = directory / side
        shutil.rmtree(output, ignore_errors=True)
        output.mkdir()
        return train_common.side(PEERS, side, *everything, output, *arguments, python=python, **environment)

    sides: dict[str, Callable[[], common.Cost]] = {
        variant: lambda more=more: train_common.stage("pretrain", directory, [*settings, *more], **environment)  # type: ignore[misc]
        for variant, more in variants(size, name != "T").items()
    }
    sides["bare"] = lambda: bare("documents")
    sides["causal"] = lambda: bare("causal")
    if name != "T":
        if common.has("accelerate"):
            sides["transformers"] = lambda: peer("transformers", 1e-3, "constant_with_warmup")
        if has_litgpt(options.litgpt_python):
            sides["litgpt"] = lambda: peer("litgpt", python=options.litgpt_python, TORCH_COMPILE_DISABLE="1")
        sides["peak"] = lambda: train_common.side(PEERS, "peak")
    chosen = options.sides.split(",") if options.sides else list(sides)
    costs: Costs = {}
    for done in range(options.rounds):
        for side in [side for side in sides if side in chosen]:
            if done and side not in repeated(costs, size):
                continue
            try:
                costs.setdefault(side, []).append(sides[side]())
            except RuntimeError as error:
                print(f"SKIPPED: {name}, {side}: {error}", flush=True)
                del costs[side]
                chosen.remove(side)
    return costs


def variants(size: Size, all_of_them: bool) -> dict[str, list[str]]:
    """Ways to run the stage, by settings that change no key; ranks share the rows of a step."""
    found: dict[str, list[str]] = {PLAIN: []}
    if all_of_them:
        ranks = [f"runtime.devices={CORES}", f"runtime.rows_per_device={max(1, size.rows_per_step // CORES)}"]
        found |= {RANKS: ranks, COMPILED: ["runtime.compile=true"], BOTH: [*ranks, "runtime.compile=true"]}
    return found


def repeated(costs: Costs, size: Size) -> set[str]:
    """What is worth another round: of ours the plain one, the ranks and the best; of the others all with a limit."""
    ours = [side for side in (PLAIN, RANKS, COMPILED, BOTH) if side in costs]
    best = {best_of(costs, size)} if ours else set()
    return {*costs} - {*ours, "causal"} | best | ({PLAIN, RANKS} & {*ours})


def best_of(costs: Costs, size: Size) -> str:
    """Our fastest way."""
    return max(
        [side for side in (PLAIN, RANKS, COMPILED, BOTH) if side in costs],
        key=lambda side: train_common.median(costs[side], size),
    )


def report(name: str, size: Size, costs: Costs, table: common.Table) -> None:
    """The lines of one size."""
    for side in [side for side in costs if side != "peak"]:
        first = costs[side][0].found
        print(f"  {name}, {side}: {train_common.spread(costs[side], size)}, {common.median(costs[side], 'memory'):,.0f} MB; "
              f"first noted the time after {first['stamps'][0][1] - first['started']:.1f} s")  # fmt: skip
    best = best_of(costs, size)

    def line(ours: str, theirs: str, what: str, least: float | None) -> None:
        if ours in costs and theirs in costs:
            own, other = (train_common.median(costs[side], size) for side in (ours, theirs))
            table.add(f"{name}: {what}", f"{own:,.0f}", f"{other:,.0f}", own / other, least=least)

    line(PLAIN, "bare", "tokens/s, stage against bare loop", LEAST_BARE)
    line(PLAIN, "causal", "tokens/s, the loop without a mask, one round", None)
    line(best, "transformers", f"tokens/s, {best}, transformers.Trainer", LEAST_TRANSFORMERS)
    if best != PLAIN:
        line(PLAIN, "transformers", "tokens/s, plain, transformers.Trainer", None)
    line(best, "litgpt", f"tokens/s, {best}, litgpt eager", LEAST_LITGPT)
    if best != PLAIN:
        line(PLAIN, "litgpt", "tokens/s, plain, litgpt eager", None)
    line(RANKS, PLAIN, f"tokens/s, {CORES} ranks against {CORES} threads", LEAST_RANKS)
    line(COMPILED, PLAIN, "tokens/s, compiled against not", None)
    if "transformers" in costs:
        for side in dict.fromkeys([PLAIN, best]):
            own, other = (common.median(costs[each], "memory") for each in (side, "transformers"))
            limit = MOST_MEMORY if side == PLAIN else None
            table.add(
                f"{name}: peak MB, {side}, transformers.Trainer", f"{own:,.0f}", f"{other:,.0f}", own / other, most=limit
            )
    if "peak" in costs:
        peak = common.median(costs["peak"], "flops")
        print(f"  {size.flops_formula}; peak with matrices of {costs['peak'][0].found['size']}")
        for side in dict.fromkeys([best, PLAIN, "bare", "transformers", "litgpt"]):
            if side in costs:
                reached = train_common.median(costs[side], size) * size.flops_per_token
                least = LEAST_FLOPS if side == best else None
                table.add(
                    f"{name}: GFLOP/s, {side}, of bf16 matmul",
                    f"{reached / 1e9:.0f}",
                    f"{peak / 1e9:.0f}",
                    reached / peak,
                    least=least,
                )


def has_litgpt(python: str) -> bool:
    """Whether the interpreter has litgpt."""
    command = [python, "-c", "import importlib.util, sys; sys.exit(not importlib.util.find_spec('litgpt'))"]
    if subprocess.run(command, check=False).returncode == 0:
        return True
    print("SKIPPED: the comparison with litgpt: pip install litgpt in an environment of its own, and name its interpreter "
          "by --litgpt-python", flush=True)  # fmt: skip
    return False


if __name__ == "__main__":
    sys.exit(main())
