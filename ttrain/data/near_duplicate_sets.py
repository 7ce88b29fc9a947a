"""Near-duplicates in a set of shards and in the sets made before it; the sketches that later sets compare theirs with.

The sketches of a shard are a file in `run/near`, named by the digests of the shard and of the rule. So a run that was killed
takes those that are finished, and a night reads sketches of old documents, and the few old documents that they propose.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import orjson

from ttrain.core.files import JsonDict
from ttrain.data import blocks, near_duplicates, shards
from ttrain.data.blocks import PARTS, BlockRecipe
from ttrain.data.built_blocks import BuiltBlock, Flags, Pool
from ttrain.data.near_duplicates import NearDuplicate, SimilarityRule
from ttrain.data.overlap import Hashes, Places

FOLDER = Path("run", "near")
REPORT = Path("run", "near_duplicates.jsonl")
OPEN_SHARDS = 64  # mapped at a time, each with a file descriptor


class EarlierSet(NamedTuple):
    """A set of shards made before, by the name that the report has for it."""

    name: str
    directory: Path


class SketchedShard(NamedTuple):
    """A shard, the name of the file with its sketches, and the positions of its documents in the order of all."""

    path: Path
    sketches: str
    positions: Places
    origin: EarlierSet | None = None


class NearDuplicateSearch:
    """Finds near-duplicates among the documents of earlier sets and of blocks, in this order."""

    def __init__(
        self,
        output: Path,
        built_blocks: Sequence[BuiltBlock],
        recipe: BlockRecipe,
        rule: SimilarityRule,
        earlier: Sequence[EarlierSet],
        pool: Pool,
    ) -> None:
        """Make the sketches that are missing of all blocks and of the sets before, in any process; reuse the others."""
        self.output, self.built_blocks, self.recipe, self.rule = output, built_blocks, recipe, rule
        self.shards: list[SketchedShard] = []
        rows = 0
        for origin in earlier:
            for directory in (origin.directory / part_name for part_name in PARTS):
                for entry in shards.ShardSet(directory, recipe.tokenizer_digest).index["shards"]:
                    positions = np.arange(rows, rows + entry["rows"])
                    self.shards.append(SketchedShard(directory / entry["file"], self._name(entry), positions, origin))
                    rows += entry["rows"]
        self.old_rows = rows
        self.starts = rows + shards.offsets_of([len(block.rows) for block in built_blocks])
        for block, start in zip(built_blocks, self.starts.tolist(), strict=False):
            for part_name in PARTS:
                if entry := block.manifest[part_name]:
                    path = blocks.file_of(block.directory, part_name, entry["file"])
                    positions = start + np.flatnonzero(block.in_part(part_name))
                    self.shards.append(SketchedShard(path, self._name(entry), positions))
        rows = int(self.starts[-1])
        self.sketches = np.zeros((rule.bands, rows), np.uint32)
        self.shard_of, self.record_of = np.zeros(rows, np.int32), np.zeros(rows, np.int64)
        folders = [output, *map(Path, recipe.reuse), *(origin.directory for origin in earlier)]
        tasks = (
            (str(shard.path), recipe.tokenizer, rule, [str(folder / FOLDER / shard.sketches) for folder in folders])
            for shard in self.shards
        )
        with contextlib.closing(pool.map(near_duplicates.sketches_of_shard, tasks)) as results:
            for number, (shard, sketches) in enumerate(zip(self.shards, results, strict=True)):
                self.sketches[:, shard.positions] = sketches
                self.shard_of[shard.positions] = number
                self.record_of[shard.positions] = np.arange(len(shard.positions))
        self.current_names = {shard.sketches for shard in self.shards}
        self.column = lru_cache(maxsize=OPEN_SHARDS)(shards.read_shard)

    def find(self, present: Flags, droppable: Flags) -> tuple[Flags, JsonDict]:
        """(a flag per row of the blocks: whether it is a near-duplicate, the figures); reports each one's original.

        Only `present` rows are originals, and only `droppable` ones of these near-duplicates: held-out files that the user
        names stay as they are, but training documents like theirs are left out.
        """
        old = np.ones(self.old_rows, np.bool_)
        present, droppable = np.append(old, present), np.append(~old, droppable)
        pairs = near_duplicates.candidates(self.sketches, present, droppable)
        dropped = near_duplicates.confirm(pairs, droppable, self._shingles, self.rule)
        self._report(dropped)
        flags = np.zeros_like(present)
        flags[[near.position for near in dropped]] = True
        return flags[self.old_rows :], {
            "threshold": self.rule.threshold,
            "dropped": len(dropped),
            "of_earlier_sets": sum(near.original < self.old_rows for near in dropped),
            "earlier_documents": self.old_rows,
        }

    def keep(self, part_name: str, number: int, entry: JsonDict) -> None:
        """Write the sketches of the selected documents of a block's part, which is the shard `entry`."""
        block = self.built_blocks[number]
        path = self.output / FOLDER / self._name(entry)
        if not path.exists():
            selected = self.starts[number] + np.flatnonzero(block.selected & block.in_part(part_name))
            near_duplicates.write_sketches(path, self.sketches[:, selected])
        self.current_names.add(path.name)

    def finish(self) -> None:
        """Remove what is left of other inputs."""
        folder = self.output / FOLDER
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in self.current_names:
                path.unlink()

    def _name(self, entry: JsonDict) -> str:
        return near_duplicates.sketch_name(entry["sha256"], self.recipe.tokenizer_digest, self.rule)

    def _shingles(self, position: int) -> Hashes:
        column = self.column(self.shards[self.shard_of[position]].path)
        return near_duplicates.shingles_in(column, int(self.record_of[position]), self.recipe.tokenizer)

    def _report(self, dropped: Sequence[NearDuplicate]) -> None:
        """Write a line for each document that is dropped: its place, its original's, their similarity."""
        lines: Counter[tuple[str, int]] = Counter()
        lines_before: list[int] = []
        for block in self.built_blocks:
            lines_before.append(lines[block.role, block.file])
            lines[block.role, block.file] += block.lines

        def place(position: int) -> JsonDict:
            shard = self.shards[self.shard_of[position]]
            if shard.origin:
                name = f"{shard.path.parent.name}/{shard.path.name}"
                return {"set": shard.origin.name, "shard": name, "row": int(self.record_of[position])}
            number = int(self.starts.searchsorted(position, "right")) - 1
            block = self.built_blocks[number]
            line = lines_before[number] + int(block.rows[position - self.starts[number], 3])
            return {"file": block.source.name, "line": line}

        (self.output / REPORT).parent.mkdir(parents=True, exist_ok=True)
        with (self.output / REPORT).open("wb") as out:
            for near in dropped:
                row = {**place(near.position), "original": place(near.original), "similarity": round(near.jaccard, 4)}
                out.write(orjson.dumps(row) + b"\n")
