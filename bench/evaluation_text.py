"""Bits per byte against the model's own forward pass.

The sides take turns in one process, in fp32. Texts are random tokens of log-normal lengths (median 150, from 8 to 2,000), so
that most fit into a window and some need several. "Bare" computes as many tokens as the windows have, in full batches of
full rows, with all logits and nothing else. "Strided" is the recipe of transformers' documentation: window after window, the
model's own loss.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import common

LEAST_OF_BARE = 0.9
STRIDE_SHARE = 2  # a window begins every row_length / 2 tokens, as by default
SIZES = {"S": (512, 8, 512, 6_000), "quickstart": (128, 4, 256, 20_000)}  # hidden, layers, row length, tokens
VOCAB_SIZE = 6400


def add_lines(table: common.Table, script: str, rounds: int) -> dict[str, list[common.Cost]]:
    """The lines of the table; returns what they were made of."""
    costs = {}
    for size, (hidden, layers, row_length, tokens) in SIZES.items():
        arguments = (hidden, layers, row_length, tokens, rounds)
        found = costs[f"text, {size}"] = [common.measure(script, "text", *arguments)]
        (cost,) = found
        told = cost.found
        print(
            f"{size}: {told['texts']} texts, {told['scored']:,} tokens scored of {told['computed']:,} computed, "
            f"{told['padding']:.1%} padding beside"
        )

        ours, bare = told["computed"] / told["ours"], told["computed"] / told["bare"]
        what = f"{size}: computed tokens/s, against the bare forward pass"
        table.add(what, f"{ours:,.0f}", f"{bare:,.0f}", ours / bare, least=LEAST_OF_BARE)
        ours, strided = told["scored"] / told["ours"], told["scored"] / told["strided"]
        table.add(f"{size}: scored tokens/s, against the strided recipe", f"{ours:,.0f}", f"{strided:,.0f}", ours / strided)
        table.claim(f"{size}: the same loss as the strided recipe, to 1e-5", abs(told["difference"]) < 1e-5)
    return costs


def side(hidden: str, layers: str, row_length: str, tokens: str, rounds: str) -> dict[str, Any]:
    """Median seconds of each side, what they computed, and the relative difference of two of them."""

    import torch

    from ttrain.evaluate import perplexity
    from ttrain.evaluate.perplexity import windows

    length, device = int(row_length), torch.device("cpu")
    stride = length // STRIDE_SHARE
    model, texts = _model(int(hidden), int(layers), length), _texts(int(tokens))
    batch_tokens = perplexity.BATCH_TOKENS["cpu"]
    spans = [(text, window) for text in texts for window in windows(len(text), length, stride)]
    computed = sum(window.inputs for _, window in spans)

    def ours() -> float:
        sequences = [(text, [False] + [True] * (len(text) - 1)) for text in texts]
        found = perplexity.score_each(
            model, sequences, length=length, stride=stride, device=device,
            batch_tokens=batch_tokens, progress=lambda done, total: None,
        )  # fmt: skip
        return sum(score.nats for score in found)

    def bare() -> float:
        left = computed
        with torch.inference_mode():
            while left > 0:
                rows = max(1, min(left, batch_tokens) // length)
                model(input_ids=torch.randint(3, VOCAB_SIZE, (rows, length)), use_cache=False)
                left -= rows * length
        return 0.0

    def strided() -> float:
        total = 0.0
        for text, (start, first, end) in spans:
            ids = torch.tensor([text[start:end]])
            labels = ids.clone()
            labels[0, : first - start] = -100
            with torch.inference_mode():
                total += float(model(input_ids=ids, labels=labels, use_cache=False).loss) * (end - first)
        return total

    sides: dict[str, Callable[[], float]] = {"ours": ours, "bare": bare, "strided": strided}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    nats = {}
    for number in range(int(rounds) + 1):
        for name, work in sides.items():
            began = time.perf_counter()
            nats[name] = work()
            if number:
                seconds[name].append(time.perf_counter() - began)
    lengths = sorted((window.inputs for _, window in spans), reverse=True)
    batches = perplexity.batch_slices(lengths, batch_tokens, perplexity.ENOUGH_TOKENS["cpu"])
    padded = sum((part.stop - part.start) * lengths[part.start] for part in batches)
    return {
        **{name: statistics.median(found) for name, found in seconds.items()},
        "texts": len(texts), "computed": computed, "scored": sum(len(text) - 1 for text in texts),
        "padding": padded / computed - 1, "difference": nats["ours"] / nats["strided"] - 1,
    }  # fmt: skip


def _model(hidden: int, layers: int, length: int) -> Any:
    from ttrain.config import Model
    from ttrain.model import factory

    config = Model(hidden_size=hidden, layers=layers, heads=max(1, hidden // 64), max_length=length)
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    return factory.build(config, vocab_size=VOCAB_SIZE, ids=ids, stop_ids=[2], seed=1).eval()


def _texts(tokens: int) -> list[list[int]]:
    """Random ids until there are so many."""
    import numpy as np

    random, found = np.random.default_rng(1), []
    while tokens > 0:
        length = int(np.clip(random.lognormal(np.log(150), 1.0), 8, 2000))
        found.append(random.integers(3, VOCAB_SIZE, length).tolist())
        tokens -= length
    return found
