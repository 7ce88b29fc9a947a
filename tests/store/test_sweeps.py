"""The record of an experiment on which several processes work."""

from pathlib import Path

import pytest

from ttrain.store import runs
from ttrain.store.sweeps import find_or_begin

REQUEST = {"identity": "1", "changes": [], "seeds": 5}
ANOTHER = {"pid": 1, "started": 0.0, "host": "elsewhere"}


@pytest.mark.parametrize(
    ("outcome", "latest", "recorded"),
    [
        ("interrupted", runs.this_process(), "interrupted"),
        ("interrupted", ANOTHER, "running"),
        ("completed", ANOTHER, "completed"),
    ],
)
def test_the_latest_process_decides_the_outcome(
    tmp_path: Path, outcome: str, latest: dict[str, object], recorded: str
) -> None:
    experiment = find_or_begin(tmp_path, REQUEST)
    experiment.note(process=latest)
    experiment.end(outcome, {"verdict": "none"})
    again = find_or_begin(tmp_path, REQUEST)
    assert again.name == experiment.name
    assert (again["outcome"], again["verdict"]) == (recorded, "none")
