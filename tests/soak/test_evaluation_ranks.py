"""An evaluation on several ranks, as a pipeline starts it: a process each, the first of which outlives the others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.tiny_stages import Home, Watcher, run_here, stage_settings

from ttrain.config import EvaluateConfig
from ttrain.pipeline import launch
from ttrain.stages import EVALUATE, evaluate

pytestmark = pytest.mark.soak


def test_a_launched_evaluation_on_two_ranks_leaves_the_bytes_of_one(tmp_path: Path) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(steps=4, devices=2, rank_timeout_seconds=2.0)
    home.pretrain(settings, tmp_path / "base")
    shutil.copytree(tmp_path / "base", tmp_path / "copy")
    manifest: dict[str, Any] = {"result": {}, "ingredients": {}, "inputs": {}}
    base = home.store.publish("pretrain", "0" * 64, tmp_path / "copy", manifest)
    (tmp_path / "alone").mkdir()
    read = {"base": base.path, "documents": home.documents.path, "chats": home.chats.path}
    alone = run_here(evaluate, EvaluateConfig(evaluate=settings.evaluate), tmp_path / "alone", read, settings.runtime)
    inputs, watcher = {"base": base, "documents": home.documents, "chats": home.chats}, Watcher()
    found = launch.build(EVALUATE, settings, home.store, inputs, watcher).artifact
    assert found.result == alone
    for name in ("evaluation.json", "samples.json", "scores.json"):
        assert (found.path / name).read_bytes() == (tmp_path / "alone" / name).read_bytes()
    assert not any("rank 1" in line for line in watcher.lines), "it ends early and says nothing"
    assert not list((found.path / "run").glob("*.beat"))
