"""Packages that loggers need; a plan checks them without loading a trainer."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from ttrain.errors import UsageError

# The packages that are imported, and the extra of ttrain that installs each.
EXTRAS: Final = {"tensorboard": "tb", "wandb": "wandb", "swanlab": "swanlab"}


def check(names: Iterable[str]) -> None:
    """Raise UsageError with the install command for a missing logger."""
    for name in names:
        if getattr(find_spec(name), "origin", None) is None:  # or a directory, as wandb leaves one
            raise UsageError(
                f"runtime.loggers has {name}, which is not installed; "
                f"run: pip install 'ttrain[{EXTRAS[name]}]', or leave {name} out of runtime.loggers"
            )
