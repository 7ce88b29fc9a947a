"""Multiple choice: items a second, ours against the Hugging Face backend of lm-evaluation-harness with the same model.

    python bench/evaluation_choices.py --items poems.jsonl --model RUN     any items and model; as a part of evaluation.py:
                                                                           items made of Python's source, random weights

Both sides are one process and one model, interleaved, and no batch has more padded tokens on one side than on the other. The
random model is of size S: hidden 512, 8 layers; its tokenizer is trained on the items.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import common

LEAST = 2.0
ITEMS, WORDS, CHOICES, SHOTS = 32, 60, 4, 4
NATS_A_TOKEN = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}
Texts = list[tuple[str, str]]


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = _parser().parse_args()
    table = common.Table()
    if common.has("lm_eval"):
        _print(table, _measured(options))
    return int(table.failed)


def add_lines(table: common.Table, script: str, rounds: int) -> dict[str, list[common.Cost]]:
    """The lines of the table; returns what they were made of."""
    if not common.has("lm_eval"):
        return {}
    cost = common.measure(script, "choices", "--rounds", rounds)
    _print(table, cost.found["lines"])
    return {"choices": [cost]}


def side(*arguments: str) -> dict[str, Any]:
    """What each line of the table says."""
    return {"lines": _measured(_parser().parse_args(arguments))}


def _parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--items", nargs="*", type=Path, default=[], help='JSON lines: {"question", "choices", "answer"}')
    found.add_argument("--limit", type=int, default=ITEMS, help="items of each file")
    found.add_argument("--model", help="as of `ttrain eval`; default: random weights")
    found.add_argument("--hidden", type=int, default=512)
    found.add_argument("--layers", type=int, default=8)
    found.add_argument("--device", default="cpu")
    found.add_argument("--dtype", default="fp32")
    found.add_argument("--batch-tokens", type=int, default=4096)
    found.add_argument("--rounds", type=int, default=common.ROUNDS)
    return found


def _print(table: common.Table, lines: Sequence[dict[str, Any]]) -> None:
    for line in lines:
        table.add(line["what"], f"{line['ours']:.1f}", f"{line['theirs']:.1f}", line["ours"] / line["theirs"], least=LEAST)
        table.add(
            "the same, by CPU seconds", f"{line['cpu']:.2f} s", f"{line['their_cpu']:.2f} s", line["their_cpu"] / line["cpu"]
        )
        table.claim(f"equal scores ({line['apart']:.0e} nats a token apart)", line["apart"] < NATS_A_TOKEN[line["dtype"]])


def _measured(options: argparse.Namespace) -> list[dict[str, Any]]:
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    with common.workplace() as directory:
        files = options.items or [_written(directory / "python.jsonl", options.limit)]
        subject = _subject(options, files, directory)
        return [_compared(options, subject, file, shots) for file in files for shots in (0, SHOTS)]


def _compared(options: argparse.Namespace, subject: Any, file: Path, shots: int) -> dict[str, Any]:
    from ttrain.config.evaluate import ChoicesTask
    from ttrain.evaluate import choices
    from ttrain.evaluate.items import SuiteFiles
    from ttrain.evaluate.log_likelihood import encode_pairs, log_likelihoods

    spec = ChoicesTask(file=str(file.resolve()), shots=shots, limit=options.limit)
    items = choices.read_choices("items", spec, SuiteFiles(Path("/")))
    texts = choices.choice_texts(items.items)
    lengths = [len(one) + len(other) for one, other in encode_pairs(subject, texts)]
    longest = min(max(lengths), subject.max_length or max(lengths))
    theirs = _theirs(subject, texts, max(1, options.batch_tokens // longest))
    sides: dict[str, Callable[[], list[float]]] = {
        "ours": lambda: [one.nats for one in log_likelihoods(subject, texts, lambda done, total: None)],
        "theirs": theirs,
    }
    found = {name: side() for name, side in sides.items()}  # the first time costs more
    costs = common.interleave({name: _timed(side) for name, side in sides.items()}, options.rounds)
    rate = {name: len(items.items) / statistics.median(cost.wall for cost in costs[name]) for name in sides}
    apart = max(
        abs(one - other) / length for one, other, length in zip(found["ours"], found["theirs"], lengths, strict=True)
    )
    what = f"items/s, {file.stem[:18]}, {shots} examples, {statistics.mean(lengths):.0f} tokens"
    cpu = {name: statistics.median(cost.cpu for cost in costs[name]) for name in sides}
    return {
        "what": what, **rate, "cpu": cpu["ours"], "their_cpu": cpu["theirs"], "apart": apart, "dtype": options.dtype
    }  # fmt: skip


def _theirs(subject: Any, texts: Texts, batch_size: int) -> Callable[[], list[float]]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    model = HFLM(
        subject.model, tokenizer=AutoTokenizer.from_pretrained(subject.encoder.directory), batch_size=batch_size,
        device=str(subject.device), softmax_dtype="float32", max_length=subject.max_length,
    )  # fmt: skip
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in texts]
    return lambda: [-nats for nats, _ in model.loglikelihood(requests, disable_tqdm=True)]


def _timed(side: Callable[[], Any]) -> Callable[[], common.Cost]:
    def run() -> common.Cost:
        wall, cpu = time.perf_counter(), time.process_time()
        side()
        return common.Cost(time.perf_counter() - wall, time.process_time() - cpu, 0.0, {})

    return run


def _subject(options: argparse.Namespace, files: Sequence[Path], directory: Path) -> Any:
    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import as_evaluated_model
    from ttrain.pipeline import names

    if options.model:
        speaker = loading.load(names.resolve(options.model), device=options.device, dtype=options.dtype)
        return as_evaluated_model(speaker, batch_tokens=options.batch_tokens)
    from ttrain.config import Model
    from ttrain.data import tokenizer
    from ttrain.data.encoder import Encoder
    from ttrain.model import factory

    lines = [line for file in files for line in file.read_text().splitlines()]
    tokenizer.save(tokenizer.train(lines, common.VOCAB_SIZE), directory / "tokenizer")
    encoder = Encoder(directory / "tokenizer")
    ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    sizes = Model(
        hidden_size=options.hidden, layers=options.layers, heads=options.hidden // 64, max_length=2048, init_std=0.1
    )
    model = factory.build(sizes, vocab_size=len(encoder), ids=ids, stop_ids=[encoder.eos_id], seed=1)
    place = loading.precision.resolve_device(options.device)
    speaker = loading.with_tokenizer("random", model.to(place, loading.DTYPES[options.dtype]), directory / "tokenizer")
    return as_evaluated_model(speaker, batch_tokens=options.batch_tokens)


def _written(path: Path, items: int) -> Path:
    """Questions about which words of Python's source come next."""
    draw = random.Random(1)
    words = Path(argparse.__file__).read_text().split() + Path(statistics.__file__).read_text().split()
    with path.open("w") as file:
        for _ in range(items):
            starts = draw.sample(range(len(words) - 2 * WORDS), CHOICES)
            answer = draw.randrange(CHOICES)
            said = [" ".join(words[start + WORDS : start + WORDS + draw.randint(3, 20)]) for start in starts]
            question = " ".join(words[starts[answer] : starts[answer] + WORDS])
            file.write(json.dumps({"question": question, "choices": said, "answer": answer}) + "\n")
    return path


if __name__ == "__main__":
    raise SystemExit(main())
