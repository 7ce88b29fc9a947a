"""TensorBoard, Weights & Biases and SwanLab, as callbacks of a training.

A logger that raises costs one warning and logs nothing more, since `metrics.jsonl` has everything.
"""

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

from ttrain.core.files import JsonDict, JsonObject
from ttrain.train.callbacks import Callback, LogRecord

log = logging.getLogger("ttrain")


class Logger(Callback):
    """Logs the metrics of a training in `directory` to one service.

    Trainings find loggers by the entry points `ttrain.loggers`. A training that continues logs the
    steps after its checkpoint; each service keeps the values of a step once.
    """

    keeps_metrics = True

    def __init__(self, name: str, directory: Path, description: JsonObject) -> None:
        """`description`: project, group, job_type, name and config, as the services take them."""
        self._name = name
        self._directory = directory
        self._description = description
        self._is_broken = False
        self._last_step = -1

    def start(self, step: int, steps: int) -> None:
        self._last_step = step
        self._attempt(self.open, step)

    def log(self, record: LogRecord) -> None:
        # A validation has a row of its own at the same step.
        tokens = {} if record.step == self._last_step else {"tokens": record.tokens}
        self._last_step = record.step
        values = {**tokens, **record.metrics}
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        self._attempt(self.write, finite, record.step)

    def end(self, step: int) -> None:
        self._attempt(self.close, failed=False)

    def failed(self, error: BaseException) -> None:
        self._attempt(self.close, failed=True)

    def open(self, step: int) -> None:
        """Begin a run of the service, or continue the one of this directory after this step."""

    def write(self, values: JsonObject, step: int) -> None:
        """Log metrics."""

    def close(self, *, failed: bool) -> None:
        """End the run of the service."""

    def _attempt(self, action: Callable[..., None], *arguments: Any, **options: Any) -> None:
        try:
            if not self._is_broken:
                action(*arguments, **options)
        except Exception as error:  # whatever the service raises
            self._is_broken = True
            log.warning(
                "the logger %s raised %r and logs nothing more; training continues, "
                "and %s has all metrics",
                self._name,
                error,
                self._directory / "metrics.jsonl",
            )

    def _run_options(self, project_variable: str) -> JsonDict:
        id_file = self._directory / self._name / "id.txt"
        if not id_file.exists():
            id_file.parent.mkdir(parents=True, exist_ok=True)
            id_file.write_text(secrets.token_hex(10))  # 20 letters, which both services take
        return {
            **self._description,
            "project": os.environ.get(project_variable, self._description["project"]),
            "id": id_file.read_text(),
            "resume": "allow",
        }


@final
class TensorBoard(Logger):
    """Event files in `tensorboard/`."""

    def open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what an earlier attempt wrote after the checkpoint.
        self._writer: Any = SummaryWriter(str(self._directory / "tensorboard"), purge_step=step + 1)

    def write(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


@final
class Wandb(Logger):
    """A run of Weights & Biases, with its files in `wandb/`; WANDB_MODE and others apply."""

    def open(self, step: int) -> None:
        import wandb

        self._run = wandb.init(
            dir=str(self._directory),
            # Without the remote's address, which may hold a password.
            settings=wandb.Settings(console="off", symlink=False, disable_git=True),
            **self._run_options("WANDB_PROJECT"),
        )

    def write(self, values: JsonObject, step: int) -> None:
        if step >= self._run.starting_step:  # above 0 where the service has earlier steps
            self._run.log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        import wandb

        self._run.finish(exit_code=int(failed))
        wandb.teardown()  # waits until its process has written the files
        for path in (self._directory / self._name).rglob("*"):
            if path.is_symlink():  # to a log in its cache; an artifact has plain files only
                path.unlink()


@final
class SwanLab(Logger):
    """An experiment of SwanLab, with its files in `swanlab/`; SWANLAB_MODE and others apply."""

    def open(self, step: int) -> None:
        import swanlab

        # Without the remote's address, which may hold a password, and without the list of
        # packages, for which it runs pip: 12 to 15 s at each start on a busy machine.
        probe = swanlab.Settings.Probe(git=False, requirements=False)
        self._run: Any = swanlab.init(
            log_dir=str(self._directory / "swanlab"),
            settings=swanlab.Settings(interactive=False, probe=probe),
            **self._run_options("SWANLAB_PROJECT_NAME"),
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)  # it ignores steps that the experiment has

    def close(self, *, failed: bool) -> None:
        state = {"state": "crashed", "error": "the training failed"} if failed else {}
        self._run.finish(**state)
