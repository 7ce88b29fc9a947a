"""What a checkpoint keeps beside weights and optimizer, and whether a run may continue from it."""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import asdict
from typing import Any, Protocol

from ttrain.data.loader import Loader
from ttrain.data.samplers import Order
from ttrain.errors import ArtifactError, UsageError
from ttrain.train.callback_list import Listeners
from ttrain.train.checkpoint import Snapshot
from ttrain.train.distributed import Ranks
from ttrain.train.optim import Optimizers
from ttrain.train.precision import LossScale, Precision
from ttrain.train.progress import Counters

log = logging.getLogger("ttrain")


class Resumable(Protocol):
    """What of a training its checkpoints describe."""

    steps: int
    first: int  # step at which it begins
    loader: Loader
    counters: Counters
    loss_scale: LossScale
    listeners: Listeners
    optimizers: Optimizers
    identity: dict[str, Any]
    ranks: Ranks
    precision: Precision


def state_of(trainer: Resumable, step: int) -> dict[str, Any]:
    """The JSON part of a snapshot; `rows` are those consumed."""
    order = trainer.loader.order
    return {
        "steps": trainer.steps,
        "counters": asdict(trainer.counters),
        "loss_scale": dict(vars(trainer.loss_scale)),
        "callbacks": trainer.listeners.state(),
        "rows": min(step * order.rows_per_step, order.total_rows),
        "optimizers": [type(optimizer).__name__ for optimizer in trainer.optimizers.optimizers],
        "identity": trainer.identity,
        "world": trainer.ranks.world,
        "precision": trainer.precision.word,
    }


def check(trainer: Resumable, snapshot: Snapshot, allow: frozenset[str]) -> int:
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
    if state["precision"] != trainer.precision.word:
        log.warning("continues in %s what was computed in %s: not the same bits", trainer.precision.word, state["precision"])
    return _step(snapshot, trainer.loader.order)


def check_optimizers(trainer: Resumable, snapshot: Snapshot) -> None:
    """Raises UsageError where the state is that of other optimizers."""
    old, new = snapshot.state["optimizers"], [type(optimizer).__name__ for optimizer in trainer.optimizers.optimizers]
    if old != new:
        raise UsageError(
            f"the checkpoint of step {snapshot.step} holds the state of {' and '.join(old)}, which {' and '.join(new)} "
            f"cannot continue; put optim.kind back, or begin anew elsewhere"
        )


def check_same(trainer: Resumable, snapshot: Snapshot | None) -> None:
    """All ranks continue the same checkpoint. Raises ArtifactError where one could not read what the others did."""
    known = [float(trainer.first), float(_digest(snapshot))]
    if any(total != value * trainer.ranks.world for total, value in zip(trainer.ranks.sum(known), known, strict=True)):
        raise ArtifactError(
            f"ranks do not begin alike: rank {trainer.ranks.rank} would at step {trainer.first}; all must be able to "
            f"read the checkpoints"
        )


def _digest(snapshot: Snapshot | None) -> int:
    """32 bits of what identifies a checkpoint; sums of them over ranks are exact in fp64."""
    if snapshot is None:
        return 0
    return zlib.crc32(json.dumps({**snapshot.state, "step": snapshot.step}, sort_keys=True).encode())


def _step(snapshot: Snapshot, order: Order) -> int:
    rows = int(snapshot.state["rows"])
    if rows % order.rows_per_step and rows != order.total_rows:
        raise UsageError(
            f"the checkpoint of step {snapshot.step} has consumed {rows} rows, which is no multiple of the "
            f"{order.rows_per_step} rows of a step now; choose the size of a step so that it is, or begin anew elsewhere"
        )
    return -(-rows // order.rows_per_step)
