"""What a GPU reaches: its tests, FLOP/s, packed rows, another trainer's loop, resuming to the bit, a recipe's seconds.

    make gpu                                                     about 25 minutes on one GPU; writes bench/gpu.md
    python bench/gpu.py --only mfu,packed --nanochat ~/nanochat
    python bench/gpu.py --device cpu --small --only packed       the same code on tiny models, for its own tests

tests: those with the marker `gpu`. mfu: `ttrain stage run pretrain` with runtime.tune=auto and compiled, FLOP/s over those
of the card's data sheet. nanochat: its model and its optimizers in a loop like its own, compiled, on rows of the same shape
(needs its checkout; tokens a second of ours from `mfu`). packed: forward and backward passes over rows of twenty documents,
against rows of one. resume: the check of `ttrain doctor`. recipes: seconds of training until the defaults reach the held-out
loss at which the first version's settings end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import train_common
import train_target
from common import Cost, Table
from train_common import Size

VOCAB_SIZE = 32_768
HEAD_WIDTH = 128  # for which a GPU's kernels of attention are fastest, and nanochat's
SIZES = {
    "124 M": Size(768, 14, 1024, 64, warmup_steps=10, measured_steps=40, vocab_size=VOCAB_SIZE, head_width=HEAD_WIDTH),
    "350 M": Size(1024, 25, 1024, 64, warmup_steps=10, measured_steps=20, vocab_size=VOCAB_SIZE, head_width=HEAD_WIDTH),
}
SMALL = {"small": Size(64, 2, 64, 8, warmup_steps=2, measured_steps=4, vocab_size=512)}
ROWS, DOCUMENTS, PASSES = 32, 20, 20  # of packed rows; on a CPU two passes
RECIPE_STEPS = 400  # of the first version's settings
LEAST_MFU, LEAST_PACKED, LEAST_NANOCHAT, MOST_SECONDS = 0.45, 0.95, 1.0, 0.6


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    train_common.options(parser)
    parser.set_defaults(megabytes=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, whose figures mean nothing")
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat")


def sizes_of(options: argparse.Namespace) -> dict[str, Size]:
    """The models by their names in the table."""
    sizes = SMALL if options.small else SIZES
    return {name: train_common.resized(size, options.steps) for name, size in sizes.items()}


def settings_of(options: argparse.Namespace, directory: Path, size: Size) -> list[str]:
    """Settings of a pretraining of this size as fast as the device can."""
    text = directory / "text.jsonl"
    if not text.exists():
        common.write_text(options, directory, 1 if options.small else None)
    training = [one for one in train_common.training("pretrain", size, size.steps) if "optim.kind" not in one]  # Muon
    return [
        f"data.pretrain={text}", f"tokenizer.vocab_size={size.vocab_size}", f"runtime.device={options.device}", *training,
        "runtime.deterministic=false", "runtime.tune=auto", f"runtime.compile={str(not options.small).lower()}",
        "runtime.quick_validations=0",  # a run has 8 of them: in 50 steps one after each six
    ]  # fmt: skip


def run_tests(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-rs", "tests/train"]
    try:
        _, output = common.run(command, directory=Path(__file__).parents[1])
        print("  " + output.strip().splitlines()[-1])
        table.check("tests that need a GPU pass", " passed" in output or options.small)
    except RuntimeError as error:
        print(error)
        table.check("tests that need a GPU pass", False)


def measure_mfu(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Share of the peak that a stage reaches, for each size; against nanochat's loop, where it is named."""
    import torch

    from ttrain.train.monitor import peak_flops
    from ttrain.train.precision import Precision

    peak = peak_flops(Precision("bf16", torch.device(options.device)))
    for name, size in sizes_of(options).items():
        settings = settings_of(options, directory, size)
        train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
        sides: dict[str, common.Side] = {
            "ours": lambda settings=settings: train_common.stage("pretrain", directory, settings)
        }
        if options.nanochat:
            heads = max(1, size.hidden // size.head_width)
            shape = (size.hidden, size.layers, heads, size.row_length, size.rows_per_step, size.steps, size.vocab_size)
            sides["nanochat"] = lambda shape=shape: common.measure(
                train_nanochat, options.nanochat, options.device, "" if options.small else "compile", *shape
            )
        costs = table.interleave(sides, options.rounds, group=f"{name} ")
        rates = {side: train_common.median_rate(rounds, size) for side, rounds in costs.items()}
        print(f"  {name}: {rates['ours']:,.0f} tokens/s with {costs['ours'][-1].result['manifest']['tuned']}")
        limit = 0 if options.small else LEAST_MFU
        table.ratio(f"{name}: GFLOP/s, peak in bf16", rates["ours"] * size.flops_per_token / 1e9, peak / 1e9, least=limit)
        if "nanochat" in rates:
            limit = 0 if options.small else LEAST_NANOCHAT
            table.ratio(f"{name}: tokens/s, nanochat's loop", rates["ours"], rates["nanochat"], least=limit)


def train_nanochat(
    checkout: str, device: str, how: str, hidden: str, layers: str, heads: str, length: str, rows: str, steps: str,
    vocab_size: str,
) -> dict[str, Any]:  # fmt: skip
    """Its model and optimizers on random rows; wall time at the end of each step, for which the host waits."""
    import time

    import torch

    sys.path.insert(0, checkout)
    from nanochat.gpt import GPT, GPTConfig

    config = GPTConfig(
        sequence_len=int(length), vocab_size=int(vocab_size), n_layer=int(layers), n_head=int(heads), n_kv_head=int(heads),
        n_embd=int(hidden),
    )  # fmt: skip
    with torch.device(device):
        model = GPT(config)
    model.init_weights()
    made = model.setup_optimizers() if hasattr(model, "setup_optimizers") else [model.setup_optimizer()]
    called = torch.compile(model, dynamic=False) if how == "compile" else model
    micro = min(int(rows), 32)  # as many as its script has for one GPU of 80 GB
    ids = torch.randint(0, int(vocab_size), (micro, int(length) + 1), device=device)
    stamps = []
    for step in range(1, int(steps) + 1):
        for _ in range(int(rows) // micro):
            with torch.autocast(device, torch.bfloat16):
                loss = called(ids[:, :-1], ids[:, 1:].contiguous())
            (loss * micro / int(rows)).backward()
        for optimizer in made:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        stamps.append((step, time.time()))
    return {"stamps": stamps}


def compare_packed(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Tokens a second with twenty documents in a row, against one."""
    (name, size), *_ = sizes_of(options).items()
    how = "" if options.small else "compile"
    shape = (size.hidden, size.layers, size.head_width, size.row_length, size.vocab_size)
    sides: dict[str, common.Side] = {
        documents: lambda documents=documents: common.measure(pass_rows, options.device, how, documents, *shape)
        for documents in (str(DOCUMENTS), "1")
    }
    costs = table.interleave(sides, options.rounds, group="packed ")
    many, one = (common.median(costs[documents], "per_s") for documents in (str(DOCUMENTS), "1"))
    table.ratio(
        f"{name}: tokens/s, rows of {DOCUMENTS} documents, of 1", many, one, least=0 if options.small else LEAST_PACKED
    )


def pass_rows(
    device: str, how: str, documents: str, hidden: str, layers: str, head_width: str, length: str, vocab_size: str
) -> dict[str, float]:
    """Tokens a second of forward and backward passes as the stage makes them, without the optimizer."""
    import torch

    from ttrain.config import Pretrain
    from ttrain.train.compiling import CompiledLayers
    from ttrain.train.language_modeling import LanguageModeling

    sizes = (int(hidden), int(layers), int(length))
    model = train_common.random_model(*sizes, vocab_size=int(vocab_size), head_width=int(head_width))
    task = LanguageModeling(Pretrain(), model)
    module = task.build_model().to(device).train()
    used = CompiledLayers(module).used if how == "compile" else contextlib.nullcontext
    made = [rows_of(int(documents), int(length), int(vocab_size), seed) for seed in range(4)]

    def passes() -> Iterator[int]:
        for number in range(PASSES if how else 2):
            batch = made[number % len(made)]
            with used():
                with torch.autocast(device, torch.bfloat16):
                    loss = task.train_step(module, batch, torch.device(device))
                (loss.total / loss.count).backward()
            module.zero_grad(set_to_none=True)
            yield batch.input_ids_BT.size

    def all_passes() -> dict[str, float]:
        tokens = sum(passes())
        if device == "cuda":
            torch.cuda.synchronize()
        return {"tokens": tokens}

    all_passes()  # compiles
    cost = common.timed(all_passes)
    return {"per_s": cost.result["tokens"] / cost.wall}


def rows_of(documents: int, length: int, vocab_size: int, seed: int) -> Any:
    """Rows of random ids, each of so many documents of random lengths."""
    import numpy as np

    from ttrain.data.packing import Batch

    generator = np.random.default_rng(seed)
    ids = generator.integers(3, vocab_size, (ROWS, length))
    segments = np.zeros((ROWS, length), np.int64)
    for row in segments:
        row[generator.choice(np.arange(1, length), documents - 1, replace=False)] = 1
    segments = segments.cumsum(1)
    begins = np.maximum.accumulate(np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(length), 0), 1)
    return Batch(ids, np.roll(ids, -1, 1), np.arange(length) - begins, segments)


def check_resume(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Two steps, a checkpoint and two more, against four: to the bit, in deterministic mode."""
    (_, size), *_ = sizes_of(options).items()
    settings = [
        one for one in settings_of(options, directory, size) if not one.startswith(("runtime.tune", "runtime.deter"))
    ]
    command = [*common.TTRAIN, "doctor", "--stage", "pretrain", "--json", *settings]
    _, output = common.run(command, {"TTRAIN_HOME": str(directory / "home")}, directory, fails=None)  # another may fail
    checks = {check["name"]: check for check in json.loads(output)["checks"]}
    print(f"  save and resume: {checks['save and resume']['figure']}")
    table.check("save and resume, to the bit", checks["save and resume"]["ok"])


def compare_recipes(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Seconds to a loss of the defaults, against the first version's settings to their end."""
    (_, size), *_ = sizes_of(options).items()
    steps = 8 if options.small else RECIPE_STEPS
    size = replace(size, warmup_steps=0, measured_steps=steps)
    every = f"pretrain.validate_every_steps={max(1, steps // train_target.VALIDATIONS)}"
    kept = ("pretrain.optim", "pretrain.schedule", "runtime.log_every")
    settings = [
        *(one for one in settings_of(options, directory, size) if not one.startswith(kept)),
        "runtime.log_every_steps=1",
    ]
    train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
    runs: dict[str, Cost] = {}
    budgets = {"first": steps, "ours": steps if options.small else round(steps * MOST_SECONDS)}  # each with its own decay
    for name, changes in (("first", train_target.FIRST_RECIPE), ("ours", [])):
        own = [one for one in changes if not one.startswith("pretrain.tokens_per_step")]
        budget = f"pretrain.tokens={budgets[name] * size.tokens_per_step}"
        runs[name] = train_common.stage("pretrain", directory, [*settings, *own, every, budget])
    target = runs["first"].result["validations"][-1][2]
    seconds = train_target.seconds_to_target(runs["ours"], target)
    print(f"  first recipe: {target:.4f} in {train_target.seconds(runs['first']):.0f} s; ours ends at "
          f"{runs['ours'].result['validations'][-1][2]:.4f}")  # fmt: skip
    if not options.small:
        table.check("the defaults reach the loss of the first recipe", seconds is not None)
    if seconds is not None:
        limit = 0 if options.small else MOST_SECONDS
        table.ratio("s to the loss of the first recipe", seconds[0], train_target.seconds(runs["first"]), most=limit)
    shutil.rmtree(directory / "rows", ignore_errors=True)


def device_name(options: argparse.Namespace) -> str:
    """The card and its driver's CUDA, or the CPU."""
    import torch

    if options.device == "cpu":
        return common.processor()
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, torch {torch.__version__}; {common.processor()}"


def check_device(options: argparse.Namespace) -> None:
    """End with one line where there is no such device."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured; run this on a machine with a GPU, or with --device cpu --small")
        sys.exit(1)


PARTS = {
    "tests": run_tests, "mfu": measure_mfu, "packed": compare_packed, "resume": check_resume, "recipes": compare_recipes,
}  # fmt: skip

if __name__ == "__main__":
    common.main(str(__doc__), PARTS, rounds=3, options=options, ready=check_device, machine=device_name)
