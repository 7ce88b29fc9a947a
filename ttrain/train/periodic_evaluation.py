"""Periodic evaluation and samples during training, without influence on it."""

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ttrain.core.files import write_bytes
from ttrain.train.callbacks import Callback, LogRecord, StepRecord

PREFIX = "eval/"  # of every figure

# These differ between two runs of the same training.
TIMED = (
    f"{PREFIX}seconds",
    f"{PREFIX}time_share",
)


class PeriodicEvaluation(Callback):
    """Logs an evaluation every so many steps and after the last one: `eval/TASK/METRIC`, and

    eval/seconds      that this evaluation took
    eval/time_share   of all evaluations, of the time since this process began to train

    `measure(step)` returns the metrics, which the callbacks `writers` log. Training continues bit
    for bit as without it.
    """

    def __init__(
        self,
        model: nn.Module,
        measure: Callable[[int], Mapping[str, float]],
        writers: Sequence[Callback],
        *,
        every: int,
    ) -> None:
        self._model = model
        self._measure = measure
        self._writers = writers
        self._every = every
        self._began = self._spent = 0.0

    def start(self, step: int, steps: int) -> None:
        self._began = time.monotonic()

    def step_end(self, record: StepRecord) -> None:
        if record.step % self._every and record.step != record.steps:
            return
        began = time.monotonic()
        with preserve_rng_and_modes(self._model):
            figures = {PREFIX + name: value for name, value in self._measure(record.step).items()}
        now = time.monotonic()
        self._spent += now - began
        share = self._spent / max(now - self._began, 1e-9)
        figures |= dict(zip(TIMED, (now - began, share), strict=True))
        for callback in self._writers:
            callback.log(LogRecord(record.step, record.steps, record.tokens_read, figures))


class PeriodicSamples(Callback):
    """Writes the model's answers to prompts, as text: `directory/step-00000100.txt`.

    Training continues bit for bit as without the samples.
    """

    def __init__(
        self,
        directory: Path,
        model: nn.Module,
        write: Callable[[], Iterable[Mapping[str, str]]],
        *,
        every: int,
    ) -> None:
        self._directory = directory
        self._model = model
        self._write = write
        self._every = every

    def step_end(self, record: StepRecord) -> None:
        if record.step % self._every:
            return
        text = ""
        with preserve_rng_and_modes(self._model):
            written = self._write()
        for sample in written:
            reference = f"--- reference\n{sample['reference']}\n" if "reference" in sample else ""
            text += f"=== {sample['prompt']}\n{sample['answer']}\n{reference}\n"
        self._directory.mkdir(parents=True, exist_ok=True)
        write_bytes(self._directory / f"step-{record.step:08d}.txt", text.encode("utf-8"))


@contextmanager
def preserve_rng_and_modes(model: nn.Module) -> Iterator[None]:
    """Disable gradients inside; afterwards restore random state and training modes."""
    modes = [(module, module.training) for module in model.modules()]
    of_numpy = np.random.get_state()
    of_python = random.getstate()
    has_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if has_cuda else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
        np.random.set_state(of_numpy)
        random.setstate(of_python)
