"""The stages `reference` and `dpo`: what they leave behind, also after they were killed."""

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
from ttrain.model import adapters, factory
from ttrain.store.model_files import weights_digest
from ttrain.tasks import REFERENCE, dpo, new_model, reference, shards
from ttrain.tasks.common.job import StageContext
from ttrain.train import preference_tuning

WORDS = "the quick brown fox jumps over a lazy dog and returns nothing"
ROWS = 48  # a quarter of them held out
WEIGHTS = Path("model") / "model.safetensors"
# A stage is killed before one of these calls.
CALLS = ((preference_tuning, "score_answers"), (reference, "score_answers"), "fsync", "replace")


def settings_of(**changes: Any) -> Settings:
    row = {"tokens_per_step": 256, "row_length": 128, "validation_rows": 4}
    options = {"epochs": 2, "precision": "fp32", "optim": {"lr": 3e-3}, **row, **changes}
    speed = {"device": "cpu", "threads": 1, "rows_per_device": 2}
    steps = {"log_every_steps": 1, "checkpoint_every_steps": 4}
    sizes = {"hidden_size": 32, "layers": 2, "heads": 2, "max_length": 256}
    return Settings.model_validate({"model": sizes, "dpo": options, "runtime": {**speed, **steps}})


def pair(number: int) -> dict[str, Any]:
    dice = random.Random(number)
    words = " ".join(dice.choices(WORDS.split(), k=dice.randint(1, 6)))
    return {"prompt": f"{words} {number}?", "chosen": f"yes {words}", "rejected": f"no {words}"}


def make_shards(root: Path, tokenizer: Path, rows: list[dict[str, Any]]) -> Path:
    """Shards of these rows, a quarter of them held out."""
    source = root / "source"
    source.mkdir(parents=True)
    write_lines(source / "dpo.jsonl", rows[len(rows) // 4 :])
    write_lines(source / "dpo_heldout.jsonl", rows[: len(rows) // 4])
    settings, inputs = settings_of(), {"tokenizer": tokenizer, "source": source}
    arguments = {"kind": "pairs", "dataset": "dpo"}
    options = (arguments, root / "shards", settings.runtime, ProgressWriter(None), lambda: False)
    shards.build(settings, StageContext(inputs, {}, *options), Processes(1))
    return root / "shards"


def run_stage(module: Any, settings: Settings, output: Path, inputs: Mapping[str, Path]) -> Any:
    config = Settings.rebuilt(REFERENCE.part_of(settings)) if module is reference else settings
    return run_here(module, config, output, inputs, settings.runtime)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of random weights, shards of pairs, and their reference."""
    root, settings = tmp_path_factory.mktemp("dpo"), settings_of()
    tokenizer = make_tokenizer(root / "tokenizer").directory
    run_stage(new_model, settings, root / "base", {"tokenizer": tokenizer})
    pairs = make_shards(root, tokenizer, [pair(number) for number in range(ROWS)])
    inputs = {"base": root / "base", "shards": pairs}
    run_stage(reference, settings, root / "reference", inputs)
    return {**inputs, "reference": root / "reference", "tokenizer": tokenizer}


@pytest.fixture(scope="module")
def straight(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("straight")
    assert run_stage(dpo, settings_of(), output, inputs)["pairs"] == 36 * 2
    return output


def test_the_planted_preference_is_learnt(inputs: dict[str, Path], straight: Path) -> None:
    for part, pairs in (("train", 36), ("heldout", 12)):
        scores = load_file(inputs["reference"] / f"{part}.safetensors")
        assert len(scores["tokens"]) == 2 * pairs, "every answer once"
        assert (scores["tokens"] > 0).all() and (scores["log_probabilities"] < 0).all()
    metrics = [line["metrics"] for line in curve(straight / "run" / "metrics.jsonl")]
    assert metrics[0]["validation_loss_quick"] == pytest.approx(np.log(2), abs=1e-6)
    assert metrics[-1]["validation_reward_accuracy"] > 0.9 and metrics[-1]["validation_loss"] < 0.5


def test_an_adapter_is_kept_and_merged(inputs: dict[str, Path], tmp_path: Path) -> None:
    run_stage(dpo, settings_of(adapter="lora", rank=4, alpha=8, epochs=0.3), tmp_path, inputs)
    base = inputs["base"] / "model"
    adapted = adapters.load(factory.load(base), tmp_path / "lora", weights_digest(base))
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = adapted(ids).logits
        merged, before = (factory.load(path)(ids).logits for path in (tmp_path / "model", base))
    assert (merged - expected).abs().max() < 1e-4 < (before - expected).abs().max()


def test_only_rows_and_precision_enter_the_key_of_the_reference() -> None:
    def seen(**changes: Any) -> dict[str, Any]:
        return dict(flatten(REFERENCE.part_of(settings_of(**changes))))

    for change in ({"beta": 0.2}, {"optim": {"lr": 1e-5}}, {"loss": "ipo"}, {"adapter": "lora"}):
        assert seen(**change) == seen(epochs=9) == seen()
    assert seen() != seen(row_length=64) and seen() != seen(precision="bf16")


def test_killed_stages_end_with_the_same_bytes(
    inputs: Any, straight: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    """Two kills, each before a random one of the first calls."""
    monkeypatch.setattr(reference, "BLOCK_ROWS", 4)
    dice = random.Random()
    for name, module in {"reference": reference, "dpo": dpo}.items():
        run = partial(run_stage, module, settings_of(), tmp_path / name, inputs)
        died = [killed_at(dice.randint(1, 12), CALLS, run) for _ in range(2)]
        assert any(died), "no kill came before the end"
        run()
    for part in reference.PARTS:
        file = Path("reference") / f"{part}.safetensors"
        expected = inputs["reference"] / file.name
        assert sha256_file(tmp_path / file) == sha256_file(expected)
    assert sha256_file(tmp_path / "dpo" / WEIGHTS) == sha256_file(straight / WEIGHTS)
    metrics = Path("run") / "metrics.jsonl"
    assert curve(tmp_path / "dpo" / metrics) == curve(straight / metrics)
