"""Time until the validation loss reaches a target on a small corpus, against `transformers.Trainer`.

    python bench/train_target.py [--path FILE.jsonl]             about 8 minutes on two cores
    python bench/train_target.py --rounds 1 --steps 20           a quick try, 3 minutes

A model of hidden size 128 with 4 layers, vocabulary 2048, rows of 256 tokens, 16 of them a step on both sides.
`transformers.Trainer` (needs `pip install accelerate`) has bf16, AdamW, a warm-up and a cosine schedule, and the best of
three learning rates. They are tried first, and what the best one reaches at its end, on held-out rows, is the target. Ours
is `ttrain stage run pretrain` with its defaults (Muon), at the shortest of three budgets that reached the target when tried.
The tries of these two are the first round. Seconds are those from the first step on, without the validations; a second line
counts the whole command, from its start to the validation that shows the target, or to the other side's last step.
"""

from __future__ import annotations

import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

import common
import train_common
from train_common import PEERS, Size

SIZE = Size(128, 4, 256, rows_per_step=16, warmup_steps=1, measured_steps=90, vocab_size=2048)
LEARNING_RATES = (1e-3, 3e-3, 1e-2)
BUDGETS = (0.3, 0.4, 0.6, 0.8)  # shares of the other side's steps
VALIDATION_ROWS = 128
VALIDATIONS = 8  # of a run of ours
MOST = 0.6


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = train_common.parser(__doc__).parse_args()
    table = common.Table()
    if not common.has("accelerate"):
        return 2
    with common.workplace() as directory:
        row = {"row_length": SIZE.row_length, "tokens_per_step": SIZE.tokens_per_step, "validation_rows": VALIDATION_ROWS}
        settings = [f"data.pretrain={common.material(options, directory)}", f"tokenizer.vocab_size={SIZE.vocab_size}",
                    *SIZE.model, *(f"pretrain.{name}={value}" for name, value in row.items()), "pretrain.precision=bf16",
                    f"runtime.rows_per_device={SIZE.rows_per_step}", "runtime.log_every_steps=1"]  # fmt: skip
        compare(options, directory, settings, options.steps or SIZE.measured_steps, table)
    return int(table.failed)


def compare(options: Any, directory: Path, settings: list[str], steps: int, table: common.Table) -> None:
    """The tries, then interleaved rounds of the best of each side."""
    tokenizer, shards = (
        train_common.stage(name, directory, settings, keep=True).found["artifact"]
        for name in ("tokenizer", "shards-pretrain")
    )
    rows = train_common.export("pretrain", directory, [*settings, budget(steps)], shards, tokenizer)

    def ours(share: float) -> common.Cost:
        mine = round(share * steps)
        every = f"pretrain.validate_every_steps={max(1, mine // VALIDATIONS)}"
        return train_common.stage("pretrain", directory, [*settings, budget(mine), every])

    def theirs(rate: float) -> common.Cost:
        output = directory / "transformers"
        shutil.rmtree(output, ignore_errors=True)
        everything = (rows, directory / "config", SIZE.rows_per_step, steps, output, rate, "cosine")
        return train_common.side(PEERS, "transformers", *everything)

    tries = {BUDGETS[0]: ours(BUDGETS[0])}  # leaves the model's config.json for the other side
    rates = {rate: theirs(rate) for rate in LEARNING_RATES}
    best = min(rates, key=lambda rate: rates[rate].found["validation_loss"])
    target = rates[best].found["validation_loss"]
    print("  transformers.Trainer: " + shown({f"lr {rate:g}": cost.found["validation_loss"] for rate, cost in rates.items()})
          + f"; target {target:.4f}")  # fmt: skip
    for share in BUDGETS[1:]:
        if reached(tries[max(tries)], target) is None:
            tries[share] = ours(share)
    share = max(tries)
    print("  ours: " + shown({f"{share:g} of the steps": cost.found["validations"][-1][2] for share, cost in tries.items()}))
    if reached(tries[share], target) is None:
        table.claim(f"reaches {target:.4f} in {share:g} of the steps", holds=False)
        return
    sides = {"ours": lambda: ours(share), "theirs": lambda: theirs(best)}
    costs = {"ours": [tries[share]], "theirs": [rates[best]]}
    for side, more in common.interleave(sides, options.rounds - 1).items():
        costs[side] += more
    trained = [found for cost in costs["ours"] if (found := reached(cost, target))]
    if len(trained) < len(costs["ours"]):
        table.claim("reaches the target in every round", holds=False)
        return
    compared = {
        "s of training to the target": ([pair[0] for pair in trained], [seconds(cost) for cost in costs["theirs"]]),
        "s from the start of the command": ([pair[1] for pair in trained], [whole(cost) for cost in costs["theirs"]]),
    }
    for what, (mine, other) in compared.items():
        own, peer = statistics.median(mine), statistics.median(other)
        limit = MOST if "training" in what else None
        table.add(what, f"{own:.1f}", f"{peer:.1f}", own / peer, most=limit)
    train_common.write_json(options.json, table, costs)


def budget(steps: int) -> str:
    """The setting of so many steps."""
    return f"pretrain.tokens={steps * SIZE.tokens_per_step}"


def reached(cost: common.Cost, target: float) -> tuple[float, float] | None:
    """Seconds of training, and of the command, until our validation loss is down to the target; None where it never is."""
    stamps = dict(cost.found["stamps"])
    began = cost.found["stamps"][0][1] - cost.found["first_step_seconds"]
    validating = 0.0
    for step, ended, loss in cost.found["validations"]:
        if loss <= target:
            return stamps[step] - began - validating, ended - cost.found["started"]
        validating += ended - stamps[step]
    return None


def seconds(cost: common.Cost) -> float:
    """Of training, on the other side: from the start of its loop to the end of its last step."""
    stamps = cost.found["stamps"]
    return float(stamps[-1][1] - stamps[0][1])


def whole(cost: common.Cost) -> float:
    """From the start of the other side's process to the end of its last step."""
    return float(cost.found["stamps"][-1][1] - cost.found["started"])


def shown(losses: dict[str, float]) -> str:
    """Validation losses with what they belong to."""
    return ", ".join(f"{name}: {loss:.4f}" for name, loss in losses.items())


if __name__ == "__main__":
    sys.exit(main())
