"""A training that restarts, or continues at an older checkpoint; its unfinished work is kept."""

from pathlib import Path

import pytest
from support.held_locks import held_elsewhere
from support.planned_homes import House

from ttrain.cli.options import RestartOptions
from ttrain.engine import resume
from ttrain.engine.graph import Planned
from ttrain.engine.resume import restart, steps_in
from ttrain.errors import UsageError

SEED = "sft.seed=5"  # so that the stage runs


def unfinished(house: House, planned: Planned) -> Path:
    work = house.leave(planned, 10, 20, 30)
    (work / "output" / "run").mkdir()
    (work / "output" / "run" / "metrics.jsonl").write_text('{"step": 30}\n')
    return work


def test_fresh_training_renames_its_unfinished_work_aside(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    work = unfinished(built, planned)
    aside = f"at step 30 is set aside; --continue {work.name}.1 resumes it"
    assert restart(built.store, [planned], None) == [f"the unfinished work of sft {aside}"]
    assert not work.exists()
    again = built.plan(SEED)["sft"]
    assert again.why[0] == f"unfinished work {aside}"
    continued = built.plan(SEED, resume_key=f"{work.name}.1")["sft"]
    assert continued.partial_run is not None and continued.first_step == 30


def test_an_older_checkpoint_is_copied_and_the_old_work_kept(built: House) -> None:
    planned = built.plan(SEED)["sft"]
    work = unfinished(built, planned)
    assert restart(built.store, [planned], 20)[-1] == "sft continues at the checkpoint of step 20"
    assert steps_in(work / "output") == [10, 20]
    assert (work / "output" / "run" / "metrics.jsonl").exists()
    assert steps_in(work.with_name(f"{work.name}.1") / "output") == [10, 20, 30]
    assert built.plan(SEED)["sft"].first_step == 20
    assert resume.find_stage(built.store, work.name) == "sft", "a whole key is not ambiguous"
    aside = work.with_name(f"{work.name}.1")
    other = built.plan(SEED, "sft.optim.lr=0.0005", resume_key=aside.name)["sft"]
    restart(built.store, [other], 10)
    own = built.store.work("sft", other.known_key)
    assert steps_in(own / "output") == [10] and steps_in(aside / "output") == [10, 20, 30]
    [entry] = resume.history(own, other.known_key)
    assert (entry["key"], entry["step"]) == (aside.name, 10)
    assert "sft.optim.lr: 0.001 → 0.0005" in entry["differences"]


def test_what_cannot_restart_is_refused_and_stays(built: House) -> None:
    planned = built.plan(SEED)["sft"]

    def refuse(stage: str, step: int | None, words: str) -> None:
        with pytest.raises(UsageError, match=words):
            restart(built.store, [built.plan(SEED)[stage]], step)

    refuse("sft", 15, r"--from-step is 15, .* sft .*none")
    work = unfinished(built, planned)
    refuse("sft", 15, r"sft .* 10, 20, 30 .*keep_every_steps")
    refuse("tokenizer", 15, "rerun STAGE --from-step 15`")
    with held_elsewhere(built.store.root, "sft", work.name):
        for step in (None, 20):
            refuse("sft", step, "stop that run")
    assert steps_in(work / "output") == [10, 20, 30]
    with pytest.raises(UsageError, match=r"--fresh .*--from-step 3"):
        RestartOptions(fresh=True, from_step=3)
