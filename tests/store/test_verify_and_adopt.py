"""`ttrain artifacts` that verify, adopt, list and show."""

import json
import os
from dataclasses import replace
from typing import Any

import pytest
from support.artifact_home import Home, keys, older, printed
from support.comparing import flip_bit
from support.planned_homes import House

from ttrain import api
from ttrain.core.files import read_json
from ttrain.engine import artifact_commands
from ttrain.engine.graph import Planned
from ttrain.engine.planner import key_of
from ttrain.errors import ArtifactError, DamagedFile
from ttrain.store.layout import Artifact
from ttrain.store.model_files import Reference

Capture = pytest.CaptureFixture[str]
CHANGED_MODULE = "module ttrain.data.tokenizer changed"


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
    ingredients = {**planned.ingredients, "code": older(planned), **changed}
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


def test_adopt_all_adopts_stages_whose_key_depends_on_adopted_ones(pipeline: House) -> None:
    published(pipeline, pipeline.plan()["tokenizer"])
    artifact_commands.adopt(planned_run(pipeline))
    published(pipeline, pipeline.plan()["shards-sft"])
    tokenizer = pipeline.store.path("tokenizer", str(pipeline.plan()["tokenizer"].key))
    tokenizer.rename(pipeline.data / "moved")
    artifact_commands.adopt(planned_run(pipeline))
    stages = pipeline.plan()
    assert stages["tokenizer"].state == stages["shards-sft"].state == "cached"
