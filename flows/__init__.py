"""The recipes of pipelines and what runs them: the engine, Prefect, servers, sweeps."""

from __future__ import annotations

from ttrain.flows.full import full
from ttrain.pipeline.recipe import Recipe
from ttrain.store import references

RECIPES: dict[str, Recipe] = {"full": full}
NAMES = (*RECIPES, "nightly")  # nightly: its recipe depends on the inputs of a night (`flows/nightly.py`)


def recipe(name: str) -> Recipe:
    """The recipe of a pipeline. Raises UsageError with the nearest name."""
    if name in RECIPES:
        return RECIPES[name]
    raise references.unknown("pipeline", name, NAMES)
