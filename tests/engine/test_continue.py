"""`--continue`: unfinished work of an older code is offered, taken over whole or not at all, and the artifact says so."""

import json
import shutil
from dataclasses import replace

import pytest
from support.held_locks import held_elsewhere
from support.kill_points import killed_at
from support.planned_homes import House

from ttrain.core.files import write_json
from ttrain.engine import resume
from ttrain.engine.graph import Planned, Selection
from ttrain.engine.planner import key_of
from ttrain.errors import UsageError

SEED = "sft.seed=5"  # so that there is something to do
TOKENS = ("sft.epochs=null", "sft.tokens=409600", "sft.tokens_per_step=4096")  # 100 steps


def left(house: House, planned: Planned, step: int = 20) -> resume.PartialRun:
    work = house.leave(planned, step)
    return resume.PartialRun(planned.stage.name, planned.known_key, work, step, planned.ingredients)


def older(planned: Planned, digest: str = "0") -> Planned:
    """The same stage as planned before a module that it reads was changed."""
    code = {**planned.ingredients["code"], "ttrain.tasks.sft": digest * 64}
    ingredients = {**planned.ingredients, "code": code}
    return replace(planned, key=key_of(ingredients), ingredients=ingredients)


@pytest.fixture
def work(built: House) -> resume.PartialRun:
    """The SFT's work under the code before a change, as is its artifact."""
    made = older(built.plan()["sft"])
    shutil.rmtree(built.store.latest("sft").path)
    built.publish(made)
    return left(built, older(built.plan(SEED)["sft"]))


def test_the_plan_offers_the_work_with_its_differences_and_continue_takes_it(
    built: House, work: resume.PartialRun
) -> None:
    planned = built.plan(SEED)["sft"]
    key = work.key[:12]
    offer = f"unfinished work {key} at step 20 differs in: module ttrain.tasks.sft changed; --continue {key} resumes it"
    assert planned.key != work.key and planned.partial_run is None
    assert planned.why == (offer, "sft.seed: 1 → 5", "module ttrain.tasks.sft changed")
    planned = built.plan(SEED, resume_key=work.key[:8])["sft"]
    assert planned.partial_run == work
    assert planned.why == (
        f"continues the unfinished work {work.key[:12]} at step 20",
        "module ttrain.tasks.sft changed",
    )


def test_work_of_the_same_key_needs_no_option_and_offers_no_other(
    built: House, work: resume.PartialRun
) -> None:
    left(built, built.plan(SEED)["sft"], step=3)
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    assert (
        planned.why[0] == "continues its unfinished work at step 3" and planned.partial_run is None
    )


def test_other_settings_are_refused_with_the_difference_and_are_not_offered(
    built: House, work: resume.PartialRun
) -> None:
    for given, words in (
        (["sft.optim.weight_decay=0.5"], "sft.optim.weight_decay: 0.0 → 0.5"),
        (["sft.seed=6"], "sft.seed: 5 → 6"),
        (["sft.epochs=0.5"], "0.5 epochs, may end before that step"),
        (["sft.epochs=null", "sft.tokens=4096"], "4096 tokens, may end before that step"),
    ):
        assert not built.plan(SEED, *given)["sft"].why[0].startswith("unfinished")
        with pytest.raises(
            UsageError,
            match=rf"--continue {work.key} .*other settings or data: .*{words}.*restore them",
        ):
            built.plan(SEED, *given, resume_key=work.key)


def test_another_rate_goes_on_where_the_user_names_the_work_and_is_not_offered(
    built: House, work: resume.PartialRun
) -> None:
    given = (SEED, "sft.optim.lr=0.0005")
    assert not built.plan(*given)["sft"].why[0].startswith("unfinished")
    planned = built.plan(*given, resume_key=work.key)["sft"]
    assert planned.partial_run is not None and planned.partial_run.key == work.key
    assert "sft.optim.lr: 0.001 → 0.0005" in resume.changes(work, planned.ingredients)


def test_a_base_with_other_bytes_is_refused(built: House, work: resume.PartialRun) -> None:
    shutil.rmtree(built.store.latest("pretrain").path)
    others = {"tokenizer", "shards-pretrain", "shards-sft", "shards-lora", "pretrain"}
    built.build(built.settings(SEED), says=lambda stage, key: "other", stages=others)
    with pytest.raises(UsageError, match="input base: "):
        built.plan(SEED, resume_key=work.key)


def test_a_budget_that_reaches_the_step_may_differ(built: House, work: resume.PartialRun) -> None:
    for given in (["sft.epochs=2"], ["sft.epochs=null", "sft.tokens=409600"]):
        planned = built.plan(SEED, *given, resume_key=work.key)["sft"]
        assert planned.partial_run == work
        assert any('sft.epochs: "auto" → ' in line for line in planned.why)


def test_passes_that_the_rows_decided_may_not_become_fewer(
    built: House, work: resume.PartialRun
) -> None:
    write_json(
        resume.checkpoint_of(work.path / "output", 20) / "state.json", {"identity": {"epochs": 6.0}}
    )
    with pytest.raises(UsageError, match=r"its budget, 2\.0 epochs, may end before that step"):
        built.plan(SEED, "sft.epochs=2", resume_key=work.key)
    for budget in ("sft.epochs=6", "sft.epochs=auto"):
        assert built.plan(SEED, budget, resume_key=work.key)["sft"].partial_run == work


def test_a_budget_of_rows_that_are_not_packed_has_more_steps(built: House) -> None:
    """The work at step 150 of a budget that packed rows would reach in 100."""
    budget = (*TOKENS, "sft.packing=none")
    work = left(built, older(built.plan(*budget)["sft"]), 150)
    assert f"unfinished work {work.key[:12]} at step 150" in built.plan(*budget)["sft"].why[0]
    assert not built.plan(*budget, "sft.tokens=204800")["sft"].why[0].startswith("unfinished")


def test_the_furthest_work_is_offered(built: House) -> None:
    steps = {409600: 5, 819200: 9}
    planned = {tokens: built.plan(*TOKENS, f"sft.tokens={tokens}")["sft"] for tokens in steps}
    near, far = (left(built, older(planned[tokens]), step) for tokens, step in steps.items())
    assert f"unfinished work {far.key[:12]} at step 9" in built.plan(*TOKENS)["sft"].why[0]
    assert built.plan(*TOKENS, resume_key=near.key)["sft"].partial_run == near


def test_an_offer_of_many_changes_fits_on_the_terminal(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    old = {**planned.ingredients, "code": dict.fromkeys(planned.ingredients["code"], "0" * 64)}
    left(built, replace(planned, key="0" * 64, ingredients=old))
    more, first = len(old["code"]) - 3, sorted(old["code"])[0]
    why = built.plan(SEED)["sft"].why[0]
    assert (
        f"differs in: module {first} changed; " in why
        and f" and {more} more; --continue 000000000000" in why
    )


def test_a_key_that_is_not_there_lists_the_work_that_has_a_checkpoint(
    built: House, work: resume.PartialRun
) -> None:
    with pytest.raises(
        UsageError,
        match=f"no unfinished work has a key that begins so; there is: sft {work.key[:12]} at step 20",
    ):
        built.plan(SEED, resume_key="zzz")
    shutil.rmtree(work.path / "output" / "checkpoints")
    assert built.plan(SEED)["sft"].why[0] == "sft.seed: 1 → 5"
    with pytest.raises(UsageError, match="there is none at all"):
        built.plan(SEED, resume_key=work.key)


def test_the_beginning_of_several_keys_is_refused(built: House, work: resume.PartialRun) -> None:
    other = work.path.with_name(f"{work.key[:20]}{'0' * 44}")
    shutil.copytree(work.path, other)
    with pytest.raises(UsageError, match=r"is the beginning of 2 keys: sft .* sft "):
        built.plan(SEED, resume_key=work.key[:20])
    assert built.plan(SEED, resume_key=work.key)["sft"].partial_run == work


def test_work_of_a_stage_that_is_left_out_is_refused(built: House, work: resume.PartialRun) -> None:
    with pytest.raises(
        UsageError,
        match=f"--continue {work.key} refers to stage sft, which --until pretrain leaves out",
    ):
        built.plan(SEED, resume_key=work.key, selection=Selection(until="pretrain"))


def adopt(house: House, work: resume.PartialRun, *given: str) -> Planned:
    planned = house.plan(SEED, *given, resume_key=work.key)["sft"]
    assert planned.partial_run and planned.key
    resume.take_over(house.store, planned.partial_run, planned.key, planned.ingredients)
    return planned


def test_adopted_work_is_that_of_the_new_key_and_knows_from_where_it_came(
    built: House, work: resume.PartialRun
) -> None:
    planned = adopt(built, work)
    moved = built.store.work("sft", str(planned.key))
    assert resume.saved_step(moved) == 20 and not work.path.exists()
    came_from = {"key": work.key, "step": 20, "differences": ["module ttrain.tasks.sft changed"]}
    assert resume.history(moved, str(planned.key)) == [came_from]
    again = built.plan(SEED, resume_key=work.key)["sft"]
    assert again.why[0] == "continues its unfinished work at step 20", (
        "the same command again, after it was killed"
    )
    shutil.rmtree(moved)
    built.publish(planned, "x", continued=[came_from])
    assert built.plan(SEED, resume_key=work.key)["sft"].state == "cached", (
        "and again, when the stage is finished"
    )


def test_work_that_is_adopted_twice_tells_both_changes_in_their_order(
    built: House, work: resume.PartialRun
) -> None:
    first = older(built.plan(SEED)["sft"], "1")
    resume.take_over(built.store, work, first.known_key, first.ingredients)
    moved = built.store.work("sft", first.known_key)
    write_json(moved / resume.INGREDIENTS, first.ingredients)  # as the stage's start does
    second = adopt(built, replace(work, key=first.known_key))
    told = resume.history(built.store.work("sft", str(second.key)), str(second.key))
    assert [(entry["key"], entry["differences"]) for entry in told] == [
        (work.key, ["module ttrain.tasks.sft changed"]),
        (first.key, ["module ttrain.tasks.sft changed"]),
    ]
    assert resume.history(built.store.work("sft", str(second.key)), "another") == []


def test_work_that_a_run_is_at_is_left_to_it(built: House, work: resume.PartialRun) -> None:
    with (
        held_elsewhere(built.store.root, "sft", work.key),
        pytest.raises(UsageError, match="a run is using it now"),
    ):
        adopt(built, work)
    assert resume.saved_step(work.path) == 20
    adopt(built, work)


def test_what_another_run_saved_meanwhile_stays(built: House, work: resume.PartialRun) -> None:
    """Two runs with the same --continue: the second waits for the key's lock, and the first was stopped."""
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    left(built, planned, step=30)
    assert planned.partial_run and planned.key
    resume.take_over(built.store, planned.partial_run, planned.key, planned.ingredients)
    assert resume.saved_step(built.store.work("sft", planned.key)) == 30


def test_work_that_is_gone_is_said_to_be(built: House, work: resume.PartialRun) -> None:
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    shutil.rmtree(work.path)
    assert planned.partial_run and planned.key
    with pytest.raises(UsageError, match="is gone: a run of other code took it over"):
        resume.take_over(built.store, planned.partial_run, planned.key, planned.ingredients)


@pytest.mark.parametrize("fatal", range(1, 8))
def test_a_kill_between_any_two_writes_loses_neither_the_work_nor_its_story(
    built: House, work: resume.PartialRun, fatal: int
) -> None:
    """Every rename of a file or directory and every fsync counts; before the last of so many, the process is gone."""
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    stale = built.store.work("sft", str(planned.key)) / "output"
    stale.mkdir(parents=True)
    (stale / "of a try that saved nothing").write_text("x")
    if not killed_at(fatal, ("fsync", "rename", "replace"), lambda: adopt(built, work)):
        assert fatal > 5, "a write that this test does not see"
    kept = [resume.saved_step(built.store.work("sft", key)) for key in (work.key, str(planned.key))]
    assert sorted(kept) == [0, 20], "in one place, and whole"
    if kept[0]:
        adopt(built, work)
    moved = built.store.work("sft", str(planned.key))
    assert [entry["key"] for entry in resume.history(moved, str(planned.key))] == [work.key]
    assert not (moved / "output" / "of a try that saved nothing").exists()
    json.loads((moved / resume.CONTINUED).read_bytes())


def test_work_that_goes_on_under_its_own_code_does_not_tell_of_a_take_over_that_was_killed(
    built: House, work: resume.PartialRun
) -> None:
    entry = {"key": work.key, "to": "f" * 64, "step": 20, "differences": ["x"]}
    write_json(work.path / resume.CONTINUED, [entry])
    assert resume.history(work.path, work.key) == []


def test_stages_that_do_not_train_are_not_offered_anything(built: House) -> None:
    """What unfinished shards hold is taken block by block, where it fits."""
    planned = built.plan("shards.block_bytes=4096")["shards-sft"]
    left(built, replace(planned, key="0" * 64, ingredients={**planned.ingredients, "code": {}}))
    assert planned.why == built.plan("shards.block_bytes=4096")["shards-sft"].why
