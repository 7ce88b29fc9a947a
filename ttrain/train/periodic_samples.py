"""Texts that the model writes while it learns, for people to read."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ttrain.train.callbacks import Callback, StepRecord

Written = Callable[[], Sequence[tuple[str, str]]]
log = logging.getLogger("ttrain")


class Samples(Callback):
    """Every so many steps, what the model makes of some prompts: `directory/step-00000100.txt`.

    `write` gives (prompt, answer) pairs. The training after it is the same to the last bit as without it.
    """

    def __init__(self, directory: Path, model: nn.Module, write: Written, *, every: int) -> None:
        self._directory, self._model, self._write, self._every = directory, model, write, every

    def step_end(self, record: StepRecord) -> None:
        if record.step % self._every:
            return
        with undisturbed(self._model):
            written = self._write()
        path = self._directory / f"step-{record.step:08d}.txt"
        temporary = path.with_suffix(".tmp")  # it is read while training goes on
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            temporary.write_text("".join(f"=== {prompt}\n{answer}\n\n" for prompt, answer in written), encoding="utf-8")
            temporary.replace(path)
        except OSError as error:  # nothing is computed from it
            log.warning("the sample %s cannot be written, the training goes on: %s", path, error.strerror)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """No gradients inside; afterwards random numbers go on as before, and each module is in its mode again."""
    modes = [(module, module.training) for module in model.modules()]
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]  # torch's
    states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)
