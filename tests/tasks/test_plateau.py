"""What a night continues: the plateau of an infinite schedule."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import distance, same
from support.tiny_stages import Home, stage_settings

from ttrain.store.model_files import PLATEAU
from ttrain.tasks.common import training
from ttrain.train import checkpoint_format

STEPS = 8
DECAY_BEGINS = 5
INFINITE = {
    "schedule": {"kind": "infinite", "warmup_steps": 2, "decay_fraction": 0.375}
}  # steps 0 to 4, then 5 to 7
NIGHT = {"schedule": {"kind": "infinite", "warmup_steps": 0, "decay_fraction": 0.375}, "seed": 2}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Home]:
    """The champion's artifact, and the home of any pretraining."""
    root = tmp_path_factory.mktemp("plateau")
    home = Home.make(root / "home")
    home.pretrain(stage_settings(STEPS, INFINITE), root / "champion")
    return root / "champion", home


def weights(artifact: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(artifact / "model" / "model.safetensors")
    return found


def test_the_artifact_holds_the_state_before_the_decay_beside_the_annealed_model(
    first: Any, tmp_path: Path
) -> None:
    champion, home = first
    assert {path.name for path in (champion / PLATEAU).iterdir()} == {
        "model.safetensors",
        "optimizer.safetensors",
    }
    saved = checkpoint_format.read(champion / "checkpoints" / f"step-{DECAY_BEGINS:08d}")
    kept = training.read_plateau(champion, "model.safetensors")
    assert (
        same(saved.weights, kept.weights)
        and same(saved.optimizer, kept.optimizer)
        and kept.step == 0
    )
    assert not same(dict(kept.weights), weights(champion))
    home.pretrain(stage_settings(2), tmp_path)
    assert not (tmp_path / PLATEAU).exists(), "of another schedule"
    training.write_plateau(tmp_path, DECAY_BEGINS)
    assert not (tmp_path / PLATEAU).exists(), "without its checkpoint"


def test_a_night_continues_the_plateau_and_not_the_annealed_model(
    first: Any, tmp_path: Path
) -> None:
    champion, home = first
    settings = stage_settings(STEPS, NIGHT, checkpoint_every_steps=1, keep_checkpoints=100)
    home.pretrain(settings, tmp_path / "night", {"base": champion, "plateau": champion})
    short = stage_settings(2, NIGHT, checkpoint_every_steps=1)
    home.pretrain(short, tmp_path / "warm", {"base": champion})
    step = Path("checkpoints") / "step-00000001"
    night, warm = (checkpoint_format.read(tmp_path / name / step) for name in ("night", "warm"))
    kept = training.read_plateau(champion, "model.safetensors")
    steps = {int(value) for name, value in night.optimizer.items() if name.startswith("step|")}
    assert steps == {DECAY_BEGINS + 1}, "with those before it"
    assert {int(value) for name, value in warm.optimizer.items() if name.startswith("step|")} == {1}
    assert distance(kept.weights, night.weights) < distance(kept.weights, warm.weights)
    assert (tmp_path / "night" / PLATEAU).is_dir()
