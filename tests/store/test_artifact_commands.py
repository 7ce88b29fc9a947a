"""`ttrain artifacts`: every byte verified, kept across code changes alone, and never cleaned away while anyone needs it."""

import json
import os
import time
from pathlib import Path

import pytest
from support.artifact_home import DAY, Home, keys, printed
from support.kill_points import number_printed_by

from ttrain.core.files import read_json, write_json
from ttrain.nightly.records import needed_keys
from ttrain.store import runs
from ttrain.store.garbage_collection import Kept, clean

# In a process of its own, since it forks: cleans copies of a home, each killed one call later.
KILLED_CLEAN = """
import sys
from pathlib import Path
from support.kill_points import killed_everywhere
from ttrain.store.garbage_collection import Kept, clean
from ttrain.nightly.records import needed_keys
from ttrain.store.artifacts import ArtifactStore
def act(home):
    clean(ArtifactStore(home), (), Kept.recent(1, 14), needed_by_nights=needed_keys)
print(killed_everywhere(Path(sys.argv[1]), Path(sys.argv[2]), ("rename", "unlink", "rmdir", "mkdir"), act))
"""


def size_on_disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_what_the_newest_runs_used_is_kept_with_its_inputs_and_what_only_older_ones_did_is_not(
    user_home: Home,
) -> None:
    tokenizer = user_home.publish("tokenizer", "t")
    old, middle, new = (
        user_home.publish("pretrain", name, tokenizer=tokenizer)
        for name in ("old", "middle", "new")
    )
    for age, pretrain in ((90, old), (80, middle), (70, new), (60, new), (50, new)):
        user_home.run(
            pretrain, age=age * DAY
        )  # as `ttrain stage run pretrain` leaves it, which does not name its inputs
    cleaned = user_home.clean(keep=2)
    assert user_home.keys == keys(tokenizer, middle, new), "runs with the same artifacts count once"
    assert [(removal.kind, removal.key) for removal in cleaned.removed] == [("artifact", old.key)]
    assert user_home.clean(keep=2).removed == []


def test_what_a_recent_run_used_or_what_is_young_is_kept_whatever_the_number_of_runs(
    user_home: Home,
) -> None:
    old, used, young = (
        user_home.publish("pretrain", name, age)
        for name, age in (("a", 90 * DAY), ("b", 90 * DAY), ("c", DAY))
    )
    user_home.run(old, age=80 * DAY)
    user_home.run(used, age=3 * DAY)
    user_home.run(user_home.publish("sft", "d"), age=2 * DAY)
    user_home.clean(keep=1, days=14)
    assert user_home.keys >= keys(used, young)
    assert old.key not in user_home.keys


def test_while_a_run_is_in_progress_whose_process_is_there_nothing_goes(user_home: Home) -> None:
    """Which artifacts its coming stages take is not known before they begin."""
    tokenizer, other = (user_home.publish(stage, stage) for stage in ("tokenizer", "lora"))
    work = user_home.work("pretrain", "a" * 64)
    running = user_home.run(tokenizer, age=90 * DAY, outcome="running", sft="pending")
    (path,) = (user_home.store.root / "runs").glob("full-*.json")
    for age in (30, 20):
        user_home.run(user_home.publish("pretrain", str(age)), age=age * DAY)
    cleaned = user_home.clean(keep=1)
    assert cleaned.removed == [] and [run[-4:] for run in cleaned.running] == [running.run[-4:]]
    write_json(path, {**read_json(path), "process": {"pid": os.getpid(), "started": 1.0}})
    user_home.clean(keep=1)
    assert not work.exists() and not user_home.keys & keys(tokenizer, other)


def test_a_registered_model_keeps_itself_and_the_models_below_but_not_the_data_it_was_trained_on(
    user_home: Home,
) -> None:
    tokenizer = user_home.publish("tokenizer", "t")
    shards = user_home.publish("shards-lora", "h", tokenizer=tokenizer)
    base = user_home.publish("pretrain", "p", tokenizer=tokenizer, shards=shards)
    sft = user_home.publish("sft", "s", base=base, shards=shards)
    lora = user_home.publish("lora", "l", base=sft, shards=shards)
    other = user_home.publish("lora", "o", base=sft)
    cleaned = user_home.clean([lora.key])
    assert user_home.keys == keys(tokenizer, base, sft, lora)
    assert keys(other, shards) == {removal.key for removal in cleaned.removed}
    assert cleaned.kept_counts == {"a registered model": 4}


def test_what_was_replaced_stays_while_it_is_young_or_registered(user_home: Home) -> None:
    old, young, registered = (
        user_home.publish("sft", name) for name in ("old", "young", "registered")
    )
    for artifact, age in ((old, 90), (young, 1), (registered, 90)):
        path = user_home.store.set_aside("sft", artifact.key)
        path.rename(path.with_name(f"{artifact.key}-{time.time_ns() - age * DAY * 10**9}"))
    user_home.clean([registered.key])
    left = {path.name.partition("-")[0] for path in (user_home.store.root / "replaced").glob("*/*")}
    assert left == keys(young, registered)


def test_unfinished_work_of_a_kept_run_stays_with_what_it_reads_and_dead_work_goes(
    user_home: Home,
) -> None:
    base, gone = user_home.publish("pretrain", "p"), user_home.publish("pretrain", "gone")
    wanted, dead = (
        user_home.work("sft", "a" * 64, reads={"base": base}),
        user_home.work("sft", "b" * 64),
    )
    finished = user_home.publish("sft", "f")
    leftover = user_home.work("sft", finished.key, age=0)  # killed right after it was published
    user_home.run(age=80 * DAY, outcome="crashed", sft="crashed")
    (path,) = (user_home.store.root / "runs").glob("full-*.json")
    told = read_json(path)
    told["stages"][0]["key"] = wanted.name
    write_json(path, told)
    user_home.run(finished)
    cleaned = user_home.clean(keep=2)
    assert (wanted / "output" / "checkpoints" / "step-7" / "state.json").exists()
    assert base.key in user_home.keys and gone.key not in user_home.keys
    reasons = {removal.path: removal.why for removal in cleaned.removed if removal.kind == "work"}
    assert reasons == {leftover: "its artifact is finished", dead: "no recent run left it"}
    assert not dead.exists() and not leftover.exists()


def test_a_clean_that_is_killed_leaves_whole_artifacts_and_the_next_one_finishes(
    user_home: Home, tmp_path: Path
) -> None:
    kept, gone = user_home.publish("pretrain", "kept"), user_home.publish("sft", "gone")
    user_home.run(kept)
    user_home.work("lora", "d" * 64)
    copies = number_printed_by(KILLED_CLEAN, user_home.store.root, tmp_path / "copies")
    assert copies > 10, "it was killed at each of its calls"
    for number in range(1, copies + 1):
        copy = Home(tmp_path / "copies" / str(number))
        for artifact in (kept, gone):
            found = copy.store.at(copy.store.path(artifact.stage, artifact.key))
            assert found is None or copy.store.damage(found) is None, "all of it or nothing"
        assert kept.key in copy.keys
        copy.clean()
        assert copy.keys == keys(kept)
        assert not list(copy.store.root.glob("*/*/.trash-*"))
        assert not [path for path in (copy.store.root / "work").glob("*/*") if path.is_dir()]


def test_the_command_tells_what_and_how_much_it_removed(
    user_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, gone = user_home.publish("pretrain", "kept"), user_home.publish("pretrain", "gone")
    user_home.run(kept)
    user_home.work("sft", "b" * 64)
    root = user_home.store.root
    elsewhere = root / "elsewhere"
    os.link(
        gone.path / "model" / "weights.bin", elsewhere
    )  # as MLflow keeps big files: its bytes are not free afterwards

    def files() -> list[Path]:
        return sorted(path for path in root.rglob("*") if path.suffix not in (".lock", ".holder"))

    before, size = files(), size_on_disk(root)
    told = json.loads(printed(capsys, "artifacts", "clean", "--dry-run", "--json"))
    assert told["dry_run"] and [one["key"] for one in told["removed"]] == [gone.key, "b" * 64]
    assert "2 would be removed" in printed(
        capsys, "artifacts", "clean", "--dry-run", "--keep-runs", "1"
    )
    assert files() == before
    done = json.loads(printed(capsys, "artifacts", "clean", "--older-than", "20", "--json"))
    assert done["removed"] == told["removed"] and not gone.path.exists()
    assert done["bytes"] == told["bytes"] == size - size_on_disk(root) - elsewhere.stat().st_size
    user_home.publish("pretrain", "another")
    assert "1 removed" in printed(capsys, "artifacts", "clean", "--older-than", "20")


def record_of(home: Home, run: runs.RunRecord) -> runs.RecordedRun:
    return next(
        each for each in runs.history(home.store.root) if each["run"].endswith(run.run[-4:])
    )


def test_clean_run_removes_what_only_that_run_needs_however_young(user_home: Home) -> None:
    shared, mine = (
        user_home.publish("tokenizer", "shared", age=0),
        user_home.publish("sft", "mine", age=0),
    )
    registered = user_home.publish("lora", "registered", age=0)
    under = user_home.publish("pretrain", "under", age=0)
    other = user_home.publish("lora", "other", age=0, base=under)
    user_home.run(shared, other)
    record = record_of(user_home, user_home.run(shared, mine, registered, under))
    work = user_home.work("sft", mine.key)
    store, known = user_home.store, {registered.key}
    seen = clean(store, known, Kept(only_run=record), needed_by_nights=needed_keys, dry_run=True)
    assert {each.path for each in seen.removed} == {mine.path, work} and mine.path.is_dir()
    assert seen.kept_counts == {"another run": 2, "a registered model": 1} and seen.bytes > 0
    assert (
        clean(store, known, Kept(only_run=record), needed_by_nights=needed_keys).removed
        == seen.removed
    )
    assert user_home.keys == keys(shared, registered, under, other) and not work.exists()
    assert runs.read(store.root, str(record["run"])), "its record stays"
