"""Why a stage runs: for each kind of change the right words, and the right stages; for what does not matter, none."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from support.planned_homes import EVERYTHING, House, append, running

from ttrain.config.loading import load
from ttrain.core import hashing, machine
from ttrain.data import python_docs
from ttrain.flows.full import full
from ttrain.pipeline.plan import plan, plan_json, plan_rows, plan_stage
from ttrain.reports.summary import shortened
from ttrain.stages import PRETRAIN, SOURCE
from ttrain.store.artifacts import ArtifactStore

TRAININGS = {"pretrain", "sft", "lora"}
AFTER_SFT = {"sft", "lora", "evaluate"}


@dataclass
class Case:
    """A change, the settings that are given with it, what runs, and why the first of them does."""

    name: str
    change: Callable[[House, Path], object] = lambda house, code: None
    given: tuple[str, ...] = ()
    runs: set[str] = field(default_factory=set)
    why: dict[str, tuple[str, ...]] = field(default_factory=dict)
    alters_code: bool = False


def edit(name: str, old: str, new: str) -> Callable[[House, Path], object]:
    def change(house: House, code: Path) -> None:
        path = code / name
        text = path.read_text(encoding="utf-8")
        assert old in text, f"{name} has changed: choose another line of it"
        path.write_text(text.replace(old, new), encoding="utf-8")

    return change


def one_byte(house: House, code: Path) -> None:
    house.write("chats.jsonl", '{"messages": [2]}\n')


def rename(house: House, code: Path) -> None:
    (house.data / "chats.jsonl").rename(house.data / "domain2.jsonl")


def other_base(house: House, code: Path) -> None:
    """The base's artifact was rebuilt and came out with other bytes, as where a library computes differently."""
    base = house.store.latest("pretrain")
    shutil.rmtree(base.path)
    house.build(house.settings(), says=lambda stage, key: "another", stages={*EVERYTHING} - AFTER_SFT)


def same_base(house: House, code: Path) -> None:
    shutil.rmtree(house.store.latest("pretrain").path)
    house.build(house.settings(), stages={*EVERYTHING} - AFTER_SFT)


CASES = [
    Case("nothing"),
    Case("a setting", given=("sft.optim.lr=2e-4",), runs=AFTER_SFT, why={"sft": ("sft.optim.lr: 0.001 → 0.0002",)}),
    Case("a setting of how fast", given=("runtime.threads=1",)),
    Case(
        "the bytes of a file",
        one_byte,
        runs={"shards-sft", *AFTER_SFT},
        why={"shards-sft": ("train file chats.jsonl changed",), "sft": ("waits for shards-sft",)},
    ),
    Case("the time of a file", lambda house, code: os.utime(house.data / "chats.jsonl", (1, 1))),
    Case("the name of a file", rename, given=("data.sft={data}/domain2.jsonl",)),
    Case(
        "a helper two modules away",
        alters_code=True,
        change=edit("train/schedules.py", "WARMUP_STEPS = 10", "WARMUP_STEPS = 11"),
        runs={*TRAININGS, "evaluate"},
        why={"pretrain": ("module ttrain.train.schedules changed",), "sft": ("waits for pretrain",)},
    ),
    Case(
        "a comment in a helper",
        alters_code=True,
        change=lambda house, code: append(code / "train" / "schedules.py", "\n# a remark\n"),
    ),
    Case(
        "the form of a helper",
        alters_code=True,
        change=edit("train/schedules.py", "MINIMIND_FLOOR = 0.1", "MINIMIND_FLOOR = (\n    0.1\n)"),
    ),
    Case(
        "the docstring of a helper",
        alters_code=True,
        change=edit("train/schedules.py", '"""Learning-rate schedules, in optimizer steps', '"""Rates, in optimizer steps'),
    ),
    Case(
        "code that shapes no result",
        alters_code=True,
        change=lambda house, code: append(code / "reports" / "summary.py", "\nUNUSED = 1\n"),
    ),
    Case("an artifact that is read", other_base, runs=AFTER_SFT, why={"sft": ("input base: {base} → {new}",)}),
    Case("an artifact that is read, rebuilt to the same bytes", same_base),
    Case(
        "a file of an artifact that is gone",
        lambda house, code: (house.store.latest("sft").path / "heldout" / "file").unlink(),
        runs=AFTER_SFT,
        why={"sft": ("its artifact is damaged: heldout/file is missing",)},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_a_change_reruns_what_it_touches_and_says_what_it_was(
    built: House, case: Case, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = request.getfixturevalue("copy") if case.alters_code else Path("nowhere")
    if case.alters_code:
        monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", code)
    before = built.store.latest("pretrain").content
    case.change(built, code)
    stages = built.plan(*(given.format(data=built.data) for given in case.given))
    assert running(stages) == case.runs
    known = {"base": before[:12], "new": built.store.latest("pretrain").content[:12]}
    for name, why in case.why.items():
        assert stages[name].why == tuple(line.format(**known) for line in why)


def test_a_change_that_is_taken_back_finds_what_was_there(built: House, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "PACKAGE_DIRECTORY", copy)
    edit("train/schedules.py", "WARMUP_STEPS = 10", "WARMUP_STEPS = 11")(built, copy)
    one_byte(built, copy)
    assert running(built.plan("lora.rank=2")) == EVERYTHING - {"tokenizer", "shards-pretrain", "shards-lora"}
    edit("train/schedules.py", "WARMUP_STEPS = 11", "WARMUP_STEPS = 10")(built, copy)
    built.write("chats.jsonl", '{"messages": []}\n')
    assert running(built.plan()) == set()


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
