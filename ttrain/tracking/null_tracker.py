"""Substitutes for the store and its runs if MLflow is missing or switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import final


@final
class NullRun:
    """A run that is not tracked; `id` keeps the id of the run to continue, so that a later start still finds it."""

    url: str | None = None
    page: str | None = None
    artifact_uri: str | None = None

    def __init__(self, run_id: str | None = None, identity: str | None = None) -> None:
        self.id, self.identity = run_id, identity

    def _nothing(self, *_: object, **__: object) -> None:
        """Does nothing."""

    log_metrics = log_summary = log_params = set_tags = log_file = log_directory = log_text = log_inputs = _nothing
    note_stages = link_to_parent = link_made_by = finish = _nothing


@final
class NullStore:
    """The store if MLflow is missing or switched off."""

    def start_run(self, name: str, *, run_id: str | None = None, identity: str | None = None, **_: object) -> NullRun:
        """A run that is not tracked."""
        return NullRun(run_id, identity)

    def register_model(self, name: str, **_: object) -> str | None:
        """Register nothing."""
        return None

    register_models = register_model

    def finish_uploads(self) -> None:
        """Upload nothing."""

    def on_upload(self, on_progress: Callable[[int, int], object]) -> None:
        """Ignores the callback: nothing is uploaded."""

    def close(self) -> int:
        """Return 0: nothing is open or undelivered."""
        return 0
