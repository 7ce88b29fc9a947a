"""JSON lines to shards: CPU seconds, wall time, disk and memory, against `datasets` and against `tokenizers` alone.

    python bench/data_shards.py [--path FILE.jsonl.zst --repeat 4]      needs `pip install datasets`
    python bench/data_shards.py --scaling                              one core against two, 1 GB
    python bench/data_shards.py --memory                               a file of 2 GB against one of 100 MB

Both sides use the same tokenizer and two processes, and begin and end each document alike; the ids of all documents are
compared.
`datasets` comes twice: "lean" calls `encode_batch_fast` and keeps the ids alone; "documented" is what its documentation
shows, a transformers tokenizer in a batched map that keeps all columns.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import common

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

WORKERS = 2
BATCH_TEXTS = 1000  # what `datasets` takes at once
SCALING_MEGABYTES, LARGE_MEGABYTES, SMALL_MEGABYTES = 1000, 2000, 100
LEAST_CPU, LEAST_SCALING, MOST_DISK, MOST_MEMORY_MB, MOST_GROWTH = 10.0, 1.8, 0.2, 400, 1.1
ONE_THREAD = {"RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = common.parser(__doc__)
    options.add_argument("--memory", action="store_true")
    options.add_argument("--scaling", action="store_true")
    chosen = options.parse_args()
    table = common.Table()
    with common.workplace() as directory:
        measurement = compare_memory if chosen.memory else compare_workers if chosen.scaling else compare_peers
        measurement(chosen, directory, table)
    return int(table.failed)


def compare_peers(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """Ours against `datasets`, and against encoding alone."""
    path = common.material(options, directory)
    tokenizer = common.tokenizer(path, directory)
    megabytes = path.stat().st_size / common.MEGABYTE
    sides = {
        "ours": lambda: make("ours", path, tokenizer, directory / "ours", WORKERS),
        "alone": lambda: common.measure(__file__, "alone", path, tokenizer),
    }
    peers = ("lean", "documented") if common.has("datasets") else ()
    for peer in peers:
        sides[peer] = lambda peer=peer: make(peer, path, tokenizer, directory / peer, WORKERS, **ONE_THREAD)
    costs = common.interleave(sides, options.rounds)
    cpu, wall = common.median(costs["ours"], "cpu"), common.median(costs["ours"], "wall")
    print(f"ours: {costs['ours'][0].found}, {megabytes / cpu:.1f} MB a CPU second")
    for peer in peers:
        theirs = common.median(costs[peer], "cpu")
        table.add(f"CPU seconds, datasets ({peer})", f"{cpu:.2f}", f"{theirs:.2f}", theirs / cpu, least=LEAST_CPU)
        theirs = common.median(costs[peer], "wall")
        table.add(f"seconds, datasets ({peer})", f"{wall:.2f}", f"{theirs:.2f}", theirs / wall)
        sizes = [common.directory_bytes(directory / side) / common.MEGABYTE for side in ("ours", peer)]
        limit = MOST_DISK if peer == "documented" else None
        table.add(f"MB on disk, datasets ({peer})", f"{sizes[0]:.1f}", f"{sizes[1]:.1f}", sizes[0] / sizes[1], most=limit)
        found = common.measure(__file__, "compare", directory / "ours", directory / peer).found
        table.claim(f"ids of all {found['documents']} documents equal ({peer})", found["equal"])
    for figure, limit in (("cpu", 1.0), ("wall", 1.0)):
        mine, alone = common.median(costs["ours"], figure), common.median([only(cost) for cost in costs["alone"]], figure)
        name = f"{'CPU ' if figure == 'cpu' else ''}seconds, tokenizers without reading and writing"
        table.add(name, f"{mine:.2f}", f"{alone:.2f}", alone / mine, least=limit)


def compare_workers(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """The same file by one worker on one core and by two on two; start-up, 0.6 s, counts."""
    path = common.material(options, directory, None if options.path else SCALING_MEGABYTES)
    tokenizer = common.tokenizer(path, directory)
    sides = {
        count: lambda count=count: make("ours", path, tokenizer, directory / "ours", count, **ONE_THREAD)
        for count in ("1", "2")
    }
    costs = common.interleave(sides, options.rounds)
    for figure, limit in (("wall", LEAST_SCALING), ("cpu", None)):
        two, one = (common.median(costs[count], figure) for count in ("2", "1"))
        name = "seconds" if figure == "wall" else "CPU seconds"
        table.add(f"{name}, two cores against one", f"{two:.2f}", f"{one:.2f}", one / two, least=limit)


def compare_memory(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """Peaks of the main process and of the largest worker, for a large file and a small one."""
    found: dict[int, common.Cost] = {}
    for megabytes in (SMALL_MEGABYTES, LARGE_MEGABYTES):
        path = common.material(options, directory, megabytes)
        tokenizer = common.tokenizer(path, directory)
        found[megabytes] = make("ours", path, tokenizer, directory / "ours", WORKERS)
        path.unlink()
    for who in ("main", "worker"):
        large, small = (found[megabytes].found[f"{who}_mb"] for megabytes in (LARGE_MEGABYTES, SMALL_MEGABYTES))
        table.add(f"peak MB, {who}, 2 GB against 100 MB", f"{large:.0f}", f"{small:.0f}", large / small, most=MOST_GROWTH)
        table.claim(f"peak of {who} below {MOST_MEMORY_MB} MB", large < MOST_MEMORY_MB)


def make(side: str, path: Path, tokenizer: Path, output: Path, workers: int | str, **environment: str) -> common.Cost:
    """Run a side that writes a directory, which did not exist before."""
    shutil.rmtree(output, ignore_errors=True)
    return common.measure(__file__, side, path, tokenizer, output, workers, **environment)


def only(cost: common.Cost) -> common.Cost:
    """The cost of a side that measured the part that counts itself."""
    return common.Cost(cost.found["wall"], cost.found["cpu"], cost.memory, cost.found)


def side_ours(path: str, tokenizer: str, output: str, workers: str) -> dict[str, Any]:
    """What the stage does, with the default settings: duplicates dropped, 2 % held out, digests of all files."""
    from ttrain.config import Reading, Shards
    from ttrain.data import sharding
    from ttrain.data.assembly import DataFile
    from ttrain.data.sharding import Processes
    from ttrain.stages.shards import recipe_of

    reading = Reading()
    if workers == "1" and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
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
        **{f"{who}_mb": resource.getrusage(whose).ru_maxrss * 1024 / common.MEGABYTE for who, whose in peaks.items()},
    }


def side_alone(path: str, tokenizer: str) -> dict[str, Any]:
    """`encode_batch_fast` on texts in memory, with all threads."""
    from tokenizers import Tokenizer

    opened, texts = Tokenizer.from_file(f"{tokenizer}/tokenizer.json"), common.texts_of(path)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = 0
    for start in range(0, len(texts), BATCH_TEXTS):
        found = opened.encode_batch_fast(texts[start : start + BATCH_TEXTS], add_special_tokens=False)
        tokens += sum(map(len, found))
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu, "tokens": tokens}


def side_lean(path: str, tokenizer: str, output: str, workers: str) -> None:
    """`datasets` at its best: the fastest call of `tokenizers`, and nothing but the ids is kept."""
    import datasets
    from tokenizers import Tokenizer

    opened = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
    bos, eos = ends(tokenizer)

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = opened.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"input_ids": [[bos, *encoding.ids, eos] for encoding in found]}

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=f"{output}-cache")
    rows.map(encode, batched=True, num_proc=int(workers), remove_columns=["text"]).save_to_disk(output)
    shutil.rmtree(f"{output}-cache")


def side_documented(path: str, tokenizer: str, output: str, workers: str) -> None:
    """`datasets` as its documentation shows it: a transformers tokenizer, all columns kept."""
    import datasets
    from transformers import PreTrainedTokenizerFast

    opened = PreTrainedTokenizerFast.from_pretrained(tokenizer)

    def encode(batch: dict[str, list[str]]) -> Any:
        return opened([text + opened.eos_token for text in batch["text"]])

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=f"{output}-cache")
    rows.map(encode, batched=True, num_proc=int(workers)).save_to_disk(output)
    shutil.rmtree(f"{output}-cache")


def ends(tokenizer: str) -> tuple[int, int]:
    """Ids that begin and end a document."""
    from ttrain.data.encoder import Encoder

    opened = Encoder(Path(tokenizer), fast=False)
    return opened.bos_id, opened.eos_id


def side_compare(ours: str, theirs: str) -> dict[str, Any]:
    """Whether both sides made the same ids of the same documents, in whatever order."""
    found = sorted(map(digest, our_rows(Path(ours))))
    return {"documents": len(found), "equal": found == sorted(map(digest, their_rows(theirs)))}


def digest(ids: npt.NDArray[Any]) -> bytes:
    return hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=16).digest()


def our_rows(directory: Path) -> Iterator[npt.NDArray[np.uint16]]:
    from ttrain.data.shards import ShardSet

    for part in ("train", "heldout"):
        for column in ShardSet(directory / part).columns():
            for start, end in itertools.pairwise(column.offsets):
                yield column.tokens[start:end]


def their_rows(directory: str) -> Iterator[npt.NDArray[np.int32]]:
    import datasets

    for chunk in datasets.load_from_disk(directory).data.column("input_ids").chunks:
        values, offsets = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        for start, end in itertools.pairwise(offsets):
            yield values[start:end]


SIDES = {
    "ours": side_ours,
    "alone": side_alone,
    "lean": side_lean,
    "documented": side_documented,
    "compare": side_compare,
}

if __name__ == "__main__":
    if not common.requested_side(SIDES):
        sys.exit(main())
