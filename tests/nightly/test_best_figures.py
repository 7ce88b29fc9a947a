"""The best value that any champion had on each night's text."""

from typing import Any

from support.night_files import completed, frozen

from ttrain.evaluate.forgetting import BestFigure
from ttrain.nightly.decision import best_figures
from ttrain.nightly.records import Nights

BITS = "bits_per_byte"


def text(name: str, champion: float | None, challenger: float, **fields: Any) -> dict[str, Any]:
    values = {"champion": champion, "challenger": challenger}
    return {"kind": "night", "name": name, "records": 40, **values, **fields}


def add(
    nights: Nights,
    outcome: str,
    champion: str | None,
    version: str,
    *texts: dict[str, Any],
    metric: str = BITS,
) -> None:
    notes = {"decision": {"metric": metric}, "texts": list(texts)}
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
    others = {"all": "several", "english": "source", "chat_loss_sft": "metric"}
    texts = [text(name, 1.0, 1.0, kind=kind) for name, kind in others.items()]
    add(known, "promoted", "10", "11", text("first", 2.5, 2.6, records=30), *texts)
    add(known, "promoted", "11", "12", text("first", 0.1, 0.1), metric="bits_per_byte_sft")
    best = best_figures(known.newest_first(), BITS)
    assert best == {"first": BestFigure(2.5, "version 10", 30)}
    best = best_figures(known.newest_first(), "bits_per_byte_sft")
    assert best == {"first": BestFigure(0.1, "version 12", 40)}
