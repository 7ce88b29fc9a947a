"""Near-duplicates in a set of shards and in the sets made before it; the sketches that later sets compare theirs with.

The sketches of a shard are a file in `run/near`, named by the digests of the shard and of the rule. So a run that was killed
takes those that are finished, and a night reads sketches of old documents, and the few old documents that they propose.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from ttrain.core.files import read_object, write_json
from ttrain.data import blocks, near_duplicates, shards
from ttrain.data.blocks import PARTS, BlockRecipe
from ttrain.data.built_blocks import BuiltBlock, FilesByRole, Flags, Pool
from ttrain.data.near_duplicates import NEAR_DUPLICATE, NearDuplicate, SimilarityRule, Sketches, Values
from ttrain.data.overlap import Hashes
from ttrain.data.records import Tally
from ttrain.errors import ArtifactError

FOLDER = Path("run", "near")
PLACES = "places.json"  # in it: the file of the documents of each shard; their lines are beside it
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


def search(
    output: Path,
    files: FilesByRole,
    built_blocks: Sequence[BuiltBlock],
    recipe: BlockRecipe,
    rule: SimilarityRule,
    earlier: Sequence[EarlierSet],
    pool: Pool,
) -> NearDuplicateSearch:
    """Make the sketches that are missing of all blocks and of the sets before, in any process; reuse the others."""
    directories = [output, *map(Path, recipe.reuse), *(origin.directory for origin in earlier)]
    tasks: dict[str, tuple[str, str, str, SimilarityRule]] = {}

    def sketched(path: Path, entry: Mapping[str, Any], origin: EarlierSet | None = None) -> SketchedShard:
        name, rows = near_duplicates.sketch_name(entry["sha256"], recipe.tokenizer_digest, rule), int(entry["rows"])
        for directory in directories:
            if near_duplicates.has_sketches(directory / FOLDER / name, rows, rule):
                return SketchedShard(path, rows, directory / FOLDER / name, origin)
        target = output / FOLDER / name
        tasks[name] = (str(path), recipe.tokenizer, str(target), rule)
        return SketchedShard(path, rows, target, origin)

    old = [
        sketched(directory / entry["file"], entry, origin)
        for origin in earlier
        for directory in (origin.directory / part_name for part_name in PARTS)
        for entry in shards.ShardSet(directory, recipe.tokenizer_digest).index["shards"]
    ]
    new = [
        {
            part_name: sketched(blocks.need_file(block.directory, part_name, entry["file"]), entry)
            for part_name in PARTS
            if (entry := block.manifest[part_name])
        }
        for block in built_blocks
    ]
    with contextlib.closing(pool.map(near_duplicates.make_sketches, iter(tasks.values()))) as results:
        list(results)
    return NearDuplicateSearch(output, files, recipe, rule, list(built_blocks), old, new)


@dataclass
class NearDuplicateSearch:
    """Finds near-duplicates among the documents of earlier sets (`old`) and of blocks (`new`: part to shard), in order."""

    output: Path
    files: FilesByRole
    recipe: BlockRecipe
    rule: SimilarityRule
    built_blocks: list[BuiltBlock]
    old: list[SketchedShard]
    new: list[dict[str, SketchedShard]]
    places: dict[str, str] = field(default_factory=dict)
    current_names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        sizes = [*(shard.rows for shard in self.old), *(len(block.rows) for block in self.built_blocks)]
        self.starts = np.cumsum([0, *sizes])
        self.old_rows = int(self.starts[len(self.old)])
        lines: Counter[tuple[str, int]] = Counter()
        self.lines_before: list[int] = []
        self.block_numbers = {id(block): number for number, block in enumerate(self.built_blocks)}
        for block in self.built_blocks:
            self.lines_before.append(lines[block.role, block.file])
            lines[block.role, block.file] += block.lines
        self.column = lru_cache(maxsize=OPEN_SHARDS)(shards.read_shard)
        self.numbers = lru_cache(maxsize=OPEN_SHARDS)(self._numbers)

    def leave_out(self, figures: Mapping[tuple[str, int], Tally], ignored: Sequence[Flags]) -> dict[str, Any]:
        """Leave near-duplicates out of the selected rows, count them and report the place of each one's original.

        `ignored` rows, by block, are left out for another reason and are no originals. Held-out files that the user names
        stay as they are, but training documents like theirs are left out.
        """
        present, droppable = np.ones(int(self.starts[-1]), np.bool_), np.zeros(int(self.starts[-1]), np.bool_)
        for start, block, flags in zip(self.starts[len(self.old) :], self.built_blocks, ignored, strict=False):
            rows = slice(start, start + len(block.rows))
            present[rows] = block.selected & ~flags
            droppable[rows] = present[rows] & (block.role == "train")
        counts = self._per_document(self.rule.bands)
        pairs = near_duplicates.candidates(self._per_document, self.rule, counts, present, droppable)
        dropped = near_duplicates.confirm(pairs, counts, droppable, self._shingles, self.rule)
        left_out: Counter[tuple[str, int]] = Counter()
        for near in dropped:
            number, row = self._locate(near.position)
            block = self.built_blocks[number - len(self.old)]
            block.selected[row] = False
            left_out[block.role, block.file] += 1
        for key, rows_left_out in left_out.items():
            figures[key].leave_out(NEAR_DUPLICATE, rows_left_out)
        self._report(dropped)
        return {
            "threshold": self.rule.threshold,
            "dropped": len(dropped),
            "of_earlier_sets": sum(near.original < self.old_rows for near in dropped),
            "earlier_documents": self.old_rows,
        }

    def keep(self, part_name: str, block: BuiltBlock, entry: Mapping[str, Any]) -> None:
        """Write the sketches and the places of the selected documents of a block's part, which is the shard `entry`."""
        number = self.block_numbers[id(block)]
        in_part = block.in_part(part_name)
        shard = self.new[number][part_name]
        selected = block.selected[in_part]
        target = self._sketch_path(entry)
        if not near_duplicates.has_sketches(target, int(entry["rows"]), self.rule):
            values = [shard.read(number)[selected] for number in range(self.rule.bands + 1)]
            near_duplicates.write_sketches(target, Sketches(np.array(values[:-1], np.uint32), values[-1]))
        self._place(f"{part_name}/{entry['file']}", block, block.rows[in_part, 3][selected])
        self.current_names.add(shard.sketches.name)

    def keep_lowest(self, block: BuiltBlock, content_hash: bytes, entry: Mapping[str, Any]) -> None:
        """The same of the one document that is held out of a set without held-out documents."""
        row = next(n for n, key in enumerate(block.rows) if key[:2].astype(">u8").tobytes() == content_hash)
        near_duplicates.make_sketches(
            str(self.output / "heldout" / entry["file"]), self.recipe.tokenizer, str(self._sketch_path(entry)), self.rule
        )
        self._place(f"heldout/{entry['file']}", block, block.rows[row : row + 1, 3])

    def finish(self) -> None:
        """Write the places, and remove what is left of other inputs."""
        (self.output / FOLDER).mkdir(parents=True, exist_ok=True)
        write_json(self.output / FOLDER / PLACES, self.places)
        sketches = [shard.sketches for shard in (*self.old, *(shard for parts in self.new for shard in parts.values()))]
        self.current_names |= {PLACES, *(path.name for path in sketches if path.parent == self.output / FOLDER)}
        for path in (self.output / FOLDER).iterdir():
            if path.name not in self.current_names:
                path.unlink()

    def _sketch_path(self, entry: Mapping[str, Any]) -> Path:
        name = near_duplicates.sketch_name(entry["sha256"], self.recipe.tokenizer_digest, self.rule)
        self.current_names.add(name)
        return self.output / FOLDER / name

    def _place(self, shard: str, block: BuiltBlock, lines: Any) -> None:
        """Write the lines in the file of documents that stand at these `lines` of the block."""
        name = _lines_name(shard)
        lines_before = self.lines_before[self.block_numbers[id(block)]]
        shards.write_files([(self.output / FOLDER / name, (lines + np.uint64(lines_before)).astype("<u8").tobytes())])
        self.places[shard] = self.files[block.role][block.file].name
        self.current_names.add(name)

    def _per_document(self, number: int) -> Values:
        """The key of a band of every document, in order; after the last band, the numbers of shingles."""
        values = np.zeros(int(self.starts[-1]), np.uint32)
        for start, shard in zip(self.starts.tolist(), self.old, strict=False):
            values[start : start + shard.rows] = shard.read(number)
        for start, block, parts in zip(self.starts[len(self.old) :].tolist(), self.built_blocks, self.new, strict=False):
            for part_name, shard in parts.items():
                values[start : start + len(block.rows)][block.in_part(part_name)] = shard.read(number)
        return values

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
            block = number - len(self.old)
            heldout, numbers = self.numbers(block)
            shard, row = self.new[block]["heldout" if heldout[row] else "train"], int(numbers[row])
        return near_duplicates.shingles_in(self.column(shard.path), row, self.recipe.tokenizer)

    def _report(self, dropped: Sequence[NearDuplicate]) -> None:
        """Write a line for each document that is dropped: its place, its original's, their similarity."""

        def place(position: int) -> dict[str, Any]:
            number, row = self._locate(position)
            if position < self.old_rows:
                return place_in(self.old[number], row)
            block = self.built_blocks[number - len(self.old)]
            line = self.lines_before[number - len(self.old)] + int(block.rows[row, 3])
            return {"file": self.files[block.role][block.file].name, "line": line}

        (self.output / REPORT).parent.mkdir(parents=True, exist_ok=True)
        with (self.output / REPORT).open("wb") as out:
            for near in dropped:
                row = {**place(near.position), "original": place(near.original), "similarity": round(near.jaccard, 4)}
                out.write(orjson.dumps(row) + b"\n")


def place_in(shard: SketchedShard, row: int) -> dict[str, Any]:
    """Where a document of an earlier set stood: its file and line, if that set has them, else its shard and row."""
    origin, name = shard.origin, f"{shard.path.parent.name}/{shard.path.name}"
    assert origin is not None
    file = _places(origin.directory).get(name)
    with contextlib.suppress(OSError):
        lines = np.fromfile(origin.directory / FOLDER / _lines_name(name), "<u8", 1, offset=8 * row)
        if isinstance(file, str) and len(lines):
            return {"set": origin.name, "file": file, "line": int(lines[0])}
    return {"set": origin.name, "shard": name, "row": row}


@lru_cache(maxsize=64)
def _places(directory: Path) -> dict[str, Any]:
    return read_object(directory / FOLDER / PLACES)


def _lines_name(shard: str) -> str:
    return f"{shard.replace('/', '-').removesuffix('.arrow')}.lines"
