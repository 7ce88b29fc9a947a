"""A whole night killed at each of its steps and run again: the weights, the decision and the record of one never killed."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.nights import NAME, add_documents, assert_registered_once, kill_once_reached, killed_at
from support.pipeline_home import Cli, write_corpus

from ttrain.nightly.records import Nights
from ttrain.store.registry import Registry

pytestmark = pytest.mark.soak
NIGHT = ("pipeline", "run", "nightly", "--engine", "none")
STEPS, DECAY_BEGINS = 80, 40
SETTINGS = (
    "pretrain.tokens=40960", "pretrain.schedule.kind=infinite", "pretrain.schedule.decay_fraction=0.5",
    "evaluate.new_tokens=0", "promotion.resamples=0", "promotion.forgetting=0.5",
)  # fmt: skip
STAGES = ("replay", "pretrain", "sft", "lora", "heldout")


def trained_to(step: int) -> Callable[[Cli], bool]:
    """Whether a checkpoint of this step, or a later one, is whole."""
    return lambda cli: cli.newest_step() >= step


def began(stage: str) -> Callable[[Cli], bool]:
    """Whether tonight's stage has a work directory; the first night's is gone."""
    return lambda cli: any(cli.home.glob(f"work/{stage}/*/output"))


REACHED: dict[str, Callable[[Cli], bool]] = {
    "the branch": trained_to(DECAY_BEGINS + 5),
    "replay": began("replay"),
    "the plateau": trained_to(5),
    "sft": began("sft"),
    "evaluation": began("evaluate"),
}
CALLS = ("before the models are registered", "after the models are registered")  # decision, promotion: full/test_nightly.py
SAMPLE = "the branch"  # the first: `make soak SAMPLE=1` takes one of each file


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """A home whose first night is done, with documents for a second one."""
    root = tmp_path_factory.mktemp("prepared")
    write_corpus(root / "data")
    cli = Cli(root / "home", root / "data")
    cli(*NIGHT, *SETTINGS)
    add_documents(cli.data, 1, random.Random(3))
    return cli


def copied(prepared: Cli, root: Path) -> Cli:
    shutil.copytree(prepared.data, root / "data")
    shutil.copytree(prepared.home, root / "home")
    return Cli(root / "home", root / "data")


@pytest.fixture(scope="module")
def never_killed(prepared: Cli, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    cli = copied(prepared, tmp_path_factory.mktemp("reference"))
    cli(*NIGHT, *SETTINGS)
    outcome = outcome_of(cli)
    assert outcome["outcome"] == "promoted", outcome["decision"]
    return outcome


def outcome_of(cli: Cli) -> dict[str, Any]:
    """The second night's decision, its figures by night, the bytes of each model; one record and one promotion."""
    second, first = Nights(cli.home, NAME).newest_first()
    assert (first.name, second.name, second.is_open) == ("night-000001", "night-000002", False)
    assert_registered_once(cli.home, 2)
    champion = Registry(cli.home).champion(NAME)
    assert champion is not None and champion.version == second.data["version"] == "2"
    outcome: dict[str, Any] = {name: second.data[name] for name in ("outcome", "decision", "texts", "learnt")}
    for stage in STAGES:
        manifest = json.loads((cli.home / "store" / stage / champion.keys[stage] / "manifest.json").read_bytes())
        weights = {name: entry["sha256"] for name, entry in manifest["files"].items() if not name.startswith("run/")}
        outcome[stage] = {
            name: digest for name, digest in weights.items() if name.endswith((".safetensors", ".arrow", ".jsonl"))
        }
    assert any(name.startswith("plateau/") for name in outcome["pretrain"])
    return outcome


def points() -> list[Any]:
    return [
        pytest.param(name, marks=[] if name == SAMPLE else [pytest.mark.long], id=name.replace(" ", "-"))
        for name in (*REACHED, *CALLS)
    ]


@pytest.mark.parametrize("point", points())
def test_a_night_killed_anywhere_ends_like_one_that_never_was(
    prepared: Cli, never_killed: dict[str, Any], tmp_path: Path, point: str
) -> None:
    cli = copied(prepared, tmp_path)
    if point in REACHED:
        kill_once_reached(cli, REACHED[point], *NIGHT, *SETTINGS)
    else:
        done = killed_at(cli, "ttrain.engine.execution", "PipelineRun.register_set", 1, point.split()[0], *NIGHT, *SETTINGS)
        assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    step = cli.newest_step()
    assert not point.startswith("the ") or (0 < step < STEPS and (step > DECAY_BEGINS) == (point == "the branch")), step
    cli(*NIGHT, *SETTINGS)
    assert outcome_of(cli) == never_killed
    assert [one["outcome"] for one in next(Nights(cli.home, NAME).newest_first()).data["attempts"]] == [
        "crashed",
        "promoted",
    ]
