"""What a checkpoint keeps beside weights and optimizer, and whether a run may continue from it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ttrain.errors import UsageError
from ttrain.train.checkpoint import Snapshot

if TYPE_CHECKING:
    from ttrain.train.trainer import Trainer

log = logging.getLogger("ttrain")


def state_of(trainer: Trainer) -> dict[str, Any]:
    """The JSON part of a snapshot."""
    return {
        "steps": trainer.steps,
        "counters": asdict(trainer.counters),
        "loss_scale": dict(vars(trainer.loss_scale)),
        "callbacks": trainer.listeners.state(),
        "rows_per_step": trainer.loader.order.rows_per_step,
        "identity": trainer.identity,
        "world": trainer.ranks.world,
        "precision": trainer.precision.word,
    }


def check(trainer: Trainer, snapshot: Snapshot, allow: frozenset[str]) -> int:
    """The step at which this run continues the snapshot's: rows that were consumed stay consumed.

    Raises UsageError with the differences where it was made under other settings that are not allowed to change.
    """
    state = snapshot.state
    differences = {
        name: (state["identity"].get(name), trainer.identity.get(name))
        for name in sorted({*state["identity"], *trainer.identity})
        if state["identity"].get(name) != trainer.identity.get(name)
    }
    refused = {name: pair for name, pair in differences.items() if name not in allow}
    if refused:
        named = "; ".join(f"{name}: {old} → {new}" for name, (old, new) in refused.items())
        raise UsageError(
            f"the checkpoint of step {snapshot.step} was made under other settings ({named}); put them back, "
            f"begin anew elsewhere, or allow the change of {', '.join(refused)} (--allow)"
        )
    for name, (old, new) in differences.items():
        log.warning("continues with another %s: %s → %s", name, old, new)
    return _step(snapshot, state, trainer.loader.order.rows_per_step)


def _step(snapshot: Snapshot, state: Mapping[str, Any], rows_per_step: int) -> int:
    rows = snapshot.step * int(state["rows_per_step"])
    if rows % rows_per_step:
        raise UsageError(
            f"the checkpoint of step {snapshot.step} has consumed {rows} rows, which is no multiple of the {rows_per_step} "
            f"rows of a step now; choose tokens_per_step so that it is, or continue from another checkpoint"
        )
    return rows // rows_per_step
