"""Names: run, stage and directory lead to the same files; an unknown one lists what exists."""

import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from ttrain.core.files import write_json
from ttrain.data import existing
from ttrain.engine.labels import new_run_name
from ttrain.errors import ArtifactError, UsageError
from ttrain.lineage import lookup
from ttrain.lineage.lookup import resolve
from ttrain.model import factory
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER, MODEL, SECOND_HEAD, Reference, weights_digest
from ttrain.store.runs import RunRecord


def write_model(directory: Path, weights: bytes) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    (directory / MODEL).write_bytes(weights)
    return directory


def write_adapter(directory: Path, base: Path, named: str = "ttrain-sft") -> Path:
    directory.mkdir(parents=True)
    write_json(directory / "adapter_config.json", {"base_model_name_or_path": named})
    (directory / ADAPTER).write_bytes(b"adapter")
    write_json(directory / "base.json", {"base_weights_sha256": weights_digest(base)})
    return directory


class Home:
    """A run with tokenizer, SFT and adapter that failed, and a newer SFT model of no run."""

    def __init__(self, root: Path) -> None:
        self.root = root / "home"
        self.store = ArtifactStore(self.root)
        self.store.work("tokenizer", "t").mkdir(parents=True)
        self.tokenizer = self.publish("tokenizer", "t")
        self.sft = self.publish_model("sft", "s1", b"first")
        self.lora = self.publish_adapter("l", self.sft)
        self.newer = self.publish_model("sft", "s2", b"second")
        self.run = self.record(self.tokenizer, self.sft, self.lora, outcome="failed")

    def publish(self, stage: str, key: str) -> Artifact:
        manifest = {"result": {}, "ingredients": {"code": {}}, "inputs": {}}
        return self.store.publish(stage, key, self.store.work(stage, key), manifest)

    def publish_model(self, stage: str, key: str, weights: bytes) -> Artifact:
        write_model(self.store.work(stage, key) / "model", weights)
        return self.publish(stage, key)

    def publish_adapter(self, key: str, base: Artifact) -> Artifact:
        write_adapter(self.store.work("lora", key) / "adapter", base.path / "model")
        return self.publish("lora", key)

    def record(
        self, *artifacts: Artifact, pipeline: str = "full", outcome: str = "completed", **notes: str
    ) -> str:
        stages = [*(artifact.stage for artifact in artifacts), "evaluate"]
        made = RunRecord(self.root, pipeline, stages, {})
        for artifact in artifacts:
            path = str(artifact.path)
            made.stage(artifact.stage, outcome="completed", key=artifact.key, path=path)
        made.note(**notes)
        if outcome != "running":
            made.finish(outcome, {})
        time.sleep(0.002)  # names of runs sort by their milliseconds
        return made.run

    def resolve(self, text: str | None, **options: Any) -> Reference:
        return resolve(text, self.root, **options)

    def keys(self, *texts: str | None, **options: Any) -> list[str | None]:
        references = lookup.resolve_all(texts, self.root, **options)
        return [each.artifact.key if each.artifact else None for each in references]

    def forget_run(self) -> None:
        (self.root / "runs" / f"{self.run}.json").unlink()


@pytest.fixture
def runs_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    return Home(tmp_path)


def test_a_stage_that_no_run_has_is_its_newest_artifact_that_is_undamaged(
    runs_home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    runs_home.forget_run()
    newer, reference = runs_home.newer, runs_home.resolve("sft")
    assert (reference.adapter, reference.artifact) == (None, newer)
    assert reference.model == newer.path / "model" == reference.tokenizer
    (newer.path / "model" / MODEL).unlink()
    assert runs_home.keys("sft") == ["s1"]
    runs_home.record(runs_home.tokenizer, runs_home.sft)
    damaged = runs_home.record(runs_home.tokenizer, newer)
    assert runs_home.keys("sft") == ["s1"]
    assert damaged in caplog.text


def test_all_stages_of_a_command_are_of_the_newest_finished_run(runs_home: Home) -> None:
    tokenizer, sft, newer = runs_home.tokenizer, runs_home.sft, runs_home.newer
    assert runs_home.keys("sft", "lora") == ["s1", "l"], "of a failed run, if there is no other"
    mine = runs_home.record(tokenizer, sft, runs_home.lora)
    base_only = runs_home.record(tokenizer, newer, outcome="cached")
    assert runs_home.keys("sft") == runs_home.keys(None) == ["s2"]
    assert runs_home.keys("sft", "lora") == ["s1", "l"], "each of one run"
    lora = runs_home.publish_adapter("l2", newer)
    others = [("nightly", "completed", {}), ("full", "failed", {}), ("full", "running", {})]
    for pipeline, outcome, notes in [*others, ("full", "completed", {"sweep": "sweep-1"})]:
        run = runs_home.record(tokenizer, newer, lora, pipeline=pipeline, outcome=outcome, **notes)
        assert runs_home.keys("sft", "lora") == ["s1", "l"], (pipeline, outcome, notes)
        assert runs_home.keys("sft", "lora", run=run) == ["s2", "l2"], "unless it is named"
    directory = "./home/store/sft/s2"
    assert runs_home.keys("sft", f"{run}:lora", directory) == ["s2", "l2", "s2"]
    assert runs_home.keys("lora", run=mine[-5:]) == ["l"]
    with pytest.raises(UsageError, match=f"{base_only} .*'lora'"):
        runs_home.keys("sft", "lora", run=base_only)
    with pytest.raises(UsageError, match=f"--run is .*{directory}"):
        runs_home.keys(directory, run=mine)


def test_stages_of_different_runs_are_not_mixed(runs_home: Home) -> None:
    runs_home.forget_run()  # it has all of them
    tokenizer, lora = runs_home.tokenizer, runs_home.lora
    runs_home.record(tokenizer, runs_home.sft)
    runs_home.record(tokenizer, runs_home.newer, lora, pipeline="nightly", outcome="running")
    runs_home.record(tokenizer, lora)
    with pytest.raises(UsageError, match=r"lora, sft.*RUN:STAGE"):
        runs_home.keys("sft", "lora")


def test_where_only_nights_and_trials_ran_the_newest_finished_one_counts(runs_home: Home) -> None:
    runs_home.forget_run()
    tokenizer, sft = runs_home.tokenizer, runs_home.sft
    runs_home.record(tokenizer, sft, sweep="sweep-1")
    runs_home.record(tokenizer, runs_home.newer, pipeline="nightly")
    runs_home.record(tokenizer, sft, pipeline="nightly", outcome="failed")
    assert runs_home.keys("sft", None) == ["s2", "s2"]
    runs_home.record(tokenizer, sft, outcome="failed")
    assert runs_home.keys("sft", None) == ["s1", "s1"]


def test_a_run_is_its_last_model_or_the_stage_that_is_named(runs_home: Home) -> None:
    model, adapter = runs_home.sft.path / "model", runs_home.lora.path / "adapter"
    for text in (runs_home.run, runs_home.run[-5:], "latest"):
        reference = runs_home.resolve(text)
        assert (reference.model, reference.adapter) == (model, adapter)
    assert runs_home.resolve(f"{runs_home.run}:sft").model == model, "not the newest of another run"
    base = runs_home.publish_model("pretrain", "p", b"base")
    runs_home.record(runs_home.tokenizer, base)
    assert runs_home.keys(None) == ["s1"]
    assert runs_home.keys(None, run="latest") == ["p"], "which has no SFT model"


def test_a_name_is_taken_once_a_run_with_it_has_not_been_cut_short(runs_home: Home) -> None:
    root = runs_home.root
    for name, fix in (("../x", "a letter"), ("x" * 41, "39"), ("sft", "my-sft")):
        with pytest.raises(UsageError, match=fix):
            new_run_name(root, name)
    for outcome in ("interrupted", "failed"):
        RunRecord(root, "full", [], {}, {"run_name": "mine"}).finish(outcome, {})
        assert new_run_name(root, "mine") == "mine"
    running = RunRecord(root, "full", [], {}, {"run_name": "mine"})
    assert lookup.need_run(root, "mine")["run"] == running.run, "the newest"
    RunRecord(root, "full", [], {}, {"run_name": "mine-2"}).finish("completed", {})
    with pytest.raises(UsageError, match="mine-3"):
        new_run_name(root, "mine")
    assert (new_run_name(root, "mine-3"), new_run_name(root, None)) == ("mine-3", "")


def test_a_directory_is_a_model_an_adapter_an_artifact_or_a_checkpoint(runs_home: Home) -> None:
    model, adapter = runs_home.sft.path / "model", runs_home.lora.path / "adapter"
    for path in (str(runs_home.sft.path), "./home/store/sft/s1/model"):
        reference = runs_home.resolve(path)
        assert reference.artifact and (reference.model, reference.artifact.key) == (model, "s1")
    for directory in (runs_home.lora.path, adapter):
        assert runs_home.resolve(str(directory)).adapter == adapter
    here = write_model(Path("sft").absolute(), b"x")
    assert runs_home.resolve("sft").model == model, "a stage before a directory of its name"
    assert runs_home.resolve("./sft").model == here
    (here / SECOND_HEAD).touch()
    assert runs_home.resolve("./sft").second_head == here / SECOND_HEAD


def test_the_base_of_a_foreign_adapter_is_given_named_or_beside_it(runs_home: Home) -> None:
    base = write_model(Path("base").absolute(), b"foreign")
    adapter = write_adapter(Path("adapter"), base)
    with pytest.raises(UsageError, match=f"{weights_digest(base)[:12]}.*--base"):
        runs_home.resolve("adapter")
    assert runs_home.resolve("adapter", base="base").model == base
    runs_home.record(runs_home.tokenizer, runs_home.newer)
    named = runs_home.resolve("adapter", base="sft", run=runs_home.run)
    assert named.model == runs_home.sft.path / "model"
    with pytest.raises(UsageError, match="'lora'"):
        runs_home.resolve("adapter", base="lora")
    beside = shutil.copytree(base, adapter / "base")
    assert runs_home.resolve("adapter").model == beside.absolute()
    (write_adapter(Path("of-peft"), base, named=str(base)) / "base.json").unlink()
    assert runs_home.resolve("./of-peft").model == base


def test_an_index_names_own_files_only(runs_home: Home, tmp_path: Path) -> None:
    model = write_model(tmp_path / "foreign", b"x")
    (model / MODEL).rename(tmp_path / "evil.bin")
    write_json(model / f"{MODEL}.index.json", {"weight_map": {"a": "../evil.bin"}})
    place = re.escape(str(model))
    with pytest.raises(ArtifactError, match=place):
        runs_home.resolve(str(model))
    with pytest.raises(UsageError, match=place):
        existing.model_files(str(model), "sft.start_from")
    with pytest.raises(ArtifactError, match=place):
        factory.load(model)


def test_an_unknown_name_is_answered_with_what_exists(runs_home: Home) -> None:
    (write_model(Path("pickle"), b"x") / MODEL).rename("pickle/pytorch_model.bin")
    messages = {
        "nope": f"'nope'; there is {runs_home.run}; .*lora, sft",
        f"{runs_home.run}:nope": "'nope'; there are tokenizer, sft, lora, evaluate",
        "./home": r"adapter_config\.json",
        "mine-sft/1": "registered",
        "pickle": r"model\.safetensors",
    }
    for text, message in messages.items():
        with pytest.raises((UsageError, ArtifactError), match=message):
            runs_home.resolve(text)
