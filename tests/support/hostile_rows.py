"""Make shards of hostile files, and compare what became of their rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from support import shard_sets

from ttrain.config import Reading
from ttrain.data.blocks import BlockRecipe
from ttrain.data.check import check
from ttrain.data.sharding import ShardSetResult
from ttrain.data.shards import ShardSet

READING = Reading(heldout_fraction=0.0, rejected_fraction=1.0)
BOM = b"\xef\xbb\xbf"
FIRST = b'{"text": "A first line."}'
LAST = '{"text": "一行正常的中文。"}'.encode()
MARK = "not valid JSON: a byte order mark, which may stand at the start of a file only"
Outcome = dict[str, Any]


def build(
    path: Path, recipe: BlockRecipe, block_bytes: int = 1 << 20
) -> tuple[ShardSetResult, Path]:
    output = path.parent / f"shards-{path.name}-{block_bytes}"
    built = shard_sets.build(output, [path], recipe, READING, block_bytes=block_bytes)
    return built, output


def outcome(path: Path, recipe: BlockRecipe, block_bytes: int = 1 << 20) -> tuple[Outcome, Any]:
    """The counts of a file's rows that are not zero, and the lines of the rejected ones.

    `check`, which encodes nothing, must count the same.
    """
    built, output = build(path, recipe, block_bytes)
    reading = READING.model_copy(update={"max_line_bytes": recipe.max_line_bytes})
    (report,) = check([str(path)], reading, kind=recipe.kind)
    tally = built.tallies["train"]
    assert tally.rows == tally.kept + tally.skipped.total() + tally.rejected.total()
    counts = tally.to_json()
    assert counts == report.tally.to_json()
    lines = (output / "run" / "rejected.jsonl").read_bytes().splitlines()
    rejected = [json.loads(line) for line in lines]
    assert Counter(row["reason"] for row in rejected) == Counter(counts["rejected"])
    assert {row["file"] for row in rejected} <= {str(path)}
    assert built.parts["train"]["rows"] == tally.kept == len(ShardSet(output / "train"))
    shown = {name: counts[name] for name in ("kept", "skipped", "rejected") if counts[name]}
    return shown, [row["line"] for row in rejected]


def text(value: str) -> bytes:
    return json.dumps({"text": value}, ensure_ascii=False).encode("utf-8")


def bad(*reasons: str, kept: int = 2, **more: Any) -> Outcome:
    """Rejected for these reasons, between a first and a last good line."""
    return {**({"kept": kept} if kept else {}), "rejected": dict(Counter(reasons)), **more}
