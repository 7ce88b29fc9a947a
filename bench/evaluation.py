"""Multiple choice against lm-evaluation-harness: items a second, and how far the scores are apart.

    python bench/evaluation.py                      4 minutes on two cores
    python bench/evaluation.py --rounds 1           a quick try

Items are made of Python's source, and scored under one model of random weights by ttrain and by the
Hugging Face backend of lm-evaluation-harness (needs `pip install 'ttrain[harness]'`), which gets no
more padded tokens in a batch: without and with four worked examples.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import common
import train_common
from common import VOCAB_SIZE, Table

LEAST_CHOICES = 2.0
MOST_NATS_APART = 1e-4  # of a token
BATCH_TOKENS = 4096  # padded, of a batch
MADE_ITEMS = 32
WORDS = 60
CHOICES = 4
SHOTS = 4


def compare_choices(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Made items under one model of random weights, without and with worked examples."""
    if not common.has("lm_eval"):
        return
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    logging.disable(logging.WARNING)
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ttrain.inference import loading
    from ttrain.lineage import lookup

    file = write_items(directory / "python.jsonl")
    reference = lookup.resolve(str(write_random_model(file, directory / "model")))
    evaluated = replace(loading.load(reference, device="cpu"), batch_tokens=BATCH_TOKENS)
    model = AutoModelForCausalLM.from_pretrained(reference.model)
    tokenizer = AutoTokenizer.from_pretrained(reference.tokenizer)
    harness = HFLM(
        model,
        tokenizer=tokenizer,
        device="cpu",
        softmax_dtype="float32",
        max_length=evaluated.max_length,
    )
    for shots in (0, SHOTS):
        compare_items(file, shots, options.rounds, evaluated, harness, table)


def compare_items(
    file: Path, shots: int, rounds: int, evaluated: Any, harness: Any, table: Table
) -> None:
    """The lines of the items with so many worked examples."""
    from lm_eval.api.instance import Instance

    from ttrain.config.evaluate import ChoicesTask
    from ttrain.evaluate import choices
    from ttrain.evaluate.items import SuiteFiles
    from ttrain.evaluate.log_likelihood import encode_pairs, log_likelihoods

    task = ChoicesTask(file=file.name, shots=shots)
    texts = choices.choice_texts(
        choices.read("items", task, SuiteFiles(file.parent.resolve())).items
    )
    lengths = [
        len(context) + len(continuation) for context, continuation in encode_pairs(evaluated, texts)
    ]
    harness.batch_size_per_gpu = max(
        1, BATCH_TOKENS // min(max(lengths), evaluated.max_length or max(lengths))
    )
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in texts]
    label = f"{shots} examples, {statistics.mean(lengths):.0f} tokens"
    works = (
        partial(log_likelihoods, evaluated, texts, lambda done, total: None),
        partial(harness.loglikelihood, requests, disable_tqdm=True),
    )
    pairs = zip(*(work() for work in works), lengths, strict=True)  # the first time costs more
    apart = max(
        abs(score.nats + log_likelihood) / length for score, (log_likelihood, _), length in pairs
    )
    sides = {
        side: partial(common.timed, work)
        for side, work in zip(("ours", "theirs"), works, strict=True)
    }
    costs = table.interleave(sides, rounds, group=f"{label}, ")
    rates = (MADE_ITEMS / common.median(costs[side], "wall") for side in sides)
    table.ratio(f"items/s, {label}", *rates, least=LEAST_CHOICES)
    table.value(f"nats a token apart, {label}", apart, most=MOST_NATS_APART)


def write_items(path: Path) -> Path:
    """Questions about which words of Python's source come next."""
    draw = random.Random(1)
    words = (
        Path(argparse.__file__).read_text().split() + Path(statistics.__file__).read_text().split()
    )
    with path.open("w") as file:
        for _ in range(MADE_ITEMS):
            starts = draw.sample(range(len(words) - 2 * WORDS), CHOICES)
            answer = draw.randrange(CHOICES)
            choices = [
                " ".join(words[start + WORDS : start + WORDS + draw.randint(3, 20)])
                for start in starts
            ]
            question = " ".join(words[starts[answer] : starts[answer] + WORDS])
            file.write(
                json.dumps({"question": question, "choices": choices, "answer": answer}) + "\n"
            )
    return path


def write_random_model(file: Path, directory: Path) -> Path:
    """A directory with random weights of size S, and a tokenizer trained on the items."""
    from ttrain.data import tokenizer
    from ttrain.data.encoder import Encoder

    tokenizer.save(tokenizer.train(file.read_text().splitlines(), VOCAB_SIZE), directory)
    encoder = Encoder(directory)
    ids = {
        "bos_token_id": encoder.bos_id,
        "eos_token_id": encoder.eos_id,
        "pad_token_id": encoder.pad_id,
    }
    size = replace(train_common.SIZES["S"], row_length=2048, vocab_size=len(encoder))
    train_common.random_model(size, ids=ids, init_std=0.1).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    common.main(str(__doc__), {"choices": compare_choices})
