"""The held-out documents of all nights: one set, in which each night has its share."""

import json
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


def held_out(directory: Path, texts: list[str], **labels: str) -> Path:
    """A set of shards with these held-out documents."""
    part = directory / "heldout"
    part.mkdir(parents=True)
    lines = (json.dumps({"text": text, **labels}) + "\n" for text in texts)
    (part / "r.jsonl").write_text("".join(lines), encoding="utf-8")
    write_json(
        part / "index.json",
        {"format": 2, "shards": [{"records": "r.jsonl", "rows": len(texts), "tokens": 9}]},
    )
    return directory


def held_out_set(
    output: Path, earlier: Path, documents: Path, max_bytes: int = 10**6
) -> dict[str, Any]:
    """Run the stage `heldout`; returns its figures."""
    config = Settings.model_validate({"evaluate": {"max_bytes": max_bytes}})
    figures: dict[str, Any] = run_here(
        stage, config, output, {"earlier": earlier, "documents": documents}, Runtime()
    )
    return figures


def test_the_held_out_set_has_every_record_once_in_an_order_that_mixes_old_and_new(
    tmp_path: Path,
) -> None:
    old, new = [f"old {n}" for n in range(40)], [f"new {n}" for n in range(40)]
    inputs = held_out(tmp_path / "a", old), held_out(tmp_path / "b", [*new, "old 3"], lang="en")
    figures = held_out_set(tmp_path / "output", *inputs)
    texts = [record["text"] for record in heldout_records(tmp_path / "output")]
    assert sorted(texts) == sorted([*old, *new])
    assert figures == {"records": 80, "new": 40, "unscored": 0, "nights": [40, 40]}
    assert stage.read_nights(tmp_path / "output") == [
        sorted(map(record_name, texts)) for texts in (old, new)
    ]
    assert 8 <= sum(text.startswith("old") for text in texts[:40]) <= 32
    assert held_out_set(tmp_path / "again", *inputs) == figures
    name = "heldout/records.jsonl"
    assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "output" / name).read_bytes()
    later = held_out_set(
        tmp_path / "third", tmp_path / "output", held_out(tmp_path / "c", ["newer", "new 3"])
    )
    assert later["nights"] == [40, 40, 1]
    assert stage.read_nights(tmp_path / "third")[:2] == stage.read_nights(tmp_path / "output")


def test_what_is_measured_of_a_night_is_bounded_and_stays_the_same_in_all_later_nights(
    tmp_path: Path,
) -> None:
    last = held_out(tmp_path / "0", [f"before {n:03}" for n in range(100)])
    for night in range(1, 11):
        documents = held_out(
            tmp_path / f"new-{night}", [f"night {night:02} {n:03}" for n in range(100)]
        )
        figures = held_out_set(tmp_path / str(night), last, documents, max_bytes=5000)
        before, nights = stage.read_nights(last), stage.read_nights(tmp_path / str(night))
        assert nights[: len(before)] == before
        assert (figures["nights"][-1], figures["unscored"], len(nights)) == (41, 59, night + 1), (
            "500 bytes of 12 each"
        )
        last = tmp_path / str(night)
    [scored] = evaluate.heldout_items({"documents": last}, Evaluate(max_bytes=5000))
    assert len(scored.items) == sum(figures["nights"]) > 10 * 41, (
        "of each night all that it brought"
    )
    everything = held_out(
        tmp_path / "all", [f"night {night:02} {n:03}" for night in range(12) for n in range(100)]
    )
    again = held_out_set(tmp_path / "again", last, everything, max_bytes=5000)
    assert (again["nights"][-1], again["unscored"]) == (41, 159), (
        "what is beyond a night's share is not another night's"
    )


def test_a_document_that_does_not_fit_keeps_no_others_from_being_scored() -> None:
    def sizes(*bytes_each: int, most: int = 100) -> list[int]:
        return [
            len(document["text"])
            for document in scored_documents([{"text": "x" * n} for n in bytes_each], most)
        ]

    assert sizes(10, 10, 90, 30, 40) == [10, 10, 30, 40] and sizes(10, 51, 50, 41, 20) == [10, 51]
    assert sizes(60, 60, 60, 1) == [60] and sizes(300, 200, 250) == [200] and sizes() == []
