"""Loggers that curves go to beside MLflow (see `ttrain.tracking`): TensorBoard, Weights & Biases, SwanLab.

Each is a process of its own that follows the same rows of `metrics.jsonl` (`process.py`): a service that hangs, fills the
terminal or crashes costs the training nothing, and libraries that know one run a process are used as they are meant to be.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from ttrain.errors import UsageError

# What is imported, and the extra that brings it along.
EXTRAS: Final = {"tensorboard": "tb", "wandb": "wandb", "swanlab": "swanlab"}


def check(loggers: Iterable[str]) -> None:
    """Raises UsageError, with the command that installs it, for a logger of `runtime.loggers` that is not installed."""
    for name in loggers:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a mere directory, such as wandb leaves
            raise UsageError(
                f"runtime.loggers has {name}, which is not installed; run: pip install 'ttrain[{EXTRAS[name]}]', "
                f"or leave {name} out of runtime.loggers"
            )
