"""The model that `pretrain.teacher` names: a previous run, the champion, a run by its name."""

import pytest
from support.artifact_home import Home
from support.data_commands import in_process
from support.night_files import artifact
from support.planned_homes import House

from ttrain import api
from ttrain.errors import UsageError
from ttrain.flows.full import full
from ttrain.flows.teacher import with_teachers
from ttrain.store.layout import Artifact
from ttrain.store.registry import Registry

PREVIOUS = "pretrain.teacher=previous"
PASSES = "pretrain.tokens=null", "pretrain.epochs=3"
MODEL = {"model/config.json": "{}", "model/model.safetensors": ""}


def planned_teacher(house: House, *overrides: str) -> Artifact:
    plan = api.plan("full", house.settings(*PASSES, *overrides), home=house.store.root)
    assert [stage.name for stage in plan][4:6] == ["teacher", "pretrain"]
    teacher = plan.graph["teacher"].sources["by-0"]
    assert isinstance(teacher, Artifact)
    assert plan.settings.pretrain.teacher == (f"pretrain/{teacher.key}",)  # so that a rerun has it
    return teacher


def trained(
    house: House, key: str, name: str = "quickstart", *, taught: bool = False, **given: float
) -> None:
    """A finished run that is newer than all before. `given`: its settings, and its loss."""
    inputs = {"teacher": {"stage": "teacher", "key": "k", "content": ""}} if taught else {}
    result = {"validation_loss": given.pop("loss", 1.0)}
    settings = {f"pretrain.{setting}": value for setting, value in given.items()}
    ingredients = {"files": {}, "settings": settings}
    facts = {"inputs": inputs, "ingredients": ingredients, "result": result}
    made = artifact(house.store, "pretrain", key, MODEL, **facts)
    Home(house.store.root).run(made, age=-int(key[0], 16), name=name)


def test_the_teacher_is_the_newest_other_pretraining(house: House) -> None:
    with pytest.raises(UsageError, match="named quickstart"):
        planned_teacher(house, PREVIOUS)
    trained(house, "a" * 64)
    assert planned_teacher(house, PREVIOUS).key == "a" * 64
    trained(house, "b" * 64, taught=True)
    trained(house, "c" * 64, name="other")
    assert planned_teacher(house, PREVIOUS).key == "a" * 64  # it does not teach itself


def test_the_best_seeds_of_the_newest_pretraining_teach_together(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(house, "1" * 64, tokens=2, seed=9, loss=0.1)  # of other settings
    for seed, (key, loss) in enumerate(zip("abcdef", [3.7, 3.5, 3.4, 3.8, 3.6, 3.9], strict=True)):
        trained(house, key * 64, tokens=1, seed=seed, loss=loss)
    plan = api.plan("full", house.settings(*PASSES, PREVIOUS), home=house.store.root)
    assert plan.settings.pretrain.teacher == tuple(f"pretrain/{key * 64}" for key in "abce")
    monkeypatch.setenv("TTRAIN_HOME", str(house.store.root))
    said = in_process(capsys)("plan", *house.files, *PASSES, PREVIOUS).out
    names = ", ".join(f"{key * 12}:pretrain" for key in "abce")
    assert f"teachers of pretrain: {names}" in said


def test_what_a_sweep_would_mix_and_few_passes_are_refused(house: House) -> None:
    trained(house, "a" * 64)
    settings = house.settings(*PASSES, PREVIOUS)
    with pytest.raises(UsageError, match="each trial"):
        with_teachers(full(settings), settings, house.store)
    with pytest.raises(UsageError, match=r"epochs is 2\.5, but"):
        planned_teacher(house, PREVIOUS, "pretrain.epochs=2.5")


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
