"""The best that any champion had on the held-out text of each night, as the nights' records tell it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ttrain.evaluate.candidates import metric_of_texts
from ttrain.evaluate.forgetting import BestFigure
from ttrain.nightly.records import COMPLETED, NightRecord


def best_figures(nights: Iterable[NightRecord], metric: str) -> dict[str, BestFigure]:
    """By the label of a text, the best figure of a champion; `nights` are the newest first, lower figures are better.

    Figures of another metric, of sources, whose text grows, and of a text that has other records by now tell nothing. Of
    texts that were judged together, each counts by itself.
    """
    best: dict[str, BestFigure] = {}
    variances: dict[str, float] = {}  # of what champions have lost or gained since, by label

    def take(text: Mapping[str, Any], value: float | None, version: str) -> None:
        name, records = text["name"], text["records"]
        known = best.get(name)
        if value is not None and (known is None or (known.records == records and known.value > value)):
            best[name] = BestFigure(value, f"version {version}", records, math.sqrt(variances.get(name, 0.0)))

    for night in nights:
        decision, champion = night.data.get("decision") or {}, night.frozen.champion
        if night.outcome not in COMPLETED or metric_of_texts(str(decision.get("metric"))) != metric:
            continue
        for text in night.data.get("texts") or ():
            if text["kind"] != "night":
                continue
            if night.outcome == "promoted":  # its challenger is the champion from then on
                take(text, text["challenger"], night.data["version"])
                low, high = text["interval"] or (-math.inf, math.inf)  # without an interval nothing is judged by it
                variances[text["name"]] = variances.get(text["name"], 0.0) + ((high - low) / 2) ** 2
            if champion is not None:
                take(text, text["champion"], champion.version)
    return best
