"""Files that are cut, damaged, unreadable or bombs are refused by name, in bounded memory, whatever their names."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.hostile_rows import FIRST, LAST, READING, build, outcome
from support.packed_files import gzip_bomb, zstd_bomb

from ttrain.config import Reading, Runtime, Shards, ShardsConfig
from ttrain.core.files import ProgressWriter
from ttrain.core.sandbox import Sandbox
from ttrain.data import parquet
from ttrain.data.blocks import BlockRecipe
from ttrain.data.sharding import Here
from ttrain.data.validate import validate
from ttrain.errors import CannotRead, DataError
from ttrain.stages import shards
from ttrain.stages.job import StageContext

# --- whole files


GOOD_FILE = FIRST + b"\n" + LAST + b"\n"
LARGE = b"".join(b'{"text": "%d"}\n' % (n * n) for n in range(10_000))


class Shrinking(Here):
    """Cuts the file after its blocks are known and before they are read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:  # type: ignore[override]
        for task in tasks:
            os.truncate(self._path, 100_000)
            yield function(*task)


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: path.write_bytes(gzip.compress(LARGE)[:-3000]), "is truncated"),
    "missing": (lambda path: None, "cannot read"),
}
if Path("/proc/self/mem").exists():  # a file whose bytes cannot be read, as on a broken disk
    REFUSED["an error of the disk"] = (lambda path: path.symlink_to("/proc/self/mem"), "cannot read")


@pytest.mark.parametrize(("make", "says"), REFUSED.values(), ids=REFUSED.keys())
def test_a_file_that_cannot_be_read_whole_is_one_error_with_its_name_and_leaves_no_shards(
    tmp_path: Path, recipes: dict[str, BlockRecipe], make: Callable[[Path], object], says: str
) -> None:
    path = tmp_path / "rows.jsonl"
    make(path)
    for kind, recipe in recipes.items():
        with pytest.raises(DataError, match=says) as raised:
            build(path, recipe)
        assert str(path) in str(raised.value)
        assert raised.value.files == (() if isinstance(raised.value, CannotRead) else (str(path),))
        assert isinstance(raised.value, CannotRead) == (says == "cannot read")
        assert not list(tmp_path.glob("shards-*/*/index.json"))
        (report,) = validate([str(path)], READING, pool=Here(), kind=kind)
        assert report.error == str(raised.value)


def test_files_of_bad_rows_are_named_where_these_are_too_many_and_others_are_not(tmp_path: Path, tokenizer: Path) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_bytes(GOOD_FILE)
    bad.write_bytes(b'{"text": 1}\n' * 500)
    files = {"train": [str(good), str(bad)]}
    job = StageContext(
        {"tokenizer": tokenizer}, files, {"kind": "documents", "dataset": "pretrain"}, tmp_path / "out",
        Runtime(workers=1), ProgressWriter(None), lambda: False, versions={"train": ["", ""]}, groups={"train": [0, 0]},
    )  # fmt: skip
    with pytest.raises(DataError, match=r"500 of \d+ rows are bad") as raised:
        shards.run(ShardsConfig(reading=Reading(), shards=Shards()), job)
    assert raised.value.files == (str(bad),)


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error_and_not_fewer_rows(
    tmp_path: Path, recipes: dict[str, BlockRecipe]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LARGE)
    with pytest.raises(CannotRead, match="shorter while it was read") as raised:
        build(path, recipes["documents"], 1 << 16, Shrinking(path))
    assert str(path) in str(raised.value)


def test_what_is_appended_while_a_file_is_read_is_left_for_the_next_time(
    tmp_path: Path, recipes: dict[str, BlockRecipe]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LARGE)

    class Growing(Here):
        def map(self, function: Callable[..., Any], tasks: Iterator[tuple[Any, ...]]) -> Iterator[Any]:  # type: ignore[override]
            for task in tasks:
                with path.open("ab") as file:
                    file.write(GOOD_FILE)
                yield function(*task)

    built, _ = build(path, recipes["documents"], 1 << 16, Growing())
    assert built.tallies["train"].to_json() == {"rows": 10_000, "kept": 10_000, "skipped": {}, "rejected": {}}


LIST = pa.ListArray.from_arrays(pa.array([0, 20_000_000], pa.int32()), pa.nulls(20_000_000))
INDEXES = pa.Array.from_buffers(pa.int32(), 100_000, [None, pa.py_buffer(bytes(400_000))])
BOMBS = {
    "a list of nulls in one row": (LIST, "unpacks to"),
    "one long text": (pa.array(["a" * 50_000_000]), "unpacks to"),
    "a text in all rows": (
        pa.DictionaryArray.from_arrays(INDEXES, ["a" * 10_000]), r"unpacks to more than 100 times .* 1 MiB, at its row"
    ),
}  # fmt: skip


def test_a_small_parquet_file_that_unpacks_to_gigabytes_is_refused_and_the_process_lives(
    tmp_path: Path, recipes: dict[str, BlockRecipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bomb.parquet"
    small = Sandbox(parquet.answer, seconds=5, seconds_per_result=5, memory_bytes=512 << 20, preloaded=("pyarrow.parquet",))
    monkeypatch.setattr(parquet, "OUTPUT_BYTES", 1 << 20)
    with contextlib.closing(small):
        monkeypatch.setattr(parquet, "SANDBOX", small)
        for column, reason in BOMBS.values():
            pq.write_table(pa.table({"text": column}), path, compression="zstd", write_statistics=False)
            assert path.stat().st_size < 20_000
            with pytest.raises(DataError, match=rf"bomb.parquet {reason}.*; fetch it again, or write it as JSON Lines"):
                build(path, recipes["documents"])


def test_rows_of_parquet_are_numbered_through_empty_groups(tmp_path: Path, recipes: dict[str, BlockRecipe]) -> None:
    path, table = tmp_path / "rows.parquet", pa.table({"text": ["a", None]})
    with pq.ParquetWriter(path, table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0), table.slice(0, 0), table):
            writer.write_table(part)
    rejected = {"'text' is null, not text": 2}
    for block_bytes in (1, 1 << 20):
        found = outcome(path, recipes["documents"], block_bytes)
        assert found == ({"kept": 1, "skipped": {"duplicate": 1}, "rejected": rejected}, [2, 4])


# --- memory

# The peak is read from /proc where there is one: what getrusage says begins with that of the process that started this one.
MEASURED = """
import re, resource, sys
from pathlib import Path
from ttrain.config import Reading
from ttrain.data import sharding
from ttrain.data.built_blocks import DataFile
from ttrain.data.sharding import Here
from ttrain.stages.shards import recipe_of
status, reading = Path("/proc/self/status"), Reading(heldout_fraction=0.0, max_line_bytes=int(sys.argv[2]))
recipe = recipe_of(reading, Path(sys.argv[1]), "documents")
for path in sys.argv[3:]:
    files = {"train": [DataFile(path, path)]}
    built = sharding.build(Path(path + ".shards"), files, recipe, reading, block_bytes=16 << 20, pool=Here())
    tally = built.tallies["train"]
    if status.exists():
        kib = int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
    else:
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(tally.kept, tally.rejected.total(), kib // 1024)
"""


def measured(recipe: BlockRecipe, paths: Sequence[Path], max_line_bytes: int) -> list[tuple[int, int, int]]:
    """(kept, rejected, MiB at most in use until then) after each file, by a process of its own."""
    command = [sys.executable, "-c", MEASURED, recipe.tokenizer, str(max_line_bytes), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [map(int, line.split()) for line in done.stdout.splitlines()]
    return [(kept, rejected, peak) for kept, rejected, peak in found]


def check_zeros(directory: Path, recipe: BlockRecipe, mebibytes: int, line_mebibytes: int) -> None:
    """140 MiB for the libraries, twice `reading.max_line_bytes`, and pieces."""
    (directory / "blank").write_bytes(b"\n" * 200_000 + FIRST)
    (directory / "zeros.gz").write_bytes(gzip_bomb(mebibytes))
    (directory / "zeros.zst").write_bytes(zstd_bomb(mebibytes))
    with (directory / "sparse").open("wb") as file:
        file.truncate(mebibytes << 20)
    found = measured(
        recipe, [directory / name for name in ("blank", "zeros.gz", "zeros.zst", "sparse")], line_mebibytes << 20
    )
    assert [counts[:2] for counts in found] == [(1, 0), (0, 1), (0, 1), (0, 1)]
    assert max(peak for *_, peak in found) < 190 + 5 * line_mebibytes


def test_a_line_without_end_costs_the_memory_of_the_longest_that_is_allowed(
    tmp_path: Path, recipes: dict[str, BlockRecipe]
) -> None:
    check_zeros(tmp_path, recipes["documents"], 60, 2)


@pytest.mark.long
@pytest.mark.soak
def test_a_line_of_four_gibibytes_costs_no_more(tmp_path: Path, recipes: dict[str, BlockRecipe]) -> None:
    check_zeros(tmp_path, recipes["documents"], 4096, 32)


@pytest.mark.soak
def test_a_document_of_20_mb_costs_what_is_said_of_it(tmp_path: Path, recipes: dict[str, BlockRecipe]) -> None:
    """Of words 24 bytes a byte, of letters without a boundary, which the encoder merges as one word, at most 64."""
    (tmp_path / "words").write_bytes(b'{"text": "' + b"words of a line " * (20_000_000 // 16) + b'"}\n' + LAST)
    (tmp_path / "letters").write_bytes(b'{"text": "' + b"letters" * (20_000_000 // 7) + b'"}\n' + LAST)
    words, letters = measured(recipes["documents"], [tmp_path / "words", tmp_path / "letters"], 32 << 20)
    assert words[:2] == letters[:2] == (2, 0)
    assert words[2] < 200 + 24 * 20
    assert letters[2] < 200 + 64 * 20
