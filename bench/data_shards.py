"""JSON lines to shards, and shards to batches: CPU seconds, wall time, disk and memory, against `datasets`.

    python bench/data_shards.py [--path FILE.jsonl.zst --megabytes 300] needs `pip install datasets`
    python bench/data_shards.py --only batches                         shuffled rows of 512 tokens
    python bench/data_shards.py --only memory                          a file of 2 GB against one of 100 MB
    python bench/data_shards.py --only near                            near-duplicates of shards that are made already

Both sides use the same tokenizer and two processes, begin and end each document alike, and must make the same ids of all
documents; `datasets` calls `encode_batch_fast` and keeps the ids alone. Ours comes with one worker, too. Batches have the
same arrays on both sides.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
from common import MEGABYTE, Cost, Table

WORKERS = 2
LARGE_MEGABYTES, SMALL_MEGABYTES = 2000, 100
LEAST_CPU, LEAST_WORKERS, MOST_MEMORY_MB, MOST_GROWTH = 10.0, 1.8, 400, 1.1
LEAST_NEAR = 100.0  # MB a CPU minute
PLANTED_BYTES = 10_000_000
ROW_LENGTH, ROWS_PER_BATCH, BATCHES, LEAST_BATCHES = 512, 32, 2000, 1.7
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def compare_peers(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Ours against `datasets`."""
    path = common.write_text(options, directory)
    tokenizer = common.train_tokenizer(path, directory)
    sides = {
        "ours": lambda: make(shard, path, tokenizer, directory / "ours", WORKERS),
        "one worker": lambda: make(shard, path, tokenizer, directory / "one", 1),
    }
    if has_peer := common.has("datasets"):
        sides["datasets"] = lambda: make(map_lean, path, tokenizer, directory / "datasets", WORKERS, **ONE_THREAD)
    costs = table.interleave(sides, options.rounds)
    cpu, wall = common.median(costs["ours"], "cpu"), common.median(costs["ours"], "wall")
    print(f"ours: {costs['ours'][0].result}, {path.stat().st_size / MEGABYTE / cpu:.1f} MB a CPU second")
    table.speedup("seconds, one worker", wall, common.median(costs["one worker"], "wall"), least=LEAST_WORKERS)
    if has_peer:
        table.speedup("CPU seconds, datasets", cpu, common.median(costs["datasets"], "cpu"), least=LEAST_CPU)
        table.speedup("seconds, datasets", wall, common.median(costs["datasets"], "wall"))
        sizes = [directory_bytes(directory / side) / MEGABYTE for side in ("ours", "datasets")]
        table.ratio("MB on disk, datasets", *sizes)
        compared = compare_ids(directory / "ours", directory / "datasets")
        table.check(f"ids of all {compared['documents']} documents equal", compared["equal"])


def compare_memory(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Peaks of the main process and of the largest worker, for a large file and a small one."""
    peaks: dict[int, Cost] = {}
    for megabytes in (SMALL_MEGABYTES, LARGE_MEGABYTES):
        path = common.write_text(options, directory, megabytes)
        tokenizer = common.train_tokenizer(path, directory)
        peaks[megabytes] = make(shard, path, tokenizer, directory / "ours", WORKERS)
        path.unlink()
    for process in ("main", "worker"):
        large, small = (peaks[megabytes].result[f"{process}_mb"] for megabytes in (LARGE_MEGABYTES, SMALL_MEGABYTES))
        table.ratio(f"peak MB of the {process} process, 2 GB, 100 MB", large, small, most=MOST_GROWTH)
        table.value(f"peak MB of the {process} process", large, most=MOST_MEMORY_MB)


def compare_near(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """CPU time to find near-duplicates, beside what encoding takes; and the planted ones that are found.

    Each pass over the text is a near-duplicate of the first, so that all are compared exactly.
    """
    path = common.write_text(options, directory)
    tokenizer = common.train_tokenizer(path, directory)
    make(shard, path, tokenizer, directory / "ours", 1)
    costs = []
    for _ in range(options.rounds):
        shutil.rmtree(directory / "ours" / "run" / "near", ignore_errors=True)
        costs.append(common.measure(shard, path, tokenizer, directory / "ours", 1, "0.8"))
    without = common.measure(shard, path, tokenizer, directory / "ours", 1)
    megabytes, result = path.stat().st_size / MEGABYTE, costs[0].result
    print(f"{result['near']}, {costs[0].memory:.0f} MB of memory; {without.cpu:.1f} CPU s without near-duplicates")
    rate = 60 * megabytes / (common.median(costs, "cpu") - without.cpu)
    table.value("near-duplicates, MB a CPU minute", rate, least=LEAST_NEAR)
    planted = common.measure(find_planted, path)
    for figure in ("recall", "precision"):
        table.value(f"near-duplicates of 1 to 20 % edits, {figure}", planted.result[figure], least=0.99)


def find_planted(path: str) -> dict[str, float]:
    """Recall and precision of near-duplicates with a stretch of 1 to 20 % replaced, against the exact Jaccard of each pair.

    A copy counts where its original stays: else it is compared with another text.
    """
    import numpy as np

    from ttrain.data import near_duplicates, overlap
    from ttrain.data.near_duplicates import SimilarityRule

    rule, random_source = SimilarityRule(0.8), random.Random(1)
    texts = [text for text in common.read_texts(path, PLANTED_BYTES) if len(text) > 200]
    plain = []
    for text in texts:
        share = random_source.uniform(0.01, 0.2)
        start = random_source.randrange(len(text) - int(share * len(text)))
        other = random_source.choice(texts)[: int(share * len(text))]
        plain += [overlap.plain(text), overlap.plain(text[:start] + other + text[start + len(other) :])]
    hashes = [near_duplicates.shingles_of(np.frombuffer(text, np.uint8)) for text in plain]
    sketches = near_duplicates.sketches_of(plain, rule)
    all_rows = np.ones(len(plain), np.bool_)
    found = near_duplicates.candidates(lambda band: sketches.keys[band], rule, sketches.counts, all_rows, all_rows)
    dropped = near_duplicates.confirm(found, sketches.counts, all_rows, lambda position: hashes[position], rule)
    copies = {near.position for near in dropped}
    stay = [number for number in range(0, len(plain), 2) if number not in copies]
    exact = {number + 1 for number in stay if near_duplicates.jaccard(hashes[number], hashes[number + 1]) >= rule.threshold}
    right = [near for near in dropped if near_duplicates.jaccard(hashes[near.position], hashes[near.original]) >= 0.8]
    return {"recall": len(exact & copies) / len(exact), "precision": len(right) / len(dropped), "planted": len(exact)}


def make(side: Any, path: Path, tokenizer: Path, output: Path, workers: int | str, **environment: str) -> Cost:
    """Run a side that writes a directory, which does not exist before."""
    shutil.rmtree(output, ignore_errors=True)
    return common.measure(side, path, tokenizer, output, workers, **environment)


def directory_bytes(directory: Path) -> int:
    """Size of all files below."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def shard(path: str, tokenizer: str, output: str, workers: str, near: str = "") -> dict[str, Any]:
    """What the stage does, with the default settings: duplicates dropped, 2 % held out, digests of all files."""
    from ttrain.config import Reading, Shards
    from ttrain.data import sharding
    from ttrain.data.built_blocks import DataFile
    from ttrain.data.sharding import Processes
    from ttrain.stages.shards import recipe_of

    reading = Reading(near_duplicates=float(near) if near else None)
    with Processes(int(workers)) as pool:
        if pool.workers > 1:
            pool.begin()
        built = sharding.build(
            Path(output),
            {"train": [DataFile(path, path)]},
            recipe_of(reading, Path(tokenizer), "documents"),
            reading,
            block_bytes=Shards().block_bytes,
            pool=pool,
        )
    peaks = {"main": resource.RUSAGE_SELF, "worker": resource.RUSAGE_CHILDREN}
    tokens = sum(part["tokens"] for part in built.parts.values())
    return {
        "tokens": tokens,
        "encoder": built.encoder,
        "near": built.near_duplicates,
        **{f"{name}_mb": resource.getrusage(process).ru_maxrss * 1024 / MEGABYTE for name, process in peaks.items()},
    }


def map_lean(path: str, tokenizer: str, output: str, workers: str) -> None:
    """`datasets` at its best: the fastest call of `tokenizers`, and nothing but the ids is kept."""
    from tokenizers import Tokenizer

    from ttrain.data.encoder import Encoder

    opened = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    ends = Encoder(Path(tokenizer), fast=False)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = opened.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[ends.bos_id, *encoding.ids, ends.eos_id] for encoding in encodings]}

    map_dataset(path, output, encode, num_proc=int(workers), remove_columns=["text"])


def map_dataset(path: str, output: str, encode: Any, **arguments: Any) -> None:
    """Read JSON lines, encode them in batches and save the result, all by `datasets`."""
    import datasets

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=f"{output}-cache")
    rows.map(encode, batched=True, **arguments).save_to_disk(output)
    shutil.rmtree(f"{output}-cache")


def compare_ids(ours: Path, theirs: Path) -> dict[str, Any]:
    """Whether both sides made the same ids of the same documents, in whatever order."""
    import datasets

    from ttrain.data.shards import ShardSet

    columns = [column for part in ("train", "heldout") for column in ShardSet(ours / part).columns()]
    digests = sorted(digest for column in columns for digest in digests_of(column.tokens, column.offsets))
    chunks = datasets.load_from_disk(str(theirs)).data.column("input_ids").chunks
    their_digests = (digests_of(chunk.values.to_numpy(), chunk.offsets.to_numpy()) for chunk in chunks)
    return {"documents": len(digests), "equal": digests == sorted(itertools.chain.from_iterable(their_digests))}


def digests_of(tokens: Any, offsets: Any) -> Iterator[bytes]:
    """A digest of the ids of each document."""
    for start, end in itertools.pairwise(offsets):
        yield hashlib.blake2b(tokens[start:end].astype("<u4").tobytes(), digest_size=16).digest()


def compare_batches(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Tokens that reach the model, a second and a CPU second of one process."""
    path = common.write_text(options, directory)
    tokenizer = common.train_tokenizer(path, directory)
    shards = directory / "shards" / "train"
    make(shard, path, tokenizer, directory / "shards", WORKERS)
    sides = {"ours": lambda: common.measure(read_batches, shards, tokenizer)}
    if common.has("datasets"):
        common.measure(save_rows, shards, directory / "rows")
        sides["datasets"] = lambda: common.measure(read_datasets, directory / "rows")
    costs = table.interleave(sides, options.rounds)
    table.value("tokens a CPU second", common.median(costs["ours"], "per_cpu_s"))
    if "datasets" in costs:
        for figure, unit, least in (("per_cpu_s", "CPU second", LEAST_BATCHES), ("per_s", "second", 0)):
            rates = (common.median(costs[side], figure) for side in ("ours", "datasets"))
            table.ratio(f"tokens a {unit}, datasets", *rates, least=least)


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


def save_rows(directory: str, output: str) -> None:
    """The rows of a set of shards as a `datasets` directory, in int32 as its map would leave them."""
    import datasets
    import numpy as np

    rows = loader_of(directory, 0, 1).rows
    batch = rows.batch(range(len(rows) - 1))
    columns = {name: getattr(batch, f"{name}_BT") for name in ("input_ids", "labels", "positions", "segments")}
    features = datasets.Features({name: datasets.List(datasets.Value("int32")) for name in columns})
    arrays = {name: array.astype(np.int32) for name, array in columns.items()}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(arrays, features=features).save_to_disk(output)


PARTS = {"peers": compare_peers, "batches": compare_batches, "memory": compare_memory, "near": compare_near}

if __name__ == "__main__":
    common.main(str(__doc__), PARTS, default="peers,batches", options=common.text_options)
