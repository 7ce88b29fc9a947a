"""Settings of a test: a file of them, and what is said where they are refused."""

from pathlib import Path
from typing import Any

import pytest

from ttrain.config.loading import load
from ttrain.errors import UsageError


def settings_file(tmp_path: Path, text: str, name: str = "settings.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def refused(*overrides: str, **layers: Any) -> str:
    with pytest.raises(UsageError) as raised:
        load(overrides, **{"environment": {}, **layers})
    return str(raised.value)
