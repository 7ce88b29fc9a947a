"""torch.compile with a way back: where it fails, training goes on eagerly and says so."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from ttrain.train.distributed import Ranks

log = logging.getLogger("ttrain")


def compiled(attempt: Callable[[nn.Module], None], module: nn.Module, ranks: Ranks) -> tuple[nn.Module, bool]:
    """The compiled module and True, or the module as it is and False where any rank cannot compile it.

    `attempt` runs one forward and backward pass, since that is when the compiler works.
    """
    found: nn.Module = torch.compile(module, dynamic=False)  # type: ignore[assignment]
    failure = ""
    try:
        attempt(found)
    except Exception as error:
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if ranks.sum([float(bool(failure))])[0]:
        log.warning("torch.compile failed (%s); training goes on without it", failure or "on another rank")
        torch._dynamo.reset()
        return module, False
    return found, True
