"""References: run, stage and directory lead to the same files; a wrong one is told what there is."""

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from ttrain.cli import chat
from ttrain.data import existing
from ttrain.engine.labels import new_run_name
from ttrain.errors import ArtifactError, UsageError
from ttrain.lineage import lookup
from ttrain.lineage.lineage import lineage_of
from ttrain.lineage.lookup import resolve
from ttrain.model import factory
from ttrain.store.artifacts import ArtifactStore
from ttrain.store.layout import Artifact
from ttrain.store.model_files import ADAPTER, MODEL, SECOND_HEAD, Reference, weights_digest
from ttrain.store.runs import RunRecord


def write_model(directory: Path, weights: bytes, *, shards: int = 1) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer.json").write_text("{}")
    if shards == 1:
        (directory / MODEL).write_bytes(weights)
        return directory
    names = [f"model-{number:05d}-of-{shards:05d}.safetensors" for number in range(1, shards + 1)]
    for name in names:
        (directory / name).write_bytes(weights + name.encode())
    index = {"weight_map": {f"tensor {number}": name for number, name in enumerate(names)}}
    (directory / f"{MODEL}.index.json").write_text(json.dumps(index))
    return directory


def write_adapter(directory: Path, base: Path | None, named: str = "ttrain-sft") -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": named}))
    (directory / ADAPTER).write_bytes(b"adapter")
    if base is not None:
        (directory / "base.json").write_text(
            json.dumps({"base_weights_sha256": weights_digest(base)})
        )
    return directory


class Home:
    def __init__(self, root: Path) -> None:
        self.store = ArtifactStore(root / "home")
        self.tokenizer = self.publish(
            "tokenizer", "t", lambda output: (output / "tokenizer.json").write_text("{}")
        )
        self.sft = self.publish("sft", "s1", lambda output: write_model(output / "model", b"first"))
        self.lora = self.publish(
            "lora", "l", lambda output: write_adapter(output / "adapter", self.sft.path / "model")
        )
        self.newer = self.publish(
            "sft", "s2", lambda output: write_model(output / "model", b"second")
        )
        self.run = self.record(self.tokenizer, self.sft, self.lora)

    def publish(
        self,
        stage: str,
        key: str,
        write: Callable[[Path], object],
        inputs: Mapping[str, Artifact] = MappingProxyType({}),
    ) -> Artifact:
        output = self.store.work(stage, key)
        output.mkdir(parents=True)
        write(output)
        used = {
            name: {"stage": one.stage, "key": one.key, "content": one.content}
            for name, one in inputs.items()
        }
        return self.store.publish(
            stage, key, output, {"result": {}, "ingredients": {"code": {}}, "inputs": used}
        )

    def record(
        self,
        *artifacts: Artifact,
        pipeline: str = "full",
        outcome: str = "failed",
        name: str = "",
        **notes: str,
    ) -> str:
        stages = [*(artifact.stage for artifact in artifacts), "evaluate"]
        made = RunRecord(self.store.root, pipeline, stages, {"name": name} if name else {})
        for artifact in artifacts:
            made.stage(
                artifact.stage, outcome="completed", key=artifact.key, path=str(artifact.path)
            )
        made.note(**notes)
        if outcome != "running":
            made.finish(outcome, {})
        time.sleep(0.002)  # names of runs sort by their milliseconds
        return made.run

    def resolve(self, text: str, **options: Any) -> Reference:
        return resolve(text, self.store.root, **options)


@pytest.fixture
def runs_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return Home(tmp_path)


def test_a_stage_that_no_run_has_is_its_newest_artifact_that_is_undamaged(runs_home: Home) -> None:
    (runs_home.store.root / "runs" / f"{runs_home.run}.json").unlink()
    found = runs_home.resolve("sft")
    assert (found.model, found.adapter, found.artifact) == (
        runs_home.newer.path / "model",
        None,
        runs_home.newer,
    )
    assert found.directory == found.tokenizer == found.model
    (runs_home.newer.path / "model" / MODEL).unlink()
    assert runs_home.resolve("sft").model == runs_home.sft.path / "model"


def test_a_newest_model_that_is_damaged_is_not_replaced_in_silence(
    runs_home: Home, caplog: pytest.LogCaptureFixture
) -> None:
    runs_home.record(runs_home.tokenizer, runs_home.sft, outcome="completed")
    newest = runs_home.record(runs_home.tokenizer, runs_home.newer, outcome="completed")
    assert runs_home.resolve("sft").artifact == runs_home.newer and not caplog.text
    (runs_home.newer.path / "model" / MODEL).unlink()
    assert runs_home.resolve("sft").artifact == runs_home.sft
    assert f"sft of the run {newest} is damaged" in caplog.text


def test_the_stages_of_a_command_are_those_of_the_newest_finished_run_that_has_them(
    runs_home: Home,
) -> None:
    """A night in progress has newer models; so has a run that failed, a trial, a stage that ran alone."""

    def keys(*texts: str, **options: Any) -> list[str | None]:
        found = lookup.resolve_all(texts, runs_home.store.root, **options)
        return [one.artifact.key if one.artifact else None for one in found]

    assert keys("sft", "lora") == ["s1", "l"], "a run that failed is better than models of several"
    mine = runs_home.record(
        runs_home.tokenizer, runs_home.sft, runs_home.lora, outcome="completed", name="mine"
    )
    base_only = runs_home.record(
        runs_home.tokenizer, runs_home.newer, outcome="cached", name="other"
    )
    assert keys("sft") == ["s2"] and keys("sft", "lora") == ["s1", "l"], "each of one run"
    other_lora = runs_home.publish(
        "lora",
        "l2",
        lambda output: write_adapter(output / "adapter", runs_home.newer.path / "model"),
    )
    for pipeline, outcome, notes in (
        ("nightly", "running", {}),
        ("nightly", "completed", {}),
        ("full", "failed", {}),
        ("full", "running", {}),
        ("full", "completed", {"sweep": "sweep-1"}),
    ):
        run = runs_home.record(
            runs_home.tokenizer,
            runs_home.newer,
            other_lora,
            pipeline=pipeline,
            outcome=outcome,
            **notes,
        )
        assert keys("sft", "lora") == ["s1", "l"], (pipeline, outcome, notes)
        assert keys("sft", "lora", run=run) == ["s2", "l2"], "unless it is named"
    assert keys("sft", f"{run}:lora", "./home/store/sft/s2") == ["s2", "l2", "s2"], (
        "what says more is what it says"
    )
    assert keys("lora", run=mine[-5:]) == ["l"]
    with pytest.raises(UsageError, match=f"the run {base_only} has no stage 'lora'"):
        keys("sft", "lora", run=base_only)
    with pytest.raises(UsageError, match="there is no run 'nothing'; there are "):
        keys("sft", run="nothing")
    with pytest.raises(UsageError, match=r"--run is .*, but \./home/store/sft/s2 names no stage"):
        keys("./home/store/sft/s2", run=mine)


def test_stages_that_stand_in_different_runs_only_are_not_mixed(runs_home: Home) -> None:
    (runs_home.store.root / "runs" / f"{runs_home.run}.json").unlink()  # it has all of them
    runs_home.record(runs_home.tokenizer, runs_home.sft, outcome="completed")
    runs_home.record(
        runs_home.tokenizer, runs_home.newer, runs_home.lora, pipeline="nightly", outcome="running"
    )
    runs_home.record(runs_home.tokenizer, runs_home.lora, outcome="completed")
    expected = "no run has all of lora, sft; name each as RUN:STAGE"
    with pytest.raises(UsageError, match=expected):
        lookup.resolve_all(["sft", "lora"], runs_home.store.root)


def test_where_only_nights_and_trials_ran_the_newest_finished_one_counts(runs_home: Home) -> None:
    (runs_home.store.root / "runs" / f"{runs_home.run}.json").unlink()
    assert lookup.run_of(["sft"], runs_home.store.root) is None
    with pytest.raises(
        UsageError, match=r"no finished run has a model in .*; stages with a model: lora, sft"
    ):
        resolve(None, runs_home.store.root)
    runs_home.record(runs_home.tokenizer, runs_home.sft, outcome="completed", sweep="sweep-1")
    night = runs_home.record(
        runs_home.tokenizer, runs_home.newer, pipeline="nightly", outcome="completed"
    )
    runs_home.record(runs_home.tokenizer, runs_home.sft, pipeline="nightly", outcome="failed")
    assert (
        runs_home.resolve("sft").run["run"]
        == resolve(None, runs_home.store.root).run["run"]
        == night
    )
    mine = runs_home.record(runs_home.tokenizer, runs_home.sft, outcome="failed")
    runs_home.record(runs_home.tokenizer)  # fails after the tokenizer
    assert (
        runs_home.resolve("sft").run["run"]
        == resolve(None, runs_home.store.root).run["run"]
        == mine
    )


def test_a_damaged_manifest_is_named_with_what_sets_it_aside(runs_home: Home) -> None:
    for artifact in (runs_home.sft, runs_home.newer, runs_home.lora):
        os.truncate(artifact.path / "manifest.json", 40)
    said = r"is damaged: manifest\.json cannot be read: .*`ttrain artifacts verify --set-aside`"
    for text in ("sft", f"{runs_home.run}:sft", None, runs_home.run):
        with pytest.raises((UsageError, ArtifactError), match=said):
            resolve(text, runs_home.store.root)
    with pytest.raises(ArtifactError, match=said):
        lineage_of(runs_home.store.root, "sft")


def test_a_line_says_which_model_each_name_led_to(runs_home: Home) -> None:
    mine = runs_home.record(
        runs_home.tokenizer, runs_home.sft, runs_home.lora, outcome="completed", name="mine"
    )
    elsewhere = write_model(Path("elsewhere").absolute(), b"x")
    found = lookup.resolve_all(["sft", "lora", "./elsewhere", f"{mine}:sft"], runs_home.store.root)
    assert [*map(lookup.line_of, found)] == [
        f"sft = mine, {mine}:sft, s1",
        f"lora = mine, {mine}:lora, l",
        f"./elsewhere = {elsewhere}",
        f"{mine}:sft = mine, {mine}:sft, s1",
    ]
    assert lookup.to_json(found[0]) == {
        "model": "sft",
        "name": "mine",
        "run": f"{mine}:sft",
        "key": "s1",
        "digest": weights_digest(runs_home.sft.path / "model"),
    }
    assert lookup.to_json(found[2])["run"] is None


def test_a_run_is_its_last_model_or_the_stage_that_is_named(runs_home: Home) -> None:
    last = runs_home.resolve(runs_home.run)
    assert (last.model, last.adapter) == (
        runs_home.sft.path / "model",
        runs_home.lora.path / "adapter",
    )
    assert last.directory == last.adapter
    assert (
        runs_home.resolve(runs_home.run[-5:]).adapter
        == last.adapter
        == runs_home.resolve("latest").adapter
    )
    assert runs_home.resolve(f"{runs_home.run}:sft").model == runs_home.sft.path / "model", (
        "not another run's newest"
    )


def test_the_default_model_is_that_of_sft_of_the_newest_finished_run_that_has_one(
    runs_home: Home,
) -> None:
    finished = runs_home.record(
        runs_home.tokenizer, runs_home.sft, runs_home.lora, outcome="completed"
    )
    base = runs_home.publish("pretrain", "p", lambda output: write_model(output / "model", b"base"))
    without = runs_home.record(runs_home.tokenizer, base, outcome="completed")
    [found] = lookup.resolve_all([None], runs_home.store.root)
    assert (found.text, found.run["run"]) == ("sft", finished)
    [found] = lookup.resolve_all([None], runs_home.store.root, run=without)
    assert (found.text, found.run["run"]) == ("pretrain", without), "that run has none of SFT"


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("../x", "a letter"),
        ("x" * 41, "at most 39"),
        ("sft", "my-sft"),
        ("mine", "mine-3"),
    ],
)
def test_a_name_of_a_run_that_is_no_name_or_is_taken_is_refused_with_the_fix(
    runs_home: Home, name: str, fix: str
) -> None:
    for taken in ("mine", "mine-2"):
        RunRecord(runs_home.store.root, "full", [], {}, {"run_name": taken}).finish("completed", {})
    with pytest.raises(UsageError, match=fix):
        new_run_name(runs_home.store.root, name)
    assert (
        new_run_name(runs_home.store.root, "mine-3") == "mine-3"
        and new_run_name(runs_home.store.root, None) == ""
    )


def test_a_command_with_a_name_may_be_given_again_after_its_run_was_cut_short(
    runs_home: Home,
) -> None:
    root = runs_home.store.root
    for outcome in ("interrupted", "failed"):
        RunRecord(root, "full", [], {}, {"run_name": "mine"}).finish(outcome, {})
        assert new_run_name(root, "mine") == "mine"
    last = RunRecord(root, "full", [], {}, {"run_name": "mine"})
    assert lookup.need_run(root, "mine")["run"] == last.run, "the newest"
    with pytest.raises(UsageError, match="try --run-name mine-2"):
        new_run_name(root, "mine")


def test_a_directory_is_a_model_an_adapter_an_artifact_or_a_checkpoint(runs_home: Home) -> None:
    for path in (runs_home.sft.path, Path("home/store/sft/s1"), Path("./home/store/sft/s1/model")):
        found = runs_home.resolve(str(path))
        assert (found.model, found.artifact and found.artifact.key) == (
            runs_home.sft.path / "model",
            "s1",
        ), path
    for path in (runs_home.lora.path, runs_home.lora.path / "adapter"):
        assert runs_home.resolve(str(path)).adapter == runs_home.lora.path / "adapter"
    elsewhere = write_model(Path("elsewhere").absolute(), b"x")
    found = runs_home.resolve("elsewhere")
    assert (found.model, found.artifact, found.second_head) == (elsewhere, None, None)
    (elsewhere / SECOND_HEAD).touch()
    assert runs_home.resolve("elsewhere").second_head == elsewhere / SECOND_HEAD
    here = write_model(Path("sft").absolute(), b"x")
    assert runs_home.resolve("sft").model == runs_home.sft.path / "model", (
        "a word is a stage before it is a directory"
    )
    assert runs_home.resolve("./sft").model == here


def test_the_base_of_an_adapter_is_the_model_whose_weights_have_the_digest(runs_home: Home) -> None:
    shutil.copytree(runs_home.lora.path / "adapter", "copied")
    found = runs_home.resolve("copied")
    assert (found.model, found.adapter, found.artifact) == (
        runs_home.sft.path / "model",
        Path("copied").absolute(),
        None,
    )
    assert found.base_digest == hashlib.sha256(b"first").hexdigest()
    sharded = runs_home.publish(
        "pretrain", "p", lambda output: write_model(output / "model", b"big", shards=3)
    )
    write_adapter(Path("adapter"), sharded.path / "model")
    assert runs_home.resolve("adapter").model == sharded.path / "model"


def test_the_base_of_an_adapter_from_elsewhere_is_named_or_lies_beside(
    runs_home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_model(Path("base").absolute(), b"foreign")
    adapter = write_adapter(Path("adapter"), base)
    with pytest.raises(
        UsageError,
        match=f"its base with the weights {weights_digest(base)[:12]} is not in .*--base",
    ):
        runs_home.resolve("adapter")
    assert runs_home.resolve("adapter", base="base").model == base
    later = runs_home.record(runs_home.tokenizer, runs_home.newer, outcome="completed")
    for run, sft in ((runs_home.run, runs_home.sft), (later, runs_home.newer)):
        [found] = lookup.resolve_all(["adapter"], runs_home.store.root, base="sft", run=run)
        assert found.model == sft.path / "model", "as of the other stages of the command"
    monkeypatch.setenv("TTRAIN_HOME", str(runs_home.store.root))
    options = chat.LoadingOptions(base="sft", run=later)
    alone, beside = (
        chat._resolved(["adapter"], options),
        chat._resolved(["adapter", "sft"], options),
    )
    assert [model.model for model in (*alone, *beside)] == [runs_home.newer.path / "model"] * 3
    with pytest.raises(UsageError, match="--base is 'lora', which is an adapter itself"):
        runs_home.resolve("adapter", base="lora")
    beside = shutil.copytree(base, adapter / "base")
    assert runs_home.resolve("adapter").model == beside.absolute()
    named = write_adapter(Path("of-peft"), None, named=str(base))
    assert runs_home.resolve(str(named)).model == base


@pytest.mark.parametrize("name", ["/dev/zero", "../evil.bin", 7], ids=str)
def test_an_index_names_files_of_its_own_directory_alone_before_any_is_opened(
    runs_home: Home, tmp_path: Path, name: object
) -> None:
    model = write_model(tmp_path / "foreign", b"x", shards=2)
    (tmp_path / "evil.bin").write_bytes(b"x")
    index = model / f"{MODEL}.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ArtifactError, match=re.escape(str(model))):
        runs_home.resolve(str(model))
    with pytest.raises(UsageError, match=re.escape(str(model))):
        existing.model_files(str(model), "sft.start_from")
    with pytest.raises(ArtifactError, match=re.escape(str(index))):
        factory.load(model)


def test_what_is_not_there_is_answered_with_what_there_is(runs_home: Home) -> None:
    (write_model(Path("pickle"), b"x") / MODEL).rename("pickle/pytorch_model.bin")
    (write_adapter(Path("half"), None) / ADAPTER).unlink()
    for text, said in {
        "nope": f"no model 'nope'; there is {runs_home.run}; stages with a model: lora, sft",
        "tokenizer": ":tokenizer has no model that is in .*; stages with a model: lora, sft",
        f"{runs_home.run}:nope": "has no stage 'nope'; there are tokenizer, sft, lora, evaluate",
        "dpo": "stage dpo has no artifact .* run `ttrain pipeline run full` first, with files in data.dpo",
        "./home": "holds neither config.json nor adapter_config.json",
        "mine-sft/1": "nothing is registered in",
        "pickle": "holds neither model.safetensors nor",
        "half": f"holds neither {ADAPTER}",
    }.items():
        with pytest.raises((UsageError, ArtifactError), match=said):
            runs_home.resolve(text)
    assert not (runs_home.store.root / "mlflow").exists(), "a question makes no database"
    for text in ("nope", None):
        with pytest.raises(UsageError, match="run `ttrain pipeline run full` first"):
            resolve(text, runs_home.store.root / "empty")
