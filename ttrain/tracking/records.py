"""What the home's records of runs (`runs/<run>.json`) say of the tracked ones."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ttrain.core.files import read_json, write_json


def there_are(home: Path, beginning: str) -> bool:
    """Whether a run's name begins so."""
    return any((home / "runs").glob(f"{_plain(beginning)}*.json"))


def note_run_id(home: Path, about: Mapping[str, Any]) -> None:
    """The record of an ended run names the run that MLflow made of it later. `about`: what its outbox says of it."""
    path = home / "runs" / f"{_plain(str(about.get('name')))}.json"
    record = read_json(path) if about.get("run_id") else None
    if isinstance(record, dict) and (record.get("tracking") or {}).get("identity") == about.get("id"):
        with contextlib.suppress(OSError):
            write_json(path, {**record, "tracking": {**record["tracking"], "run_id": about["run_id"]}})


def _plain(name: str) -> str:
    """The name of a run as that of a file: never a path, never a pattern."""
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name).lstrip(".") or "_"
