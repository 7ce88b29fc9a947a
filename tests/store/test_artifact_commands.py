"""`ttrain artifacts`: what is cleaned, verified and adopted; a kill damages nothing."""

import json
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.artifact_home import DAY, Home, keys, printed
from support.comparing import flip_bit
from support.kill_points import number_printed_by
from support.planned_homes import House

from ttrain import api
from ttrain.core.files import read_json, write_json
from ttrain.core.hashing import digest_of
from ttrain.engine import artifact_commands
from ttrain.engine.graph import Planned
from ttrain.engine.planner import key_of
from ttrain.errors import ArtifactError, DamagedFile
from ttrain.nightly.records import needed_keys
from ttrain.store import runs
from ttrain.store.garbage_collection import CleanupResult, Kept, clean
from ttrain.store.layout import Artifact
from ttrain.store.model_files import Reference

Capture = pytest.CaptureFixture[str]
CHANGED_MODULE = "module ttrain.data.tokenizer changed"

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
names = ("rename", "unlink", "rmdir", "mkdir")
print(killed_everywhere(Path(sys.argv[1]), Path(sys.argv[2]), names, act))
"""


def only_record(home: Home) -> Path:
    (path,) = (home.store.root / "runs").glob("full-*.json")
    return path


def test_the_newest_different_runs_keep_their_artifacts_and_inputs(user_home: Home) -> None:
    tokenizer = user_home.publish("tokenizer", "t")
    publish = partial(user_home.publish, "pretrain", tokenizer=tokenizer)
    old, middle, new = map(publish, ("a", "b", "c"))
    for age, pretrain in ((90, old), (80, middle), (70, new), (60, new), (50, new)):
        user_home.run(pretrain, age=age * DAY)  # `ttrain stage run pretrain` records no inputs
    cleaned = user_home.clean(keep=2)
    assert user_home.keys == keys(tokenizer, middle, new), "runs of the same artifacts count once"
    assert [(removal.kind, removal.key) for removal in cleaned.removed] == [("artifact", old.key)]
    young = publish("d", DAY)
    user_home.run(middle, age=3 * DAY)
    user_home.run(new, age=2 * DAY)
    user_home.clean(keep=1, days=14)
    assert user_home.keys == keys(tokenizer, middle, new, young), "young ones, and of recent runs"


def test_nothing_is_removed_while_a_run_is_in_progress(user_home: Home) -> None:
    tokenizer, lora = (user_home.publish(stage, stage) for stage in ("tokenizer", "lora"))
    work = user_home.work("pretrain", "a" * 64)
    running = user_home.run(tokenizer, age=90 * DAY, outcome="running", sft="pending")
    path = only_record(user_home)
    user_home.run(user_home.publish("pretrain", "p"), age=20 * DAY)
    cleaned = user_home.clean(keep=1)
    assert cleaned.removed == [] and [run[-4:] for run in cleaned.running] == [running.run[-4:]]
    write_json(path, {**read_json(path), "process": {"pid": os.getpid(), "started": 1.0}})
    user_home.clean(keep=1)
    assert not work.exists() and not user_home.keys & keys(tokenizer, lora)


def test_a_registered_model_keeps_its_base_models_but_not_their_data(user_home: Home) -> None:
    tokenizer = user_home.publish("tokenizer", "t")
    shards = user_home.publish("shards-lora", "h", tokenizer=tokenizer)
    base = user_home.publish("pretrain", "p", tokenizer=tokenizer, shards=shards)
    sft = user_home.publish("sft", "s", base=base, shards=shards)
    lora = user_home.publish("lora", "l", base=sft, shards=shards)
    unregistered = user_home.publish("lora", "o", base=sft)
    cleaned = user_home.clean([lora.key])
    assert user_home.keys == keys(tokenizer, base, sft, lora)
    assert {removal.key for removal in cleaned.removed} == keys(unregistered, shards)
    assert cleaned.kept_counts == {"a registered model": 4}


def test_replaced_artifacts_stay_while_they_are_young_or_registered(user_home: Home) -> None:
    ages = {"old": 90, "young": 1, "registered": 90}
    made = {name: user_home.publish("sft", name) for name in ages}
    for name, artifact in made.items():
        path = user_home.store.set_aside("sft", artifact.key)
        path.rename(path.with_name(f"{artifact.key}-{time.time_ns() - ages[name] * DAY * 10**9}"))
    user_home.clean([made["registered"].key])
    left = {path.name.partition("-")[0] for path in user_home.store.root.glob("replaced/*/*")}
    assert left == keys(made["young"], made["registered"])


def test_unfinished_work_of_a_kept_run_stays_with_what_it_reads(user_home: Home) -> None:
    base, unused = (user_home.publish("pretrain", name) for name in ("p", "unused"))
    wanted = user_home.work("sft", "a" * 64, reads={"base": base})
    dead = user_home.work("sft", "b" * 64)
    finished = user_home.publish("sft", "f")
    leftover = user_home.work("sft", finished.key, age=0)  # killed right after it was published
    user_home.run(age=80 * DAY, outcome="crashed", sft="crashed")
    record = read_json(only_record(user_home))
    record["stages"][0]["key"] = wanted.name
    write_json(only_record(user_home), record)
    user_home.run(finished)
    cleaned = user_home.clean(keep=2)
    assert (wanted / "output" / "checkpoints" / "step-7" / "state.json").exists()
    assert base.key in user_home.keys and unused.key not in user_home.keys
    reasons = {removal.path: removal.why for removal in cleaned.removed if removal.kind == "work"}
    assert reasons == {leftover: "its artifact is finished", dead: "no recent run left it"}
    assert not dead.exists() and not leftover.exists()


def test_the_next_clean_finishes_one_that_was_killed(user_home: Home, tmp_path: Path) -> None:
    kept = user_home.publish("pretrain", "kept")
    user_home.publish("sft", "unused")
    user_home.run(kept)
    user_home.work("lora", "d" * 64)
    copies = number_printed_by(KILLED_CLEAN, user_home.store.root, tmp_path / "copies")
    assert copies > 10, "it was killed at each of its calls"
    for number in range(1, copies + 1):
        copy = Home(tmp_path / "copies" / str(number))
        for artifact in copy.store.artifacts():
            assert copy.store.damage(artifact) is None, "all of it or nothing"
        assert kept.key in copy.keys
        copy.clean()
        assert copy.keys == keys(kept)
        assert not list(copy.store.root.glob("*/*/.trash-*"))
        assert not [path for path in copy.store.root.glob("work/*/*") if path.is_dir()]


def test_clean_run_removes_what_only_that_run_needs_however_young(user_home: Home) -> None:
    stages = {"shared": "tokenizer", "mine": "sft", "registered": "lora", "under": "pretrain"}
    made = {name: user_home.publish(stage, name, age=0) for name, stage in stages.items()}
    mine, under = made["mine"], made["under"]
    foreign = user_home.publish("lora", "foreign", age=0, base=under)
    user_home.run(made["shared"], foreign)
    suffix = user_home.run(*made.values()).run[-4:]
    work = user_home.work("sft", mine.key)
    store, known = user_home.store, {made["registered"].key}
    record = next(run for run in runs.history(store.root) if run["run"].endswith(suffix))

    def clean_run(dry_run: bool) -> CleanupResult:
        kept = Kept(only_run=record)
        return clean(store, known, kept, needed_by_nights=needed_keys, dry_run=dry_run)

    dry = clean_run(dry_run=True)
    assert {removal.path for removal in dry.removed} == {mine.path, work} and mine.path.is_dir()
    assert dry.kept_counts == {"another run": 2, "a registered model": 1} and dry.bytes > 0
    assert clean_run(dry_run=False).removed == dry.removed
    assert user_home.keys == keys(foreign, *made.values()) - keys(mine) and not work.exists()
    assert runs.read(store.root, str(record["run"])), "its record stays"


def test_a_model_is_not_compared_with_an_altered_manifest(user_home: Home) -> None:
    made = user_home.publish("sft", "mine")
    reference = Reference("mine", made.path / "model")
    reference.verify()
    manifest = made.path / "manifest.json"
    manifest.write_text(json.dumps({**read_json(manifest), "result": {"loss": 1.4}}))
    with pytest.raises(DamagedFile, match=r"manifest\.json.*verify"):
        reference.verify()
    manifest.unlink()
    reference.verify()  # as any directory of a model


def test_verify_names_all_damage_and_sets_it_aside(user_home: Home, capsys: Capture) -> None:
    names = ("whole", "flipped", "missing", "short", "cut")
    whole, flipped, missing, short, cut = (user_home.publish("pretrain", name) for name in names)
    sft = user_home.publish("sft", "sft", base=flipped)
    assert "6 artifacts" in printed(capsys, "artifacts", "verify")
    weights = "model/weights.bin"
    flip_bit(flipped.path / weights)
    (missing.path / weights).unlink()
    (short.path / weights).write_bytes(b"x")
    os.truncate(cut.path / "manifest.json", 40)
    problems = {
        flipped.key: f"{weights} was altered",
        missing.key: f"{weights} is missing",
        short.key: f"{weights} has 1 bytes",
        cut.key: "manifest.json cannot be read: ",
    }
    report = json.loads(printed(capsys, "artifacts", "verify", "--json", code=1))
    assert (report["artifacts"], len(report["damaged"])) == (6, 4)
    for entry in report["damaged"]:
        [problem] = entry["problems"]
        assert problem.startswith(problems[entry["key"]])
    assert flipped.key[:12] in printed(capsys, "artifacts", "verify", "--set-aside", code=1)
    assert user_home.keys == keys(whole, sft), "what was made from a damaged one stays"
    assert len(list(user_home.store.root.glob("replaced/*/*"))) == 4


@pytest.fixture
def pipeline(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setenv("TTRAIN_HOME", str(house.store.root))
    return house


def published(house: House, planned: Planned, seconds: float = 1.0, **changed: Any) -> Artifact:
    """What the plan would build, but of older code, and of the changed ingredients."""
    code = {**planned.ingredients["code"], "ttrain.data.tokenizer": digest_of("old")}
    ingredients = {**planned.ingredients, "code": code, **changed}
    provenance = {"libraries": {"torch": "2.12"}}
    planned = replace(planned, key=key_of(ingredients), ingredients=ingredients)
    return house.publish(planned, "text", inputs={}, seconds=seconds, provenance=provenance)


def planned_run(house: House) -> api.Plan:
    return api.plan("full", house.settings(), home=house.store.root)


def test_what_differs_only_in_code_gets_a_new_key(pipeline: House, capsys: Capture) -> None:
    planned = pipeline.plan()["tokenizer"]
    old = published(pipeline, planned)
    assert pipeline.plan()["tokenizer"].state == "run"
    text = printed(capsys, "artifacts", "adopt", "tokenizer", *pipeline.files)
    assert CHANGED_MODULE in text
    after = pipeline.plan()["tokenizer"]
    assert (after.state, after.key) == ("cached", planned.key)
    assert after.why[0].startswith(f"adopted from {old.key[:12]}, although {CHANGED_MODULE}")
    new = pipeline.store.latest("tokenizer")
    assert (new.key, new.content) == (planned.key, old.content) and after.artifact == new
    (entry,) = new.manifest["adopted"]
    assert (entry["key"], entry["differences"][0]) == (old.key, CHANGED_MODULE)
    assert new.provenance == old.provenance, "it is still the work of that day"
    assert pipeline.store.find("tokenizer", old.key) == old and artifact_commands.verify(new) == []
    assert artifact_commands.adopt(planned_run(pipeline), "tokenizer") == []


def test_other_settings_or_files_are_not_adopted_and_damage_is_refused(pipeline: House) -> None:
    planned = pipeline.plan()["tokenizer"]
    published(pipeline, planned, settings={"tokenizer.vocab_size": 7})
    file = {"name": "documents.jsonl", "sha256": "0" * 64}
    published(pipeline, planned, files={"train": [file]})
    assert artifact_commands.adopt(planned_run(pipeline)) == []
    flip_bit(published(pipeline, planned).path / "heldout" / "file")
    with pytest.raises(ArtifactError, match="heldout/file"):
        artifact_commands.adopt(planned_run(pipeline))


def test_adopt_all_adopts_only_what_differs_in_code(pipeline: House, capsys: Capture) -> None:
    """The shards, too, whose key is known once the tokenizer is adopted; none of other settings."""
    tokenizer = pipeline.plan()["tokenizer"]
    published(pipeline, tokenizer)
    current = pipeline.publish(tokenizer, "text", inputs={})
    published(pipeline, pipeline.plan()["shards-sft"])
    published(pipeline, pipeline.plan("shards.block_bytes=4096")["shards-lora"])
    current.path.rename(pipeline.data / "moved")
    adopted = json.loads(printed(capsys, "artifacts", "adopt", "--all", *pipeline.files, "--json"))
    assert [each["stage"] for each in adopted] == ["tokenizer", "shards-sft"]
    stages = pipeline.plan()
    states = [stages[name].state for name in ("tokenizer", "shards-sft", "shards-lora")]
    assert states == ["cached", "cached", "run"]
