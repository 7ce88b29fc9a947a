"""Shards to batches: shuffled rows against `datasets` and against tokenizing on the way; opening and resuming.

    python bench/data_rows.py [--path FILE.jsonl.zst --repeat 4]        needs `pip install datasets`
    python bench/data_rows.py --opening                                 sets of 50 M and 500 M random tokens, 1.1 GB of disk

Rows have ROW_LENGTH tokens on every side. `datasets` comes twice: with the input ids, labels, positions and segments that
ours have, and with input ids alone. A row of the last side is a document, encoded when it is asked for, cut or padded.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import common
import data_shards

ROW_LENGTH, ROWS_PER_BATCH = 512, 32
BATCHES = {"ours": 2000, "packed": 2000, "encoded": 32}
LEAST_PACKED, LEAST_ENCODED = 1.7, 140.0
TOKENS = {"small": 50_000_000, "large": 500_000_000}
SHARD_TOKENS, DOCUMENT_TOKENS, VOCAB_SIZE = 8_000_000, 800, 6400
RESUMED_STEP = 1_000_000
OPENING_ROUNDS = 7
MOST_OPENING_MS, MOST_FIRST_MS, MOST_RATIO = 25, 10, 2


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = common.parser(__doc__)
    options.add_argument("--opening", action="store_true")
    chosen = options.parse_args()
    table = common.Table()
    with common.workplace() as directory:
        (compare_opening if chosen.opening else compare_batches)(chosen, directory, table)
    return int(table.failed)


def compare_batches(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """Tokens that reach the model, a second and a CPU second of one process."""
    path = common.material(options, directory)
    tokenizer = common.tokenizer(path, directory)
    data_shards.make("ours", path, tokenizer, directory / "shards", data_shards.WORKERS)
    sides = {
        "ours": lambda: common.measure(__file__, "ours", directory / "shards" / "train", tokenizer),
        "encoded": lambda: common.measure(__file__, "encoded", path, tokenizer),
    }
    if common.has("datasets"):
        for side in ("packed", "ids"):
            common.measure(__file__, "pack", directory / "shards" / "train", directory / side, side)
            sides[side] = lambda side=side: common.measure(__file__, "packed", directory / side)
    costs = common.interleave(sides, options.rounds)
    limits = {"packed": LEAST_PACKED, "encoded": LEAST_ENCODED}
    names = {"packed": "datasets, the same arrays", "ids": "datasets, ids alone", "encoded": "encoding in __getitem__"}
    for peer in [side for side in names if side in costs]:
        for figure, unit in (("per_cpu_s", "CPU second"), ("per_s", "second")):
            ours, theirs = (common.median(costs[side], figure) for side in ("ours", peer))
            what = f"tokens a {unit}, {names[peer]}"
            table.add(what, f"{ours:.3g}", f"{theirs:.3g}", ours / theirs, least=limits.get(peer))


def compare_opening(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """Milliseconds until a set is open, and from there to the first batch, at the first step and at a late one."""
    for name, tokens in TOKENS.items():
        common.measure(__file__, "random", directory / name, tokens)
    sides = {
        (name, step): lambda name=name, step=step: common.measure(__file__, "open", directory / name, step)
        for name in TOKENS
        for step in (0, RESUMED_STEP)
    }
    costs = common.interleave(sides, max(options.rounds, OPENING_ROUNDS))
    large, small = (common.median(costs[name, 0], "open_ms") for name in ("large", "small"))
    table.add("ms to open 500 M tokens against 50 M", f"{large:.2f}", f"{small:.2f}", large / small)
    table.claim(f"500 M tokens are open in less than {MOST_OPENING_MS} ms", large < MOST_OPENING_MS)
    late, first = (common.median(costs["large", step], "first_ms") for step in (RESUMED_STEP, 0))
    what = f"ms to the first batch of 500 M, step {RESUMED_STEP} against 0"
    table.add(what, f"{late:.2f}", f"{first:.2f}", late / first, most=MOST_RATIO)
    table.claim(f"the first batch takes less than {MOST_FIRST_MS} ms", max(late, first) < MOST_FIRST_MS)


def side_ours(directory: str, tokenizer: str) -> dict[str, float]:
    """As the trainer gets them: arrays of a step, turned into tensors that share their memory."""
    import torch

    from ttrain.data.encoder import Encoder

    loader = loader_of(directory, Encoder(Path(tokenizer), fast=False).pad_id, BATCHES["ours"])

    def batches() -> Iterator[int]:
        for step in range(BATCHES["ours"]):
            for micro_batch in loader.step(step):
                batch = micro_batch.batch
                arrays = (batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.segments_BT)
                tensors = [torch.from_numpy(array) for array in arrays]
                yield tensors[0].numel()

    return rate(batches())


def side_packed(directory: str) -> dict[str, float]:
    """`datasets` with rows of the same length, memory-mapped too, through a shuffled DataLoader."""
    import datasets
    from torch.utils.data import DataLoader

    rows = datasets.load_from_disk(directory).with_format("torch")
    loader = DataLoader(rows, batch_size=ROWS_PER_BATCH, shuffle=True)

    def batches() -> Iterator[int]:
        epochs = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(epochs, BATCHES["packed"]):
            yield batch["input_ids"].numel()

    return rate(batches())


def side_encoded(path: str, tokenizer: str) -> dict[str, float]:
    """A data set over JSON lines that encodes in __getitem__, through a shuffled DataLoader."""
    import torch
    from tokenizers import Tokenizer
    from torch.utils.data import DataLoader, Dataset

    opened = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    opened.enable_truncation(ROW_LENGTH)
    opened.enable_padding(length=ROW_LENGTH)

    class Lines(Dataset[Any]):
        def __init__(self) -> None:
            with Path(path).open("rb") as file:
                self.lines = file.readlines()

        def __len__(self) -> int:
            return len(self.lines)

        def __getitem__(self, row: int) -> tuple[Any, Any]:
            encoding = opened.encode(json.loads(self.lines[row])["text"])
            return torch.tensor(encoding.ids), torch.tensor(encoding.attention_mask)

    loader = DataLoader(Lines(), batch_size=ROWS_PER_BATCH, shuffle=True)

    def batches() -> Iterator[int]:
        for _, mask in itertools.islice(loader, BATCHES["encoded"]):
            yield int(mask.sum())

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


def side_pack(directory: str, output: str, columns: str) -> None:
    """The rows of a set of shards as a `datasets` directory, in int32 as its map would leave them."""
    import datasets
    import numpy as np

    rows = loader_of(directory, 0, 1).rows
    batch = rows.batch(range(len(rows) - 1))
    found = {"input_ids": batch.input_ids_BT}
    if columns == "packed":
        found |= {"labels": batch.labels_BT, "positions": batch.positions_BT, "segments": batch.segments_BT}
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in found})
    arrays = {name: array.astype(np.int32) for name, array in found.items()}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(arrays, features=features).save_to_disk(output)


def side_random(directory: str, tokens: str) -> None:
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


def side_open(directory: str, step: str) -> dict[str, float]:
    """Milliseconds to open a set, and to make the batch of a step; modules are imported before."""
    import pyarrow as pa

    from ttrain.data import loader, record_rows, shards

    assert pa and record_rows and loader and loader and shards, "imported, so that the clock leaves that out"
    began = time.perf_counter()
    opened = loader_of(directory, 0, RESUMED_STEP + 1)
    between = time.perf_counter()
    opened.step(int(step))
    return {"open_ms": 1000 * (between - began), "first_ms": 1000 * (time.perf_counter() - between)}


SIDES: Mapping[str, Callable[..., Mapping[str, Any] | None]] = {
    "ours": side_ours,
    "packed": side_packed,
    "encoded": side_encoded,
    "pack": side_pack,
    "random": side_random,
    "open": side_open,
}

if __name__ == "__main__":
    if not common.requested_side(SIDES):
        sys.exit(main())
