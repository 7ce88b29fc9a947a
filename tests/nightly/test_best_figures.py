"""The best that any champion had on each night's text, from planted records."""

from pathlib import Path
from typing import Any

import pytest

from ttrain.evaluate.forgetting import BestFigure
from ttrain.nightly.decision import best_figures
from ttrain.nightly.records import Champion, InputSnapshot, Nights

BITS = "bits_per_byte"


def text(name: str, champion: float | None, challenger: float, **fields: Any) -> dict[str, Any]:
    return {
        "kind": "night",
        "name": name,
        "records": 40,
        "champion": champion,
        "challenger": challenger,
        **fields,
    }


def add(
    nights: Nights,
    outcome: str,
    champion: str | None,
    version: str,
    *texts: dict[str, Any],
    metric: str = BITS,
) -> None:
    nights.directory.mkdir(parents=True, exist_ok=True)
    night = nights.begin(InputSnapshot({}, {}, Champion(champion, {}) if champion else None), None)
    night.note(version=version, decision={"metric": metric}, texts=list(texts))
    night.end_try(outcome, "", closed=True)


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    """Ten nights of a home: those after the first each lose 2.9 % on its text, and all but one are promoted."""
    nights, value = Nights(tmp_path, "mine"), 2.0
    add(nights, "promoted", None, "1", text("first", None, value))
    for number in range(2, 11):
        lost = value * 1.029
        outcome = "kept" if number == 5 else "promoted"
        champion = str(number - 2 if number == 6 else number - 1)
        add(
            nights,
            outcome,
            champion,
            str(number),
            text("first", value, lost),
            text(f"new-{number}", 3.0, 1.0),
        )
        value = lost if outcome == "promoted" else value
    return nights


def test_the_best_champion_on_a_text_of_a_completed_night_is_found(nights: Nights) -> None:
    add(nights, "unfinished", "1", "11", text("first", 1.0, 1.0))
    best = best_figures(nights.newest_first(), BITS)
    assert best["first"] == BestFigure(2.0, "version 1", 40)
    assert best["new-9"] == BestFigure(1.0, "version 9", 40), "nothing was promoted on it since"
    assert best["new-5"] == BestFigure(3.0, "version 4", 40), (
        "the challenger was kept, so it was no champion"
    )


def test_texts_of_other_records_or_metrics_those_judged_together_and_sources_tell_nothing(
    nights: Nights,
) -> None:
    add(
        nights,
        "promoted",
        "10",
        "11",
        text("first", 2.5, 2.6, records=30),
        text("all", 1.0, 1.0, kind="several"),
        text("english", 1.0, 1.0, kind="source"),
        text("chat_loss_sft", 1.0, 1.0, kind="metric"),
    )
    add(nights, "promoted", "11", "12", text("first", 0.1, 0.1), metric="bits_per_byte_sft")
    best = best_figures(nights.newest_first(), BITS)
    assert best["first"] == BestFigure(2.5, "version 10", 30)
    assert {"all", "english", "chat_loss_sft"}.isdisjoint(best)
    assert best_figures(nights.newest_first(), "bits_per_byte_sft") == {
        "first": BestFigure(0.1, "version 12", 40)
    }
