"""Callbacks of an installed package in stages."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_stages import Home, stage_settings

from ttrain.engine.planner import plan_stage
from ttrain.errors import TTrainError
from ttrain.store.artifacts import ArtifactStore
from ttrain.tasks import PRETRAIN

SPY = """
from ttrain.train.callbacks import Callback

seen, reasons = [], []
HOOKS = "start epoch_start step_start step_end log validated saved epoch_end end failed"

class Spy(Callback):
    def stop_reason(self):
        return reasons[-1] if reasons else None

def recorder(hook):
    def record(self, argument, *others):
        seen.append(f"{type(self).__name__}.{hook} {getattr(argument, 'step', argument)}")
    return record

for hook in HOOKS.split():
    setattr(Spy, hook, recorder(hook))
"""


def install(site: Path, monkeypatch: Any) -> Any:
    """Install a package with a callback; returns its module."""
    info = site / "spies-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: spies\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ttrain.callbacks]\nspy = spies:Spy\n")
    (site / "spies.py").write_text(SPY)
    monkeypatch.delitem(sys.modules, "spies", raising=False)
    monkeypatch.syspath_prepend(site)
    return importlib.import_module("spies")


def test_a_callback_of_a_package_sees_every_hook(tmp_path: Path, monkeypatch: Any) -> None:
    home = Home.make(tmp_path / "home")
    settings = stage_settings(2, {"validate_every_steps": 2}, quick_validations=0)

    def key() -> str | None:
        store = ArtifactStore(tmp_path / "home")
        return plan_stage(PRETRAIN, settings, store, home.pretrain_inputs()).key

    original = key()
    spies = install(tmp_path / "site", monkeypatch)
    home.pretrain(settings, tmp_path / "out")
    first = "start 0, epoch_start 0, step_start 1, step_end 1, log 1"
    second = "step_start 2, step_end 2, log 2, validated 2, log 2, saved 2, epoch_end 0, end 2"
    assert ", ".join(spies.seen).replace("Spy.", "") == f"{first}, {second}"
    assert key() == original


def test_in_a_stage_a_callback_of_a_package_may_not_stop(tmp_path: Path, monkeypatch: Any) -> None:
    home, settings = Home.make(tmp_path / "home"), stage_settings(2)
    install(tmp_path / "site", monkeypatch).reasons.append("enough")
    with pytest.raises(TTrainError, match=r"Spy\.stop_reason .*'enough'.*early_stopping"):
        home.pretrain(settings, tmp_path / "out")
