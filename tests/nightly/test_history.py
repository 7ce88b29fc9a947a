"""The last nights from their records, in a table, and the best value of any champion."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.night_files import completed, frozen

from ttrain.evaluate.forgetting import BestFigure
from ttrain.nightly import history
from ttrain.nightly.decision import best_figures
from ttrain.nightly.records import Nights

BITS = "bits_per_byte"
KEPT = "it forgets night-000001: 2.00000 became 2.20000"
LEARNT = {"documents": 1200, "tokens": 340_000, "left_out": 3, "chats": 12}


def text(name: str, champion: float | None, challenger: float, **fields: Any) -> dict[str, Any]:
    values = {"champion": champion, "challenger": challenger}
    return {"kind": "night", "name": name, "records": 40, **values, **fields}


def test_nights_are_listed_newest_first_with_losses(known: Nights) -> None:
    decision = {"metric": BITS, "challenger": 2.0, "champion": None, "lost": []}
    notes = {"decision": decision, "learnt": LEARNT, "texts": []}
    completed(known, frozen("a", "<b>"), "promoted", "1", **notes)
    second = known.begin(frozen("c", champion="1"), None)
    decision |= {"challenger": 1.9, "champion": 2.0, "lost": ["night-000001"]}
    lost = text("night-000001", 2.0, 2.2, difference=-0.2, lost=True)
    second.note(version="2", decision=decision, learnt=LEARNT, texts=[lost])
    second.end_try("kept", KEPT, closed=True)
    known.add_empty("nothing-new", None, "nothing new")
    known.begin(frozen("d", champion="1"), None)
    listed = history.history(known.directory.parents[1], None, 30)[1]
    assert [night["outcome"] for night in listed] == ["running", "nothing-new", "kept", "promoted"]
    running, _, kept, promoted = listed
    assert promoted["files"] == ["/inbox/a.jsonl", "/inbox/<b>.jsonl"]
    expected = {"reason": KEPT, "lost": ["night-000001"], "champion": "1", "version": "2"}
    assert expected.items() <= kept.items() and kept["texts"][0]["change"] == pytest.approx(0.1)
    assert (running["figure"], running["texts"], running["reason"]) == (None, [], "")
    row = dict(zip(history.HEADER, history.row(kept), strict=True))
    cells = {"new documents": "1,200", "chats": "12", "lost": "night-000001", "why": KEPT}
    assert cells.items() <= row.items()


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
    assert history.learnt_of(artifacts, chats) == expected | {"chats": 12}
    assert history.learnt_of({"pretrain": pretrain}, chats) == {"chats": 12}, "it keeps the base"


def add(
    nights: Nights, outcome: str, champion: str | None, version: str, *texts: Any, by: str = BITS
) -> None:
    notes = {"decision": {"metric": by}, "texts": list(texts)}
    completed(nights, frozen(champion=champion), outcome, version, **notes)


def test_the_best_champion_on_a_text_of_a_completed_night_is_found(known: Nights) -> None:
    value = 2.0
    add(known, "promoted", None, "1", text("first", None, value))
    for number in range(2, 11):  # each loses 2.9 % on the first text, and all but one are promoted
        outcome = "kept" if number == 5 else "promoted"
        champion = str(number - 2 if number == 6 else number - 1)
        texts = (text("first", value, value * 1.029), text(f"new-{number}", 3.0, 1.0))
        add(known, outcome, champion, str(number), *texts)
        value *= 1.029 if outcome == "promoted" else 1.0
    add(known, "unfinished", "1", "11", text("first", 1.0, 1.0))
    best = best_figures(known.newest_first(), BITS)
    assert best["first"] == BestFigure(2.0, "version 1", 40)
    assert best["new-9"] == BestFigure(1.0, "version 9", 40), "nothing was promoted on it since"
    assert best["new-5"] == BestFigure(3.0, "version 4", 40), "a kept challenger was no champion"


def test_only_texts_of_nights_with_the_newest_records_and_the_metric_count(known: Nights) -> None:
    add(known, "promoted", None, "10", text("first", None, 2.0))
    others = [text("chat_loss_sft", 1.0, 1.0, kind="metric")]
    add(known, "promoted", "10", "11", text("first", 2.5, 2.6, records=30), *others)
    add(known, "promoted", "11", "12", text("first", 0.1, 0.1), by="bits_per_byte_sft")
    best = best_figures(known.newest_first(), BITS)
    assert best == {"first": BestFigure(2.5, "version 10", 30)}
