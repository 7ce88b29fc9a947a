"""Near-duplicates in a set of shards and in the sets made before it; the sketches that later sets compare theirs with.

The sketches of a shard are a file in `run/near`, named by the digests of the shard and of the rule. So a run that was killed
takes those that are finished, and a night reads sketches of old documents, and the few old documents that they propose.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from ttrain.core.files import JsonDict
from ttrain.data import blocks, near_duplicates, shards
from ttrain.data.blocks import PARTS, BlockRecipe
from ttrain.data.built_blocks import BuiltBlock, Flags, Pool
from ttrain.data.near_duplicates import NearDuplicate, SimilarityRule, Sketches, Values
from ttrain.data.overlap import Hashes
from ttrain.errors import ArtifactError

FOLDER = Path("run", "near")
REPORT = Path("run", "near_duplicates.jsonl")
OPEN_SHARDS = 64  # mapped at a time, each with a file descriptor


class EarlierSet(NamedTuple):
    """A set of shards made before, by the name that the report has for it."""

    name: str
    directory: Path


@dataclass(frozen=True)
class SketchedShard:
    """A shard, and the file with its sketches."""

    path: Path
    rows: int
    sketches: Path
    origin: EarlierSet | None = None

    def read(self, number: int) -> Values:
        """The key of a band of each document; after the last band, the numbers of their distinct shingles."""
        offset = near_duplicates.DIGEST_BYTES + 4 * self.rows * number
        values = np.fromfile(self.sketches, "<u4", self.rows, offset=offset)
        if len(values) != self.rows:
            raise ArtifactError(f"{self.sketches} became shorter while it was read; run the same command again")
        return values


class NearDuplicateSearch:
    """Finds near-duplicates among the documents of earlier sets (`old`) and of blocks (`new`: part to shard), in order."""

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
        self.current_names: set[str] = set()
        directories = [output, *map(Path, recipe.reuse), *(origin.directory for origin in earlier)]
        tasks: dict[str, tuple[str, str, str, SimilarityRule]] = {}

        def sketched(path: Path, entry: JsonDict, origin: EarlierSet | None = None) -> SketchedShard:
            name, rows = near_duplicates.sketch_name(entry["sha256"], recipe.tokenizer_digest, rule), int(entry["rows"])
            for directory in directories:
                if near_duplicates.has_sketches(directory / FOLDER / name, rows, rule):
                    return SketchedShard(path, rows, directory / FOLDER / name, origin)
            target = output / FOLDER / name
            tasks[name] = (str(path), recipe.tokenizer, str(target), rule)
            return SketchedShard(path, rows, target, origin)

        self.old = [
            sketched(directory / entry["file"], entry, origin)
            for origin in earlier
            for directory in (origin.directory / part_name for part_name in PARTS)
            for entry in shards.ShardSet(directory, recipe.tokenizer_digest).index["shards"]
        ]
        self.new = [
            {
                part_name: sketched(blocks.need_file(block.directory, part_name, entry["file"]), entry)
                for part_name in PARTS
                if (entry := block.manifest[part_name])
            }
            for block in built_blocks
        ]
        with contextlib.closing(pool.map(near_duplicates.make_sketches, iter(tasks.values()))) as results:
            list(results)
        self.starts = shards.offsets_of([shard.rows for shard in self.old] + [len(block.rows) for block in built_blocks])
        self.old_rows = int(self.starts[len(self.old)])
        lines: Counter[tuple[str, int]] = Counter()
        self.lines_before: list[int] = []
        self.block_numbers = {id(block): number for number, block in enumerate(built_blocks)}
        for block in built_blocks:
            self.lines_before.append(lines[block.role, block.file])
            lines[block.role, block.file] += block.lines
        self.column = lru_cache(maxsize=OPEN_SHARDS)(shards.read_shard)
        self.numbers = lru_cache(maxsize=OPEN_SHARDS)(self._numbers)

    def find(self, present: Flags, droppable: Flags) -> tuple[Flags, JsonDict]:
        """(a flag per row of the blocks: whether it is a near-duplicate, the figures); reports each one's original.

        Only `present` rows are originals, and only `droppable` ones of these near-duplicates: held-out files that the user
        names stay as they are, but training documents like theirs are left out.
        """
        old = np.ones(self.old_rows, np.bool_)
        present, droppable = np.append(old, present), np.append(~old, droppable)
        counts = self._per_document(self.rule.bands)
        pairs = near_duplicates.candidates(self._per_document, self.rule, counts, present, droppable)
        dropped = near_duplicates.confirm(pairs, counts, droppable, self._shingles, self.rule)
        self._report(dropped)
        flags = np.zeros_like(present)
        flags[[near.position for near in dropped]] = True
        return flags[self.old_rows :], {
            "threshold": self.rule.threshold,
            "dropped": len(dropped),
            "of_earlier_sets": sum(near.original < self.old_rows for near in dropped),
            "earlier_documents": self.old_rows,
        }

    def keep(self, part_name: str, block: BuiltBlock, entry: JsonDict) -> None:
        """Write the sketches of the selected documents of a block's part, which is the shard `entry`."""
        number = self.block_numbers[id(block)]
        in_part = block.in_part(part_name)
        shard = self.new[number][part_name]
        selected = block.selected[in_part]
        target = self._sketch_path(entry)
        if not near_duplicates.has_sketches(target, int(entry["rows"]), self.rule):
            values = [shard.read(number)[selected] for number in range(self.rule.bands + 1)]
            near_duplicates.write_sketches(target, Sketches(np.array(values[:-1], np.uint32), values[-1]))
        self.current_names.add(shard.sketches.name)

    def finish(self) -> None:
        """Remove what is left of other inputs."""
        sketches = [shard.sketches for shard in (*self.old, *(shard for parts in self.new for shard in parts.values()))]
        self.current_names |= {path.name for path in sketches if path.parent == self.output / FOLDER}
        folder = self.output / FOLDER
        for path in folder.iterdir() if folder.is_dir() else ():
            if path.name not in self.current_names:
                path.unlink()

    def _sketch_path(self, entry: JsonDict) -> Path:
        name = near_duplicates.sketch_name(entry["sha256"], self.recipe.tokenizer_digest, self.rule)
        self.current_names.add(name)
        return self.output / FOLDER / name

    def _per_document(self, number: int) -> Values:
        """The key of a band of every document, in order; after the last band, the numbers of shingles."""
        values = [np.zeros(0, np.uint32), *(shard.read(number) for shard in self.old)]
        for block, parts in zip(self.built_blocks, self.new, strict=True):
            values.append(np.zeros(len(block.rows), np.uint32))
            for part_name, shard in parts.items():
                values[-1][block.in_part(part_name)] = shard.read(number)
        return np.concatenate(values)

    def _locate(self, position: int) -> tuple[int, int]:
        """The number of the old shard of a document, or, after these, of its block; and of its row there."""
        number = int(self.starts.searchsorted(position, "right")) - 1
        return number, position - int(self.starts[number])

    def _numbers(self, block: int) -> tuple[Flags, Any]:
        """Of the rows of a block: whether each is held out, and its number in its part."""
        heldout = self.built_blocks[block].is_heldout
        return heldout, np.where(heldout, heldout.cumsum(), (~heldout).cumsum()) - 1

    def _shingles(self, position: int) -> Hashes:
        number, row = self._locate(position)
        if position < self.old_rows:
            shard = self.old[number]
        else:
            heldout, numbers = self.numbers(number - len(self.old))
            shard = self.new[number - len(self.old)]["heldout" if heldout[row] else "train"]
            row = int(numbers[row])
        return near_duplicates.shingles_in(self.column(shard.path), row, self.recipe.tokenizer)

    def _report(self, dropped: Sequence[NearDuplicate]) -> None:
        """Write a line for each document that is dropped: its place, its original's, their similarity."""

        def place(position: int) -> JsonDict:
            number, row = self._locate(position)
            if position < self.old_rows:
                shard = self.old[number]
                assert shard.origin is not None
                return {"set": shard.origin.name, "shard": f"{shard.path.parent.name}/{shard.path.name}", "row": row}
            number -= len(self.old)
            block = self.built_blocks[number]
            line = self.lines_before[number] + int(block.rows[row, 3])
            return {"file": block.source.name, "line": line}

        (self.output / REPORT).parent.mkdir(parents=True, exist_ok=True)
        with (self.output / REPORT).open("wb") as out:
            for near in dropped:
                row = {**place(near.position), "original": place(near.original), "similarity": round(near.jaccard, 4)}
                out.write(orjson.dumps(row) + b"\n")
