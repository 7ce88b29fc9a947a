"""The last nights from their records, in a table."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.night_files import completed

from ttrain.nightly import history
from ttrain.nightly.records import Champion, InputSnapshot, Nights

KEPT = "it forgets night-000001: 2.00000 became 2.20000"
LOCATIONS = ["/in/a.jsonl", "/in/<b>.jsonl"]
FILES = {"pretrain": [{"location": name, "sha256": name} for name in LOCATIONS]}
LEARNT = {"documents": 1200, "tokens": 340_000, "left_out": 3, "chats": 12}


def text(name: str, champion: float, challenger: float, lost: bool = False) -> dict[str, Any]:
    values = {"champion": champion, "challenger": challenger, "difference": champion - challenger}
    return {"kind": "night", "name": name, "records": 40, "lost": lost, **values}


@pytest.fixture
def nights(known: Nights) -> Nights:
    """A promoted night, one that forgot, one without news, and one that is running."""
    inputs = InputSnapshot(FILES, {}, Champion("1", {}))
    decision = {"metric": "bits_per_byte", "challenger": 2.0, "champion": None, "lost": []}
    notes = {"decision": decision, "learnt": LEARNT, "texts": []}
    completed(known, InputSnapshot(FILES, {}), "promoted", "1", **notes)
    second = known.begin(inputs, None)
    decision |= {"challenger": 1.9, "champion": 2.0, "lost": ["night-000001"]}
    lost, better = text("night-000001", 2.0, 2.2, lost=True), text("night-000002", 3.0, 1.5)
    worse = text("source <i>", 2.0, 2.02)
    second.note(version="2", decision=decision, learnt=LEARNT, texts=[lost, better, worse])
    second.end_try("kept", KEPT, closed=True)
    known.add_empty("nothing-new", None, "nothing new")
    known.begin(inputs, None)
    return known


@pytest.fixture
def listed(nights: Nights) -> list[dict[str, Any]]:
    return history.history(nights.directory.parents[1], None)[1]


def test_nights_are_listed_newest_first_with_losses(listed: list[dict[str, Any]]) -> None:
    assert [night["outcome"] for night in listed] == ["running", "nothing-new", "kept", "promoted"]
    running, _, kept, promoted = listed
    assert promoted["learnt"]["documents"] == 1200 and promoted["files"] == LOCATIONS
    expected = {"reason": KEPT, "lost": ["night-000001"], "champion": "1", "version": "2"}
    assert expected.items() <= kept.items()
    assert kept["texts"][0]["change"] == pytest.approx(0.1) and kept["texts"][0]["lost"] is True
    assert (running["figure"], running["texts"], running["reason"]) == (None, [], "")
    row = dict(zip(history.HEADER, history.row(kept), strict=True))
    cells = {"new documents": "1,200", "chats": "12", "lost": "night-000001", "why": KEPT}
    assert cells.items() <= row.items()
    assert history.row(promoted)[2] == "promoted as version 1"
    summary = history.summary_line(listed)
    assert summary.startswith("4 nights: 1 running, 1 nothing-new, 1 kept, 1 promoted; ")
    assert summary.endswith(" 1,200 documents, 340,000 tokens")


def test_what_a_night_trained_on_is_counted_with_the_rows_that_it_left_out() -> None:
    def made(**result: Any) -> Any:
        return SimpleNamespace(result=result)

    counts = {"skipped": {"duplicate": 2, "empty": 1}, "rejected": {"not JSON": 4}}
    shards = made(train={"rows": 90, "tokens": 800}, rows={"train": counts})
    replay = made(tokens=60, records=2, share=0.05)
    pretrain, chats = made(tokens=1000), made(train={"rows": 12, "tokens": 900})
    artifacts = {"shards-pretrain": shards, "pretrain": pretrain, "replay": replay}
    expected = {"documents": 90, "tokens": 800, "left_out": 7}
    expected |= {"read_tokens": 1000, "replayed_tokens": 50}
    assert history.learnt_of(artifacts, None) == expected
    assert history.learnt_of(artifacts, chats) == expected | {"chats": 12}
    kept_base = {"pretrain": pretrain}
    assert history.learnt_of(kept_base, chats) == {"chats": 12}
