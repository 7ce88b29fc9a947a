"""The graphs of pipelines and what runs them: the engine, Prefect, servers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ttrain.store import name_syntax

if TYPE_CHECKING:
    from ttrain.engine.graph import Pipeline

NAMES = (
    "full",
    "nightly",
)  # nightly: its graph depends on the inputs of a night (`flows/nightly.py`)


def pipeline(name: str) -> Pipeline:
    """The function that makes the graph of a pipeline. Raises UsageError with the nearest name."""
    if name == "full":
        from ttrain.flows.full import (
            full,
        )  # here: it loads all settings, which listing schedules need not

        return full
    raise name_syntax.unknown("pipeline", name, NAMES)
