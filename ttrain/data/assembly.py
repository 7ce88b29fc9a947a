"""Assemble blocks into sets of shards: select rows, place files, write the indexes, the quarantine and the figures.

Decisions that need all rows are made here, from 32 bytes a row: duplicates, overlap with the held-out part, limits. The
block's shard is copied without such rows; the whole shard is kept in `run/blocks`, so that a later set can reuse it.
"""

from __future__ import annotations

import hashlib
import itertools
import re
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
from ttrain.data.blocks import BEYOND_LIMIT, BLOCKS, PARTS, BlockRecipe
from ttrain.data.built_blocks import BuiltBlock, FilesByRole, Flags, Table
from ttrain.data.contamination import OverlapCheck
from ttrain.data.near_duplicate_sets import NearDuplicateSearch
from ttrain.data.near_duplicates import NEAR_DUPLICATE
from ttrain.data.overlap import TextMatch
from ttrain.data.records import Tally
from ttrain.errors import CannotRead

REJECTED = Path("run", "rejected.jsonl")
SHARD_FILE_NAME = re.compile(
    r"^\.?((train|heldout)-)?[0-9a-f]{16,24}(-\w+)?\.(arrow|jsonl|json|rows|rejected\.jsonl)(\.\d+\.tmp)?$"
)
HELD_OUT, DUPLICATE = "stands in the held-out part", "duplicate"


Entry = JsonDict  # of a shard, in the index of its part
Overlaps = tuple[OverlapCheck, Sequence[list[TextMatch]]]  # with evaluation items, of each block's training part
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

    `overlaps`: the overlap of each block's training part with evaluation items. `near`: what finds near-duplicates.
    `earlier_heldout`: content hashes, two halves a row, of what sets made before hold out, which is not to be learnt.
    """
    tallies = {role: Tally() for role in files}
    figures = {(role, n): Tally() for role in files for n in range(len(files[role]))}
    _quarantine(output, built_blocks, figures)
    selection = _Selection(built_blocks, figures, recipe.kind)
    duplicates = selection.select(reading)
    places = selection.places_of(overlaps[1]) if overlaps else []
    removed = np.zeros_like(selection.selected)
    for rows in places if overlaps and overlaps[0].remove else ():
        removed[rows] = True
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
        overlapping = _overlap_report(built_blocks, overlaps, places, selection.selected)
        selection.leave_out(contamination.OVERLAPS, removed)
    for (role, _), tally in figures.items():
        tallies[role].add(tally)
    for part_name in PARTS:  # an output that is being changed is not a set of shards
        (output / part_name / shards.INDEX).unlink(missing_ok=True)
    entries, sizes = _place_shards(output, built_blocks, recipe, near)
    if lowest is not None:
        block, row = lowest
        entries["heldout"].append(_write_lowest_row(output, block, row, recipe))
    _copy_block_records(output, built_blocks)
    parts = {part_name: _write_index(output / part_name, entries[part_name], recipe, weights) for part_name in PARTS}
    _remove_stale_files(output, entries, built_blocks)
    _write_overlap_report(output, overlapping)
    if near:
        near.finish()
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
    output: Path, built_blocks: list[BuiltBlock], recipe: BlockRecipe, near: NearDuplicateSearch | None
) -> tuple[dict[str, list[Entry]], Mapping[tuple[str, int], Counter[str]]]:
    """Place the shards of all blocks; returns (the entries of each part, tokens and bytes by role and file number)."""
    entries: dict[str, list[Entry]] = {part_name: [] for part_name in PARTS}
    sizes: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    (output / BLOCKS).mkdir(parents=True, exist_ok=True)  # no worker has made it where all blocks are reused
    for part_name in PARTS:
        (output / part_name).mkdir(parents=True, exist_ok=True)
        used_names = set[str]()
        for number, block in enumerate(built_blocks):
            entry = _place_shard(output, part_name, block, used_names, recipe)
            if entry:
                used_names.add(entry["file"])
                entries[part_name].append({**entry, "group": block.source.group})
                sizes[block.role, block.file].update({name: entry[name] for name in ("tokens", "bytes")})
                if near:
                    near.keep(part_name, number, entry)
    return entries, sizes


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
            path = block.directory / BLOCKS / f"{block.identity}.rejected.jsonl"
            bad_rows = map(orjson.loads, path.read_bytes().splitlines() if counts["rejected"] else ())
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

    def places_of(self, scans: Sequence[Sequence[TextMatch]]) -> list[npt.NDArray[np.int64]]:
        """For each block, the number of the row of each match in its training part."""
        return [
            span.start + np.flatnonzero(~block.is_heldout)[[match.record for match in matches]]
            for (block, span), matches in zip(self._spans(), scans, strict=True)
        ]


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


def _overlap_report(
    built_blocks: list[BuiltBlock], overlaps: Overlaps, places: Sequence[npt.NDArray[np.int64]],
    selected: Flags,
) -> JsonDict:  # fmt: skip
    """The report on the selected training documents that contain an evaluation item."""
    against, scans = overlaps
    file_scans = []
    for block, matches, rows in zip(built_blocks, scans, places, strict=True):
        kept = [match for match, row in zip(matches, rows, strict=True) if selected[row]]
        file_scans.append(({"file": block.source.name}, kept))
    return contamination.report(against, file_scans)


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


def _place_shard(output: Path, part_name: str, block: BuiltBlock, used_names: set[str], recipe: BlockRecipe) -> Entry | None:
    """Put the selected rows of a block into a part; returns the entry for its index, or None if there are none."""
    entry = block.manifest[part_name]
    if entry is None:
        return None
    in_part = block.in_part(part_name)
    selected = block.selected[in_part]
    names = _file_names(entry)
    if not selected.all():
        for name in names.values():  # an equal block may already be in the set
            _place_file(block, part_name, name, output / BLOCKS / f"{part_name}-{name}", keep=entry["file"] in used_names)
        if not selected.any():
            return None
        return _write_selection(output, part_name, block, entry, selected, in_part, recipe)
    new_names, number = names, 2
    while new_names["file"] in used_names:  # the same block twice, where duplicates are kept
        new_names = {kind: f"{Path(name).stem}-{number}{Path(name).suffix}" for kind, name in names.items()}
        number += 1
    for kind, name in names.items():
        _place_file(block, part_name, name, output / part_name / new_names[kind], keep=new_names[kind] != name)
    return {key: value for key, value in (entry | new_names).items() if key != "files"}


def _file_names(entry: JsonDict) -> dict[str, str]:
    """The names of the files of a shard, by their keys in its entry."""
    return {kind: entry[kind] for kind in ("file", "records") if kind in entry}


def _write_selection(
    output: Path,
    part_name: str,
    block: BuiltBlock,
    entry: JsonDict,
    selected: Flags,
    in_part: Flags,
    recipe: BlockRecipe,
) -> Entry:
    """Write a copy of a shard with the selected rows only; its name depends on the selection. Returns the index entry."""
    stem = f"{Path(entry['file']).stem}-{hashlib.blake2b(selected.tobytes(), digest_size=4).hexdigest()}"
    column = shards.read_shard(output / BLOCKS / f"{part_name}-{entry['file']}").select(selected)
    new_entry = shards.write_shard(output / part_name / f"{stem}.arrow", column, recipe.vocab_size)
    if "records" in entry:
        lines = (output / BLOCKS / f"{part_name}-{entry['records']}").read_bytes().splitlines(keepends=True)
        new_entry["records"] = f"{stem}.jsonl"
        chosen = b"".join(line for line, keep in zip(lines, selected, strict=True) if keep)
        shards.write_files([(output / part_name / new_entry["records"], chosen)])
    return {**new_entry, "bytes": int(block.rows[in_part, 2][selected].sum())}


def _place_file(block: BuiltBlock, part_name: str, name: str, target: Path, *, keep: bool) -> None:
    """Put a block's file at `target`: moved if it belongs to this output, else linked (copied across file systems)."""
    source = blocks.file_of(block.directory, part_name, name)
    if source == target:
        return
    target.unlink(missing_ok=True)
    if not keep and target.is_relative_to(block.directory):
        source.rename(target)
    else:
        link_or_copy(source, target)


def _copy_block_records(output: Path, built_blocks: list[BuiltBlock]) -> None:
    """Link the row hashes, rejected rows and manifests of reused blocks into this output."""
    for block in built_blocks:
        for ending in ("rows", "rejected.jsonl", "json"):  # the last one makes it exist
            source, target = (directory / BLOCKS / f"{block.identity}.{ending}" for directory in (block.directory, output))
            if source != target and source.exists() and not target.exists():
                link_or_copy(source, target)


def _remove_stale_files(output: Path, entries: Mapping[str, list[Entry]], built_blocks: list[BuiltBlock]) -> None:
    """Remove files left by removed inputs, other settings or a killed run; only names that ttrain writes are touched."""
    current_names = {f"{block.identity}.{ending}" for block in built_blocks for ending in ("json", "rows", "rejected.jsonl")}
    for part_name in PARTS:
        _remove_except(output / part_name, {name for entry in entries[part_name] for name in _file_names(entry).values()})
        for block in built_blocks:
            current_names.update(f"{part_name}-{name}" for name in _file_names(block.manifest[part_name] or {}).values())
    _remove_except(output / BLOCKS, current_names)


def _remove_except(directory: Path, current_names: set[str]) -> None:
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in current_names and SHARD_FILE_NAME.match(path.name):
            path.unlink()
