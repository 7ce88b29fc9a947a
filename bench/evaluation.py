"""Speed of an evaluation against the bare forward pass and against lm-evaluation-harness.

    python bench/evaluation.py                                       both parts, with random weights and made items
    python bench/evaluation.py --only text --rounds 1                a quick try of one part

text: bits per byte in fp32. Texts are random tokens of log-normal lengths (median 150, from 8 to 2,000), so that most fit
into a window and some need several. "Bare" computes as many tokens as the windows have, in full batches of full rows, with
all logits and nothing else.

choices: items a second of multiple choice, against the Hugging Face backend of lm-evaluation-harness (needs `pip install
'ttrain[harness]'`) with the same model and no more padded tokens in a batch, without and with four worked examples; and by
how many nats the scores differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
from common import VOCAB_SIZE, Table

LEAST_OF_BARE, LEAST_CHOICES = 0.9, 2.0
MOST_NATS_APART, BATCH_TOKENS = 1e-4, 4096  # of a token; padded, of a batch
SIZES = {"S": (512, 8, 512, 6_000), "quickstart": (128, 4, 256, 20_000)}  # hidden, layers, row length, tokens
MADE_ITEMS, WORDS, CHOICES, SHOTS = 32, 60, 4, 4


def options(parser: argparse.ArgumentParser) -> None:
    """The options of this command."""
    parser.add_argument("--size", choices=sorted(SIZES), help="of the model of the text part; default: all")


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


# --- choices


def compare_choices(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Made items under one model of random weights, opened by both."""
    if not common.has("lm_eval"):
        return
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ttrain.inference import loading
    from ttrain.inference.evaluated_model import as_evaluated_model
    from ttrain.pipeline import names

    file = write_items(directory / "python.jsonl")
    reference = names.resolve(str(write_random_model(file, directory / "model")))
    evaluated = as_evaluated_model(loading.load(reference, device="cpu"), batch_tokens=BATCH_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(reference.model, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(reference.tokenizer)
    harness = HFLM(model, tokenizer=tokenizer, device="cpu", softmax_dtype="float32", max_length=evaluated.max_length)
    for shots in (0, SHOTS):
        compare_items(file, shots, options.rounds, evaluated, harness, table)


def compare_items(file: Path, shots: int, rounds: int, evaluated: Any, harness: Any, table: Table) -> None:
    """The lines of the items with so many worked examples."""
    from lm_eval.api.instance import Instance

    from ttrain.config.evaluate import ChoicesTask
    from ttrain.evaluate import choices
    from ttrain.evaluate.items import SuiteFiles
    from ttrain.evaluate.log_likelihood import encode_pairs, log_likelihoods

    task = ChoicesTask(file=file.name, shots=shots)
    items = choices.read_choices("items", task, SuiteFiles(file.parent.resolve())).items
    texts = choices.choice_texts(items)
    lengths = [len(context) + len(continuation) for context, continuation in encode_pairs(evaluated, texts)]
    harness.batch_size_per_gpu = max(1, BATCH_TOKENS // min(max(lengths), evaluated.max_length or max(lengths)))
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in texts]
    label = f"{shots} examples, {statistics.mean(lengths):.0f} tokens"
    works: dict[str, Callable[[], list[Any]]] = {
        "ours": lambda: log_likelihoods(evaluated, texts, lambda done, total: None),
        "theirs": lambda: harness.loglikelihood(requests, disable_tqdm=True),
    }
    ours, theirs = (work() for work in works.values())  # the first time costs more
    sides = {side: partial(common.timed, work) for side, work in works.items()}
    costs = table.interleave(sides, rounds, group=f"{label}, ")
    rates = [len(items) / common.median(costs[side], "wall") for side in works]
    table.ratio(f"items/s, {label}", *rates, least=LEAST_CHOICES)
    table.speedup(f"CPU seconds, {label}", *(common.median(costs[side], "cpu") for side in works))
    pairs = zip(ours, theirs, lengths, strict=True)
    apart = max(abs(score.nats + log_likelihood) / length for score, (log_likelihood, _), length in pairs)
    table.value(f"nats a token apart, {label}", apart, most=MOST_NATS_APART)


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


def write_random_model(file: Path, directory: Path) -> Path:
    """A directory with random weights of size S, and a tokenizer trained on the items."""
    from ttrain.data import tokenizer
    from ttrain.data.encoder import Encoder

    tokenizer.save(tokenizer.train(file.read_text().splitlines(), VOCAB_SIZE), directory)
    encoder = Encoder(directory)
    ids = {"bos_token_id": encoder.bos_id, "eos_token_id": encoder.eos_id, "pad_token_id": encoder.pad_id}
    model = train_common.random_model(512, 8, 2048, vocab_size=len(encoder), ids=ids, init_std=0.1)
    model.save_pretrained(directory)
    return directory


if __name__ == "__main__":
    common.main(str(__doc__), {"text": compare_text, "choices": compare_choices}, options=options)
