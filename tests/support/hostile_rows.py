"""Make shards of hostile files, and compare what became of their rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from ttrain.config import Reading
from ttrain.data import sharding
from ttrain.data.blocks import BlockRecipe, DataFile
from ttrain.data.check import check
from ttrain.data.pool import Processes
from ttrain.data.sharding import ShardSetResult, Work
from ttrain.data.shards import ShardSet

READING = Reading(heldout_fraction=0.0, rejected_fraction=1.0)
BOM = b"\xef\xbb\xbf"
FIRST, LAST = b'{"text": "A first line."}', '{"text": "一行正常的中文。"}'.encode()
Outcome = dict[str, Any]


def build(
    path: Path, recipe: BlockRecipe, block_bytes: int = 1 << 20, pool: Any = None
) -> tuple[ShardSetResult, Path]:
    output = path.parent / f"shards-{path.name}-{block_bytes}"
    files = {"train": [DataFile(str(path))]}
    return sharding.build(
        Work(output, files, recipe, READING, block_bytes, pool or Processes(1))
    ), output


def outcome(
    path: Path, recipe: BlockRecipe, block_bytes: int = 1 << 20
) -> tuple[Outcome, list[int]]:
    """What became of a file's rows, without what is nothing, and the lines of the bad ones; rows are accounted for.
    Checking the file, which encodes nothing, has to say the same."""
    built, output = build(path, recipe, block_bytes)
    (report,) = check(
        [str(path)],
        READING.model_copy(update={"max_line_bytes": recipe.max_line_bytes}),
        kind=recipe.kind,
    )
    for tally in (built.tallies["train"], report.tally):
        assert tally.rows == tally.kept + tally.skipped.total() + tally.rejected.total()
    found, checked = built.tallies["train"].to_json(), report.tally.to_json()
    assert found == checked
    listed = [
        json.loads(line) for line in (output / "run" / "rejected.jsonl").read_bytes().splitlines()
    ]
    assert Counter(row["reason"] for row in listed) == Counter(found["rejected"]), (
        "one line for each rejected row"
    )
    assert {row["file"] for row in listed} <= {str(path)}
    assert built.parts["train"]["rows"] == found["kept"] == len(ShardSet(output / "train"))
    return {name: found[name] for name in ("kept", "skipped", "rejected") if found[name]}, [
        row["line"] for row in listed
    ]


def text(value: str) -> bytes:
    return json.dumps({"text": value}, ensure_ascii=False).encode("utf-8")


def bad(*reasons: str, kept: int = 2, **more: Any) -> Outcome:
    """Rejected for these reasons, between a first and a last good line."""
    return {**({"kept": kept} if kept else {}), "rejected": dict(Counter(reasons)), **more}


def json_error(error: str) -> str:
    return f"not valid JSON: {error}"


MARK = json_error("a byte order mark, which may stand at the start of a file only")
