"""Why a stage runs: for each kind of change the right words, and the right stages; for what does not matter, none."""

from __future__ import annotations

import platform
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import AFTER_SFT, EVERYTHING, House, running

from ttrain.config.loading import load
from ttrain.core import hashing, machine
from ttrain.data import python_docs
from ttrain.flows.full import full
from ttrain.pipeline.plan import plan, plan_json, plan_rows, plan_stage
from ttrain.reports.summary import shortened
from ttrain.stages import PRETRAIN, SOURCE
from ttrain.store.artifacts import ArtifactStore


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, f"{path.name} has changed: choose another line of it"
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_a_change_that_is_taken_back_finds_what_was_there(built: House, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", copy)
    replace(copy / "train" / "schedules.py", "WARMUP_STEPS = 10", "WARMUP_STEPS = 11")
    built.write("chats.jsonl", '{"messages": [2]}\n')
    stages = built.plan("lora.rank=2")
    assert running(stages) == EVERYTHING - {"tokenizer", "shards-pretrain", "shards-lora"}
    assert stages["pretrain"].why == ("module ttrain.train.schedules changed",)
    assert stages["shards-sft"].why == ("train file chats.jsonl changed",)
    replace(copy / "train" / "schedules.py", "WARMUP_STEPS = 11", "WARMUP_STEPS = 10")
    built.write("chats.jsonl", '{"messages": []}\n')
    assert running(built.plan()) == set()


def test_an_artifact_that_came_out_with_other_bytes_reruns_what_reads_it(built: House) -> None:
    """As where a library computes differently; to the same bytes nothing runs."""
    base, upstream = built.store.latest("pretrain"), {*EVERYTHING} - {"sft", "lora", "evaluate"}
    for text, runs in (("", set()), ("another", {"sft", "lora", "evaluate"})):
        shutil.rmtree(base.path)
        built.build(built.settings(), says=lambda stage, key, text=text: text or key, stages=upstream)
        stages = built.plan()
        assert running(stages) == runs
    new = built.store.latest("pretrain")
    assert stages["sft"].why == (f"input base: {base.content[:12]} → {new.content[:12]}",)


# --- what does not count, and is told: libraries and Python


def test_a_model_that_exists_in_place_of_a_new_one_is_one_change_both_ways(built: House) -> None:
    """And not one for each size of the new one; what changed beside it is told as ever."""
    given = {"tokenizer": built.store.latest("tokenizer"), "shards": built.store.latest("shards-pretrain")}
    night = built.settings(f"pretrain.start_from={built.data}", "pretrain.optim.lr=0.5")
    planned = plan_stage(PRETRAIN, night, built.store, {**given, "base": built.store.latest("sft")})
    lr = built.settings().pretrain.optim.lr
    assert planned.why == (
        "starts from an existing model instead of a new one", "pretrain.optim.betas: [0.5, 0.95] → [0.9, 0.95]",
        "pretrain.optim.embedding_lr: 0.04 → null",
        "pretrain.optim.head_lr: 0.004 → null", f"pretrain.optim.lr: {lr} → 0.5",
    )  # fmt: skip
    for artifact in built.store.artifacts("pretrain"):
        shutil.rmtree(artifact.path)
    built.publish(planned)
    anew = plan_stage(PRETRAIN, built.settings("model.multi_token.weight=0.5", "pretrain.optim.lr=0.5"), built.store, given)
    assert anew.why[0] == "starts from a new model instead of an existing one"
    assert {line.partition(": ")[0] for line in anew.why[1:]} == {
        "model.multi_token", "model.multi_token.weight", "model.multi_token.keep_head", "pretrain.optim.embedding_lr",
        "pretrain.optim.head_lr", "pretrain.optim.betas",
    }  # fmt: skip


def remade(house: House, **provenance: Any) -> None:
    """The SFT's artifact, as if it had been made with these."""
    artifact = house.store.latest("sft")
    planned = house.plan()["sft"]
    shutil.rmtree(artifact.path)
    house.publish(planned, artifact.key, provenance=provenance)


def notes_of(house: House) -> dict[str, list[str]]:
    return {stage["name"]: stage["notes"] for stage in plan_json("full", house.plan().values())["stages"]}


def test_another_version_of_a_library_reruns_nothing_and_is_told(built: House) -> None:
    here = machine.versions()
    remade(built, libraries={**here, "torch": "2.12.0", "numpy": here["numpy"]}, python=platform.python_version())
    assert running(built.plan()) == set()
    told = f"made with torch 2.12.0, here is torch {here['torch']}"
    assert notes_of(built) == {name: [told] if name == "sft" else [] for name in built.plan()}
    assert [row[3] for row in plan_rows(built.plan().values()) if row[0] == "sft"] == [
        f"same settings, inputs and code; {told}"
    ]


def test_the_installed_versions_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = machine.versions()
    monkeypatch.setattr(metadata, "version", lambda name: pytest.fail("looked up again"))
    found["torch"] = "changed by whoever asked"
    assert machine.versions()["torch"] != found["torch"]


def test_the_same_versions_are_not_told(built: House) -> None:
    remade(built, libraries=machine.versions(), python=platform.python_version())
    assert not any(notes_of(built).values())


def test_another_python_is_told_with_the_libraries(built: House) -> None:
    remade(built, libraries={"torch": "2.12.0", "of long ago": "1"}, python="3.10.1")
    here = f"torch {machine.versions()['torch']}, Python {platform.python_version()}"
    assert notes_of(built)["sft"] == [f"made with torch 2.12.0, Python 3.10.1, here is {here}"]


def test_what_will_run_anyway_is_told_nothing_of_its_libraries(built: House) -> None:
    remade(built, libraries={"torch": "2.12.0"})
    stages = plan_json("full", built.plan("sft.seed=2").values())["stages"]
    assert not any(stage["notes"] for stage in stages)


def test_the_text_that_ships_counts_for_the_stage_that_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, own = load([], environment={}).settings, House(tmp_path)

    def first() -> Any:
        return plan(full, settings, ArtifactStore(own.store.root))[0]

    own.publish(first())
    assert (first().stage, first().state) == (SOURCE, "cached")
    monkeypatch.setattr(platform, "python_version", lambda: "3.10.1")
    assert first().state == "cached"
    monkeypatch.setattr(python_docs, "text_file", lambda: tmp_path / "python.jsonl.zst")
    (tmp_path / "python.jsonl.zst").write_bytes(b"other text")
    assert first().why == ("python file python.jsonl.zst changed",)


# --- how it is shown


def test_a_long_explanation_is_short_on_the_terminal_and_whole_in_json(built: House) -> None:
    given = [f"sft.{name}" for name in ("seed=7", "optim.lr=0.5", "epochs=3.0", "stride=8", "dropped_fraction=0.5")]
    stages = built.plan(*given)
    assert len(stages["sft"].why) == 5
    (row,) = [row for row in plan_rows(stages.values()) if row[0] == "sft"]
    assert row[3] == f"{'; '.join(stages['sft'].why[:3])}; and 2 more, which `plan --json` has"
    (whole,) = [stage for stage in plan_json("full", stages.values())["stages"] if stage["name"] == "sft"]
    assert whole["why"] == list(stages["sft"].why)


def test_three_reasons_are_not_shortened() -> None:
    assert [shortened(["a", "b", "c"][:count]) for count in range(4)] == ["", "a", "a; b", "a; b; c"]
    assert shortened(["a", "b", "c", "d"]) == "a; b; c; and 1 more, which `plan --json` has"


# --- side branches


def test_two_variants_on_one_base_share_all_before_them(built: House) -> None:
    """A sweep: nothing before the stage that differs is built again, and each variant keeps what it made."""
    before = {name: planned.key for name, planned in built.plan().items()}
    variants = [f"sft.optim.lr={rate}" for rate in ("1e-4", "2e-4", "3e-4")]
    for variant in variants:
        stages = built.plan(variant)
        assert running(stages) == AFTER_SFT
        made = built.build(built.settings(variant))
        assert {name for name in made if made[name].key != before[name]} == AFTER_SFT
    assert len(built.store.artifacts("sft")) == 4
    assert [len(built.store.artifacts(name)) for name in sorted(EVERYTHING - AFTER_SFT)] == [1] * 5
    for variant in variants:
        assert running(built.plan(variant)) == set()
