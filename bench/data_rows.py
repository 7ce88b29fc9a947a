"""Shards to batches: shuffled rows against `datasets`; opening a large set, and resuming in it.

    python bench/data_rows.py [--path FILE.jsonl.zst --repeat 4]        needs `pip install datasets`
    python bench/data_rows.py --only opening                            sets of 50 M and 500 M random tokens, 1.1 GB of disk

Rows have 512 tokens on every side. `datasets` comes twice: with the input ids, labels, positions and segments that ours
have, and with input ids alone.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import data_shards
from common import VOCAB_SIZE, Table

ROW_LENGTH, ROWS_PER_BATCH = 512, 32
BATCHES = 2000
LEAST_PACKED = 1.7
TOKENS = {"small": 50_000_000, "large": 500_000_000}
SHARD_TOKENS, DOCUMENT_TOKENS = 8_000_000, 800
RESUMED_STEP = 1_000_000
OPENING_ROUNDS = 7
MOST_OPENING_MS, MOST_FIRST_MS, MOST_RATIO = 25, 10, 2


def compare_batches(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Tokens that reach the model, a second and a CPU second of one process."""
    path = common.write_text(options, directory)
    tokenizer = common.train_tokenizer(path, directory)
    shards = directory / "shards" / "train"
    data_shards.make(data_shards.shard, path, tokenizer, directory / "shards", data_shards.WORKERS)
    sides = {"ours": lambda: common.measure(read_batches, shards, tokenizer)}
    peers = {"packed": ("the same arrays", LEAST_PACKED), "ids": ("ids alone", 0)} if common.has("datasets") else {}
    for peer in peers:
        common.measure(save_rows, shards, directory / peer, peer)
        sides[peer] = lambda peer=peer: common.measure(read_datasets, directory / peer)
    costs = table.interleave(sides, options.rounds)
    table.value("tokens a CPU second", common.median(costs["ours"], "per_cpu_s"))
    for peer, (name, least) in peers.items():
        for figure, unit in (("per_cpu_s", "CPU second"), ("per_s", "second")):
            rates = (common.median(costs[side], figure) for side in ("ours", peer))
            table.ratio(f"tokens a {unit}, datasets, {name}", *rates, least=least)


def compare_opening(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Milliseconds until a set is open, and from there to the first batch, at the first step and at a late one."""
    for name, tokens in TOKENS.items():
        common.measure(write_random_shards, directory / name, tokens)
    sides = {
        f"{name}, step {step}": lambda name=name, step=step: common.measure(open_shards, directory / name, step)
        for name in TOKENS
        for step in (0, RESUMED_STEP)
    }
    costs = table.interleave(sides, max(options.rounds, OPENING_ROUNDS))
    large, small = (common.median(costs[f"{name}, step 0"], "open_ms") for name in ("large", "small"))
    table.ratio("ms to open 500 M tokens, 50 M", large, small)
    table.value("ms to open 500 M tokens", large, most=MOST_OPENING_MS)
    late, first = (common.median(costs[f"large, step {step}"], "first_ms") for step in (RESUMED_STEP, 0))
    table.ratio(f"ms to the first batch of 500 M, step {RESUMED_STEP}, step 0", late, first, most=MOST_RATIO)
    table.value("ms to the first batch", max(late, first), most=MOST_FIRST_MS)


def read_batches(directory: str, tokenizer: str) -> dict[str, float]:
    """As the trainer gets them: arrays of a step, turned into tensors that share their memory."""
    import torch

    from ttrain.data.encoder import Encoder

    loader = loader_of(directory, Encoder(Path(tokenizer), fast=False).pad_id, BATCHES)

    def batches() -> Iterator[int]:
        for step in range(BATCHES):
            for micro_batch in loader.step(step):
                batch = micro_batch.batch
                arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
                tensors = [torch.from_numpy(array) for array in arrays]
                yield tensors[0].numel()

    return rate(batches())


def read_datasets(directory: str) -> dict[str, float]:
    """`datasets` with rows of the same length, memory-mapped too, through a shuffled DataLoader."""
    import datasets
    from torch.utils.data import DataLoader

    rows = datasets.load_from_disk(directory).with_format("torch")
    loader = DataLoader(rows, batch_size=ROWS_PER_BATCH, shuffle=True)

    def batches() -> Iterator[int]:
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(epochs, BATCHES):
            yield batch["input_ids"].numel()

    return rate(batches())


def rate(batches: Iterator[int]) -> dict[str, float]:
    """Tokens a second of those after the first batch, which pays for imports and opening."""
    next(batches)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = sum(batches)
    return {"per_s": tokens / (time.perf_counter() - wall), "per_cpu_s": tokens / (time.process_time() - cpu)}


def loader_of(directory: str, pad_id: int, steps: int) -> Any:
    """The loader of the training stages, for one rank."""
    from ttrain.data.loader import Loader, ShuffledOrder
    from ttrain.data.record_rows import DocumentRows
    from ttrain.data.shards import ShardSet

    rows = DocumentRows(ShardSet(Path(directory)), ROW_LENGTH, pad_id)
    order = ShuffledOrder(len(rows), ROWS_PER_BATCH, steps * ROWS_PER_BATCH, seed=1)
    return Loader(rows, order, rows_per_device=ROWS_PER_BATCH)


def save_rows(directory: str, output: str, kind: str) -> None:
    """The rows of a set of shards as a `datasets` directory, in int32 as its map would leave them."""
    import datasets
    import numpy as np

    rows = loader_of(directory, 0, 1).rows
    batch = rows.batch(range(len(rows) - 1))
    columns = {"input_ids": batch.input_ids_BT}
    if kind == "packed":
        columns |= {"labels": batch.labels_BT, "positions": batch.positions_BT, "segments": batch.segments_BT}
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in columns})
    arrays = {name: array.astype(np.int32) for name, array in columns.items()}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(arrays, features=features).save_to_disk(output)


def write_random_shards(directory: str, tokens: str) -> None:
    """A set of so many random tokens, in shards as the stage makes them."""
    import numpy as np

    from ttrain.data.shards import Column, write_index, write_shard

    Path(directory).mkdir()
    generator = np.random.default_rng(0)
    entries = []
    for number, start in enumerate(range(0, int(tokens), SHARD_TOKENS)):
        count = min(SHARD_TOKENS, int(tokens) - start)
        offsets = np.append(np.arange(0, count, DOCUMENT_TOKENS), count)
        column = Column(generator.integers(0, VOCAB_SIZE, count, np.uint16), offsets)
        entry = write_shard(Path(directory) / f"{number:05}.arrow", column, VOCAB_SIZE)
        entries.append({**entry, "bytes": 4 * count, "group": 0})
    write_index(Path(directory), kind="documents", vocab_size=VOCAB_SIZE, tokenizer="random", shards=entries)


def open_shards(directory: str, step: str) -> dict[str, float]:
    """Milliseconds to open a set, and to make the batch of a step; modules are imported before."""
    import pyarrow as pa

    from ttrain.data import loader, record_rows, shards

    assert pa and record_rows and loader and loader and shards, "imported, so that the clock leaves that out"
    began = time.perf_counter()
    opened = loader_of(directory, 0, RESUMED_STEP + 1)
    between = time.perf_counter()
    opened.step(int(step))
    return {"open_ms": 1000 * (between - began), "first_ms": 1000 * (time.perf_counter() - between)}


PARTS = {"batches": compare_batches, "opening": compare_opening}

if __name__ == "__main__":
    common.main(str(__doc__), PARTS, default="batches", options=common.text_options)
