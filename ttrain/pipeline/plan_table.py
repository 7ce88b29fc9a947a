"""A plan as a table and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ttrain.core import libraries
from ttrain.pipeline.planned import Planned
from ttrain.reports.summary import shortened


def plan_rows(stages: Iterable[Planned]) -> list[tuple[str, str, str, str]]:
    """(stage, state, key, why) for a table; what is cached says which libraries are others now."""
    here = libraries.versions()
    return [(p.stage.name, p.state, (p.key or "")[:12], shortened([*p.why, *_notes(p, here)])) for p in stages]


def plan_json(pipeline: str, stages: Iterable[Planned]) -> dict[str, Any]:
    """What `plan --json` prints."""
    here = libraries.versions()
    return {"pipeline": pipeline, "stages": [{**p.to_json(), "notes": _notes(p, here)} for p in stages]}


def _notes(planned: Planned, here: Mapping[str, str]) -> list[str]:
    cached = planned.artifact if planned.state == "cached" else None
    return libraries.notes(cached.manifest, here) if cached else []
