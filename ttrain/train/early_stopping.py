"""End a training whose validation loss no longer falls; the trainer then keeps the best weights."""
# Apart from the guards, which only observe, because it shapes the result of a stage.

import logging
from collections.abc import Sequence
from typing import Any

from ttrain.config import Loop
from ttrain.errors import UsageError
from ttrain.train.callbacks import Callback

log = logging.getLogger("ttrain")


class EarlyStopping(Callback):
    """Asks for a stop after `patience` validations in a row not better by over `min_delta`."""

    saved_attributes = ("best", "waited")

    def __init__(self, patience: int, min_delta: float = 0.0) -> None:
        self.patience = patience
        self.min_delta = min_delta
        self._best: float | None = None
        self._waited = 0

    def validated(self, step: int, loss: float) -> None:
        """Count validations without improvement; a NaN loss is never the best."""
        if loss == loss and (self._best is None or loss < self._best - self.min_delta):
            self._best = loss
            self._waited = 0
            return
        self._waited += 1
        if self._waited == self.patience:
            log.info(
                "step %d: %d validations without a better loss end the training",
                step,
                self.patience,
            )

    def stop_reason(self) -> str | None:
        return "early stopping" if self._waited >= self.patience else None


def early_stopping(config: Loop, validation: Sequence[Any]) -> list[Callback]:
    """The callback for the settings, or none. Raises UsageError without rows to validate on."""
    settings = config.early_stopping
    if settings is None:
        return []
    if not validation:
        raise UsageError(
            f"{config.prefix}early_stopping is set, but there are no held-out rows to validate "
            "on; hold some out (reading.heldout_fraction, or held-out data), or set "
            f"{config.prefix}early_stopping to null"
        )
    return [EarlyStopping(settings.patience, settings.min_delta)]
