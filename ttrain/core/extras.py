"""The packages that loggers need; apart from them, since a plan checks these and loads no trainer."""

from collections.abc import Iterable
from importlib.util import find_spec
from typing import Final

from ttrain.errors import UsageError

# The packages that are imported, and the extra of ttrain that installs each.
EXTRAS: Final = {"tensorboard": "tb", "wandb": "wandb", "swanlab": "swanlab"}


def check(names: Iterable[str]) -> None:
    """Raise UsageError, with the command that installs it, for a logger that is not installed."""
    for name in names:
        if getattr(find_spec(name), "origin", None) is None:  # or a directory, as wandb leaves one
            raise UsageError(
                f"runtime.loggers has {name}, which is not installed; "
                f"run: pip install 'ttrain[{EXTRAS[name]}]', or leave {name} out of runtime.loggers"
            )
