"""`--continue`: unfinished work of an older code is offered, taken over, and noted."""

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

SEED = "sft.seed=5"  # so that the stage runs
TOKENS = ("sft.epochs=null", "sft.tokens=409600", "sft.tokens_per_step=4096")  # 100 steps
CHANGE = "module ttrain.tasks.sft changed"


def leave_work(house: House, planned: Planned, step: int = 20) -> resume.PartialRun:
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
    artifact = older(built.plan()["sft"])
    shutil.rmtree(built.store.latest("sft").path)
    built.publish(artifact)
    return leave_work(built, older(built.plan(SEED)["sft"]))


def test_the_plan_offers_work_with_its_differences(built: House, work: resume.PartialRun) -> None:
    planned = built.plan(SEED)["sft"]
    key = work.key[:12]
    offer = f"unfinished work {key} at step 20 differs in: {CHANGE}; --continue {key} resumes it"
    assert planned.key != work.key and planned.partial_run is None
    assert planned.why == (offer, "sft.seed: 1 → 5", CHANGE)
    planned = built.plan(SEED, resume_key=work.key[:8])["sft"]
    assert planned.partial_run == work
    assert planned.why == (f"continues the unfinished work {key} at step 20", CHANGE)


def test_work_of_the_same_key_needs_no_option(built: House, work: resume.PartialRun) -> None:
    leave_work(built, built.plan(SEED)["sft"], step=3)
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    assert planned.why[0] == "continues its unfinished work at step 3"
    assert planned.partial_run is None


def test_work_of_other_settings_is_refused(built: House, work: resume.PartialRun) -> None:
    for change, words in {
        "sft.optim.weight_decay=0.5": "sft.optim.weight_decay: 0.0 → 0.5",
        "sft.seed=6": "sft.seed: 5 → 6",
        "sft.epochs=0.5": "0.5 epochs, may end before that step",
        "sft.epochs=null sft.tokens=4096": "4096 tokens, may end before that step",
    }.items():
        overrides = (SEED, *change.split())
        assert not built.plan(*overrides)["sft"].why[0].startswith("unfinished")
        refusal = rf"--continue {work.key} .*other settings or data: .*{words}.*restore them"
        with pytest.raises(UsageError, match=refusal):
            built.plan(*overrides, resume_key=work.key)


def test_another_rate_continues_only_named_work(built: House, work: resume.PartialRun) -> None:
    overrides = (SEED, "sft.optim.lr=0.0005")
    assert not built.plan(*overrides)["sft"].why[0].startswith("unfinished")
    planned = built.plan(*overrides, resume_key=work.key)["sft"]
    assert planned.partial_run is not None and planned.partial_run.key == work.key
    assert "sft.optim.lr: 0.001 → 0.0005" in planned.why


def test_a_base_with_other_bytes_is_refused(built: House, work: resume.PartialRun) -> None:
    shutil.rmtree(built.store.latest("pretrain").path)
    others = {"tokenizer", "shards-pretrain", "shards-sft", "shards-lora", "pretrain"}
    built.build(built.settings(SEED), says=lambda stage, key: "other", stages=others)
    with pytest.raises(UsageError, match="input base: "):
        built.plan(SEED, resume_key=work.key)


def test_a_budget_that_reaches_the_step_may_differ(built: House, work: resume.PartialRun) -> None:
    for overrides in (["sft.epochs=2"], ["sft.epochs=null", "sft.tokens=409600"]):
        planned = built.plan(SEED, *overrides, resume_key=work.key)["sft"]
        assert planned.partial_run == work
        assert any('sft.epochs: "auto" → ' in line for line in planned.why)


def test_passes_decided_by_rows_may_not_decrease(built: House, work: resume.PartialRun) -> None:
    state = resume.checkpoint_of(work.path / "output", 20) / "state.json"
    write_json(state, {"identity": {"epochs": 6.0}})
    with pytest.raises(UsageError, match=r"its budget, 2\.0 epochs, may end before that step"):
        built.plan(SEED, "sft.epochs=2", resume_key=work.key)
    for budget in ("sft.epochs=6", "sft.epochs=auto"):
        assert built.plan(SEED, budget, resume_key=work.key)["sft"].partial_run == work


def test_a_budget_of_rows_that_are_not_packed_has_more_steps(built: House) -> None:
    """The work at step 150 of a budget that packed rows would reach in 100."""
    budget = (*TOKENS, "sft.packing=none")
    work = leave_work(built, older(built.plan(*budget)["sft"]), 150)
    assert f"unfinished work {work.key[:12]} at step 150" in built.plan(*budget)["sft"].why[0]
    assert not built.plan(*budget, "sft.tokens=204800")["sft"].why[0].startswith("unfinished")


def test_the_furthest_work_is_offered(built: House) -> None:
    def work(tokens: int, step: int) -> resume.PartialRun:
        return leave_work(built, older(built.plan(*TOKENS, f"sft.tokens={tokens}")["sft"]), step)

    near, far = work(409600, 5), work(819200, 9)
    assert f"unfinished work {far.key[:12]} at step 9" in built.plan(*TOKENS)["sft"].why[0]
    assert built.plan(*TOKENS, resume_key=near.key)["sft"].partial_run == near


def test_an_offer_of_many_changes_fits_on_the_terminal(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    code = dict.fromkeys(planned.ingredients["code"], "0" * 64)
    old = {**planned.ingredients, "code": code}
    leave_work(built, replace(planned, key="0" * 64, ingredients=old))
    why = built.plan(SEED)["sft"].why[0]
    assert f"differs in: module {min(code)} changed; " in why
    assert f" and {len(code) - 3} more; --continue 000000000000" in why


def test_an_unknown_key_lists_unfinished_work(built: House, work: resume.PartialRun) -> None:
    listed = (
        f"no unfinished work has a key that begins so; there is: sft {work.key[:12]} at step 20"
    )
    with pytest.raises(UsageError, match=listed):
        built.plan(SEED, resume_key="zzz")
    shutil.rmtree(work.path / "output" / "checkpoints")
    assert built.plan(SEED)["sft"].why[0] == "sft.seed: 1 → 5"
    with pytest.raises(UsageError, match="there is none at all"):
        built.plan(SEED, resume_key=work.key)


def test_the_beginning_of_several_keys_is_refused(built: House, work: resume.PartialRun) -> None:
    shutil.copytree(work.path, work.path.with_name(f"{work.key[:20]}{'0' * 44}"))
    with pytest.raises(UsageError, match=r"is the beginning of 2 keys: sft .* sft "):
        built.plan(SEED, resume_key=work.key[:20])
    assert built.plan(SEED, resume_key=work.key)["sft"].partial_run == work


def test_work_of_a_stage_that_is_left_out_is_refused(built: House, work: resume.PartialRun) -> None:
    refusal = f"--continue {work.key} refers to stage sft, which --until pretrain leaves out"
    with pytest.raises(UsageError, match=refusal):
        built.plan(SEED, resume_key=work.key, selection=Selection(until="pretrain"))


def take_over(house: House, planned: Planned) -> None:
    assert planned.partial_run and planned.key
    resume.take_over(house.store, planned.partial_run, planned.key, planned.ingredients)


def adopt(house: House, work: resume.PartialRun) -> Planned:
    planned = house.plan(SEED, resume_key=work.key)["sft"]
    take_over(house, planned)
    return planned


def test_adopted_work_knows_its_origin(built: House, work: resume.PartialRun) -> None:
    planned = adopt(built, work)
    moved = built.store.work("sft", planned.known_key)
    assert resume.saved_step(moved) == 20 and not work.path.exists()
    came_from = {"key": work.key, "step": 20, "differences": [CHANGE]}
    assert resume.history(moved, planned.known_key) == [came_from]
    # The same command again, after a kill, and when the stage is finished
    again = built.plan(SEED, resume_key=work.key)["sft"]
    assert again.why[0] == "continues its unfinished work at step 20"
    shutil.rmtree(moved)
    built.publish(planned, "x", continued=[came_from])
    assert built.plan(SEED, resume_key=work.key)["sft"].state == "cached"


def test_work_adopted_twice_has_both_changes(built: House, work: resume.PartialRun) -> None:
    first = older(built.plan(SEED)["sft"], "1")
    resume.take_over(built.store, work, first.known_key, first.ingredients)
    moved = built.store.work("sft", first.known_key)
    write_json(moved / resume.INGREDIENTS, first.ingredients)  # as the stage's start does
    second = adopt(built, replace(work, key=first.known_key)).known_key
    history = resume.history(built.store.work("sft", second), second)
    changes = [(entry["key"], entry["differences"]) for entry in history]
    assert changes == [(work.key, [CHANGE]), (first.key, [CHANGE])]
    assert resume.history(built.store.work("sft", second), "another") == []


def test_work_in_use_is_left_alone(built: House, work: resume.PartialRun) -> None:
    with held_elsewhere(built.store.root, "sft", work.key):
        with pytest.raises(UsageError, match="a run is using it now"):
            adopt(built, work)
    assert resume.saved_step(work.path) == 20
    adopt(built, work)


def test_what_another_run_saved_meanwhile_stays(built: House, work: resume.PartialRun) -> None:
    """Of two runs with one --continue, the second waits for the lock, and the first was stopped."""
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    leave_work(built, planned, step=30)
    take_over(built, planned)
    assert resume.saved_step(built.store.work("sft", planned.known_key)) == 30


def test_work_that_is_gone_is_refused(built: House, work: resume.PartialRun) -> None:
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    shutil.rmtree(work.path)
    with pytest.raises(UsageError, match="is gone: a run of other code took it over"):
        take_over(built, planned)


@pytest.mark.parametrize("fatal", range(1, 8))
def test_a_kill_loses_no_work_or_history(built: House, work: resume.PartialRun, fatal: int) -> None:
    """Renames and fsyncs count; the process dies before the last of so many."""
    planned = built.plan(SEED, resume_key=work.key)["sft"]
    moved = built.store.work("sft", planned.known_key)
    stale = moved / "output" / "of a try that saved nothing"
    stale.parent.mkdir(parents=True)
    stale.write_text("x")
    if not killed_at(fatal, ("fsync", "rename", "replace"), lambda: adopt(built, work)):
        assert fatal > 5, "a write that this test does not see"
    kept = [resume.saved_step(path) for path in (work.path, moved)]
    assert sorted(kept) == [0, 20], "in one place, and complete"
    if kept[0]:
        adopt(built, work)
    history = resume.history(moved, planned.known_key)
    assert [entry["key"] for entry in history] == [work.key]
    assert not stale.exists()
    json.loads((moved / resume.CONTINUED).read_bytes())


def test_work_forgets_a_killed_take_over(built: House, work: resume.PartialRun) -> None:
    entry = {"key": work.key, "to": "f" * 64, "step": 20, "differences": ["x"]}
    write_json(work.path / resume.CONTINUED, [entry])
    assert resume.history(work.path, work.key) == []


def test_stages_that_do_not_train_are_not_offered_anything(built: House) -> None:
    """Unfinished shards are reused block by block, where they fit."""
    planned = built.plan("shards.block_bytes=4096")["shards-sft"]
    old = replace(planned, key="0" * 64, ingredients={**planned.ingredients, "code": {}})
    leave_work(built, old)
    assert planned.why == built.plan("shards.block_bytes=4096")["shards-sft"].why
