"""An experiment of SwanLab for a training; SWANLAB_MODE and the like count as always.

Offline, its files are left under `run/swanlab`, for `swanlab sync`. A continued training continues the same
experiment, by its id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import swanlab

from ttrain.loggers.service import ServiceRun

# Not asked for on a terminal; without the commit, which the run's manifest has, the remote's address, which may hold a
# password, and the list of packages, for which it runs pip: 12 to 15 s (its limit) at each start on a busy machine.
SETTINGS = swanlab.Settings(interactive=False, probe=swanlab.Settings.Probe(git=False, requirements=False))


@final
class SwanLabRun(ServiceRun):
    """One experiment, in a directory of the training."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        super().__init__("swanlab", task, "SWANLAB_PROJECT_NAME")
        self._state.continued(Path(self._run.dir), online=self._run.mode == "online")

    def _open(self, mode: str | None) -> Any:
        return swanlab.init(**self._init_arguments, mode=mode, log_dir=str(self._directory), settings=SETTINGS)

    def _shown(self, text: str) -> swanlab.Text:
        return swanlab.Text(text)

    def finish(self, *, failed: bool) -> None:
        if failed:
            swanlab.finish(state="crashed", error="the training failed or was killed")
        else:
            swanlab.finish()


open_run = SwanLabRun
