"""JSON lines to shards: CPU seconds and wall time against `datasets`, memory, near-duplicates.

    python bench/data_shards.py [--path FILE.jsonl.zst --megabytes 300] needs `pip install datasets`
    python bench/data_shards.py --only memory  a file of 2 GB against one of 100 MB
    python bench/data_shards.py --only near  near-duplicates of shards that are made already

Both sides use the same tokenizer and two processes, begin and end each document alike, and must
make each id as often; `datasets` calls `encode_batch_fast` and keeps the ids alone. Ours comes with
one worker, too, from when the stage begins.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import MEGABYTE, VOCAB_SIZE, Cost, Table

WORKERS = 2
LARGE_MEGABYTES = 2000
SMALL_MEGABYTES = 100
LEAST_CPU = 10.0
LEAST_WORKERS = 1.8
MOST_MEMORY_MB = 400
MOST_GROWTH = 1.1
LEAST_NEAR = 100.0  # MB a CPU minute
THRESHOLD = 0.8
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def compare_peers(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Ours against `datasets`."""
    path = common.write_text(options, directory)
    tokenizer = common.train_tokenizer(path, directory)
    sides = {
        "ours": partial(make, shard, path, tokenizer, directory / "ours", WORKERS),
        "one worker": partial(make, shard, path, tokenizer, directory / "one", 1),
    }
    if has_peer := common.has("datasets"):
        sides["datasets"] = partial(
            make, map_lean, path, tokenizer, directory / "datasets", WORKERS, **ONE_THREAD
        )
    costs = table.interleave(sides, options.rounds)
    cpu = {side: common.median(costs[side], "cpu") for side in sides}
    size = path.stat().st_size / MEGABYTE
    rates = [size / common.median(costs[side], "seconds") for side in ("ours", "one worker")]
    print(f"ours: {costs['ours'][0].result}")
    table.ratio("MB a second, one worker", *rates, least=LEAST_WORKERS)
    if has_peer:
        table.ratio(
            "MB a CPU second, datasets", size / cpu["ours"], size / cpu["datasets"], least=LEAST_CPU
        )
        count, equal = compare_ids(directory / "ours", directory / "datasets")
        table.check(f"each id as often, {count:,} in all", equal)


def compare_memory(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Peaks of the main process and of the largest worker, for a large file and a small one."""
    peaks: dict[int, Cost] = {}
    for megabytes in (SMALL_MEGABYTES, LARGE_MEGABYTES):
        path = common.write_text(options, directory, megabytes)
        tokenizer = common.train_tokenizer(path, directory)
        peaks[megabytes] = make(shard, path, tokenizer, directory / "ours", WORKERS)
        path.unlink()
    for process in ("main", "worker"):
        large, small = (
            peaks[megabytes].result[f"{process}_mb"]
            for megabytes in (LARGE_MEGABYTES, SMALL_MEGABYTES)
        )
        table.ratio(
            f"peak MB of the {process} process, 2 GB, 100 MB", large, small, most=MOST_GROWTH
        )
        table.value(f"peak MB of the {process} process", large, most=MOST_MEMORY_MB)


def compare_near(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """CPU time to find near-duplicates, beside what encoding takes.

    Each pass over the text is a near-duplicate of the first, so that all are compared exactly.
    """
    path = common.write_text(options, directory)
    work = (path, common.train_tokenizer(path, directory), directory / "ours", 1)
    make(shard, *work)
    costs = []
    for _ in range(options.rounds):
        shutil.rmtree(directory / "ours" / "run" / "near", ignore_errors=True)
        costs.append(common.measure(shard, *work, THRESHOLD))
    without = common.measure(shard, *work)
    print(
        f"{costs[0].result['near']}, {costs[0].memory:.0f} MB; "
        f"{without.cpu:.1f} CPU s without near-duplicates"
    )
    rate = 60 * path.stat().st_size / MEGABYTE / (common.median(costs, "cpu") - without.cpu)
    table.value("near-duplicates, MB a CPU minute", rate, least=LEAST_NEAR)


def make(
    side: Any, path: Path, tokenizer: Path, output: Path, workers: int, **environment: str
) -> Cost:
    """Run a side that writes a directory, which does not exist before."""
    shutil.rmtree(output, ignore_errors=True)
    return common.measure(side, path, tokenizer, output, workers, **environment)


def shard(path: str, tokenizer: str, output: str, workers: str, near: str = "") -> dict[str, Any]:
    """What the stage does by default: duplicates dropped, 2 % held out, digests of all files."""
    from ttrain.config import Reading, Shards
    from ttrain.data import sharding
    from ttrain.data.blocks import DataFile
    from ttrain.data.pool import Processes
    from ttrain.tasks.shards import recipe_of

    reading = Reading(heldout_fraction=0.02, near_duplicates=float(near) if near else None)
    recipe = recipe_of(reading, Path(tokenizer), "documents")
    began = time.perf_counter()
    files = {"train": [DataFile(path)]}
    with Processes(int(workers)) as pool:
        if pool.workers > 1:
            pool.begin()
        work = sharding.Work(Path(output), files, recipe, reading, Shards().block_bytes, pool)
        built = sharding.build(work)
    return {
        "seconds": time.perf_counter() - began,
        "tokens": sum(part["tokens"] for part in built.parts.values()),
        "near": built.near_duplicates,
        "main_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE,
        "worker_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / MEGABYTE,
    }


def map_lean(path: str, tokenizer: str, output: str, workers: str) -> None:
    """`datasets` at its best: the fastest call of `tokenizers`, and nothing but the ids is kept."""
    import datasets
    from tokenizers import Tokenizer

    from ttrain.data.encoder import Encoder

    opened = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    ends = Encoder(Path(tokenizer), fast=False)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encodings = opened.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[ends.bos_id, *encoding.ids, ends.eos_id] for encoding in encodings]}

    datasets.disable_progress_bars()
    rows = datasets.load_dataset(
        "json", data_files=path, split="train", cache_dir=f"{output}-cache"
    )
    rows.map(encode, batched=True, num_proc=int(workers), remove_columns=["text"]).save_to_disk(
        output
    )
    shutil.rmtree(f"{output}-cache")


def compare_ids(ours: Path, theirs: Path) -> tuple[int, bool]:
    """How many ids ours has, and whether both sides have each as often."""
    import datasets
    import numpy as np

    from ttrain.data.shards import ShardSet

    def counts(arrays: Any) -> Any:
        return sum(np.bincount(array, minlength=VOCAB_SIZE) for array in arrays)

    columns = [
        column for part in ("train", "heldout") for column in ShardSet(ours / part).columns()
    ]
    chunks = datasets.load_from_disk(str(theirs)).data.column("input_ids").chunks
    our_counts = counts(column.tokens for column in columns)
    their_counts = counts(chunk.flatten().to_numpy() for chunk in chunks)
    return int(np.sum(our_counts)), np.array_equal(our_counts, their_counts)


if __name__ == "__main__":
    parts = {"peers": compare_peers, "memory": compare_memory, "near": compare_near}
    common.main(str(__doc__), parts, default="peers", options=common.text_options)
