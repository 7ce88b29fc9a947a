"""The stages `reference` and `dpo`: what they leave behind, also after they were killed, and what makes them run again."""

import os
import random
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.comparing import curve
from support.kill_points import killed_at
from support.shard_sets import write_lines
from support.tiny_data import make_tokenizer
from support.tiny_stages import run_here

from ttrain.config import Settings, flatten
from ttrain.core.files import ProgressWriter
from ttrain.core.hashing import sha256_file
from ttrain.data.pool import Processes
from ttrain.errors import UsageError
from ttrain.model import adapters, factory
from ttrain.store.model_files import weights_digest
from ttrain.tasks import REFERENCE, dpo, new_model, reference, shards
from ttrain.tasks.common.job import StageContext
from ttrain.train import preference_tuning

KILLS = int(os.environ.get("TTRAIN_SOAK_KILLS", "10"))
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "returns",
    "nothing",
]
ROWS = 48  # a quarter of them held out
WEIGHTS = Path("model") / "model.safetensors"


def settings_of(**changes: Any) -> Settings:
    of_dpo = {
        "epochs": 2,
        "tokens_per_step": 256,
        "row_length": 128,
        "validation_rows": 4,
        "precision": "fp32",
        "optim": {"lr": 3e-3},
        **changes,
    }
    speed = {
        "device": "cpu",
        "threads": 1,
        "rows_per_device": 2,
        "log_every_steps": 1,
        "checkpoint_every_steps": 4,
    }
    sizes = {"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 256}
    return Settings.model_validate({"model": sizes, "dpo": of_dpo, "runtime": speed})


def pair(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    question, answer = (" ".join(dice.choices(WORDS, k=dice.randint(1, 6))) for _ in range(2))
    return {
        "prompt": f"{question} {number}?",
        "chosen": f"yes {answer}",
        "rejected": f"no {answer}",
    }


def rated(number: int) -> dict[str, Any]:
    row, good = pair(number), number % 3 > 0
    return {
        "prompt": row["prompt"],
        "completion": row["chosen" if good else "rejected"],
        "label": good,
    }


def make_shards(root: Path, tokenizer: Path, rows: list[dict[str, Any]]) -> Path:
    """Shards of these rows, a quarter of them held out."""
    source = root / "source"
    source.mkdir(parents=True)
    write_lines(source / "dpo.jsonl", rows[len(rows) // 4 :])
    write_lines(source / "dpo_heldout.jsonl", rows[: len(rows) // 4])
    settings, inputs = settings_of(), {"tokenizer": tokenizer, "source": source}
    arguments, runtime = {"kind": "pairs", "dataset": "dpo"}, settings.runtime
    job = StageContext(
        inputs, {}, arguments, root / "shards", runtime, ProgressWriter(None), lambda: False
    )
    shards.build(settings, job, Processes(1))
    return root / "shards"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of random weights, shards of pairs, and their reference."""
    root, settings = tmp_path_factory.mktemp("dpo"), settings_of()
    make_tokenizer(root / "tokenizer")
    run_here(
        new_model, settings, root / "base", {"tokenizer": root / "tokenizer"}, settings.runtime
    )
    found = {
        "base": root / "base",
        "shards": make_shards(root, root / "tokenizer", [pair(n) for n in range(ROWS)]),
    }
    run_here(reference, of_reference(settings), root / "reference", found, settings.runtime)
    return {**found, "reference": root / "reference", "tokenizer": root / "tokenizer"}


def of_reference(settings: Settings) -> Settings:
    return Settings.rebuilt(REFERENCE.part_of(settings))


def tune(output: Path, inputs: Mapping[str, Path], **changes: Any) -> dict[str, Any]:
    settings = settings_of(**changes)
    figures: dict[str, Any] = run_here(dpo, settings, output, inputs, settings.runtime)
    return figures


@pytest.fixture(scope="module")
def straight(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    assert tune(output, inputs)["pairs"] == 36 * 2
    return output


def test_the_reference_has_every_answer_once_and_the_planted_preference_is_learnt_from_ln_2_on(
    inputs: dict[str, Path], straight: Path
) -> None:
    for part, pairs in (("train", 36), ("heldout", 12)):
        scores = load_file(inputs["reference"] / f"{part}.safetensors")
        assert len(scores["tokens"]) == 2 * pairs and (scores["tokens"] > 0).all()
        assert (
            np.isfinite(scores["log_probabilities"]).all()
            and (scores["log_probabilities"] < 0).all()
        )
    assert sorted(path.name for path in inputs["reference"].iterdir()) == [
        "heldout.safetensors",
        "train.safetensors",
    ]
    figures = [line["metrics"] for line in curve(straight / "run" / "metrics.jsonl")]
    assert figures[0]["validation_loss_quick"] == pytest.approx(np.log(2), abs=1e-6)
    margins = [line["reward_margin"] for line in figures if "reward_margin" in line]
    assert margins[0] == pytest.approx(0, abs=1e-6) and margins[-1] > 0
    assert figures[-1]["validation_reward_accuracy"] > 0.9 and figures[-1]["validation_loss"] < 0.5


def test_an_adapter_is_kept_beside_the_whole_model_that_it_is_merged_into(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    tune(tmp_path, inputs, adapter="lora", rank=4, alpha=8, epochs=0.3)
    base = inputs["base"] / "model"
    adapted = adapters.load(factory.load(base), tmp_path / "lora", weights_digest(base))
    ids = torch.arange(20)[None]
    found, expected = factory.load(tmp_path / "model")(ids).logits, adapted(ids).logits
    assert (
        float((found - expected).abs().max())
        < 1e-4
        < float((expected - factory.load(base)(ids).logits).abs().max())
    )


def test_rated_answers_are_learnt_by_kto_and_refused_by_what_compares_two(
    inputs: dict[str, Path], tmp_path: Path
) -> None:
    of_rated = {
        **inputs,
        "shards": make_shards(tmp_path, inputs["tokenizer"], [rated(n) for n in range(ROWS)]),
    }
    with pytest.raises(UsageError, match=r"dpo\.loss is dpo, .* set dpo\.loss=kto"):
        tune(tmp_path / "refused", of_rated)
    settings = settings_of()
    run_here(reference, of_reference(settings), tmp_path / "reference", of_rated, settings.runtime)
    figures = tune(
        tmp_path / "kto", {**of_rated, "reference": tmp_path / "reference"}, loss="kto", epochs=3
    )
    assert figures["answers"] == 36 * 3 and figures["validation_loss"] < 0.5, (
        "half a nat is the loss of two equal models"
    )


def test_only_the_rows_and_the_precision_enter_the_key_of_the_reference() -> None:
    def of(**changes: Any) -> dict[str, Any]:
        return dict(flatten(REFERENCE.part_of(settings_of(**changes))))

    assert (
        of()
        == of(beta=0.2)
        == of(optim={"lr": 1e-5})
        == of(loss="ipo")
        == of(adapter="lora")
        == of(epochs=9)
    )
    assert of() != of(row_length=64) and of() != of(precision="bf16")


CALLS = (
    (preference_tuning, "score_answers"),
    (reference, "score_answers"),
    "fsync",
    "replace",
)  # passes and writes


@pytest.mark.parametrize(
    ("kills", "most"), [(1, 12), pytest.param(KILLS, 25, marks=pytest.mark.soak)]
)
def test_stages_that_were_killed_come_to_the_same_bytes(
    inputs: dict[str, Path],
    straight: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kills: int,
    most: int,
) -> None:
    """Killed so often, each time before one of so many calls, by chance."""
    monkeypatch.setattr(reference, "BLOCK_ROWS", 4)
    dice, settings = random.Random(), settings_of()
    stages: dict[str, tuple[Any, Any]] = {
        "reference": (reference, of_reference(settings)),
        "dpo": (dpo, settings),
    }
    for name, (stage, config) in stages.items():
        run = partial(run_here, stage, config, tmp_path / name, inputs, settings.runtime)
        died = [killed_at(dice.randint(1, most), CALLS, run) for _ in range(kills)]
        assert any(died), "no kill came before the end"
        run()
    for part in reference.PARTS:
        file = Path(f"{part}.safetensors")
        assert sha256_file(tmp_path / "reference" / file) == sha256_file(inputs["reference"] / file)
    assert sha256_file(tmp_path / "dpo" / WEIGHTS) == sha256_file(straight / WEIGHTS)
    assert curve(tmp_path / "dpo" / "run" / "metrics.jsonl") == curve(
        straight / "run" / "metrics.jsonl"
    )
