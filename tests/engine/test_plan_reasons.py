"""Why a stage runs, in words for each kind of change; libraries, which are told and rerun nothing."""

import platform
import shutil

import pytest
from support.planned_homes import House, running

from ttrain import api
from ttrain.core import machine
from ttrain.engine.planner import plan_stage
from ttrain.errors import UsageError
from ttrain.tasks import PRETRAIN


def test_a_model_that_exists_in_place_of_a_new_one_is_one_change_both_ways(built: House) -> None:
    """And not one for each size of the new one; what changed beside it is told as ever."""
    given = {
        "tokenizer": built.store.latest("tokenizer"),
        "shards": built.store.latest("shards-pretrain"),
    }
    night = built.settings(f"pretrain.start_from={built.data}", "pretrain.optim.lr=0.5")
    planned = plan_stage(PRETRAIN, night, built.store, {**given, "base": built.store.latest("sft")})
    assert planned.why == (
        "starts from an existing model instead of a new one",
        "pretrain.optim.betas: [0.5, 0.95] → [0.9, 0.95]",
        "pretrain.optim.embedding_lr: 0.04 → null",
        "pretrain.optim.head_lr: 0.004 → null",
        "pretrain.optim.lr: 0.004 → 0.5",
    )
    shutil.rmtree(built.store.latest("pretrain").path)
    built.publish(planned)
    again = plan_stage(PRETRAIN, built.settings("pretrain.optim.lr=0.5"), built.store, given)
    assert again.why[0] == "starts from a new model instead of an existing one"
    changed = {line.partition(": ")[0] for line in again.why[1:]}
    assert changed == {f"pretrain.optim.{name}" for name in ("embedding_lr", "head_lr", "betas")}


def test_other_versions_rerun_nothing_and_are_told_where_nothing_else_runs(built: House) -> None:
    planned = built.plan()["sft"]
    shutil.rmtree(built.store.latest("sft").path)
    built.publish(
        planned,
        planned.known_key,
        provenance={"libraries": {"torch": "2.12.0", "of long ago": "1"}, "python": "3.10.1"},
    )
    stages = built.plan()
    here = f"here is torch {machine.versions()['torch']}, Python {platform.python_version()}"
    told = f"made with torch 2.12.0, Python 3.10.1, {here}"
    assert running(stages) == set()
    assert {name: stage.notes for name, stage in stages.items() if stage.notes} == {"sft": [told]}
    assert stages["sft"].row[3] == f"same settings, inputs and code; {told}"
    assert not any(stage.notes for stage in built.plan("sft.seed=2").values())


def test_a_long_explanation_is_short_on_the_terminal_and_whole_in_json(built: House) -> None:
    given = [
        f"sft.{name}"
        for name in ("seed=7", "optim.lr=0.5", "epochs=3.0", "stride=8", "dropped_fraction=0.5")
    ]
    sft = built.plan(*given)["sft"]
    assert sft.row[3] == f"{'; '.join(sft.why[:3])} and 2 more"
    assert sft.to_json()["why"] == list(sft.why) and len(sft.why) == 5


def test_mistakes_in_several_data_sets_are_told_at_once_and_what_is_left_out_is_not_read(
    house: House,
) -> None:
    settings = house.settings("data.lora=gone")
    assert len(api.plan("full", settings, until="shards-sft", home=house.store.root)) == 2
    house.write("documents.jsonl", '{"question": "q", "answer": "a"}\n')
    with pytest.raises(
        UsageError,
        match=r"^data.pretrain needs documents, .*\ndata.lora is 'gone' but there is no such file",
    ):
        api.plan("full", settings, home=house.store.root)
    with pytest.raises(UsageError, match=r"^data\.pretrain needs documents"):
        api.plan("full", settings, only="tokenizer", home=house.store.root)
    own_text = house.settings(f"data.tokenizer={settings.data.pretrain[0]}")
    with pytest.raises(UsageError, match=r"^data\.tokenizer needs documents"):
        api.plan("full", own_text, only="tokenizer", home=house.store.root)
