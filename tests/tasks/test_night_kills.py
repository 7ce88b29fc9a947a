"""The stages of nights alone: killed anywhere and run again, each leaves the files of a run that was never killed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.kill_points import killed_everywhere

from ttrain.config import Pretrain, Settings
from ttrain.data.shards import Column, write_index, write_shard
from ttrain.tasks import heldout, replay

# With what opens a file to write, all calls before which a killed process leaves other files than before the one before.
CALLS = ("mkdir", "open", "replace", "rename", "unlink", "link", "sendfile")


def shards(directory: Path, first: int, count: int) -> Path:
    for part, numbers in (("train", range(first, first + count)), ("heldout", range(first + count, first + count + 2))):
        (directory / part).mkdir(parents=True)
        rows = [[100, number % 256, number // 256, *range(2 + number % 9)] for number in numbers]
        column = Column(np.concatenate(rows).astype(np.uint16), np.cumsum([0, *map(len, rows)]))
        entry = write_shard(directory / part / "0.arrow", column, 300) | {"bytes": 0, "group": 0, "records": "r.jsonl"}
        (directory / part / "r.jsonl").write_text("".join(json.dumps({"text": f"text {n}"}) + "\n" for n in numbers))
        write_index(directory / part, kind="documents", vocab_size=300, tokenizer="mine", shards=[entry])
    return directory


def case_of(stage: str, root: Path) -> tuple[Any, Any, dict[str, Path]]:
    """(module, settings, inputs) of a stage."""
    if stage == "replay":
        config = Settings.model_validate({"nightly": {"replay": 0.3}, "pretrain": Pretrain(tokens=None, epochs=1.0)})
        return replay, config, {"documents": shards(root / "new", 500, 60), "learnt-0000": shards(root / "old", 0, 90)}
    inputs = {"earlier": shards(root / "old", 0, 5), "documents": shards(root / "new", 500, 5)}
    return heldout, Settings.model_validate({"evaluate": {"max_bytes": 10**6}}), inputs


def files_of(directory: Path) -> dict[str, str]:
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and not path.name.endswith(".tmp")
    }


@pytest.mark.parametrize("stage", ["replay", "heldout"])
def test_a_killed_stage_of_a_night_leaves_the_same_files_as_one_that_never_was(stage: str, tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    module, config, inputs = case_of(stage, tmp_path / "inputs")

    def run(output: Path) -> Any:
        return module.run(config, SimpleNamespace(inputs=inputs, output=output))

    act: Callable[[Path], Any] = run
    reference = tmp_path / "reference"
    reference.mkdir()
    figures = run(reference)
    (tmp_path / "empty").mkdir()
    copies = tmp_path / "copies"
    kills = killed_everywhere(tmp_path / "empty", copies, CALLS, act, writing=True) - 1
    assert kills >= 2
    for number in range(1, kills + 1):
        assert run(copies / str(number)) == figures, f"killed at call {number} of {kills}"
        assert files_of(copies / str(number)) == files_of(reference), f"killed at call {number} of {kills}"
