"""What a second of training buys: against `transformers.Trainer` and ttrain's first recipe.

    python bench/train_target.py [--path FILE.jsonl]                  half an hour on two cores
    python bench/train_target.py --only target --rounds 1 --steps 20  a quick try, 3 minutes
    python bench/train_target.py --only recipe --first CHECKOUT       10 minutes; commit 50dc1ba
    python bench/train_target.py --only recipe --preset 5m --tokens 400000 --seeds 1
    python bench/train_target.py --only passes        80 minutes on two cores; three seeds

target: time until the validation loss reaches a target on a small corpus. A model of hidden size
128 with 4 layers, vocabulary 2048, rows of 256 tokens, 16 of them a step on both sides.
`transformers.Trainer` (needs `pip install accelerate`) has AdamW, a warm-up and a cosine schedule,
and the best of three learning rates. They are tried first; the held-out loss of the best one at its
end is the target. Ours is `ttrain stage run pretrain` with its defaults (Muon), at the shortest of
four budgets that reached the target when tried. The tries of these two are the first round. Seconds
count from the first step on, without the validations; a second line counts the whole command, from
its start to the validation that shows the target, or to the last step of the other side.

recipe: bits per byte of the quickstart's held-out documents. The first version's settings, with
`--first` by its own code, train on a million tokens; the defaults on as many as take the same
seconds, by the runs before each seed, and on 0.55 of these, which must reach the first version's
bits. With `--preset` the model has another size, and both sides train on as many tokens. The sides
take turns, one seed after the other.

passes: bits per byte of the same documents for at most four times the seconds of the quickstart's
pretraining: the best plain run of those that were tried (docs/recipe.md), and one with four of six
runs of the quickstart as its teachers, those of the lowest validation losses, whose passes over the
rows count. Two runs train side by side with one thread each, a plain one beside a taught one. The
interval of the difference is that of the seeds, by Student's t.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from pathlib import Path

import common
import train_common
import train_peers
from common import Cost, Table
from train_common import Size

from ttrain.evaluate.statistics import t_interval

SIZE = Size(128, 4, 256, rows_per_step=16, warmup_steps=1, measured_steps=90, vocab_size=2048)
LEARNING_RATES = (1e-3, 3e-3, 1e-2)
BUDGETS = (0.15, 0.2, 0.25, 0.3, 0.4, 0.6, 0.8)  # shares of the steps of the other side
VALIDATION_ROWS = 128
VALIDATIONS = 8  # of a run of ours
MOST = 0.25
FIRST_RECIPE = [
    "model.kind=llama",
    "model.tie_embeddings=true",
    "pretrain.packing=stream",
    "pretrain.tokens_per_step=4096",
    "pretrain.optim.lr=4e-3",
    "pretrain.optim.muon_lr=0.02",
    "pretrain.optim.betas=[0.9,0.95]",
    "pretrain.optim.embedding_lr=null",
    "pretrain.optim.head_lr=null",
]
TOKENS = 1_000_000
MOST_BITS = 1.78
MOST_AT_EQUAL_TOKENS = 0.95
SHARE = 0.55  # of the tokens of equal seconds
MOST_TO_LOSS = 0.6  # of the first version's seconds to its loss
ONE_THREAD = "runtime.threads=1"  # of each of two runs side by side
PLAIN = ["pretrain.tokens=null", "pretrain.epochs=10"]
TAUGHT = ["--profile=thorough"]
FIRST_RUNS, TEACHERS = 6, 4  # two of the six did not learn to copy, and with them it was worse
FAR = 100  # from the teachers' seeds
MOST_SECONDS, MOST_TAUGHT_BITS, LEAST_GAIN = 4.0, 1.58, 0.03


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    train_common.options(parser)
    parser.add_argument("--seeds", type=int, default=3, help="of the recipes")
    parser.add_argument(
        "--preset", help="of the model of the recipes; default: the quickstart's model"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of the first version's recipe")
    parser.add_argument(
        "--first",
        type=Path,
        help="a checkout of the first version, which then trains with its own code",
    )


def compare_recipes(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Bits per byte at equal seconds of training, or with a preset at equal tokens, by seed."""
    model = [f"model.preset={options.preset}"] if options.preset else []
    own = (
        {"PYTHONPATH": str(options.first.resolve()), "TTRAIN_HOME": str(directory / "first")}
        if options.first
        else {}
    )
    inputs = ("source", "tokenizer", "shards-pretrain")
    recipe = [] if options.first else FIRST_RECIPE
    train_common.artifacts(directory, model, *inputs, **own)
    source, *_ = train_common.artifacts(directory, model, *inputs)
    heldout = Path(source) / "pretrain_heldout.jsonl"
    rates = defaultdict[bool, list[float]](list)
    costs = defaultdict[str, list[Cost]](list)

    def side(name: str, tokens: int, seed: int) -> Cost:
        changes, environment = (recipe, own) if name == "first" else ([], {})
        settings = [*model, *changes, f"pretrain.tokens={tokens}", f"pretrain.seed={seed}"]
        cost = train_common.stage("pretrain", directory, settings, keep=True, **environment)
        rates[name == "first"].append(tokens / seconds(cost))
        bits = bits_per_byte(cost, heldout, directory)
        return replace(cost, result={**cost.result, "bits": bits})

    tokens = dict.fromkeys(("first", "ours"), options.tokens)
    for name, count in () if options.preset else tokens.items():
        side(name, count, 1000)
    for seed in range(1, options.seeds + 1):
        if not options.preset:  # by all runs so far, since the speed of a machine varies
            tokens["ours"] = round(
                options.tokens * statistics.median(rates[False]) / statistics.median(rates[True])
            )
            tokens["fewer"] = round(SHARE * tokens["ours"])
        for name, count in tokens.items():
            costs[name].append(cost := side(name, count, seed))
            result = f"{cost.result['bits']:.3f} in {seconds(cost):.0f} s"
            print(f"  seed {seed}, {name}, {count:,} tokens: {result}", flush=True)
    medians = {name: statistics.median(map(seconds, runs)) for name, runs in costs.items()}
    table.ratio(
        "s of training", medians["ours"], medians["first"], most=0 if options.preset else 1.03
    )
    means = {}
    for name, runs in costs.items():
        means[name] = statistics.mean(run.result["bits"] for run in runs)
    if options.preset:
        label = f"{options.preset}: bits per byte at equal tokens"
        table.ratio(label, means["ours"], means["first"], most=MOST_AT_EQUAL_TOKENS)
    else:
        table.ratio("bits per byte at equal seconds", means["ours"], means["first"])
        table.value("bits per byte", means["ours"], most=MOST_BITS)
        table.ratio(
            f"bits per byte with {SHARE:g} of the tokens", means["fewer"], means["first"], most=1
        )
        table.ratio(
            "s of training to the first version's bits",
            medians["fewer"],
            medians["first"],
            most=MOST_TO_LOSS,
        )


def compare_passes(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Bits per byte at four times the seconds of today's runs: plain, and taught by the best."""
    source, *_ = train_common.artifacts(directory, [], "source", "tokenizer", "shards-pretrain")
    heldout = Path(source) / "pretrain_heldout.jsonl"
    runs = defaultdict[str, dict[int, tuple[float, float]]](dict)  # bits and seconds, by seed
    losses = dict[str, float]()  # validation losses by artifact

    def train(name: str, seed: int, changes: Sequence[str] = (), more: float = 0.0) -> str:
        settings = [ONE_THREAD, f"pretrain.seed={seed}", *changes]
        cost = train_common.stage("pretrain", directory, settings, keep=True)
        bits = bits_per_byte(cost, heldout, directory)
        runs[name][seed] = bits, seconds(cost) + more
        print(f"  {name}, seed {seed}: {bits:.4f} in {runs[name][seed][1]:.0f} s", flush=True)
        artifact = str(cost.result["artifact"])
        losses[artifact] = cost.result["manifest"]["validation_loss"]
        return artifact

    seeds = range(1, options.seeds + 1)
    with ThreadPoolExecutor(max_workers=2) as pair:
        first = list(pair.map(train, repeat("today"), range(1, FIRST_RUNS + 1)))
        best = sorted(first, key=losses.__getitem__)[:TEACHERS]
        taught = [*TAUGHT, f"pretrain.teacher={','.join(best)}"]
        (path,) = train_common.artifacts(directory, [ONE_THREAD, *taught], "teacher")
        teaching = json.loads((Path(path) / "manifest.json").read_text())["seconds"]
        print(f"  the teachers' passes: {teaching:.0f} s", flush=True)
        work: list[Future[str]] = []
        for seed in seeds:
            work.append(pair.submit(train, "plain", seed, PLAIN))
            work.append(pair.submit(train, "taught", seed + FAR, taught, teaching))
        for job in work:
            job.result()
    times = {name: statistics.mean(run[1] for run in runs[name].values()) for name in runs}
    bits = {name: [run[0] for _, run in sorted(runs[name].items())] for name in runs}
    for name in ("plain", "taught"):
        label = f"s of training, {name}; today's"
        table.ratio(label, times[name], times["today"], most=MOST_SECONDS)
    for name, most in (("today", 0), ("plain", 0), ("taught", MOST_TAUGHT_BITS)):
        table.value(f"bits per byte, {name}", statistics.mean(bits[name]), most=most)
    gains = [plain - own for plain, own in zip(bits["plain"], bits["taught"], strict=True)]
    table.value("gain over plain", statistics.mean(gains), least=LEAST_GAIN)
    if reach := t_interval(gains):
        table.check(f"gain of {reach[0]:.4f} to {reach[1]:.4f} (95 %) is not 0", reach[0] > 0)


def bits_per_byte(cost: Cost, documents: Path, directory: Path) -> float:
    """Of the model that a stage has trained, on a file of documents."""
    model = f"{cost.result['artifact']}/model"
    command = [*common.TTRAIN, "eval", model, "--text", str(documents), "--json"]
    _, output = common.run(command, {"TTRAIN_HOME": str(directory / "home")}, directory)
    (figures,) = json.loads(output)["tasks"][0]["models"].values()
    return float(figures["figures"]["bits_per_byte"]["value"])


def compare(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """The tries, then interleaved rounds of the best of each side."""
    if not common.has("accelerate"):
        return
    steps = options.steps or SIZE.measured_steps
    row = {
        "row_length": SIZE.row_length,
        "tokens_per_step": SIZE.tokens_per_step,
        "validation_rows": VALIDATION_ROWS,
    }
    settings = [
        f"data.pretrain={common.write_text(options, directory)}",
        f"tokenizer.vocab_size={SIZE.vocab_size}",
        *SIZE.model,
        *(f"pretrain.{name}={value}" for name, value in row.items()),
        f"runtime.rows_per_device={SIZE.rows_per_step}",
        "runtime.log_every_steps=1",
    ]
    tokenizer, shards = train_common.artifacts(directory, settings, "tokenizer", "shards-pretrain")
    rows = train_common.export("pretrain", directory, [*settings, budget(steps)], shards, tokenizer)

    def ours(share: float) -> Cost:
        own_steps = round(share * steps)
        every = f"pretrain.validate_every_steps={max(1, own_steps // VALIDATIONS)}"
        return train_common.stage("pretrain", directory, [*settings, budget(own_steps), every])

    def theirs(learning_rate: float) -> Cost:
        output = directory / "transformers"
        shutil.rmtree(output, ignore_errors=True)
        work = (
            rows,
            directory / "config",
            SIZE.rows_per_step,
            steps,
            output,
            learning_rate,
            "cosine",
        )
        return common.measure(train_peers.train_with_transformers, *work)

    tries = {BUDGETS[0]: ours(BUDGETS[0])}  # leaves the config.json of the model for the other side
    rates = {rate: theirs(rate) for rate in LEARNING_RATES}
    losses = {rate: cost.result["validation_loss"] for rate, cost in rates.items()}
    best = min(losses, key=losses.__getitem__)
    target = losses[best]
    print(f"  transformers.Trainer by learning rate: {losses}; target {target:.4f}")
    for share in BUDGETS[1:]:
        if seconds_to_target(tries[max(tries)], target) is None:
            tries[share] = ours(share)
    share = max(tries)
    by_share = {share: cost.result["validations"][-1][2] for share, cost in tries.items()}
    print(f"  ours by share of the steps: {by_share}")
    costs = {"ours": [tries[share]], "theirs": [rates[best]]}
    if seconds_to_target(tries[share], target):
        sides = {"ours": lambda: ours(share), "theirs": lambda: theirs(best)}
        for side, rounds in table.interleave(sides, options.rounds - 1).items():
            costs[side] += rounds
    reached = [seconds for cost in costs["ours"] if (seconds := seconds_to_target(cost, target))]
    table.check(
        f"reaches the target in {share:g} of the steps, in every round",
        len(reached) == len(costs["ours"]),
    )
    if len(reached) < len(costs["ours"]):
        return
    stamps = [cost.result["stamps"] for cost in costs["theirs"]]
    training = [times[-1][1] - times[0][1] for times in stamps]
    whole = [
        times[-1][1] - cost.result["started"]
        for times, cost in zip(stamps, costs["theirs"], strict=True)
    ]
    for label, index, peer, limit in (
        ("s of training to the target", 0, training, MOST),
        ("s from the start of the command", 1, whole, 0),
    ):
        own = statistics.median(seconds[index] for seconds in reached)
        table.ratio(label, own, statistics.median(peer), most=limit)


def seconds(cost: Cost) -> float:
    """Seconds of training of a stage, without its start."""
    return float(cost.result["manifest"]["train_seconds"])


def budget(steps: int) -> str:
    """The setting of so many steps."""
    return f"pretrain.tokens={steps * SIZE.tokens_per_step}"


def seconds_to_target(cost: Cost, target: float) -> tuple[float, float] | None:
    """Seconds of training, and of the command, until our validation loss is at the target.

    None where it never is.
    """
    stamps = dict(cost.result["stamps"])
    began = cost.result["stamps"][0][1] - cost.result["step_seconds"][0]
    validating = 0.0
    for step, ended, loss in cost.result["validations"]:
        if loss <= target:
            return stamps[step] - began - validating, ended - cost.result["started"]
        validating += ended - stamps[step]
    return None


if __name__ == "__main__":
    parts = {"target": compare, "recipe": compare_recipes, "passes": compare_passes}
    common.main(str(__doc__), parts, default="target,recipe", options=options)
