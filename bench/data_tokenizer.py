"""Training a tokenizer, against the trainer of `tokenizers` with the same pattern, alphabet and vocabulary.

    python bench/data_tokenizer.py [--path FILE.jsonl.zst]

The texts are in memory on both sides; seconds are those of training alone.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import common

from ttrain.data import jinja_templates

TRAINING_MEGABYTES = 50  # what the stage takes at most, unless it is told otherwise
LEAST = 0.95  # no slower, but for what the clock leaves open


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = common.parser(__doc__).parse_args()
    table = common.Table()
    with common.workplace() as directory:
        path = common.material(options, directory)
        sides = {side: lambda side=side: common.measure(__file__, side, path) for side in SIDES}
        costs = common.interleave(sides, options.rounds)
    for figure, name in (("cpu_s", "CPU seconds"), ("wall_s", "seconds")):
        ours, theirs = (common.median(costs[side], figure) for side in ("ours", "theirs"))
        what = f"{name}, BpeTrainer with {common.VOCAB_SIZE} entries"
        table.add(what, f"{ours:.2f}", f"{theirs:.2f}", theirs / ours, least=LEAST)
    merges = {cost.found["merges"] for found in costs.values() for cost in found}
    table.claim(f"the same {costs['ours'][0].found['count']} merges in every round", len(merges) == 1)
    return int(table.failed)


def side_ours(path: str) -> dict[str, Any]:
    from ttrain.data import tokenizer

    return timed(lambda texts: tokenizer.train(texts, common.VOCAB_SIZE), path)


def side_theirs(path: str) -> dict[str, Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    def train(texts: list[str]) -> Any:
        opened = Tokenizer(models.BPE(unk_token=jinja_templates.UNK))
        opened.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        trainer = trainers.BpeTrainer(
            vocab_size=common.VOCAB_SIZE,
            special_tokens=list(jinja_templates.SPECIAL_TOKENS["ttrain"]),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        opened.train_from_iterator(texts, trainer)
        return opened

    return timed(train, path)


def timed(train: Callable[[list[str]], Any], path: str) -> dict[str, Any]:
    """Seconds of training on the file's first megabytes, and a digest of the merges in their order."""
    import orjson

    texts = common.texts_of(path, TRAINING_MEGABYTES * common.MEGABYTE)
    wall, cpu = time.perf_counter(), time.process_time()
    trained = train(texts)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    merges = orjson.loads(trained.to_str())["model"]["merges"]
    digest = hashlib.sha256(orjson.dumps(merges)).hexdigest()
    return {"wall_s": wall, "cpu_s": cpu, "count": len(merges), "merges": digest}


SIDES: Mapping[str, Callable[..., dict[str, Any]]] = {"ours": side_ours, "theirs": side_theirs}

if __name__ == "__main__":
    if not common.requested_side(SIDES):
        sys.exit(main())
