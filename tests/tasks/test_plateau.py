"""What a night continues: the plateau of an infinite schedule."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.comparing import distance, same
from support.tiny_stages import Home, stage_settings

from ttrain.store.model_files import PLATEAU
from ttrain.tasks.common import training
from ttrain.train import checkpoint_format

STEPS = 8
DECAY_BEGINS = 5
SCHEDULE = {"kind": "infinite", "decay_fraction": 0.375}  # the decay has the steps 5 to 7
INFINITE = {"schedule": {**SCHEDULE, "warmup_steps": 2}}
NIGHT = {"schedule": {**SCHEDULE, "warmup_steps": 0}, "seed": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Home]:
    """The champion's artifact, and the home of any pretraining."""
    root = tmp_path_factory.mktemp("plateau")
    home = Home.make(root / "home")
    home.pretrain(stage_settings(STEPS, INFINITE), root / "champion")
    return root / "champion", home


def test_the_artifact_keeps_the_state_before_the_decay(first: Any, tmp_path: Path) -> None:
    champion, home = first
    files = {path.name for path in (champion / PLATEAU).iterdir()}
    assert files == {"model.safetensors", "optimizer.safetensors"}
    saved = checkpoint_format.read(champion / "checkpoints" / f"step-{DECAY_BEGINS:08d}")
    kept = training.read_plateau(champion, "model.safetensors")
    assert same(saved.weights, kept.weights) and same(saved.optimizer, kept.optimizer)
    assert kept.step == 0
    assert not same(dict(kept.weights), load_file(champion / "model" / "model.safetensors"))
    home.pretrain(stage_settings(2), tmp_path)
    assert not (tmp_path / PLATEAU).exists(), "of another schedule"


def test_a_night_continues_the_plateau(first: Any, tmp_path: Path) -> None:
    def steps(checkpoint: Any) -> set[int]:
        optimizer = checkpoint.optimizer.items()
        return {int(value) for name, value in optimizer if name.startswith("step|")}

    champion, home = first
    settings = stage_settings(STEPS, NIGHT, checkpoint_every_steps=1, keep_checkpoints=100)
    home.pretrain(settings, tmp_path / "night", {"base": champion, "plateau": champion})
    short = stage_settings(2, NIGHT, checkpoint_every_steps=1)
    home.pretrain(short, tmp_path / "warm", {"base": champion})
    step = Path("checkpoints") / "step-00000001"
    night, warm = (checkpoint_format.read(tmp_path / name / step) for name in ("night", "warm"))
    kept = training.read_plateau(champion, "model.safetensors")
    assert steps(night) == {DECAY_BEGINS + 1} and steps(warm) == {1}
    assert distance(kept.weights, night.weights) < distance(kept.weights, warm.weights)
    assert (tmp_path / "night" / PLATEAU).is_dir()
