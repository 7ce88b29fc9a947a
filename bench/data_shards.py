"""JSON lines to shards: CPU seconds, wall time, disk and memory, against `datasets` and against `tokenizers` alone.

    python bench/data_shards.py [--path FILE.jsonl.zst --megabytes 300] needs `pip install datasets`
    python bench/data_shards.py --only memory                          a file of 2 GB against one of 100 MB
    python bench/data_shards.py --only near                            near-duplicates of shards that are made already

Both sides use the same tokenizer and two processes, begin and end each document alike, and must make the same ids of all
documents. `datasets` comes twice: "lean" calls `encode_batch_fast` and keeps the ids alone; "documented" is what its
documentation shows, a transformers tokenizer in a batched map that keeps all columns. Ours comes with one worker, too.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import random
import resource
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
from common import MEGABYTE, Cost, Table

WORKERS = 2
BATCH_TEXTS = 1000  # the default of `datasets`
LARGE_MEGABYTES, SMALL_MEGABYTES = 2000, 100
LEAST_CPU, LEAST_ALONE, LEAST_WORKERS, MOST_DISK, MOST_MEMORY_MB, MOST_GROWTH = 10.0, 1.0, 1.8, 0.2, 400, 1.1
LEAST_NEAR = 100.0  # MB a CPU minute
PLANTED_BYTES = 10_000_000
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def compare_peers(options: argparse.Namespace, directory: Path, table: Table) -> None:
    """Ours against `datasets`, and against encoding alone."""
    path = common.write_text(options, directory)
    tokenizer = common.train_tokenizer(path, directory)
    sides = {
        "ours": lambda: make(shard, path, tokenizer, directory / "ours", WORKERS),
        "one worker": lambda: make(shard, path, tokenizer, directory / "one", 1),
        "alone": lambda: common.measure(encode_alone, path, tokenizer),
    }
    peers = {"lean": map_lean, "documented": map_documented} if common.has("datasets") else {}
    for peer, side in peers.items():
        sides[peer] = partial(make, side, path, tokenizer, directory / peer, WORKERS, **ONE_THREAD)
    costs = table.interleave(sides, options.rounds)
    cpu, wall = common.median(costs["ours"], "cpu"), common.median(costs["ours"], "wall")
    print(f"ours: {costs['ours'][0].result}, {path.stat().st_size / MEGABYTE / cpu:.1f} MB a CPU second")
    table.speedup("seconds, one worker", wall, common.median(costs["one worker"], "wall"), least=LEAST_WORKERS)
    for peer in peers:
        table.speedup(f"CPU seconds, datasets ({peer})", cpu, common.median(costs[peer], "cpu"), least=LEAST_CPU)
        table.speedup(f"seconds, datasets ({peer})", wall, common.median(costs[peer], "wall"))
        sizes = [directory_bytes(directory / side) / MEGABYTE for side in ("ours", peer)]
        table.ratio(f"MB on disk, datasets ({peer})", *sizes, most=MOST_DISK if peer == "documented" else 0)
        compared = compare_ids(directory / "ours", directory / peer)
        table.check(f"ids of all {compared['documents']} documents equal ({peer})", compared["equal"])
    for figure, ours in (("cpu", cpu), ("wall", wall)):
        name = f"{'CPU ' if figure == 'cpu' else ''}seconds, tokenizers without reading and writing"
        table.speedup(name, ours, common.median(costs["alone"], f"encoding_{figure}"), least=LEAST_ALONE)


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


def encode_alone(path: str, tokenizer: str) -> dict[str, Any]:
    """`encode_batch_fast` on texts in memory, with all threads."""
    from tokenizers import Tokenizer

    opened, texts = Tokenizer.from_file(f"{tokenizer}/tokenizer.json"), common.read_texts(path)

    def encode() -> None:
        for start in range(0, len(texts), BATCH_TEXTS):
            opened.encode_batch_fast(texts[start : start + BATCH_TEXTS], add_special_tokens=False)

    cost = common.timed(encode)
    return {"encoding_wall": cost.wall, "encoding_cpu": cost.cpu}


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


def map_documented(path: str, tokenizer: str, output: str, workers: str) -> None:
    """`datasets` as its documentation shows it: a transformers tokenizer, all columns kept."""
    from transformers import PreTrainedTokenizerFast

    opened = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def encode(batch: dict[str, list[str]]) -> Any:
        return opened([text + opened.eos_token for text in batch["text"]])

    map_dataset(path, output, encode, num_proc=int(workers))


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


PARTS = {"peers": compare_peers, "memory": compare_memory, "near": compare_near}

if __name__ == "__main__":
    common.main(str(__doc__), PARTS, default="peers", options=common.text_options)
