"""The commands of sets of models: list, promote, roll back."""

import json
from functools import partial
from pathlib import Path

import pytest
from support.artifact_home import SUFFIXES, register
from support.data_commands import Run, in_process

from ttrain.store.registry import Registry

DECISION = {"promote": True, "reason": "better by 0.10000"}


@pytest.fixture
def models(capsys: pytest.CaptureFixture[str]) -> Run:
    return partial(in_process(capsys), "models")


def test_the_commands_list_promote_and_roll_back(sets_home: Path, models: Run) -> None:
    (sets_home / "runs").mkdir()
    stages = [{"name": stage, "key": f"{stage}-1", "outcome": "cached"} for stage in SUFFIXES]
    record = {"run": "again", "pipeline": "full", "outcome": "completed", "started_unix": 0}
    record |= {"stages": stages, "process": {"pid": 1, "started": 0}}
    (sets_home / "runs" / "again.json").write_text(json.dumps(record))
    for name, version in (("2", "2"), ("ll-3", "3"), ("again", "1")):
        line = f"mine/{version} of the run full-{version} is champion: mine-base/{version}"
        assert models("promote", name).out.startswith(line)
    assert "already" in models("promote", "1").out
    assert models("promote", "--previous", "--json").json["version"] == "3"
    Registry(sets_home).decide("mine", "3", DECISION, run="full-3")
    listed = models("list", "--json").json
    aliases = [(entry["version"], entry["aliases"]) for entry in listed]
    assert aliases == [("3", ["champion"]), ("2", []), ("1", [])]
    assert listed[0]["decision"] == DECISION
    assert DECISION["reason"] in " ".join(models("list").out.split())


def test_sets_of_two_pipelines_need_a_name(sets_home: Path, models: Run) -> None:
    register(sets_home, 1, name="other")
    refused = models("promote", "1")
    assert refused.code == 2 and "--name" in refused.err
    assert models("promote", "1", "--name", "other").code == 0
    champion = Registry(sets_home).champion("other")
    assert champion is not None and champion.version == "1"
    assert Registry(sets_home).champion("mine") is None
