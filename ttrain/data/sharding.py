"""Make a set of shards from files: encode blocks in any process, choose rows, write both parts.

A block whose rows are all selected is linked into its part; else its selected rows are written.
"""

import contextlib
import hashlib
import itertools
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import orjson

from ttrain.config import Reading
from ttrain.core import redact
from ttrain.core.files import JsonDict, link_or_copy, read_object, write_bytes, write_json
from ttrain.data import blocks, contamination, records, shards
from ttrain.data.blocks import BLOCKS, PARTS, Block, BlockRecipe, BuiltBlock, FilesByRole, Table
from ttrain.data.json_rows import Tally
from ttrain.data.near_duplicates import NEAR_DUPLICATE, NearDuplicateSearch
from ttrain.data.packing import Words
from ttrain.data.pool import Pool
from ttrain.data.selection import HELD_OUT, Selection, Tallies

REJECTED = Path("run", "rejected.jsonl")


@dataclass
class ShardSetResult:
    """The result of sharding: counts of both parts, by role, and by file."""

    parts: dict[str, JsonDict]
    tallies: dict[str, Tally]
    files: list[JsonDict]
    duplicates: int
    blocks: int
    encoded_blocks: int
    contamination: JsonDict | None = None
    near_duplicates: JsonDict | None = None
    of_earlier_heldout: int | None = None  # rows left out since an earlier held-out set has them

    def to_json(self) -> JsonDict:
        """The counts of the manifest."""
        names = (*shards.COUNTED, "kind", "vocab_size")
        counts: JsonDict = {}
        for part_name, index in self.parts.items():
            counts[part_name] = {name: index[name] for name in names}
        counts["rows"] = {role: tally.to_json() for role, tally in self.tallies.items()}
        others = {field.name: getattr(self, field.name) for field in fields(self)[2:]}
        return counts | {name: value for name, value in others.items() if value is not None}


@dataclass(frozen=True)
class Work:
    """Files to make blocks of, and where they go."""

    output: Path
    files: FilesByRole  # of the roles "train" and, if given, "heldout"
    recipe: BlockRecipe
    reading: Reading
    block_bytes: int
    pool: Pool
    progress: Callable[[int, int], None] = lambda rows, blocks: None  # gets their numbers so far

    def cut(self, role: str) -> Iterator[Block]:
        """The blocks of the role's files, before they are made."""
        for number, file in enumerate(self.files[role]):
            yield from blocks.cut(file.location, number, self.block_bytes, self.recipe)


def build(
    work: Work,
    weights: Sequence[float] = (),
    against: contamination.OverlapCheck | None = None,
    earlier: Sequence[Path] = (),
    earlier_heldout: Table | None = None,
) -> ShardSetResult:
    """Make `train/` and `heldout/` under the output; complete blocks are reused.

    `weights`: of the sources. `against`: the evaluation items that training documents are checked
    against. `earlier`: sets of shards with originals of near-duplicates. `earlier_heldout`: content
    hashes of rows not to be trained on. Raises DataError for a file that cannot be read.
    """
    output = work.output
    recipe = work.recipe
    built_blocks = make_blocks(work)
    tallies = _quarantine(output, work.files, built_blocks)
    selection = Selection(built_blocks, tallies, recipe.kind)
    duplicates = selection.select(work.reading)
    matches: list[tuple[int, str, contamination.TextMatch]] = []
    if against:  # the blocks are read again
        tasks = ((block, recipe, against.texts) for block in work.cut("train"))
        with contextlib.closing(work.pool.map(contamination.scan, tasks)) as results:
            matches = selection.matched_rows(results)
    removed = np.zeros_like(selection.selected)
    removed[[row for row, _, _ in matches]] = against is not None and against.remove
    near_counts = None
    if recipe.kind == "documents" and work.reading.near_duplicates:
        search = NearDuplicateSearch(
            output, built_blocks, recipe, work.reading.near_duplicates, earlier, work.pool
        )
        present = selection.selected & ~removed
        flags, near_counts = search.find(present, present & ~selection.from_heldout)
        selection.leave_out(NEAR_DUPLICATE, flags)
    kept_back = selection.in_earlier_heldout(earlier_heldout)
    lowest = selection.hold_out_lowest_row(kept_back) if recipe.heldout_fraction > 0 else None
    selection.leave_out(HELD_OUT, kept_back)
    overlaps = None
    if against:
        overlaps = contamination.report(
            against, [(file, match) for row, file, match in matches if selection.selected[row]]
        )
        selection.leave_out(contamination.OVERLAPS, removed)
    sizes: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    entries = {
        part_name: _place_shards(output, part_name, built_blocks, recipe, sizes)
        for part_name in PARTS
    }
    if lowest is not None:
        entries["heldout"].append(_write_lowest_row(output, *lowest, recipe))
    _keep_blocks(output, built_blocks)
    # For evaluations the items that the training part has, and for people the report.
    items = overlaps["items"] if overlaps and not overlaps["removed"] else ()
    contamination.write_item_shares(output, {item["digest"]: item["share"] for item in items})
    (output / contamination.REPORT).unlink(missing_ok=True)
    if overlaps:
        write_json(output / contamination.REPORT, overlaps)
    totals = {role: Tally() for role in work.files}
    for (role, _), tally in tallies.items():
        totals[role].add(tally)
    described: JsonDict = {
        "kind": recipe.kind,
        "vocab_size": recipe.vocab_size,
        "tokenizer": recipe.tokenizer_digest,
        **({"weights": list(weights)} if weights else {}),
        **({"template": recipe.template} if recipe.kind != "documents" else {}),
    }
    return ShardSetResult(
        {
            part_name: shards.write_index(
                output / part_name, shards=entries[part_name], **described
            )
            for part_name in PARTS
        },
        totals,
        [
            {
                "name": work.files[role][n].name,
                "role": role,
                **tally.to_json(),
                "tokens": 0,
                "bytes": 0,
                **sizes[role, n],
            }
            for (role, n), tally in tallies.items()
        ],
        duplicates,
        len(built_blocks),
        sum(block.encoded for block in built_blocks),
        contamination={name: value for name, value in overlaps.items() if name != "items"}
        if overlaps
        else None,
        near_duplicates=near_counts,
        of_earlier_heldout=None if earlier_heldout is None else int(kept_back.sum()),
    )


def make_blocks(work: Work) -> list[BuiltBlock]:
    """Make or reuse the blocks of both roles; of a sample or a head, only what it may need."""
    reading = work.reading
    recipe = work.recipe
    built_blocks: list[BuiltBlock] = []
    if "heldout" in work.files:
        recipe = replace(recipe, heldout_fraction=0.0)
        built_blocks += _make_role(work, "heldout", replace(recipe, heldout_fraction=1.0))
    held_out = {key for block in built_blocks for key in _keys(block.rows)}
    head = reading.limit if reading.sample == "head" else None
    if reading.limit and not head:
        draws = _draws(work, held_out)
        if len(draws) > reading.limit:
            recipe = replace(recipe, keep_below=int(draws[reading.limit - 1]) + 1)
    return built_blocks + _make_role(work, "train", recipe, head, held_out)


def _make_role(
    work: Work,
    role: str,
    recipe: BlockRecipe,
    head: int | None = None,
    held_out: Set[bytes] = frozenset(),
) -> list[BuiltBlock]:
    built_blocks: list[BuiltBlock] = []
    rows = 0
    distinct: set[bytes] = set()
    lines: Counter[int] = Counter()
    tasks = ((block, recipe, work.output) for block in work.cut(role))
    with contextlib.closing(work.pool.map(blocks.make, tasks)) as results:
        for number, directory, encoded in results:
            manifest = read_object(directory / blocks.MANIFEST)
            table = blocks.table_of((directory / blocks.ROWS).read_bytes())
            block = BuiltBlock(
                role,
                number,
                work.files[role][number],
                directory,
                encoded,
                manifest,
                table,
                lines[number],
            )
            built_blocks.append(block)
            lines[number] += manifest["tally"]["lines"]
            rows += len(table)
            work.progress(rows, len(built_blocks))
            if head:
                distinct |= _keys(table) - held_out
                if len(distinct) >= head:
                    break
    return built_blocks


def _keys(table: Table) -> set[bytes]:
    return {row.tobytes() for row in table[:, :2].astype(">u8")}


def _draws(work: Work, held_out: Set[bytes]) -> Words:
    tasks = ((block, work.recipe) for block in work.cut("train"))
    draws = np.concatenate([np.zeros(0, np.uint64), *work.pool.map(blocks.scan, tasks)])
    drawn = np.array([blocks.draw(key, work.recipe.seed) for key in held_out], np.uint64)
    draws = draws[~np.isin(draws, drawn)]
    return np.unique(draws) if work.reading.deduplicate else np.sort(draws)


def _quarantine(output: Path, files: FilesByRole, built_blocks: Sequence[BuiltBlock]) -> Tallies:
    tallies = {(role, n): Tally() for role in files for n in range(len(files[role]))}
    (output / REJECTED).parent.mkdir(parents=True, exist_ok=True)
    with (output / REJECTED).open("wb") as out:
        for block in built_blocks:
            tally = tallies[block.role, block.file]
            location = block.source.location
            tally.add_counts(block.manifest["tally"])
            for line in (block.directory / blocks.BAD_ROWS).read_bytes().splitlines():
                row = orjson.loads(line)
                row |= {"file": redact.url(location), "line": block.lines_before + row["line"]}
                tally.list_rejected(location, row)
                out.write(orjson.dumps(row) + b"\n")
    return tallies


def _place_shards(
    output: Path,
    part_name: str,
    built_blocks: Sequence[BuiltBlock],
    recipe: BlockRecipe,
    sizes: Mapping[tuple[str, int], Counter[str]],
) -> list[JsonDict]:
    directory = output / part_name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    entries: list[JsonDict] = []
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
        if path.exists():  # the same block twice, where duplicates are kept
            path = path.with_stem(f"{stem}-{len(entries)}")
        if selected.all():
            link_or_copy(block.shard(part_name), path)
            entry = {**entry, "file": path.name}
        else:
            column = shards.read_shard(block.shard(part_name)).select(selected)
            entry = shards.write_shard(path, column, recipe.vocab_size)
            entry["bytes"] = int(block.rows[in_part, 2][selected].sum())
        if part_name == "heldout":
            entry["records"] = path.with_suffix(".jsonl").name
            lines = (block.directory / blocks.HELDOUT_RECORDS).read_bytes().splitlines(True)
            write_bytes(directory / entry["records"], b"".join(itertools.compress(lines, selected)))
        sizes[block.role, block.file].update(tokens=entry["tokens"], bytes=entry["bytes"])
        entries.append({**entry, "group": block.source.group})
    return entries


def _write_lowest_row(output: Path, block: BuiltBlock, row: int, recipe: BlockRecipe) -> JsonDict:
    (content_hash,) = _keys(block.rows[[row]])
    rows = records.read(
        [block.source.location], recipe.parser, Tally(), recipe.max_line_bytes, recipe.text_field
    )
    record = next(record for record in rows if records.content_hash(record) == content_hash)
    column = blocks.encode_records(blocks.encoder_of(recipe.tokenizer), recipe.kind, [record])
    stem = hashlib.blake2b(record.content(), digest_size=8).hexdigest()
    path = output / "heldout" / f"{stem}-lowest.arrow"
    entry = shards.write_shard(path, column, recipe.vocab_size)
    text = path.with_suffix(".jsonl")
    write_bytes(text, orjson.dumps(record.to_json()) + b"\n")
    return {**entry, "records": text.name, "bytes": int(block.rows[row, 2]), "group": 0}


def _keep_blocks(output: Path, built_blocks: Sequence[BuiltBlock]) -> None:
    folder = output / BLOCKS
    folder.mkdir(parents=True, exist_ok=True)
    for block in built_blocks:
        directory = folder / block.directory.name
        if block.directory != directory:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            for name in (*block.manifest["files"], blocks.MANIFEST):  # the last one makes it exist
                link_or_copy(block.directory / name, directory / name)
    current = {block.directory.name for block in built_blocks}
    for directory in folder.iterdir():
        if directory.name not in current:
            shutil.rmtree(directory)
