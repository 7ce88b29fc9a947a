"""A training that begins again, or at an older checkpoint; unfinished work is kept beside it."""

from pathlib import Path

import pytest
from support.held_locks import held_elsewhere
from support.planned_homes import House
from support.tiny_stages import Home, Watcher, build_stage, stage_settings

from ttrain.cli.options import RestartOptions
from ttrain.engine import resume
from ttrain.engine.graph import Planned, Rerun
from ttrain.engine.planner import plan_stage
from ttrain.engine.resume import restart, steps_in
from ttrain.errors import UsageError
from ttrain.tasks import PRETRAIN

SEED = "sft.seed=5"  # so that there is something to do


def unfinished(house: House, planned: Planned, steps: tuple[int, ...] = (10, 20, 30)) -> Path:
    work = house.leave(planned, *steps)
    (work / "output" / "run").mkdir()
    (work / "output" / "run" / "metrics.jsonl").write_text('{"step": 30}\n')
    return work


def test_a_fresh_training_finds_no_work_and_that_which_was_there_can_be_continued(
    built: House,
) -> None:
    planned = built.plan(SEED)["sft"]
    work = unfinished(built, planned)
    line = (
        f"the unfinished work of sft at step 30 is set aside; --continue {work.name}.1 resumes it"
    )
    assert restart(built.store, [planned], None) == [line] and not work.exists()
    again = built.plan(SEED)["sft"]
    assert (
        again.why[0]
        == f"unfinished work at step 30 is set aside; --continue {work.name}.1 resumes it"
    )
    continued = built.plan(SEED, resume_key=f"{work.name}.1")["sft"]
    assert continued.partial_run is not None and continued.first_step == 30
    unfinished(built, again, (5,))
    restart(built.store, [again], None)
    assert steps_in(work.with_name(f"{work.name}.2") / "output") == [5], (
        "each has a name of its own"
    )
    assert restart(built.store, [again], None) == [], "nothing is left to set aside"


def test_an_older_checkpoint_is_the_newest_of_new_work_and_all_of_the_old_work_is_kept(
    built: House,
) -> None:
    planned = built.plan(SEED)["sft"]
    work = unfinished(built, planned)
    assert restart(built.store, [planned], 20)[-1] == "sft continues at the checkpoint of step 20"
    assert (
        steps_in(work / "output") == [10, 20]
        and (work / "output" / "run" / "metrics.jsonl").exists()
    )
    assert steps_in(work.with_name(f"{work.name}.1") / "output") == [10, 20, 30]
    assert built.plan(SEED)["sft"].why[0] == "continues its unfinished work at step 20"


def test_an_older_checkpoint_of_other_work_is_continued_with_its_differences(built: House) -> None:
    work = unfinished(built, built.plan(SEED)["sft"])
    planned = built.plan(SEED, "sft.optim.lr=0.0005", resume_key=work.name)["sft"]
    assert planned.key
    restart(built.store, [planned], 10)
    mine = built.store.work("sft", planned.key)
    assert steps_in(mine / "output") == [10] and steps_in(work / "output") == [10, 20, 30]
    [entry] = resume.history(mine, planned.key)
    assert (entry["key"], entry["step"]) == (
        work.name,
        10,
    ) and "sft.optim.lr: 0.001 → 0.0005" in entry["differences"]


def test_what_cannot_be_begun_again_is_refused_and_stays(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    with pytest.raises(
        UsageError,
        match="--from-step is 15, but sft has no checkpoint of that step; there are none",
    ):
        restart(built.store, [planned], 15)
    work = unfinished(built, planned)
    with pytest.raises(
        UsageError,
        match=r"is 15, but sft has no .* those of the steps 10, 20, 30 .*keep_every_steps keeps more",
    ):
        restart(built.store, [planned], 15)
    with pytest.raises(
        UsageError, match="but no training will run; `ttrain pipeline rerun STAGE --from-step 15`"
    ):
        restart(built.store, [built.plan(SEED)["tokenizer"]], 15)
    with held_elsewhere(built.store.root, "sft", work.name):
        for from_step in (None, 20):
            with pytest.raises(UsageError, match="a run is using it now; stop that run first"):
                restart(built.store, [planned], from_step)
    assert steps_in(work / "output") == [10, 20, 30]
    with pytest.raises(UsageError, match="--fresh cannot be combined with --from-step 3"):
        RestartOptions(fresh=True, from_step=3)


def test_a_finished_training_that_runs_again_from_a_checkpoint_comes_to_the_same_bits(
    tmp_path: Path,
) -> None:
    """With the state of its optimizer; also an earlier best checkpoint is still there."""
    home = Home.make(tmp_path / "home")
    settings = stage_settings(
        8, {"validate_every_steps": 2}, checkpoint_every_steps=2, keep_checkpoints=9
    )
    inputs = home.pretrain_inputs()
    first = build_stage(PRETRAIN, settings, home.store, inputs, Watcher()).artifact
    assert steps_in(first.path) == [2, 4, 6, 8]
    again = Rerun(frozenset({"pretrain"}))
    planned = plan_stage(PRETRAIN, settings, home.store, inputs, again, forced=True)
    restart(home.store, [planned], 4)
    observer = Watcher()
    outcome = build_stage(PRETRAIN, settings, home.store, inputs, observer, again, forced=True)
    assert outcome.state == "equal"
    assert any("continuing at step 4" in line for line in observer.lines)
