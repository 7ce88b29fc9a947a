"""Why a stage runs: for each kind of change the right words, and the right stages; for what does not matter, none."""

from __future__ import annotations

import platform
import shutil
from typing import Any

import pytest
from support.planned_homes import House, running

from ttrain.core import machine
from ttrain.engine.planner import plan_stage
from ttrain.tasks import PRETRAIN

# --- what does not count, and is told: libraries and Python


def test_a_model_that_exists_in_place_of_a_new_one_is_one_change_both_ways(built: House) -> None:
    """And not one for each size of the new one; what changed beside it is told as ever."""
    given = {"tokenizer": built.store.latest("tokenizer"), "shards": built.store.latest("shards-pretrain")}
    night = built.settings(f"pretrain.start_from={built.data}", "pretrain.optim.lr=0.5")
    planned = plan_stage(PRETRAIN, night, built.store, {**given, "base": built.store.latest("sft")})
    lr = built.settings().pretrain.optim.lr
    assert planned.why == (
        "starts from an existing model instead of a new one", "pretrain.optim.betas: [0.5, 0.95] → [0.9, 0.95]",
        "pretrain.optim.embedding_lr: 0.04 → null",
        "pretrain.optim.head_lr: 0.004 → null", f"pretrain.optim.lr: {lr} → 0.5",
    )  # fmt: skip
    for artifact in built.store.artifacts("pretrain"):
        shutil.rmtree(artifact.path)
    built.publish(planned)
    anew = plan_stage(PRETRAIN, built.settings("model.multi_token.weight=0.5", "pretrain.optim.lr=0.5"), built.store, given)
    assert anew.why[0] == "starts from a new model instead of an existing one"
    assert {line.partition(": ")[0] for line in anew.why[1:]} == {
        "model.multi_token", "model.multi_token.weight", "model.multi_token.keep_head", "pretrain.optim.embedding_lr",
        "pretrain.optim.head_lr", "pretrain.optim.betas",
    }  # fmt: skip


def remade(house: House, **provenance: Any) -> None:
    """The SFT's artifact, as if it had been made with these."""
    artifact = house.store.latest("sft")
    planned = house.plan()["sft"]
    shutil.rmtree(artifact.path)
    house.publish(planned, artifact.key, provenance=provenance)


HERE = {"libraries": machine.versions(), "python": platform.python_version()}
TORCH = f"here is torch {machine.versions()['torch']}"


@pytest.mark.parametrize(
    ("provenance", "told"),
    [
        ({**HERE, "libraries": {**machine.versions(), "torch": "2.12.0"}}, f"made with torch 2.12.0, {TORCH}"),
        (
            {"libraries": {"torch": "2.12.0", "of long ago": "1"}, "python": "3.10.1"},
            f"made with torch 2.12.0, Python 3.10.1, {TORCH}, Python {platform.python_version()}",
        ),
    ],
    ids=["another library", "another Python"],
)
def test_other_versions_rerun_nothing_and_are_told_where_nothing_else_runs(
    built: House, provenance: dict[str, Any], told: str
) -> None:
    remade(built, **provenance)
    stages = built.plan()
    assert running(stages) == set()
    assert {name: stage.notes for name, stage in stages.items() if stage.notes} == {"sft": [told]}
    assert stages["sft"].row[3] == f"same settings, inputs and code; {told}"
    assert not any(stage.notes for stage in built.plan("sft.seed=2").values())


# --- how it is shown


def test_a_long_explanation_is_short_on_the_terminal_and_whole_in_json(built: House) -> None:
    given = [f"sft.{name}" for name in ("seed=7", "optim.lr=0.5", "epochs=3.0", "stride=8", "dropped_fraction=0.5")]
    stages = built.plan(*given)
    assert len(stages["sft"].why) == 5
    assert stages["sft"].row[3] == f"{'; '.join(stages['sft'].why[:3])}; and 2 more, which `plan --json` has"
    assert stages["sft"].to_json()["why"] == list(stages["sft"].why)
