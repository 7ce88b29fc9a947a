"""Assemble blocks into sets of shards: select rows, place files, write the indexes, the quarantine and the figures.

Decisions that need all rows are made here, from 32 bytes a row: duplicates, overlap with the held-out part, limits. A
block whose rows are all selected is linked into its part, of another its selected rows are written there.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from ttrain.config import Reading
from ttrain.core.files import JsonDict, link_or_copy, write_json
from ttrain.data import blocks, contamination, records, shards
from ttrain.data.blocks import BAD_ROWS, BEYOND_LIMIT, BLOCKS, HELDOUT_RECORDS, PARTS, BlockRecipe
from ttrain.data.built_blocks import BuiltBlock, FilesByRole, Flags, Table
from ttrain.data.contamination import OverlapCheck, TextMatch
from ttrain.data.near_duplicates import NEAR_DUPLICATE, NearDuplicateSearch
from ttrain.data.records import Tally
from ttrain.errors import CannotRead

REJECTED = Path("run", "rejected.jsonl")
HELD_OUT, DUPLICATE = "stands in the held-out part", "duplicate"


Entry = JsonDict  # of a shard, in the index of its part
Overlaps = tuple[OverlapCheck, Sequence[Sequence[TextMatch]]]  # with evaluation items, of each block
Tallies = Mapping[tuple[str, int], Tally]  # by role and number of the file


@dataclass
class ShardSetResult:
    """The result of sharding: counts of both parts, one tally per role, one entry per file."""

    parts: dict[str, JsonDict]
    tallies: dict[str, Tally]
    files: list[JsonDict]
    duplicates: int
    blocks: int
    encoded_blocks: int
    encoder: str
    contamination: JsonDict | None = None
    near_duplicates: JsonDict | None = None
    of_earlier_heldout: int | None = None  # rows that would be learnt, if no earlier held-out set had them

    def to_json(self) -> JsonDict:
        """The figures of the manifest."""
        names = (*shards.COUNTED, "kind", "vocab_size")
        figures = [field.name for field in fields(self)][2:]
        return {
            **{part_name: {name: index[name] for name in names} for part_name, index in self.parts.items()},
            "rows": {role: tally.to_json() for role, tally in self.tallies.items()},
            **{name: value for name in figures if (value := getattr(self, name)) is not None},
        }


def assemble(
    output: Path,
    files: FilesByRole,
    built_blocks: list[BuiltBlock],
    recipe: BlockRecipe,
    reading: Reading,
    weights: Sequence[float],
    overlaps: Overlaps | None = None,
    near: NearDuplicateSearch | None = None,
    earlier_heldout: Table | None = None,
) -> ShardSetResult:
    """Choose the rows, lay out both parts, write their indexes, the quarantine and the figures.

    `overlaps`: what each block has of evaluation items. `near`: what finds near-duplicates.
    `earlier_heldout`: content hashes, two halves a row, of what sets made before hold out, which is not to be learnt.
    """
    figures = {(role, n): Tally() for role in files for n in range(len(files[role]))}
    _quarantine(output, built_blocks, figures)
    selection = _Selection(built_blocks, figures, recipe.kind)
    duplicates = selection.select(reading)
    matches = selection.matched_rows(overlaps[1]) if overlaps else []
    removed = np.zeros_like(selection.selected)
    if overlaps and overlaps[0].remove:
        removed[[row for row, _, _ in matches]] = True
    near_figures = None
    if near:
        present = selection.selected & ~removed
        flags, near_figures = near.find(present, present & ~selection.from_heldout)
        selection.leave_out(NEAR_DUPLICATE, flags)
    kept_back = selection.in_earlier_heldout(earlier_heldout)
    of_earlier_heldout = int(kept_back.sum())
    lowest = None
    if recipe.heldout_fraction > 0 and "heldout" not in files:
        lowest = selection.hold_out_lowest_row(kept_back)
    selection.leave_out(HELD_OUT, kept_back)
    overlapping = None
    if overlaps:
        found = [(file, match) for row, file, match in matches if selection.selected[row]]
        overlapping = contamination.report(overlaps[0], found)
        selection.leave_out(contamination.OVERLAPS, removed)
    tallies = {role: Tally() for role in files}
    for (role, _), tally in figures.items():
        tallies[role].add(tally)
    sizes: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    entries = {part_name: _place_shards(output, part_name, built_blocks, recipe, sizes) for part_name in PARTS}
    if lowest is not None:
        block, row = lowest
        entries["heldout"].append(_write_lowest_row(output, block, row, recipe))
    _keep_blocks(output, built_blocks)
    parts = {part_name: _write_index(output / part_name, entries[part_name], recipe, weights) for part_name in PARTS}
    _write_overlap_report(output, overlapping)
    return ShardSetResult(
        parts,
        tallies,
        [
            {"name": files[role][n].name, "role": role, **tally.to_json(), "tokens": 0, "bytes": 0, **sizes[role, n]}
            for (role, n), tally in figures.items()
        ],
        blocks=len(built_blocks),
        encoded_blocks=sum(block.encoded for block in built_blocks),
        duplicates=duplicates,
        encoder=", ".join(sorted({block.manifest["encoder"] for block in built_blocks})),
        contamination={name: value for name, value in overlapping.items() if name != "items"} if overlapping else None,
        near_duplicates=near_figures,
        of_earlier_heldout=None if earlier_heldout is None else of_earlier_heldout,
    )


def _place_shards(
    output: Path,
    part_name: str,
    built_blocks: list[BuiltBlock],
    recipe: BlockRecipe,
    sizes: Mapping[tuple[str, int], Counter[str]],
) -> list[Entry]:
    """Make a part anew from the selected rows of all blocks; its entries. Adds tokens and bytes of each file to `sizes`."""
    directory = output / part_name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    entries: list[Entry] = []
    for block in built_blocks:
        in_part = block.in_part(part_name)
        selected = block.selected[in_part]
        if not selected.any():
            continue
        entry = block.manifest[part_name]
        stem = Path(entry["file"]).stem
        if not selected.all():
            stem += f"-{hashlib.blake2b(selected.tobytes(), digest_size=4).hexdigest()}"
        path = directory / f"{stem}.arrow"
        number = 2
        while path.exists():  # the same block twice, where duplicates are kept
            path = path.with_stem(f"{stem}-{number}")
            number += 1
        if selected.all():
            link_or_copy(block.shard(part_name), path)
            entry = {**entry, "file": path.name}
        else:
            column = shards.read_shard(block.shard(part_name)).select(selected)
            written = shards.write_shard(path, column, recipe.vocab_size)
            entry = {**written, "bytes": int(block.rows[in_part, 2][selected].sum())}
        if part_name == "heldout":
            entry["records"] = path.with_suffix(".jsonl").name
            lines = (block.directory / HELDOUT_RECORDS).read_bytes().splitlines(keepends=True)
            shards.write_files([(directory / entry["records"], b"".join(itertools.compress(lines, selected)))])
        sizes[block.role, block.file].update(tokens=entry["tokens"], bytes=entry["bytes"])
        entries.append({**entry, "group": block.source.group})
    return entries


def _write_index(directory: Path, entries: list[Entry], recipe: BlockRecipe, weights: Sequence[float]) -> JsonDict:
    """Write the index of a part, which makes it a set of shards."""
    extra_fields: JsonDict = {"weights": list(weights)} if weights else {}
    if recipe.kind != "documents":
        extra_fields["template"] = recipe.template
    return shards.write_index(
        directory,
        kind=recipe.kind,
        vocab_size=recipe.vocab_size,
        tokenizer=recipe.tokenizer_digest,
        shards=entries,
        **extra_fields,
    )


def _quarantine(output: Path, built_blocks: list[BuiltBlock], figures: Tallies) -> None:
    """Count each file's rows and write the bad ones, numbered within the file, to `run/rejected.jsonl`."""
    (output / REJECTED).parent.mkdir(parents=True, exist_ok=True)
    with (output / REJECTED).open("wb") as out:
        for tally in figures.values():
            tally.quarantine = lambda row: out.write(orjson.dumps(row) + b"\n")
        for block in built_blocks:
            counts = block.manifest["tally"]
            skipped, rejected, keys_seen = (Counter(counts[name]) for name in ("skipped", "rejected", "keys_seen"))
            tally = Tally(counts["rows"], counts["kept"], skipped, rejected, keys_seen, lines=block.manifest["lines"])
            tally.unread_keys.update(counts.get("unread_keys", {}))
            tally.with_reasoning = counts.get("with_reasoning", 0)
            bad_rows = map(orjson.loads, (block.directory / BAD_ROWS).read_bytes().splitlines())
            figures[block.role, block.file].add_block(tally, bad_rows, block.source.location)


class _Selection:
    """The rows of all blocks, in order, and which of them are selected; what the blocks have are views of these arrays."""

    def __init__(self, built_blocks: list[BuiltBlock], figures: Tallies, kind: str) -> None:
        self._blocks, self._figures, self._kind = built_blocks, figures, kind
        lengths = [len(block.rows) for block in built_blocks]
        self._starts = shards.offsets_of(lengths)
        self.rows = np.concatenate([np.zeros((0, 4), np.uint64), *(block.rows for block in built_blocks)])
        self.selected = np.ones(len(self.rows), np.bool_)
        self.from_heldout = np.repeat(np.array([block.role == "heldout" for block in built_blocks], np.bool_), lengths)
        self._is_heldout: Flags = np.concatenate([self.selected[:0], *(block.is_heldout for block in built_blocks)])
        for block, span in self._spans():
            block.rows, block.selected = self.rows[span], self.selected[span]

    def _spans(self) -> Iterator[tuple[BuiltBlock, slice]]:
        """Each block with its part of the arrays."""
        return zip(self._blocks, itertools.starmap(slice, itertools.pairwise(self._starts.tolist())), strict=True)

    def leave_out(self, rule: str, flags: Flags) -> None:
        """Leave the flagged rows out by a rule, and count those that were selected."""
        flags = flags & self.selected
        for block, span in self._spans():
            self._figures[block.role, block.file].leave_out(rule, int(flags[span].sum()))
        self.selected &= ~flags

    def select(self, reading: Reading) -> int:
        """Leave out what is held out, duplicates and what is beyond the limit. Returns the number of duplicate rows."""
        repeated = ~is_first(self.rows)
        if self.from_heldout.any():
            keys = _split_keys(self.rows, self._kind)
            self.leave_out(HELD_OUT, ~self.from_heldout & np.isin(keys, keys[self.from_heldout]))
        repeated &= self.selected
        if reading.deduplicate:
            self.leave_out(DUPLICATE, repeated)
        if reading.limit:
            learnt = self.selected & ~self.from_heldout
            self.leave_out(BEYOND_LIMIT, learnt & (np.cumsum(learnt) > reading.limit * reading.rounds))
        return int(repeated.sum())

    def in_earlier_heldout(self, earlier_heldout: Table | None) -> Flags:
        """A flag per row: whether it is to be learnt, although an earlier held-out set has its content."""
        if earlier_heldout is None:
            return np.zeros_like(self.selected)
        keys, earlier_keys = (_split_keys(table, self._kind) for table in (self.rows, earlier_heldout))
        return self.selected & ~self._is_heldout & np.isin(keys, earlier_keys)

    def hold_out_lowest_row(self, kept_back: Flags) -> tuple[BuiltBlock, int] | None:
        """If nothing was held out, move the row with the lowest hash (and its copies) out of the training part.

        This lets a small set be evaluated too. Returns the first block with the row, and its number there. Other pairs of
        the same prompt leave the training part with it. The last row that may be learnt stays: then it is one of those
        `kept_back`, which are not learnt anyway.
        """
        if (self._is_heldout & self.selected).any():
            return None
        can_spare_one = int((self.selected & ~kept_back).sum()) > 1
        rows = np.flatnonzero(self.selected if can_spare_one else self.selected & kept_back)
        if not len(rows):
            return None
        lowest = int(rows[np.lexsort((self.rows[rows, 1], self.rows[rows, 0]))[0]])
        same = self.selected & (self.rows[:, 0] == self.rows[lowest, 0])
        if self._kind != "pairs":
            same &= self.rows[:, 1] == self.rows[lowest, 1]
        self.selected[same.argmax()] = False  # it is kept, in the held-out part
        self.leave_out(HELD_OUT, same)
        number = int(self._starts.searchsorted(lowest, "right")) - 1
        return self._blocks[number], lowest - int(self._starts[number])

    def matched_rows(self, matches: Sequence[Sequence[TextMatch]]) -> list[tuple[int, str, TextMatch]]:
        """(row, name of its file, match with its line there) of the matches in training parts of the blocks."""
        rows: list[tuple[int, str, TextMatch]] = []
        for (block, span), found in zip(self._spans(), matches, strict=True):
            lines, is_heldout = block.rows[:, 3], block.is_heldout
            for match in found:
                row = int(lines.searchsorted(np.uint64(match.line)))
                if row < len(lines) and lines[row] == match.line and not is_heldout[row]:
                    match = match._replace(line=block.line_of(row))
                    rows.append((span.start + row, block.source.name, match))
        return rows


def _split_keys(table: Table, kind: str) -> npt.NDArray[Any]:
    """What may not stand in both parts: the content of a row, of a pair its prompt (`records.content_hash`)."""
    return table[:, 0] if kind == "pairs" else np.ascontiguousarray(table[:, :2]).view([("", np.uint64)] * 2).ravel()


def is_first(table: Table) -> Flags:
    """A flag per row: whether no earlier row has the same content."""
    flags = np.ones(len(table), np.bool_)
    halves = np.sort(table[:, 0])
    if (halves[1:] == halves[:-1]).any():  # seldom; sorting with indexes takes forty times as long
        order = np.lexsort((table[:, 1], table[:, 0]))  # stable: of equal rows the first stays first
        ordered = table[order, :2]
        flags[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return flags


def _write_overlap_report(output: Path, overlapping: JsonDict | None) -> None:
    """Write the report for people, and for evaluations the items that the training part still contains."""
    (output / contamination.REPORT).unlink(missing_ok=True)
    items = overlapping["items"] if overlapping and not overlapping["removed"] else ()
    contamination.write_item_shares(output, {item["digest"]: item["share"] for item in items})
    if overlapping:
        write_json(output / contamination.REPORT, overlapping)


def _write_lowest_row(output: Path, block: BuiltBlock, row: int, recipe: BlockRecipe) -> Entry:
    """Read the record of this row again and write it as a held-out shard. Raises DataError if it is gone."""
    location, content_hash = block.source.location, block.rows[row, :2].astype(">u8").tobytes()
    rows = records.read([location], recipe.parser, Tally(), recipe.max_line_bytes, recipe.text_field)
    record = next((record for record in rows if records.content_hash(record) == content_hash), None)
    if record is None:
        raise CannotRead(f"{location} changed while it was read; run the same command again")
    column = blocks.encode_records(blocks.encoder_of(recipe.tokenizer), recipe.kind, [record])
    name = f"{hashlib.blake2b(record.content(), digest_size=8).hexdigest()}-lowest"
    entry = shards.write_shard(output / "heldout" / f"{name}.arrow", column, recipe.vocab_size)
    shards.write_files([(output / "heldout" / f"{name}.jsonl", orjson.dumps(record.to_json()) + b"\n")])
    return {**entry, "records": f"{name}.jsonl", "bytes": len(blocks.text_of(record).encode("utf-8")), "group": 0}


def _keep_blocks(output: Path, built_blocks: list[BuiltBlock]) -> None:
    """Link reused blocks into this output, and remove those of other inputs, other settings or a killed run."""
    folder = output / BLOCKS
    folder.mkdir(parents=True, exist_ok=True)
    for block in built_blocks:
        directory = folder / block.directory.name
        if block.directory != directory and not blocks.is_built(directory):
            directory.mkdir(exist_ok=True)
            for name in (*block.manifest["files"], blocks.MANIFEST):  # the last one makes it exist
                (directory / name).unlink(missing_ok=True)
                link_or_copy(block.directory / name, directory / name)
    for path in folder.glob("*/.*.tmp"):
        path.unlink()
    current = {block.directory.name for block in built_blocks}
    for directory in folder.iterdir():
        if directory.name not in current:
            shutil.rmtree(directory)
