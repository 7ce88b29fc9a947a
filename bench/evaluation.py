"""Speed of an evaluation against the bare forward pass and lm-evaluation-harness, and agreement with the latter.

    python bench/evaluation.py                                       all parts, with random weights and made items
    python bench/evaluation.py --only text --rounds 1                a quick try of one part
    python bench/evaluation.py --only agreement --items eval/ --model RUN --dtype bf16

text: bits per byte in fp32. Texts are random tokens of log-normal lengths (median 150, from 8 to 2,000), so that most fit
into a window and some need several. "Bare" computes as many tokens as the windows have, in full batches of full rows, with
all logits and nothing else.

choices: items a second of multiple choice, against the Hugging Face backend of lm-evaluation-harness (needs `pip install
'ttrain[harness]'`) with the same model and no more padded tokens in a batch, without and with four worked examples.

agreement: each item of files of `{"question", "choices", "answer"}` or `{"context", "target"}`, judged by both scores. The
harness opens the model by itself; its softmax is in fp32: in bf16 it rounds a log-likelihood of 100 nats to half a nat.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
from common import VOCAB_SIZE, Table

LEAST_OF_BARE, LEAST_CHOICES = 0.9, 2.0
NATS_A_TOKEN = {"fp32": 1e-4, "bf16": 0.1, "fp16": 0.02}  # by which ours and the harness may differ
SIZES = {"S": (512, 8, 512, 6_000), "quickstart": (128, 4, 256, 20_000)}  # hidden, layers, row length, tokens
MADE_ITEMS, WORDS, CHOICES, SHOTS = 32, 60, 4, 4


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--size", choices=sorted(SIZES), help="of the model of the text part; default: all")
    parser.add_argument("--items", nargs="+", type=Path, default=[], help="files or directories; default: made items")
    parser.add_argument("--limit", type=int, help="items of each file; default: 32 for choices, all for agreement")
    parser.add_argument("--model", help="as of `ttrain eval`; default: random weights of size S")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=sorted(NATS_A_TOKEN), default="fp32")
    parser.add_argument("--batch-tokens", type=int, default=4096)


# --- text


def compare_text(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Bits per byte of each size of model."""
    for size in [options.size] if options.size else SIZES:
        compare_size(size, options.rounds, table)


def compare_size(size: str, rounds: int, table: Table) -> None:
    """Bits per byte of one size of model."""
    import torch

    from ttrain.evaluate import perplexity

    hidden, layers, length, tokens = SIZES[size]
    stride, batch_tokens = length // 2, perplexity.BATCH_TOKENS["cpu"]  # the defaults
    model, texts = train_common.random_model(hidden, layers, length).eval(), random_texts(tokens)
    computed = sum(window.inputs for text in texts for window in perplexity.windows(len(text), length, stride))
    sequences = [(text, [False] + [True] * (len(text) - 1)) for text in texts]

    def ours() -> None:
        perplexity.score_each(
            model, sequences, length=length, stride=stride, device=torch.device("cpu"),
            batch_tokens=batch_tokens, progress=lambda done, total: None,
        )  # fmt: skip

    def bare() -> None:
        left = computed
        with torch.inference_mode():
            while left > 0:
                rows = max(1, min(left, batch_tokens) // length)
                model(input_ids=torch.randint(3, VOCAB_SIZE, (rows, length)), use_cache=False)
                left -= rows * length

    sides = {"ours": partial(common.timed, ours), "bare": partial(common.timed, bare)}
    costs = table.interleave(sides, rounds, warmups=1, group=f"{size}, ")
    rates = (computed / common.median(costs[side], "wall") for side in sides)
    table.ratio(f"{size}: computed tokens/s, bare forward passes", *rates, least=LEAST_OF_BARE)


def random_texts(tokens: int) -> list[list[int]]:
    """Texts of random ids that have so many tokens together."""
    import numpy as np

    generator, texts = np.random.default_rng(1), []
    while tokens > 0:
        length = int(np.clip(generator.lognormal(np.log(150), 1.0), 8, 2000))
        texts.append(generator.integers(3, VOCAB_SIZE, length).tolist())
        tokens -= length
    return texts


# --- choices and agreement


def compare_items(options: argparse.Namespace, directory: Path, table: Table, *, is_timed: bool) -> None:
    """The files of items under one model, opened by both."""
    if not common.has("lm_eval"):
        return
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import as_evaluated_model
    from ttrain.pipeline import names

    paths = options.items or [write_items(directory / "python.jsonl")]
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    reference = names.resolve(options.model or str(write_random_model(files, directory / "model")))
    loaded = loading.load(reference, device=options.device, dtype=options.dtype)
    evaluated = as_evaluated_model(loaded, batch_tokens=options.batch_tokens)
    dtype = loading.DTYPES[options.dtype]
    harness = HFLM(
        AutoModelForCausalLM.from_pretrained(reference.model, dtype=dtype, trust_remote_code=True).to(evaluated.device),
        tokenizer=AutoTokenizer.from_pretrained(reference.tokenizer), device=str(evaluated.device),
        softmax_dtype="float32", max_length=evaluated.max_length,
    )  # fmt: skip
    for file in files:
        kind = kind_of(file)
        if kind == "choices" or (kind and not is_timed):
            for shots in (0, SHOTS) if is_timed else (0,):
                compare_file(file, kind, shots, options, evaluated, harness, table, is_timed)


def compare_file(
    file: Path,
    kind: str,
    shots: int,
    options: argparse.Namespace,
    evaluated: Any,
    harness: Any,
    table: Table,
    is_timed: bool,
) -> None:
    """The lines of one file with so many worked examples."""
    from lm_eval.api.instance import Instance

    from ttrain.config.evaluate import ChoicesTask, LastWordTask
    from ttrain.evaluate import choices
    from ttrain.evaluate.items import SuiteFiles
    from ttrain.evaluate.log_likelihood import Likelihood, encode_pairs, log_likelihoods

    files, limit = SuiteFiles(file.parent.resolve()), options.limit or (MADE_ITEMS if is_timed else None)
    if kind == "choices":
        items = choices.read_choices("items", ChoicesTask(file=file.name, shots=shots, limit=limit), files).items
        texts = choices.choice_texts(items)
    else:
        items = choices.read_passages("items", LastWordTask(file=file.name, limit=limit), files).items
        texts = choices.passage_texts(items)
    lengths = [len(context) + len(continuation) for context, continuation in encode_pairs(evaluated, texts)]
    harness.batch_size_per_gpu = max(1, options.batch_tokens // min(max(lengths), evaluated.max_length or max(lengths)))
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in texts]
    label = f"{file.stem[:18]}, {shots} examples, {statistics.mean(lengths):.0f} tokens"
    works: dict[str, Callable[[], list[Any]]] = {
        "ours": lambda: log_likelihoods(evaluated, texts, lambda done, total: None),
        "theirs": lambda: harness.loglikelihood(requests, disable_tqdm=True),
    }
    ours = works["ours"]()  # the first time costs more
    theirs = [
        score._replace(nats=-nats, greedy=greedy) for score, (nats, greedy) in zip(ours, works["theirs"](), strict=True)
    ]
    if is_timed:
        sides = {side: partial(common.timed, work) for side, work in works.items()}
        costs = table.interleave(sides, options.rounds, group=f"{label}, ")
        rates = [len(items) / common.median(costs[side], "wall") for side in works]
        table.ratio(f"items/s, {label}", *rates, least=LEAST_CHOICES)
        table.speedup(f"CPU seconds, {label}", *(common.median(costs[side], "cpu") for side in works))
    else:
        left = [iter(ours), iter(theirs)]

        def judge(item: Any, scores: Iterator[Likelihood]) -> Any:
            if kind != "choices":
                return next(scores).greedy
            return choices.chosen_by(item.choice.choices, [next(scores) for _ in item.continuations])

        different = sum(judge(item, left[0]) != judge(item, left[1]) for item in items)
        table.check(f"{file.stem[:18]}: {len(items)} items, {different} judged differently", not different)
    apart = max(abs(one.nats - other.nats) / length for one, other, length in zip(ours, theirs, lengths, strict=True))
    table.value(f"nats a token apart, {label}", apart, most=NATS_A_TOKEN[options.dtype])


def kind_of(file: Path) -> str:
    """choices or last_word; empty for a file of other items."""
    first = json.loads(file.read_text().split("\n", 1)[0])
    return "choices" if "choices" in first else "last_word" if "target" in first else ""


def write_items(path: Path) -> Path:
    """Questions about which words of Python's source come next."""
    draw = random.Random(1)
    words = Path(argparse.__file__).read_text().split() + Path(statistics.__file__).read_text().split()
    with path.open("w") as file:
        for _ in range(MADE_ITEMS):
            starts = draw.sample(range(len(words) - 2 * WORDS), CHOICES)
            answer = draw.randrange(CHOICES)
            choices = [" ".join(words[start + WORDS : start + WORDS + draw.randint(3, 20)]) for start in starts]
            question = " ".join(words[starts[answer] : starts[answer] + WORDS])
            file.write(json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n")
    return path


def write_random_model(files: Sequence[Path], directory: Path) -> Path:
    """A directory with random weights of size S, and a tokenizer trained on the items."""
    from ttrain.data import tokenizer
    from ttrain.data.encoder import Encoder

    if not directory.exists():
        lines = [line for file in files for line in file.read_text().splitlines()]
        tokenizer.save(tokenizer.train(lines, VOCAB_SIZE), directory)
        encoder = Encoder(directory)
        ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
        model = train_common.random_model(512, 8, 2048, vocab_size=len(encoder), ids=ids, init_std=0.1)
        model.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    PARTS = {
        "text": compare_text,
        "choices": partial(compare_items, is_timed=True),
        "agreement": partial(compare_items, is_timed=False),
    }
    common.main(str(__doc__), PARTS, options=options)
