"""Search of training shards for evaluation items: GB a minute of one core, and memory, whatever the size of the shards.

    python bench/contamination.py --items eval/*.jsonl [--path FILE.jsonl.zst --megabytes 400]

Text is sharded with a tokenizer of 6400 entries in blocks of 16 MiB; one process then searches all shards. The limit is one
GB of shards (as they lie on the disk) in a minute of CPU time, items read and indexed included, and memory that is the same
for four times the text. `in` is what a set of strings does, the plain way: each item's parts of 32 bytes, one by one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import common

LEAST_GB_A_MINUTE, MOST_GROWTH = 1.0, 1.1
PLAIN_MEGABYTES = 2  # that the plain way is given


def main() -> int:
    """Print the table; 1 where a limit was missed."""
    options = common.parser(__doc__)
    options.add_argument("--items", nargs="+", required=True, help="files of evaluations")
    chosen = options.parse_args()
    table = common.Table()
    with common.workplace() as directory:
        measure(chosen, directory, table)
    return int(table.failed)


def measure(options: argparse.Namespace, directory: Path, table: common.Table) -> None:
    """One process on all shards, on a quarter of them, and the plain way on a little of the text."""
    path = common.material(options, directory)
    tokenizer = common.tokenizer(path, directory)
    common.measure(__file__, "shard", path, tokenizer, directory / "shards")
    everything = ["scan", directory / "shards", tokenizer, 1, *options.items]
    sides = {
        "ours": lambda: common.measure(__file__, *everything, OMP_NUM_THREADS="1"),
        "quarter": lambda: common.measure(__file__, *everything[:3], 4, *options.items, OMP_NUM_THREADS="1"),
        "plain": lambda: common.measure(__file__, "plain", path, *options.items),
    }
    costs = common.interleave(sides, options.rounds)
    rates = {name: common.median(found, "bytes") / common.median(found, "cpu") * 60 / 1e9 for name, found in costs.items()}
    ours = costs["ours"]
    rate = rates["ours"]
    table.add("GB of shards a CPU minute", f"{rate:.2f}", f"{LEAST_GB_A_MINUTE:g}", rate / LEAST_GB_A_MINUTE, least=1.0)
    text, plain = (common.median(costs[name], "text_bytes") / common.median(costs[name], "seconds") / 1e6
                   for name in ("ours", "plain"))  # fmt: skip
    table.add("MB of text a second, search alone; theirs: `in`", f"{text:.0f}", f"{plain:.1f}", text / plain)
    memory, less = common.median(ours, "memory"), common.median(costs["quarter"], "memory")
    table.add(
        "memory in MB; theirs: a quarter of the shards", f"{memory:.0f}", f"{less:.0f}", memory / less, most=MOST_GROWTH
    )
    found = ours[0].found
    print(f"{found['items']} items, {found['overlapping']} of them held by {found['documents']} documents")


def shard(path: str, tokenizer: str, output: str) -> None:
    """Make the shards."""
    from ttrain.config import Reading
    from ttrain.data import sharding
    from ttrain.data.assembly import DataFile
    from ttrain.data.sharding import Here
    from ttrain.stages.shards import recipe_of

    reading = Reading(heldout_fraction=0.0, deduplicate=False)
    recipe = recipe_of(reading, Path(tokenizer), "documents")
    sharding.build(Path(output), {"train": [DataFile(path, "text")]}, recipe, reading, block_bytes=16 << 20, pool=Here())


def scan(directory: str, tokenizer: str, part: str, *items: str) -> dict[str, Any]:
    """Search every shard, or the first of so many parts of them."""
    from ttrain.data import contamination
    from ttrain.data.shards import ShardSet

    against = contamination.overlap_check(items, contamination.OverlapRule(), remove=False)
    shards = ShardSet(Path(directory) / "train").index["shards"]
    shards = shards[: max(1, len(shards) // int(part))]
    began = time.process_time()
    found = [
        ({}, contamination.scan(str(Path(directory) / "train" / shard["file"]), tokenizer, against.texts, against.rule))
        for shard in shards
    ]
    seconds = time.process_time() - began
    report = contamination.report(against, found)
    size = sum((Path(directory) / "train" / shard["file"]).stat().st_size for shard in shards)
    return {
        "bytes": size, "text_bytes": sum(shard["bytes"] for shard in shards), "seconds": seconds,
        "items": len(against.items), "overlapping": len(report["items"]), "documents": report["documents"],
    }  # fmt: skip


def plain(path: str, *items: str) -> dict[str, Any]:
    """The plain way: whether each part of each document is in a set of the items' parts."""
    from ttrain.data import contamination, overlap

    against = contamination.overlap_check(items, contamination.OverlapRule(), remove=False)
    size = contamination.NGRAM_BYTES
    parts = {text[at : at + size] for text in against.texts for at in range(len(text) - size + 1)}
    documents = common.texts_of(path, PLAIN_MEGABYTES * common.MEGABYTE)
    began = time.process_time()
    found = 0
    for document in documents:
        text = overlap.plain(document)
        found += any(text[at : at + size] in parts for at in range(len(text) - size + 1))
    seconds = time.process_time() - began
    return {"bytes": 0, "text_bytes": sum(len(text.encode()) for text in documents), "seconds": seconds, "found": found}


if __name__ == "__main__" and not common.requested_side({"shard": shard, "scan": scan, "plain": plain}):
    sys.exit(main())
