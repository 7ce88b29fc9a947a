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
    for night in nights:
        decision = night.data.get("decision") or {}
        if night.outcome not in COMPLETED or metric_of_texts(str(decision.get("metric"))) != metric:
            continue
        for text in night.data.get("texts") or ():
            if text["kind"] == "night":
                _note(best, variances, night, text)
    return best


def _note(best: dict[str, BestFigure], variances: dict[str, float], night: NightRecord, text: Mapping[str, Any]) -> None:
    """Note the figures of the champion that a night made, and of the one before."""
    name, champion = str(text["name"]), night.frozen.champion
    if night.outcome == "promoted":
        _take(best, name, text, text["challenger"], f"version {night.data['version']}", variances)
        variances[name] = variances.get(name, 0.0) + _variance(text["interval"])
    if champion is not None:
        _take(best, name, text, text["champion"], f"version {champion.version}", variances)


def _take(
    best: dict[str, BestFigure],
    name: str,
    text: Mapping[str, Any],
    value: float | None,
    version: str,
    variances: Mapping[str, float],
) -> None:
    known, records = best.get(name), text["records"]
    if value is None or (known and (known.records != records or known.value <= value)):
        return
    best[name] = BestFigure(value, version, records, math.sqrt(variances.get(name, 0.0)))


def _variance(interval: list[float] | None) -> float:
    """The square of half an interval; infinite where there is none, so that nothing is judged by it."""
    return math.inf if interval is None else ((interval[1] - interval[0]) / 2) ** 2
