"""What a GPU reaches: tests, FLOP/s, packed rows, another trainer's loop, resuming, a recipe.

    make gpu  about 25 minutes on one GPU; writes bench/gpu.md
    python bench/gpu.py --only mfu,packed --nanochat ~/nanochat
    python bench/gpu.py --device cpu --small --only packed  on tiny models, for its own tests

tests: those with the marker `gpu`. mfu: `ttrain stage run pretrain` with runtime.tune=auto and
compiled, FLOP/s over those of the card's data sheet. nanochat: its model and its optimizers in a
loop like its own, compiled, on rows of the same shape (needs its checkout; tokens a second of ours
from `mfu`). packed: forward and backward passes over rows of twenty documents, against rows of one.
resume: the check of `ttrain doctor`. recipes: seconds of training until the defaults reach the
held-out loss at which the first version's settings end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
import train_target
from common import Cost, Table
from train_common import Size

SMALL = "small"  # whose figures mean nothing: without limits, and not compiled
VOCAB_SIZE = 32_768
HEAD_WIDTH = 128  # for which a GPU's kernels of attention are fastest, and nanochat's
SIZES = {
    "124 M": Size(768, 14, 1024, 64, 10, 40, vocab_size=VOCAB_SIZE, head_width=HEAD_WIDTH),
    "350 M": Size(1024, 25, 1024, 64, 10, 20, vocab_size=VOCAB_SIZE, head_width=HEAD_WIDTH),
    SMALL: Size(64, 2, 64, 8, warmup_steps=2, measured_steps=4, vocab_size=512),
}
ROWS = 32
DOCUMENTS = 20  # of a packed row
PASSES = 20  # on a CPU two
RECIPE_STEPS = 400  # of the first version's settings
LEAST_MFU = 0.45
LEAST_PACKED = 0.95
LEAST_NANOCHAT = 1.0
MOST_SECONDS = 0.6


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    train_common.options(parser)
    parser.set_defaults(megabytes=30)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="tiny models, whose figures mean nothing"
    )
    parser.add_argument("--nanochat", type=Path, help="a checkout of nanochat")


def sizes_of(options: argparse.Namespace) -> dict[str, Size]:
    """The models by their names in the table."""
    return {
        name: train_common.resized(size, options.steps)
        for name, size in SIZES.items()
        if (name == SMALL) == options.small
    }


def settings_of(
    options: argparse.Namespace, directory: Path, size: Size, *without: str
) -> list[str]:
    """Settings of a pretraining of this size as fast as the device can, without some prefixes."""
    text = directory / "text.jsonl"
    if not text.exists():
        common.write_text(options, directory, 1 if options.small else None)
    settings = [
        f"data.pretrain={text}",
        f"tokenizer.vocab_size={size.vocab_size}",
        f"runtime.device={options.device}",
        *train_common.training("pretrain", size, size.steps),
        "runtime.deterministic=false",
        "runtime.tune=auto",
        f"runtime.compile={str(not options.small).lower()}",
    ]
    without = ("pretrain.optim.kind", *without)  # so that it is Muon
    return [one for one in settings if not one.startswith(without)]


def run_tests(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """The tests that need a GPU."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-rs", "tests/train"]
    try:
        _, output = common.run(command, directory=Path(__file__).parents[1])
        print("  " + output.strip().splitlines()[-1])
        passed = " passed" in output or options.small
    except RuntimeError as error:
        print(error)
        passed = False
    table.check("tests that need a GPU pass", passed)


def measure_mfu(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Fraction of the peak that a stage reaches, by size; against nanochat's loop, where given."""
    import torch

    from ttrain.train.monitor import peak_flops
    from ttrain.train.precision import Precision

    peak = peak_flops(Precision("bf16", torch.device(options.device)))
    for name, size in sizes_of(options).items():
        settings = settings_of(options, directory, size)
        train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
        sides: dict[str, common.Side] = {
            "ours": partial(train_common.stage, "pretrain", directory, settings)
        }
        if options.nanochat:
            work = (options.nanochat, options.device, name, size.steps)
            sides["nanochat"] = partial(common.measure, train_nanochat, *work)
        costs = table.interleave(sides, options.rounds, group=f"{name} ")
        rates = {side: train_common.median_rate(rounds, size) for side, rounds in costs.items()}
        tuned = costs["ours"][-1].result["manifest"]["tuned"]
        print(f"  {name}: {rates['ours']:,.0f} tokens/s with {tuned}")
        flops = rates["ours"] * size.flops_per_token / 1e9
        known = (
            peak / 1e9 or flops
        )  # the peak is known of GPUs alone; elsewhere the ratio says nothing
        table.ratio(f"{name}: GFLOP/s, peak in bf16", flops, known, least=limit(options, LEAST_MFU))
        if "nanochat" in rates:
            least = limit(options, LEAST_NANOCHAT)
            table.ratio(
                f"{name}: tokens/s, nanochat's loop", rates["ours"], rates["nanochat"], least=least
            )


def limit(options: argparse.Namespace, figure: float) -> float:
    """The limit, which tiny models do not have."""
    return 0 if options.small else figure


def train_nanochat(checkout: str, device: str, name: str, steps: str) -> dict[str, Any]:
    """Its model and optimizers on random rows; wall time at the end of each step, synchronized."""
    import time

    import torch

    sys.path.insert(0, checkout)
    from nanochat.gpt import GPT, GPTConfig

    size = SIZES[name]
    config = GPTConfig(
        sequence_len=size.row_length,
        vocab_size=size.vocab_size,
        n_layer=size.layers,
        n_head=size.heads,
        n_kv_head=size.heads,
        n_embd=size.hidden,
    )
    with torch.device(device):
        model = GPT(config)
    model.init_weights()
    optimizers = (
        model.setup_optimizers()
        if hasattr(model, "setup_optimizers")
        else [model.setup_optimizer()]
    )
    called = model if name == SMALL else torch.compile(model, dynamic=False)
    micro = min(size.rows_per_step, 32)  # as many as its script has for one GPU of 80 GB
    ids = torch.randint(0, size.vocab_size, (micro, size.row_length + 1), device=device)
    stamps = []
    for step in range(1, int(steps) + 1):
        for _ in range(size.rows_per_step // micro):
            with torch.autocast(device, torch.bfloat16):
                loss = called(ids[:, :-1], ids[:, 1:].contiguous())
            (loss * micro / size.rows_per_step).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        loss.item()
        stamps.append((step, time.time()))
    return {"stamps": stamps}


def compare_packed(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Tokens a second with twenty documents in a row, against one."""
    name = next(iter(sizes_of(options)))
    sides = {
        str(documents): partial(common.measure, pass_rows, options.device, name, documents)
        for documents in (DOCUMENTS, 1)
    }
    costs = table.interleave(sides, options.rounds, group="packed ")
    rates = (common.median(costs[documents], "per_s") for documents in sides)
    least = limit(options, LEAST_PACKED)
    table.ratio(f"{name}: tokens/s, rows of {DOCUMENTS} documents, of 1", *rates, least=least)


def pass_rows(device: str, name: str, documents: str) -> dict[str, float]:
    """Tokens a second of the stage's forward and backward passes, without the optimizer."""
    import torch

    from ttrain.config import Pretrain
    from ttrain.train.compiling import CompiledLayers
    from ttrain.train.language_modeling import LanguageModeling

    size = SIZES[name]
    task = LanguageModeling(Pretrain(), train_common.random_model(size))
    module = task.build_model().to(device).train()
    used = contextlib.nullcontext if name == SMALL else CompiledLayers(module).used
    shape = (ROWS, size.row_length)
    batches = [
        train_common.random_batch(shape, int(documents), size.vocab_size, seed) for seed in range(4)
    ]
    passes = 2 if name == SMALL else PASSES

    def pass_all() -> None:
        for number in range(passes):
            with used():
                with torch.autocast(device, torch.bfloat16):
                    loss = task.train_step(
                        module, batches[number % len(batches)], torch.device(device)
                    )
                (loss.total / loss.count).backward()
            module.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    pass_all()  # compiles
    return {"per_s": passes * ROWS * size.row_length / common.timed(pass_all).wall}


def check_resume(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Two steps, a checkpoint and two more, against four: to the bit, in deterministic mode."""
    size = next(iter(sizes_of(options).values()))
    settings = settings_of(options, directory, size, "runtime.tune", "runtime.deterministic")
    command = [*common.TTRAIN, "doctor", "--stage", "pretrain", "--json", *settings]
    _, output = common.run(
        command, {"TTRAIN_HOME": str(directory / "home")}, directory, check=False
    )  # another may fail
    (check,) = (
        check for check in json.loads(output)["checks"] if check["name"] == "save and resume"
    )
    print(f"  save and resume: {check['measured']}")
    table.check("save and resume, to the bit", check["ok"])


def compare_recipes(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Seconds to a loss of the defaults, against the first version's settings to their end."""
    size = next(iter(sizes_of(options).values()))
    steps = 8 if options.small else RECIPE_STEPS
    size = replace(size, warmup_steps=0, measured_steps=steps)
    without = ("pretrain.optim", "pretrain.schedule", "runtime.log_every")
    settings = [
        *settings_of(options, directory, size, *without),
        "runtime.log_every_steps=1",
        f"pretrain.validate_every_steps={max(1, steps // train_target.VALIDATIONS)}",
    ]
    train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
    first_recipe = [
        one for one in train_target.FIRST_RECIPE if not one.startswith("pretrain.tokens_per_step")
    ]

    def train(changes: list[str], own_steps: int) -> Cost:  # each with its own decay
        budget = f"pretrain.tokens={own_steps * size.tokens_per_step}"
        return train_common.stage("pretrain", directory, [*settings, *changes, budget])

    first = train(first_recipe, steps)
    ours = train([], steps if options.small else round(steps * MOST_SECONDS))
    target = first.result["validations"][-1][2]
    seconds = train_target.seconds_to_target(ours, target)
    print(
        f"  first recipe: {target:.4f} in {train_target.seconds(first):.0f} s; ours ends at "
        f"{ours.result['validations'][-1][2]:.4f}"
    )
    if not options.small:
        table.check("the defaults reach the loss of the first recipe", seconds is not None)
    if seconds is not None:
        most = limit(options, MOST_SECONDS)
        table.ratio(
            "s to the loss of the first recipe", seconds[0], train_target.seconds(first), most=most
        )


def device_name(options: argparse.Namespace) -> str:
    """The card and its driver's CUDA, or the CPU."""
    import torch

    if options.device == "cpu":
        return common.processor()
    versions = f"CUDA {torch.version.cuda}, torch {torch.__version__}"
    return f"{torch.cuda.get_device_name()}, {versions}; {common.processor()}"


def check_device(options: argparse.Namespace) -> None:
    """End with one line where there is no such device."""
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "no CUDA device: nothing is measured; "
            "run this on a machine with a GPU, or with --device cpu --small"
        )
        sys.exit(1)


PARTS = {
    "tests": run_tests,
    "mfu": measure_mfu,
    "packed": compare_packed,
    "resume": check_resume,
    "recipes": compare_recipes,
}

if __name__ == "__main__":
    common.main(
        str(__doc__), PARTS, rounds=3, options=options, ready=check_device, machine=device_name
    )
