"""An extended stage comes to the bytes of one from the start. Killed ones:
soak/test_pipeline_kills."""

from pathlib import Path
from typing import Any

import pytest
from support.tiny_stages import Home, stage_settings

from ttrain.core.hashing import sha256_file
from ttrain.engine.graph import Rerun
from ttrain.engine.planner import plan_stage
from ttrain.engine.resume import begun_at
from ttrain.tasks import PRETRAIN

WEIGHTS = Path("model") / "model.safetensors"


WARM = {"schedule": {"warmup_steps": 2}}
UNPACKED = {**WARM, "packing": "none"}
EPOCHS = {"tokens": None, "schedule": {"kind": "constant"}}


# name: settings of both, of the short one, of the long one, the step where the extension begins
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int]] = {
    "before the decay": (WARM, {"tokens": 8 * 256}, {"tokens": 10 * 256}, 4),
    # The run ends within a step, which a longer run fills up: it begins one checkpoint before.
    "a last step cut short": (EPOCHS, {"epochs": 0.2}, {"epochs": 0.3}, 0),
    "rows that are not packed": (UNPACKED, {"tokens": 1000}, {"tokens": 2000}, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_an_extended_stage_has_the_same_bytes(stage_home: Home, tmp_path: Path, name: str) -> None:
    common, short, long, begins = CASES[name]
    store, inputs = stage_home.store, stage_home.pretrain_inputs()
    first, second = (
        stage_settings(pretrain=common | budget, keep_checkpoints=9) for budget in (short, long)
    )
    planned = plan_stage(PRETRAIN, first, store, inputs)
    assert planned.key is not None
    result = stage_home.pretrain(first, tmp_path / "short")
    if not begins:
        assert result["steps"] * 256 > result["tokens"], "the last step is a part of one"
        begins = 4 * ((result["steps"] - 1) // 4)
    manifest = {"result": result, "ingredients": planned.ingredients, "inputs": {}}
    store.publish("pretrain", planned.key, tmp_path / "short", manifest)
    extension = plan_stage(PRETRAIN, second, store, inputs, Rerun(extend=True))
    assert extension.start_from is not None
    assert extension.start_from.name == f"step-{begins:08d}"
    start = extension.start_from.parents[1]
    output = begun_at(store, extension, start, extension.first_step) / "output"
    extended = stage_home.pretrain(second, output)
    straight = stage_home.pretrain(second, tmp_path / "straight")
    assert extended["resumed_from_step"] == begins
    assert extended["steps"] == straight["steps"] > result["steps"]
    assert sha256_file(output / WEIGHTS) == sha256_file(tmp_path / "straight" / WEIGHTS)
