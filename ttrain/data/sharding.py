"""Files to sets of shards: their blocks are made by any number of workers, then put together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ttrain.config import Reading
from ttrain.core.files import read_json, read_object, write_json
from ttrain.data import blocks, contamination, locations
from ttrain.data.assembly import Built, DataFile, Made, assemble
from ttrain.data.blocks import BLOCKS, Block, Recipe
from ttrain.data.contamination import Against, Scanned
from ttrain.data.encoder import EncoderDiffers

FILES = "files.json"


class Pool(Protocol):
    """Calls a function with many tuples of arguments, somewhere; results in order, a bounded number ahead."""

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Generator[Any]: ...


def build(
    output: Path,
    files: Mapping[str, Sequence[DataFile]],
    recipe: Recipe,
    reading: Reading,
    *,
    block_bytes: int,
    pool: Pool,
    weights: Sequence[float] = (),
    against: Against | None = None,
    progress: Callable[[int, int], None] = lambda rows, made: None,
) -> Built:
    """Make `train/` and `heldout/` under `output` from the files of the roles "train" and, where it is named, "heldout".

    `against` names the items of evaluations that training documents are checked against.
    Whole blocks that are there already are taken as they are, so a run that was killed goes on. Raises DataError for a file
    that cannot be read.
    """
    made = make_all(output, files, recipe, reading, block_bytes=block_bytes, pool=pool, progress=progress)
    overlaps = (against, scan(made, recipe, against, pool)) if against else None
    return assemble(output, files, made, recipe, reading, weights, overlaps)


def make_all(
    output: Path,
    files: Mapping[str, Sequence[DataFile]],
    recipe: Recipe,
    reading: Reading,
    *,
    block_bytes: int,
    pool: Pool,
    progress: Callable[[int, int], None] = lambda rows, made: None,
) -> list[Made]:
    """Every block of the files, made or found. A difference between the encoders makes all anew with `tokenizers`."""
    recipe = replace(recipe, heldout_fraction=0.0 if "heldout" in files else recipe.heldout_fraction)
    try:
        return _make_all(output, files, recipe, reading, block_bytes, pool, progress)
    except EncoderDiffers:
        return _make_all(output, files, replace(recipe, fast=False), reading, block_bytes, pool, progress)


def _make_all(
    output: Path,
    files: Mapping[str, Sequence[DataFile]],
    recipe: Recipe,
    reading: Reading,
    block_bytes: int,
    pool: Pool,
    progress: Callable[[int, int], None],
) -> list[Made]:
    found: list[Made] = []
    names: dict[str, list[str]] = {}
    if "heldout" in files:
        everything = replace(recipe, heldout_fraction=1.0, keep_below=None)
        found += _make_role(output, "heldout", files["heldout"], everything, block_bytes, pool, progress, names)
    kept_back = {row[:2].tobytes() for block in found for row in block.rows}
    limit = reading.limit * reading.rounds if reading.limit else None
    enough = None
    if limit and reading.sample == "reservoir":
        draws = _draws(files["train"], recipe, reading, block_bytes, pool, kept_back)
        recipe = replace(recipe, keep_below=int(draws[limit - 1]) + 1 if len(draws) > limit else None)
    elif limit:
        enough = _Enough(limit, kept_back, distinct=reading.deduplicate)
    found += _make_role(output, "train", files["train"], recipe, block_bytes, pool, progress, names, enough)
    if names:
        path = output / BLOCKS / FILES
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, names)
    return found


def scan(made: Sequence[Made], recipe: Recipe, against: Against, pool: Pool) -> list[Scanned]:
    """What the training part of each block has in common with the items; nothing, where it has no training part."""
    paths = [
        blocks.find(block.directory, "train", block.about["train"]["file"]) if block.about["train"] else None
        for block in made
    ]
    tasks = ((str(path), recipe.tokenizer, against.texts, against.rule) for path in paths if path)
    with contextlib.closing(pool.map(contamination.scan, tasks)) as results:
        found = iter(list(results))
    return [next(found) if path else Scanned({}, []) for path in paths]


class _Enough:
    """Whether the head of the input has as many rows as were asked for, besides those that are kept back."""

    def __init__(self, limit: int, kept_back: Set[bytes], *, distinct: bool) -> None:
        self._limit, self._kept_back, self._distinct, self._rows = limit, kept_back, distinct, 0
        self._seen: set[bytes] = set()

    def __call__(self, made: Made) -> bool:
        keys = [key for row in made.rows if (key := row[:2].tobytes()) not in self._kept_back]
        self._rows += len(keys)
        if self._distinct:
            self._seen.update(keys)
        return (len(self._seen) if self._distinct else self._rows) >= self._limit


def _make_role(
    output: Path,
    role: str,
    files: Sequence[DataFile],
    recipe: Recipe,
    block_bytes: int,
    pool: Pool,
    progress: Callable[[int, int], None],
    remembered: dict[str, list[str]],
    enough: _Enough | None = None,
) -> list[Made]:
    """The blocks of a role's files, in order. A file whose blocks are all there is not even opened.

    `remembered` gets the blocks of each file that did not change meanwhile.
    """
    names = [f"{file.digest} {recipe.digest} {block_bytes}" if file.digest and not enough else "" for file in files]
    known = _known_files(output, recipe)
    made: dict[int, list[Made]] = {
        number: [_open(role, number, identity, directory, False) for directory, identity in known[name]]
        for number, name in enumerate(names)
        if name in known
    }
    numbers: list[int] = []
    opened = [number for number in range(len(files)) if number not in made]
    before = _stamps(files, opened)

    def tasks() -> Iterator[tuple[Block, Recipe, str]]:
        for number in opened:
            for block in blocks.cut(files[number].location, number, block_bytes, recipe):
                numbers.append(number)
                yield block, recipe, str(output)

    rows = sum(len(block.rows) for found in made.values() for block in found)
    with contextlib.closing(pool.map(blocks.make, tasks())) as results:
        for place, (identity, directory, encoded) in enumerate(results):
            block = _open(role, numbers[place], identity, directory, encoded)
            made.setdefault(numbers[place], []).append(block)
            rows += len(block.rows)
            progress(rows, place + 1)
            if enough and enough(block):
                break
    after = _stamps(files, opened)
    for number, found in made.items():
        if names[number] and not enough and before.get(number) == after.get(number):  # its digest is that of what was read
            remembered[names[number]] = [block.identity for block in found]
    return [block for number in sorted(made) for block in made[number]]


def _open(role: str, file: int, identity: str, directory: str, encoded: bool) -> Made:
    about = read_json(Path(directory) / BLOCKS / f"{identity}.json")
    data = (Path(directory) / BLOCKS / f"{identity}.rows").read_bytes()
    rows = np.frombuffer(data, ">u8").astype(np.uint64).reshape(-1, 3)
    return Made(role, file, identity, Path(directory), encoded, about, rows)


def _stamps(files: Sequence[DataFile], numbers: Sequence[int]) -> dict[int, list[int] | None]:
    """What changes with the bytes of the files that are on this machine."""
    found: dict[int, list[int] | None] = {}
    for number in numbers:
        location = files[number].location
        if locations.is_remote(location):
            found[number] = None
            continue
        with contextlib.suppress(OSError):  # what is missing is told where it is opened
            stat = locations.local_path(location).stat()
            found[number] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    return found


def _draws(
    files: Sequence[DataFile], recipe: Recipe, reading: Reading, block_bytes: int, pool: Pool, kept_back: Set[bytes]
) -> npt.NDArray[np.uint64]:
    """The draws of all good rows that are not kept back, ascending; of equal rows one, where the others are dropped."""
    tasks = (
        (block, recipe)
        for number, file in enumerate(files)
        for block in blocks.cut(file.location, number, block_bytes, recipe)
    )
    with contextlib.closing(pool.map(blocks.scan, tasks)) as results:
        draws = np.concatenate([np.zeros(0, np.uint64), *results])
    if kept_back:
        hashes = (np.frombuffer(key, np.uint64).astype(">u8").tobytes() for key in kept_back)
        draws = draws[~np.isin(draws, np.array([blocks.draw(key, recipe.seed) for key in hashes], np.uint64))]
    return np.unique(draws) if reading.deduplicate else np.sort(draws)


def _known_files(output: Path, recipe: Recipe) -> dict[str, list[tuple[str, str]]]:
    """{name of a file's bytes and recipe: (directory, id) of each of its blocks}, where all of them are still there."""
    found: dict[str, list[tuple[str, str]]] = {}
    for directory in (str(output), *recipe.reuse):
        for name, identities in read_object(Path(directory) / BLOCKS / FILES).items():
            if name not in found and all(blocks.is_there(Path(directory), i, fast=recipe.fast) for i in identities):
                found[name] = [(directory, identity) for identity in identities]
    return found
