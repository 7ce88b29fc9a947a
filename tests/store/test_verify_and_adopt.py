"""`ttrain artifacts` that verify, adopt, list and show."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.artifact_home import DAY, LONG_AGO, Home, keys, older, printed
from support.comparing import flip_bit
from support.planned_homes import House

from ttrain import api
from ttrain.core.files import read_json, write_json
from ttrain.engine import artifact_commands
from ttrain.engine.graph import Planned
from ttrain.engine.planner import key_of
from ttrain.errors import ArtifactError, DamagedFile, UsageError
from ttrain.store import runs
from ttrain.store.layout import Artifact
from ttrain.store.model_files import Reference


def alter(manifest: Path, **values: Any) -> None:
    manifest.write_text(
        json.dumps({**read_json(manifest), **values})
    )  # half a pair is an escape in it


def test_a_model_is_compared_with_no_manifest_that_was_altered(user_home: Home) -> None:
    """Nor with that of another program, such as a web page's in a directory above."""
    made = user_home.publish("sft", "mine")
    write_json(user_home.store.root.parent / "manifest.json", {"name": "a page"})
    reference = Reference("mine", made.path / "model")
    reference.verify()
    alter(made.path / "manifest.json", result={"loss": 1.4})
    with pytest.raises(
        DamagedFile,
        match=r"manifest\.json was altered after it was written; `ttrain artifacts verify",
    ):
        reference.verify()
    (made.path / "manifest.json").unlink()
    reference.verify()  # as any directory of a model


def test_verify_names_each_kind_of_damage_and_sets_it_aside(
    user_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was made from it stays."""
    names = ("whole", "flipped", "missing", "short", "cut")
    whole, *harmed = (user_home.publish("pretrain", name) for name in names)
    flipped, missing, short, cut = harmed
    sft = user_home.publish("sft", "sft", base=flipped)
    assert "6 artifacts" in printed(capsys, "artifacts", "verify")
    weights = "model/weights.bin"
    flip_bit(flipped.path / weights)
    assert user_home.store.find("pretrain", flipped.key), "a hit looks at sizes and times"
    (missing.path / weights).unlink()
    (short.path / weights).write_bytes(b"x")
    os.truncate(cut.path / "manifest.json", 40)
    problems = ("was altered after it was published", "is missing", "has 1 bytes where")
    said = {
        artifact.key: f"{weights} {problem}"
        for artifact, problem in zip(harmed, problems, strict=False)
    }
    said[cut.key] = "manifest.json cannot be read: "
    states = {
        row["key"]: row["state"]
        for row in json.loads(printed(capsys, "artifacts", "list", "--json"))
    }
    assert states.keys() == keys(whole, sft, *harmed) and states[cut.key].startswith(
        f"damaged: {said[cut.key]}"
    )
    told = json.loads(printed(capsys, "artifacts", "verify", "--json", code=1))
    assert (told["artifacts"], {entry["key"] for entry in told["damaged"]}) == (6, {*said})
    for entry in told["damaged"]:
        [problem] = entry["problems"]
        assert problem.startswith(said[entry["key"]])
    text = printed(capsys, "artifacts", "verify", "--set-aside", code=1)
    assert flipped.key[:12] in text and ": 4 damaged; moved to replaced" in text
    assert user_home.keys == keys(whole, sft) and "none damaged" in printed(
        capsys, "artifacts", "verify", "pretrain"
    )


@pytest.fixture
def pipeline(house: House, monkeypatch: pytest.MonkeyPatch) -> House:
    monkeypatch.setenv("TTRAIN_HOME", str(house.store.root))
    return house


def published(
    house: House, planned: Planned, *, seconds: float = 1.0, **ingredients: Any
) -> Artifact:
    """What the plan would build, but made of these other ingredients."""
    made = {**planned.ingredients, **ingredients}
    more = {"inputs": {}, "seconds": seconds, "provenance": {"libraries": {"torch": "2.12"}}}
    return house.publish(replace(planned, key=key_of(made), ingredients=made), "text", **more)


def planned_run(house: House) -> api.Plan:
    return api.plan("full", house.settings(), home=house.store.root)


def test_what_differs_in_code_alone_is_adopted_under_a_new_key(
    pipeline: House, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = pipeline.plan()["tokenizer"]
    old = published(pipeline, planned, code=older(planned))
    assert pipeline.plan()["tokenizer"].state == "run"
    text = printed(capsys, "artifacts", "adopt", "tokenizer", *pipeline.files)
    assert "module ttrain.data.tokenizer changed" in text
    after = pipeline.plan()["tokenizer"]
    assert (after.state, after.key) == ("cached", planned.key)
    assert after.why[0].startswith(
        f"adopted from {old.key[:12]}, although module ttrain.data.tokenizer changed"
    )
    new = pipeline.store.latest("tokenizer")
    assert (new.key, new.content) == (planned.key, old.content) and after.artifact == new
    (entry,) = new.manifest["adopted"]
    assert (entry["key"], entry["differences"][0]) == (
        old.key,
        "module ttrain.data.tokenizer changed",
    )
    assert new.manifest["provenance"] == old.manifest["provenance"], (
        "it is still the work of that day"
    )
    assert (new.path / "heldout" / "file").samefile(old.path / "heldout" / "file")
    assert pipeline.store.find("tokenizer", old.key) == old and artifact_commands.verify(new) == []
    assert artifact_commands.adopt(planned_run(pipeline), "tokenizer") == []


def test_what_differs_in_more_than_code_is_not_adopted_and_what_is_damaged_is_refused(
    pipeline: House,
) -> None:
    planned = pipeline.plan()["tokenizer"]
    changes: list[dict[str, Any]] = [
        {"settings": {"tokenizer.vocab_size": 7}},
        {"files": {"train": [{"name": "documents.jsonl", "sha256": "0" * 64}]}},
    ]
    for changed in changes:
        published(pipeline, planned, code=older(planned), **changed)
    assert artifact_commands.adopt(planned_run(pipeline)) == []
    old = published(pipeline, planned, code=older(planned))
    flip_bit(old.path / "heldout" / "file")
    with pytest.raises(ArtifactError, match="heldout/file was altered"):
        artifact_commands.adopt(planned_run(pipeline))


def test_adopt_all_keeps_what_code_alone_would_build_again_and_nothing_else(
    pipeline: House, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer, and the shards that read it, whose key is known once it is adopted; not those of other settings."""
    planned = pipeline.plan()
    published(pipeline, planned["tokenizer"], code=older(planned["tokenizer"]))
    text = printed(capsys, "artifacts", "adopt", "--all", *pipeline.files)
    assert "tokenizer" in text and "shards" not in text and "this saves 1 s" in text
    shards = pipeline.plan()["shards-sft"]
    published(pipeline, shards, code=older(shards))
    other = pipeline.plan("shards.block_bytes=4096")["shards-lora"]
    published(pipeline, other, code=older(other))
    pipeline.store.path("tokenizer", str(pipeline.plan()["tokenizer"].key)).rename(
        pipeline.data / "moved"
    )
    kept = json.loads(printed(capsys, "artifacts", "adopt", "--all", "--json", *pipeline.files))
    assert [each["stage"] for each in kept] == ["tokenizer", "shards-sft"]
    stages = pipeline.plan()
    assert [stages[name].state for name in ("tokenizer", "shards-sft", "shards-lora")] == [
        "cached",
        "cached",
        "run",
    ]
    assert "nothing was adopted" in printed(capsys, "artifacts", "adopt", "--all", *pipeline.files)


def test_a_run_remarks_on_what_it_would_build_again_for_code_alone_after_ten_minutes(
    pipeline: House,
) -> None:
    planned = pipeline.plan()["tokenizer"]
    old = published(pipeline, planned, code=older(planned))
    plan = planned_run(pipeline)
    assert artifact_commands.remarks_on_code(plan) == []
    shutil.rmtree(old.path)
    published(pipeline, planned, code=older(planned), seconds=4000.0)
    [line] = artifact_commands.remarks_on_code(plan)
    assert line.startswith("tokenizer, which took ") and "`ttrain artifacts adopt --all`" in line


def test_the_list_names_state_size_and_newest_run_of_each(
    user_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of what could go on."""
    whole, broken = (
        user_home.publish("sft", "whole"),
        user_home.publish("sft", "broken", age=2 * LONG_AGO),
    )
    (broken.path / "model" / "weights.bin").unlink()
    user_home.run(whole, age=DAY)
    user_home.run(whole)
    write_json(user_home.work("pretrain", "a" * 64) / "ingredients.json", {"settings": {}})
    first, *_ = rows = json.loads(printed(capsys, "artifacts", "list", "--json"))
    states = {row["key"]: row["state"].partition(":")[0] for row in rows}
    assert list(states.items()) == [
        (whole.key, "finished"),
        (broken.key, "damaged"),
        ("a" * 64, "unfinished at step 7"),
    ]
    assert (first["run"], first["bytes"]) == (runs.history(user_home.store.root)[0]["run"], 5000)
    assert json.loads(printed(capsys, "artifacts", "list", "lora", "--json")) == []
    assert "2 artifacts" in printed(capsys, "artifacts", "list", "sft")


def test_an_artifact_is_found_by_the_beginning_of_its_key(
    user_home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        user_home.publish("sft", str(number), age=(20 - number) * DAY) for number in range(17)
    ]  # of 16 first letters
    assert printed(capsys, "artifacts", "path", "sft") == f"{made[-1].path}\n"
    assert printed(capsys, "artifacts", "path", "sft", made[0].key[:10]) == f"{made[0].path}\n"
    shown = json.loads(printed(capsys, "artifacts", "show", "sft", made[0].key[:10], "--json"))
    assert (shown["key"], shown["damage"], shown["result"]) == (made[0].key, None, {"loss": 1.5})
    assert made[0].key in printed(capsys, "artifacts", "show", "sft", made[0].key[:10])
    twice = next(
        letter for letter in "0123456789abcdef" if sum(one.key[0] == letter for one in made) > 1
    )
    for prefix, said in (
        ("xyz", "sft has no artifact with the key 'xyz'"),
        (twice, "is the beginning or end of"),
    ):
        with pytest.raises(UsageError, match=said):
            artifact_commands.find_artifact(user_home.store, "sft", prefix)
    with pytest.raises(UsageError, match="there is no stage 'stf'"):
        artifact_commands.find_artifact(user_home.store, "stf")
