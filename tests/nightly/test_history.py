"""What became of the last nights: told by their records, in a table."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.pipeline_home import Cli

from ttrain.errors import UsageError
from ttrain.nightly import history
from ttrain.nightly.records import Champion, InputSnapshot, Nights

KEPT = (
    "it forgets night-000001: 2.00000 became 2.20000, 10.0% worse; promotion.forgetting allows 3.0%"
)


def text(name: str, champion: float | None, challenger: float, **more: Any) -> dict[str, Any]:
    difference = None if champion is None else champion - challenger
    return {
        "kind": "night",
        "name": name,
        "records": 40,
        "champion": champion,
        "challenger": challenger,
        "difference": difference,
        "lost": False,
        **more,
    }


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """A promoted night, one that forgot, one without news, and one that is running."""
    found = Nights(tmp_path, "mine")
    found.directory.mkdir(parents=True)
    files = {
        "pretrain": [
            {"location": "/in/a.jsonl", "sha256": "a"},
            {"location": "/in/<b>.jsonl", "sha256": "b"},
        ]
    }
    learnt = {
        "documents": 1200,
        "tokens": 340_000,
        "left_out": 3,
        "read_tokens": 350_000,
        "replayed_tokens": 10_000,
        "chats": 12,
    }
    first = found.begin(InputSnapshot(files, {}), None)
    decision = {"metric": "bits_per_byte", "challenger": 2.0, "champion": None, "lost": []}
    first.note(version="1", decision=decision, learnt=learnt, texts=[])
    first.end_try("promoted", "there is no champion yet", closed=True)
    second = found.begin(InputSnapshot(files, {}, Champion("1", {})), None)
    decision = {
        "metric": "bits_per_byte",
        "challenger": 1.9,
        "champion": 2.0,
        "lost": ["night-000001"],
    }
    texts = [
        text("night-000001", 2.0, 2.2, lost=True),
        text("night-000002", 3.0, 1.5),
        text("source <i>", 2.0, 2.02),
    ]
    second.note(version="2", decision=decision, learnt=learnt, texts=texts)
    second.end_try("kept", KEPT, closed=True)
    found.add_empty(
        "nothing-new", None, "nothing new: all 2 files have been read by a night before"
    )
    found.begin(InputSnapshot(files, {}, Champion("1", {})), None)
    return found


def of_home(nights: Nights) -> list[dict[str, Any]]:
    return history.history(nights.directory.parents[1], None)[1]


def test_the_last_nights_are_told_newest_first_with_what_they_learnt_lost_and_why(
    nights: Nights,
) -> None:
    told = of_home(nights)
    assert [night["outcome"] for night in told] == ["running", "nothing-new", "kept", "promoted"]
    running, _, kept, promoted = told
    assert promoted["learnt"]["documents"] == 1200 and promoted["files"] == [
        "/in/a.jsonl",
        "/in/<b>.jsonl",
    ]
    assert [kept[name] for name in ("reason", "lost", "champion", "version")] == [
        KEPT,
        ["night-000001"],
        "1",
        "2",
    ]
    assert kept["texts"][0]["change"] == pytest.approx(0.1) and kept["texts"][0]["lost"] is True
    assert (running["figure"], running["texts"], running["reason"]) == (None, [], "")
    rows = dict(zip(history.HEADER, history.row(kept), strict=True))
    assert (rows["new documents"], rows["chats"], rows["lost"], rows["why"]) == (
        "1,200",
        "12",
        "night-000001",
        KEPT,
    )
    assert history.row(promoted)[2] == "promoted as version 1"
    assert history.summary_line(told) == (
        "4 nights: 1 running, 1 nothing-new, 1 kept, 1 promoted; promoted models learnt 1,200 documents, 340,000 tokens"
    )


def test_a_night_that_lost_nothing_beyond_the_bound_names_what_became_worse_by_most(
    nights: Nights,
) -> None:
    kept = {**of_home(nights)[2], "lost": []}
    assert (
        history.lost_text({**kept, "texts": kept["texts"][1:]})
        == "nothing; worst: source <i> +1.0%"
    )
    assert history.lost_text({**kept, "texts": kept["texts"][1:2]}) == "nothing"
    few = [{**text, "records": 3} for text in kept["texts"]]
    assert history.lost_text({**kept, "texts": few}) == "not judged (3 of 20 held-out records)"
    few[2]["records"] = 20
    assert history.lost_text({**kept, "texts": few}) == "nothing; worst: source <i> +1.0%"


def test_the_command_prints_the_table_and_gives_json_of_a_pipeline(
    nights: Nights, tmp_path: Path
) -> None:
    cli = Cli(tmp_path, tmp_path)
    assert "night-000002" in cli.here("models", "history", settings=False)
    told = json.loads(
        cli.in_process("models", "history", "--json", "--nights", "1", settings=False)
    )
    assert (told["name"], [night["night"] for night in told["nights"]]) == (
        "mine",
        ["night-000004"],
    )
    Nights(tmp_path, "other").directory.mkdir()
    with pytest.raises(UsageError, match="--name is not set, but there are nights of mine, other"):
        history.history(tmp_path, None)
    with pytest.raises(UsageError, match="there was no night yet"):
        history.history(tmp_path / "empty", "mine")


def test_what_a_night_learnt_is_counted_with_the_rows_that_it_left_out() -> None:
    def made(**result: Any) -> Any:
        return SimpleNamespace(result=result)

    tally = {"skipped": {"duplicate": 2, "empty": 1}, "rejected": {"not JSON": 4}}
    artifacts = {
        "shards-pretrain": made(train={"rows": 90, "tokens": 800}, rows={"train": tally}),
        "pretrain": made(tokens=1000),
        "replay": made(tokens=60, records=2, share=0.05),
    }
    expected = {
        "documents": 90,
        "tokens": 800,
        "left_out": 7,
        "read_tokens": 1000,
        "replayed_tokens": 50,
    }
    assert history.learnt_of(artifacts, None) == expected
    chats = made(train={"rows": 12, "tokens": 900})
    assert history.learnt_of(artifacts, chats) == expected | {"chats": 12}
    assert history.learnt_of({"pretrain": made(tokens=1)}, chats) == {"chats": 12}, (
        "the base model stays"
    )
