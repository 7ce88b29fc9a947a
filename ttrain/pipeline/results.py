"""How a stage's processes ended, as they say it themselves: one file a rank in the work directory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.core.files import read_json, write_json

RESULT = "result.json"
LOST = "RankLost"  # kind of a failure that another rank's end or silence caused


def write(work: Path, rank: int, outcome: Mapping[str, Any]) -> None:
    """Leave the outcome (completed, interrupted or failed) of a rank. Rank 0 speaks for all, unless one fails."""
    if rank == 0 or outcome["outcome"] == "failed":
        name = RESULT if rank == 0 else f"result.rank{rank}.json"
        write_json(work / name, {"rank": rank, "at": time.time(), **outcome})


def clear(work: Path) -> None:
    """Forget what an earlier try left."""
    for path in [work / RESULT, *work.glob("result.rank*.json")]:
        path.unlink(missing_ok=True)


def read(work: Path) -> dict[str, Any] | None:
    """Rank 0's outcome; where a rank failed, the first failure that did not follow from another's; None: nothing."""
    found = [read_json(path) for path in (work / RESULT, *sorted(work.glob("result.rank*.json")))]
    outcomes: list[dict[str, Any]] = [outcome for outcome in found if outcome]
    first = next((outcome for outcome in outcomes if outcome["rank"] == 0), None)
    if first and first["outcome"] != "failed":
        return first
    return min(outcomes, key=lambda outcome: (outcome.get("kind") == LOST, outcome["at"]), default=None)
