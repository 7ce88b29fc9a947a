"""The observer of a stage: what hears of its events, and asks it to stop."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ttrain.pipeline.stop_request import StopRequest
from ttrain.stages import Stage

if TYPE_CHECKING:
    from ttrain.pipeline.recipe import Planned


class StageObserver:
    """Receives the events of a stage, from its plan to the end of its processes; by itself it ignores them."""

    def __init__(self, stop_request: StopRequest | None = None) -> None:
        self.stop_request = stop_request or StopRequest()

    def waiting(self, stage: Stage, who: str) -> None:
        """Another process builds it."""

    def fetching(self, stage: Stage, line: str) -> None:
        """Files of an input are brought from the tracker."""

    def started(self, stage: Stage, planned: Planned, work: Path) -> None:
        """Its work directory is prepared."""

    def prepared(self, stage: Stage, work: Path) -> None:
        """Its process comes next."""

    def progressed(self, stage: Stage, progress: Mapping[str, Any]) -> None:
        """It reports how far it is."""

    def logged(self, stage: Stage, line: str) -> None:
        """A line of its log."""

    def process_ended(self, stage: Stage) -> None:
        """Its processes are gone; its output is not published yet."""

    def stop_signal(self) -> int:
        """The signal to stop it with; 0 for none."""
        return self.stop_request.signum

    def at_once(self) -> bool:
        """Whether it must not even save its state."""
        return self.stop_request.at_once
