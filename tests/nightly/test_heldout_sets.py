"""The held-out documents of all nights: one set, in which each night has its share."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from support.tiny_stages import run_here

from ttrain.config import Runtime, Settings
from ttrain.config.evaluate import Evaluate
from ttrain.core.files import write_json
from ttrain.evaluate.task_result import record_name
from ttrain.tasks import evaluate
from ttrain.tasks import heldout as stage
from ttrain.tasks.shards import heldout_records, scored_documents


def shards(directory: Path, texts: Iterable[str]) -> Path:
    """A set of shards with these held-out documents."""
    part = directory / "heldout"
    part.mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (part / "r.jsonl").write_text("".join(lines), encoding="utf-8")
    shard = {"records": "r.jsonl", "rows": len(lines), "tokens": 9}
    write_json(part / "index.json", {"format": 2, "shards": [shard]})
    return directory


def run(output: Path, earlier: Path, documents: Path, max_bytes: int = 10**6) -> dict[str, Any]:
    """Run the stage `heldout`; its result."""
    settings = Settings.model_validate({"evaluate": {"max_bytes": max_bytes}})
    inputs = {"earlier": earlier, "documents": documents}
    return dict(run_here(stage, settings, output, inputs, Runtime()))


def test_the_set_has_every_record_once_in_an_order_that_mixes_old_and_new(tmp_path: Path) -> None:
    old, new = ([f"{age} {number}" for number in range(40)] for age in ("old", "new"))
    output = tmp_path / "output"
    inputs = (shards(tmp_path / "a", old), shards(tmp_path / "b", [*new, "old 3"]))
    result = run(output, *inputs)
    assert result == {"records": 80, "new": 40, "unscored": 0, "nights": [40, 40]}
    texts = [record["text"] for record in heldout_records(output)]
    assert sorted(texts) == sorted([*old, *new])
    assert 8 <= sum(text.startswith("old") for text in texts[:40]) <= 32
    nights = stage.read_nights(output)
    assert nights == [sorted(map(record_name, texts)) for texts in (old, new)]
    later = run(tmp_path / "third", output, shards(tmp_path / "c", ["newer", "new 3"]))
    assert later["nights"] == [40, 40, 1]
    assert stage.read_nights(tmp_path / "third")[:2] == nights


def test_the_scored_documents_of_a_night_are_bounded_and_stay_the_same(tmp_path: Path) -> None:
    last = shards(tmp_path / "0", (f"before {number:03}" for number in range(100)))
    for night in range(1, 11):
        texts = (f"night {night:02} {number:03}" for number in range(100))
        documents, output = shards(tmp_path / f"new-{night}", texts), tmp_path / str(night)
        result = run(output, last, documents, max_bytes=5000)
        before, nights = stage.read_nights(last), stage.read_nights(output)
        assert nights[: len(before)] == before and len(nights) == night + 1
        # 500 bytes of 12 each
        assert (result["nights"][-1], result["unscored"]) == (41, 59)
        last = output
    [scored] = evaluate.heldout_items({"documents": last}, Evaluate(max_bytes=5000))
    assert len(scored.items) == sum(result["nights"]) > 10 * 41, "of each night all that it brought"


def test_too_long_documents_are_skipped() -> None:
    for sizes, expected in (
        ([10, 10, 90, 30, 40], [10, 10, 30, 40]),
        ([10, 51, 50, 41, 20], [10, 51]),
        ([60, 60, 60, 1], [60]),
        ([300, 200, 250], [200]),
        ([], []),
    ):
        scored = scored_documents([{"text": "x" * size} for size in sizes], 100)
        assert [len(document["text"]) for document in scored] == expected
