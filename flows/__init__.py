"""The recipes of pipelines and what runs them: the engine, Prefect, servers, sweeps."""

from __future__ import annotations

import difflib

from ttrain.errors import UsageError
from ttrain.flows.full import full
from ttrain.pipeline.recipe import Recipe

RECIPES: dict[str, Recipe] = {"full": full}
NAMES = (*RECIPES, "nightly")  # nightly: its recipe depends on the inputs of a night (`flows/nightly.py`)


def recipe(name: str) -> Recipe:
    """The recipe of a pipeline. Raises UsageError with the nearest name."""
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(name, NAMES, n=1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are: {', '.join(NAMES)}"
    raise UsageError(f"there is no pipeline '{name}'; {hint}")
