"""The six stages as Kedro nodes."""

from __future__ import annotations

from functools import partial, update_wrapper

from kedro.pipeline import Pipeline, node
from step import step


def first() -> int:
    return step(1, 0)


def register_pipelines() -> dict[str, Pipeline]:
    nodes = [node(first, None, "value_1", name="stage_1")]
    for number in range(2, 7):
        later = update_wrapper(partial(step, number), step)
        nodes.append(node(later, f"value_{number - 1}", f"value_{number}", name=f"stage_{number}"))
    return {"__default__": Pipeline(nodes)}
