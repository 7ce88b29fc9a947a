"""A run of Weights & Biases for a training; WANDB_MODE, WANDB_PROJECT and the like count as always.

Offline, its files are left under `run/wandb`, for `wandb sync`. A continued training continues the same run, by its id.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import wandb

from ttrain.loggers.service import ServiceRun

CONNECT_SECONDS = 10.0  # then another ten until its service process lets go


@final
class WandbRun(ServiceRun):
    """One run, in a directory of the training."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        super().__init__("wandb", task, "WANDB_PROJECT")
        online = not self._run.offline
        last = self._run.starting_step - 1 if online and self._run.resumed else -1 if online else None
        self._state.continued(Path(self._run.sync_dir), online=online, last=last)

    def _open(self, mode: Any) -> Any:
        settings = wandb.Settings(console="off", symlink=False, disable_git=True, init_timeout=CONNECT_SECONDS)
        try:
            return wandb.init(**self._init_arguments, mode=mode, dir=str(self._directory.parent), settings=settings)
        except wandb.Error:
            wandb.teardown()  # of the service process, which holds on to the id
            raise

    def _shown(self, text: str) -> wandb.Html:
        return wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
        for path in self._directory.rglob("*"):
            if path.is_symlink():  # to a log in the cache directory; an artifact has files of its own only
                path.unlink()


open_run = WandbRun
