"""Blocks to sets of shards: which rows stay, where the files lie, the indexes, the quarantine and the figures.

What needs to see all rows is decided here, from 24 bytes a row: duplicates, what stands in the held-out part, limits. Such
rows leave their block's shard by a copy without them; the whole shard stays aside, so that a later set can take it again.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from ttrain.config import Reading
from ttrain.core import redact
from ttrain.core.files import write_json
from ttrain.data import blocks, contamination, shards, sources
from ttrain.data.blocks import BEYOND_LIMIT, BLOCKS, PARTS, Recipe
from ttrain.data.contamination import Against, Scanned
from ttrain.data.jsonl import FIRST_REJECTED, Tally
from ttrain.errors import ArtifactError, DataError

REJECTED = Path("run", "rejected.jsonl")
OWN_NAME = re.compile(
    r"^\.?((train|heldout)-)?[0-9a-f]{16,24}(-\w+)?\.(arrow|jsonl|json|rows|rejected\.jsonl)(\.\d+\.tmp)?$"
)
HELD_OUT, DUPLICATE = "stands in the held-out part", "duplicate"
Flags = npt.NDArray[np.bool_]
Table = npt.NDArray[np.uint64]  # shape [rows, 3]: hash, hash, bytes of text


@dataclass(frozen=True)
class DataFile:
    """An input: where it is, what to call it, what identifies its bytes (if known), its weighted source."""

    location: str
    name: str
    digest: str | None = None
    group: int = 0


@dataclass
class Made:
    """A block that exists: where it lies, what it says of itself, which of its rows are wanted."""

    role: str
    file: int
    identity: str
    directory: Path
    encoded: bool
    about: Mapping[str, Any]
    rows: Table
    wanted: Flags = field(default_factory=lambda: np.zeros(0, np.bool_))

    @property
    def is_heldout(self) -> Flags:
        threshold = self.about["threshold"]
        return (
            self.rows[:, 0] < np.uint64(min(threshold, 2**64 - 1))
            if threshold < 2**64
            else np.ones(len(self.rows), np.bool_)
        )


@dataclass
class Built:
    """What became of the files: counts of both parts, one tally a role, one entry a file."""

    parts: dict[str, dict[str, Any]]
    tallies: dict[str, Tally]
    files: list[dict[str, Any]]
    blocks: int
    encoded_blocks: int
    duplicates: int
    encoder: str
    contamination: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """The figures of the manifest."""
        names = (*shards.COUNTED, "kind", "vocab_size")
        return {
            **{part: {name: index[name] for name in names} for part, index in self.parts.items()},
            "rows": {role: tally.to_json() for role, tally in self.tallies.items()},
            "files": self.files,
            "duplicates": self.duplicates,
            "blocks": self.blocks,
            "encoded_blocks": self.encoded_blocks,
            "encoder": self.encoder,
            **({"contamination": self.contamination} if self.contamination else {}),
        }


def assemble(
    output: Path,
    files: Mapping[str, Sequence[DataFile]],
    made: list[Made],
    recipe: Recipe,
    reading: Reading,
    weights: Sequence[float],
    overlaps: tuple[Against, Sequence[Scanned]] | None = None,
) -> Built:
    """Choose the rows, lay out both parts, write their indexes, the quarantine and the figures.

    `overlaps` has what the training part of each block has in common with items of evaluations.
    """
    tallies = {role: Tally() for role in files}
    figures = {(role, n): Tally() for role in files for n in range(len(files[role]))}
    _quarantine(output, files, made, figures)
    duplicates = _choose(made, figures, reading)
    lowest = _set_lowest_aside(made, figures) if recipe.heldout_fraction > 0 and "heldout" not in files else None
    overlapping = _set_overlaps_aside(files, made, figures, overlaps) if overlaps else None
    for (role, _), tally in figures.items():
        tallies[role].add(tally)
    for part in PARTS:  # an output that is being changed is no set of shards
        (output / part / shards.INDEX).unlink(missing_ok=True)
    entries: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    sizes: dict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for part in PARTS:
        (output / part).mkdir(parents=True, exist_ok=True)
        for block in made:
            entry = _lay_out(output, part, block, {e["file"] for e in entries[part]}, recipe)
            if entry:
                entries[part].append({**entry, "group": files[block.role][block.file].group})
                sizes[block.role, block.file].update({name: entry[name] for name in ("tokens", "bytes")})
    if lowest is not None:
        block, content_hash = lowest
        entries["heldout"].append(_write_lowest(output, files[block.role][block.file].location, content_hash, recipe))
    _keep_blocks(output, made)
    more: dict[str, Any] = {"weights": list(weights)} if weights else {}
    if recipe.kind == "chats":
        more["template"] = recipe.template
    parts = {
        part: shards.write_index(
            output / part,
            kind=recipe.kind,
            vocab_size=recipe.vocab_size,
            tokenizer=recipe.tokenizer_digest,
            shards=entries[part],
            **more,
        )
        for part in PARTS
    }
    _remove_others(output, entries, made)
    _tell_overlaps(output, overlapping)
    return Built(
        parts,
        tallies,
        [
            {"name": files[role][n].name, "role": role, **tally.to_json(), "tokens": 0, "bytes": 0, **sizes[role, n]}
            for (role, n), tally in figures.items()
        ],
        blocks=len(made),
        encoded_blocks=sum(block.encoded for block in made),
        duplicates=duplicates,
        encoder=", ".join(sorted({block.about["encoder"] for block in made})),
        contamination={name: value for name, value in overlapping.items() if name != "items"} if overlapping else None,
    )


def _quarantine(
    output: Path, files: Mapping[str, Sequence[DataFile]], made: list[Made], figures: Mapping[tuple[str, int], Tally]
) -> None:
    """Count each file's rows and write its bad ones, numbered within the file, to `run/rejected.jsonl`."""
    (output / REJECTED).parent.mkdir(parents=True, exist_ok=True)
    with (output / REJECTED).open("wb") as out:
        before: Counter[tuple[str, int]] = Counter()
        for block in made:
            place, file = (block.role, block.file), files[block.role][block.file]
            counts = block.about["tally"]
            tally = Tally(counts["rows"], counts["kept"])
            for name in ("skipped", "rejected", "keys_seen"):
                getattr(tally, name).update(counts[name])
            rejected = block.directory / BLOCKS / f"{block.identity}.rejected.jsonl"
            if counts["rejected"]:
                for line in rejected.read_bytes().splitlines():
                    row = {**orjson.loads(line), "file": redact.url(file.location)}
                    if "line" in row:
                        row["line"] += before[place]
                        if len(tally.first_rejected) < FIRST_REJECTED:
                            tally.first_rejected.append(f"{redact.url(file.location)}:{row['line']}: {row['reason']}")
                    out.write(orjson.dumps(row) + b"\n")
            figures[place].add(tally)
            before[place] += block.about["lines"]


def _choose(made: list[Made], figures: Mapping[tuple[str, int], Tally], reading: Reading) -> int:
    """Mark the rows of each block that stay; count the others. Returns how many rows have been seen before."""
    table = np.concatenate([np.zeros((0, 3), np.uint64), *(block.rows for block in made)])
    first = is_first(table)
    from_heldout = np.repeat([block.role == "heldout" for block in made], [len(block.rows) for block in made])
    shared = (
        ~from_heldout & np.isin(_keys(table), _keys(table[from_heldout]))
        if from_heldout.any()
        else np.zeros(len(table), bool)
    )
    wanted = ~shared & (first if reading.deduplicate else True)
    limit = reading.limit * reading.rounds if reading.limit else None
    beyond = wanted & ~from_heldout & (np.cumsum(wanted & ~from_heldout) > limit) if limit else np.zeros(len(table), bool)
    start = 0
    for block in made:
        end = start + len(block.rows)
        tally = figures[block.role, block.file]
        block.wanted = wanted[start:end] & ~beyond[start:end]
        tally.leave_out(HELD_OUT, int(shared[start:end].sum()))
        tally.leave_out(DUPLICATE, int((~wanted & ~shared)[start:end].sum()))
        tally.leave_out(BEYOND_LIMIT, int(beyond[start:end].sum()))
        start = end
    return int((~first & ~shared).sum())


def _keys(table: Table) -> npt.NDArray[Any]:
    """The 16 bytes that identify each row, as one comparable value."""
    return np.ascontiguousarray(table[:, :2]).view([("", np.uint64), ("", np.uint64)]).ravel()


def is_first(table: Table) -> Flags:
    """Whether no row before says the same."""
    halves = np.sort(table[:, 0])
    if len(halves) < 2 or (halves[1:] != halves[:-1]).all():  # most often; sorting with places takes forty times as long
        return np.ones(len(table), np.bool_)
    order = np.lexsort((table[:, 1], table[:, 0]))  # stable: of equal rows the first stays first
    ordered = table[order, :2]
    found = np.ones(len(table), np.bool_)
    found[order[1:]] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return found


def _set_lowest_aside(made: list[Made], figures: Mapping[tuple[str, int], Tally]) -> tuple[Made, bytes] | None:
    """Where nothing was held out, take the row of the lowest hash (and its copies) from the training part.

    So that a small set can be evaluated too. Returns its first block and its hash.
    """
    if any((block.is_heldout & block.wanted).any() for block in made) or sum(int(b.wanted.sum()) for b in made) < 2:
        return None
    lowest: tuple[tuple[int, int], Made] | None = None
    for block in made:
        rows = block.rows[block.wanted]
        if len(rows):
            first, second, _ = rows[np.lexsort((rows[:, 1], rows[:, 0]))[0]].tolist()
            if lowest is None or (first, second) < lowest[0]:
                lowest = (first, second), block
    assert lowest is not None, "two rows are wanted"
    (first, second), where = lowest
    copies = 0
    for block in made:
        same = block.wanted & (block.rows[:, 0] == np.uint64(first)) & (block.rows[:, 1] == np.uint64(second))
        block.wanted &= ~same
        figures[block.role, block.file].leave_out(HELD_OUT, max(0, int(same.sum()) - (not copies)))
        copies += int(same.sum())
    return where, first.to_bytes(8, "big") + second.to_bytes(8, "big")


def _set_overlaps_aside(
    files: Mapping[str, Sequence[DataFile]],
    made: list[Made],
    figures: Mapping[tuple[str, int], Tally],
    overlaps: tuple[Against, Sequence[Scanned]],
) -> dict[str, Any]:
    """Count the training documents that hold an item of an evaluation, and leave them out where that is asked for.

    Returns the report. Documents that are not wanted anyway do not count.
    """
    against, scans = overlaps
    told = []
    for block, scanned in zip(made, scans, strict=True):
        rows = np.flatnonzero(~block.is_heldout)  # of the block, by number of the record in its training part
        places = [place for place in scanned.places if block.wanted[rows[place.record]]]
        told.append(({"file": files[block.role][block.file].name}, scanned._replace(places=places)))
        if against.remove:
            found = rows[sorted({place.record for place in places})]
            block.wanted[found] = False
            figures[block.role, block.file].leave_out(contamination.OVERLAPS, len(found))
    return contamination.report(against, told)


def _tell_overlaps(output: Path, overlapping: Mapping[str, Any] | None) -> None:
    """Leave the report for people, and for evaluations what the training part still holds."""
    (output / contamination.REPORT).unlink(missing_ok=True)
    held = (
        {}
        if overlapping is None or overlapping["removed"]
        else {item["digest"]: item["share"] for item in overlapping["items"]}
    )
    contamination.write_known(output, held)
    if overlapping:
        write_json(output / contamination.REPORT, overlapping)


def _write_lowest(output: Path, location: str, content_hash: bytes, recipe: Recipe) -> dict[str, Any]:
    """Read the record of this hash again, and write the held-out shard that it is. Raises DataError where it is gone."""
    rows = sources.read([location], recipe.parser, Tally(), recipe.max_line_bytes, recipe.text_field)
    record = next((record for record in rows if sources.content_hash(record) == content_hash), None)
    if record is None:
        raise DataError(f"{location} changed while it was read; run the same command again")
    column = blocks.encode_records(blocks.encoder_of(recipe.tokenizer, fast=recipe.fast), recipe.kind, [record])
    name = f"{hashlib.blake2b(record.content(), digest_size=8).hexdigest()}-lowest"
    entry = shards.write_shard(output / "heldout" / f"{name}.arrow", column, recipe.vocab_size)
    shards.write_files([(output / "heldout" / f"{name}.jsonl", orjson.dumps(record.to_json()) + b"\n")])
    return {**entry, "records": f"{name}.jsonl", "bytes": len(blocks.text_of(record).encode("utf-8")), "group": 0}


def _lay_out(output: Path, part: str, block: Made, taken: set[str], recipe: Recipe) -> dict[str, Any] | None:
    """Put the wanted rows of a block into a part; returns the entry for its index, None where there are none."""
    entry = block.about[part]
    if entry is None:
        return None
    mine = block.is_heldout if part == "heldout" else ~block.is_heldout
    wanted = block.wanted[mine]
    names = [entry[kind] for kind in ("file", "records") if kind in entry]
    if not wanted.all():
        for name in names:  # an equal block may stand in the set already
            _place(block.directory, part, name, output / BLOCKS / f"{part}-{name}", keep=entry["file"] in taken)
        if not wanted.any():
            return None
        return _selected(output, part, block, entry, wanted, mine, recipe)
    kept = {key: value for key, value in entry.items() if key != "files"}
    number = 2
    while kept["file"] in taken:  # the same block twice, where duplicates are kept
        kept.update(
            {
                kind: f"{Path(entry[kind]).stem}-{number}{Path(entry[kind]).suffix}"
                for kind in ("file", "records")
                if kind in entry
            }
        )
        number += 1
    for kind in ("file", "records"):
        if kind in entry:
            _place(block.directory, part, entry[kind], output / part / kept[kind], keep=kept[kind] != entry[kind])
    return kept


def _selected(
    output: Path, part: str, block: Made, entry: Mapping[str, Any], wanted: Flags, mine: Flags, recipe: Recipe
) -> dict[str, Any]:
    """A copy of a shard without the rows that are not wanted; its name says which."""
    stem = f"{Path(entry['file']).stem}-{hashlib.blake2b(wanted.tobytes(), digest_size=4).hexdigest()}"
    column = shards.read_shard(output / BLOCKS / f"{part}-{entry['file']}").select(wanted)
    found = shards.write_shard(output / part / f"{stem}.arrow", column, recipe.vocab_size)
    if "records" in entry:
        lines = (output / BLOCKS / f"{part}-{entry['records']}").read_bytes().splitlines(keepends=True)
        found["records"] = f"{stem}.jsonl"
        chosen = b"".join(line for line, keep in zip(lines, wanted, strict=True) if keep)
        shards.write_files([(output / part / found["records"], chosen)])
    return {**found, "bytes": int(block.rows[mine, 2][wanted].sum())}


def _place(directory: Path, part: str, name: str, target: Path, *, keep: bool = False) -> None:
    """Have a block's file at `target`: moved where it is this output's own, else linked (copied, across file systems)."""
    source = blocks.find(directory, part, name)
    if source is None:
        raise ArtifactError(f"{part}/{name} vanished from {directory} while it was taken over; run the same command again")
    if source == target:
        return
    target.unlink(missing_ok=True)
    if not keep and target.is_relative_to(directory):
        source.rename(target)
        return
    _link(source, target)


def _link(source: Path, target: Path) -> None:
    """A second name of the same file; a copy, across file systems."""
    try:
        os.link(source, target)
    except OSError:
        part = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        shutil.copyfile(source, part)
        part.replace(target)


def _keep_blocks(output: Path, made: list[Made]) -> None:
    """What is known of the blocks that came from elsewhere."""
    for block in made:
        for ending in ("rows", "rejected.jsonl", "json"):  # the last one makes it exist
            source, target = (directory / BLOCKS / f"{block.identity}.{ending}" for directory in (block.directory, output))
            if source != target and source.exists() and not target.exists():
                _link(source, target)


def _remove_others(output: Path, entries: Mapping[str, list[dict[str, Any]]], made: list[Made]) -> None:
    """Remove what a file that is gone, another setting or a killed run left; only what is named as ours is touched."""
    for part in PARTS:
        wanted = {entry[kind] for entry in entries[part] for kind in ("file", "records") if kind in entry}
        _remove(output / part, wanted)
    wanted = {f"{block.identity}.{ending}" for block in made for ending in ("json", "rows", "rejected.jsonl")}
    for part in PARTS:
        for block in made:
            entry = block.about[part] or {}
            wanted.update(f"{part}-{entry[kind]}" for kind in ("file", "records") if kind in entry)
    _remove(output / BLOCKS, wanted)


def _remove(directory: Path, wanted: set[str]) -> None:
    for path in directory.iterdir() if directory.is_dir() else ():
        if path.name not in wanted and OWN_NAME.match(path.name):
            path.unlink()
