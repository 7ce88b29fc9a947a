"""The model that `pretrain.teacher` names: a previous run, the champion, a run by its name."""

import pytest
from support.artifact_home import Home
from support.night_files import artifact
from support.planned_homes import House

from ttrain import api
from ttrain.errors import UsageError
from ttrain.store.layout import Artifact
from ttrain.store.registry import Registry

PREVIOUS = "pretrain.teacher=previous"
MODEL = {"model/config.json": "{}", "model/model.safetensors": ""}


def planned_teacher(house: House, *overrides: str) -> Artifact:
    plan = api.plan("full", house.settings(*overrides), home=house.store.root)
    assert [stage.name for stage in plan][4:6] == ["teacher", "pretrain"]
    teacher = plan.graph["teacher"].sources["teacher"]
    assert isinstance(teacher, Artifact)
    return teacher


def trained(house: House, *overrides: str) -> Artifact:
    """The pretraining of a finished run of these settings."""
    made = house.build(house.settings(*overrides))["pretrain"]
    Home(house.store.root).run(made, age=60)
    return made


def test_the_teacher_is_the_newest_other_pretraining(house: House) -> None:
    with pytest.raises(UsageError, match="no other finished pretraining; run once without it"):
        planned_teacher(house, PREVIOUS)
    plain = trained(house)
    assert planned_teacher(house, PREVIOUS).key == plain.key
    ingredients = {**plain.manifest["ingredients"]}
    inputs = {"teacher": {"stage": "teacher", "key": "k", "content": ""}}
    taught = artifact(
        house.store, "pretrain", "taught", MODEL, ingredients=ingredients, inputs=inputs
    )
    Home(house.store.root).run(taught)
    assert planned_teacher(house, PREVIOUS).key == plain.key  # it does not teach itself
    assert planned_teacher(house, PREVIOUS, "pretrain.seed=2").key == "taught"


def test_a_teacher_has_a_name_or_is_the_champion(house: House) -> None:
    made = artifact(house.store, "pretrain", "a" * 64, MODEL)
    other = artifact(house.store, "tokenizer", "b" * 64, {"tokenizer.json": "{}"})
    run = Home(house.store.root).run(made)
    for name in (run.run, f"{run.run}:pretrain", "pretrain", "pretrain/aaaaaaaa"):
        assert planned_teacher(house, f"pretrain.teacher={name}").key == made.key
    with pytest.raises(UsageError, match="no whole model of that name"):
        planned_teacher(house, f"pretrain.teacher={other.key}")
    with pytest.raises(UsageError, match="champion"):
        planned_teacher(house, "pretrain.teacher=champion")
    registry = Registry(house.store.root)
    member = registry.register_model("quickstart-base", made, run.run)
    registry.register_set("quickstart", run.run, [member], {"pretrain": made.key}, {})
    registry.promote("quickstart", "1")
    assert planned_teacher(house, "pretrain.teacher=champion").key == made.key
