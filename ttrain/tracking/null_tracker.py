"""What stands in for runs and the store where nothing is tracked: MLflow is missing, or switched off."""

from __future__ import annotations

from collections.abc import Callable
from typing import final


@final
class NullRun:
    """A run that is not tracked; `id` keeps the one that was to be continued, so that a later start still finds it."""

    url: str | None = None
    page: str | None = None
    artifact_uri: str | None = None

    def __init__(self, run_id: str | None = None, identity: str | None = None) -> None:
        self.id, self.identity = run_id, identity

    def _nothing(self, *_: object, **__: object) -> None:
        """Does nothing."""

    log_metrics = log_summary = log_params = set_tags = log_file = log_directory = log_text = log_inputs = _nothing
    keep_rows = note_stages = link_to_parent = link_made_by = finish = _nothing


@final
class NullStore:
    """Stands in where MLflow is missing or switched off."""

    def start_run(self, name: str, *, run_id: str | None = None, identity: str | None = None, **_: object) -> NullRun:
        """A run that is not tracked."""
        return NullRun(run_id, identity)

    def register_model(self, name: str, **_: object) -> str | None:
        """Registers nothing."""
        return None

    register_models = register_model

    def finish_uploads(self) -> None:
        """Uploads nothing."""

    def on_upload(self, told: Callable[[int, int], object]) -> None:
        """Never calls it."""

    def close(self) -> int:
        """Has nothing open."""
        return 0
