"""Whether a difference between two evaluations is more than chance: from the scores of each held-out record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ttrain.core.files import parse_json
from ttrain.tracking import RunView

EVALUATION, PREFIX = "evaluate", "eval/"


def scores_of(view: RunView) -> Mapping[str, Any]:
    """What the run's evaluation kept of each held-out record (`ttrain.evaluate.scores`); empty where there is nothing."""
    from ttrain.evaluate.scores import FILE

    try:
        found = parse_json(view.text(EVALUATION, FILE) or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def records_of(scores: Mapping[str, Any]) -> dict[str, list[str]]:
    """Digests of the held-out records of each part: what was read, whatever the tokenizer."""
    return {name: list(part.get("records", ())) for name, part in scores.get("parts", {}).items()}


def said(better: RunView, worse: RunView, name: str) -> str:
    """In words, how sure it is that the one run is better than the other by a figure; "" where nothing tells."""
    if not name.startswith(PREFIX):
        return ""
    from ttrain.config import Promotion
    from ttrain.evaluate.promotion import Scores, decide
    from ttrain.evaluate.scores import sums_in

    metric = name.removeprefix(PREFIX)
    both = []
    for view in (better, worse):
        found = sums_in(scores_of(view), metric)
        if found is None:
            return ""
        sums, sizes, records = found
        both.append(Scores(metric, view.metrics[name], tuple(sums), tuple(sizes), tuple(records)))
    if both[0].records != both[1].records or both[0].sizes != both[1].sizes:
        return ""
    rule = Promotion()
    decision = decide(both[0], both[1], rule)
    if decision.interval is None:
        count = len(both[0].records)
        few = "1 held-out record is" if count == 1 else f"{count} held-out records are"
        return f"{few} too few to say that this is more than chance"
    low, high = decision.interval
    interval = f"the {rule.confidence:.0%} interval of the difference is {low:.4f} to {high:.4f}"
    told = f"over {decision.samples:,} held-out records, {interval}"
    return told if low > 0 else f"{told}, so this may be chance"
