"""Texts that a model writes while it learns: at their steps, to the prompts that were asked for, and without a trace."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import (
    ALONE,
    CPU,
    PLAIN,
    Home,
    NumberedRows,
    Recorder,
    copies,
    curve,
    make_trainer,
    run_here,
    same,
    settings_of_training,
    stage_settings,
    tiny_model,
)

from ttrain.config import LoraConfig, PretrainConfig, SftConfig
from ttrain.evaluate import baselines
from ttrain.stages import lora, pretrain, sft
from ttrain.train.distributed import Ranks
from ttrain.train.periodic_evaluation import PeriodicSamples
from ttrain.train.trainer import Cadence, TrainerOptions

PROMPTS = ("The quick", "Grüße an 東京", "🙂 [bold]")
ADAPTERS: Mapping[str, Mapping[str, Any]] = {
    "lora": {"dropout": 0.2}, "dora": {"kind": "dora", "dropout": 0.2}, "prefix": {"kind": "prefix", "virtual_tokens": 4},
}  # fmt: skip


@pytest.fixture(scope="module")
def base(stage_home: Home, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained model, as its stage leaves it."""
    output = tmp_path_factory.mktemp("base")
    settings = stage_settings(4)
    inputs = {name: artifact.path for name, artifact in stage_home.pretrain_inputs().items()}
    run_here(pretrain, PretrainConfig(model=settings.model, pretrain=settings.pretrain), output, inputs, settings.runtime)
    return output


@pytest.mark.parametrize(
    "what", ["lora", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("sft", "dora", "prefix"))]
)
def test_chat_stages_sample_without_moving_a_bit(stage_home: Home, base: Path, tmp_path: Path, what: str) -> None:
    """That of documents is among the tests of callbacks."""
    inputs = {"base": base, "shards": stage_home.chats.path}
    for name, every in (("without", 0), ("with", 2)):
        settings = stage_settings(sample_every_steps=every, sample_prompts=PROMPTS)
        if what == "sft":
            run_here(sft, SftConfig(sft=settings.sft), tmp_path / name, inputs, settings.runtime)
        else:
            given = {**settings.lora.model_dump(), **ADAPTERS[what]}
            config = LoraConfig.model_validate({"lora": given})
            run_here(lora, config, tmp_path / name, inputs, settings.runtime)
    directory = "model" if what == "sft" else "adapter"
    first, second = (sorted((tmp_path / name / directory).glob("*.safetensors")) for name in ("without", "with"))
    assert first and [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    lines = curve(tmp_path / "with" / "run" / "metrics.jsonl")
    assert lines == curve(tmp_path / "without" / "run" / "metrics.jsonl")
    steps = [line["step"] for line in lines if line["step"] % 2 == 0 and "loss" in line["metrics"]]
    texts = sorted((tmp_path / "with" / "run" / "samples").iterdir())
    assert [path.name for path in texts] == [f"step-{step:08d}.txt" for step in steps]
    prompts = [line[4:] for line in texts[-1].read_text(encoding="utf-8").splitlines() if line.startswith("=== ")]
    assert prompts == list(PROMPTS)


def write(model: Any) -> list[tuple[str, str]]:
    """Greedy, as stages do it."""
    tokens = baselines.greedy(model, [5, 6, 7], new_tokens=6, stop_ids=[], device=CPU)
    return [("5 6 7", " ".join(map(str, tokens)))]


def train(ranks: Ranks, directory: Path | None, how: TrainerOptions = PLAIN) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Nine steps with dropout; samples where there is a directory for them."""
    model, recorder = tiny_model(dropout=0.2), Recorder()
    callbacks = [PeriodicSamples(directory, model, lambda: write(model), every=2)] if directory else []
    trainer = make_trainer(
        settings_of_training(tokens=9 * 96), model, NumberedRows(52), rows_per_device=3, ranks=ranks, how=how,
        callbacks=[*callbacks, recorder], cadence=Cadence(log=1),
    )  # fmt: skip
    trainer.fit()
    return recorder.figures("loss"), copies(trainer.weights.state())


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_samples_of_a_compiled_training_move_nothing(tmp_path: Path) -> None:
    losses, weights = train(ALONE, None, TrainerOptions(compile=True))
    sampled, after = train(ALONE, tmp_path / "samples", TrainerOptions(compile=True))
    assert losses == sampled
    assert same(weights, after)


def test_a_run_that_continues_writes_the_same_texts(tmp_path: Path) -> None:
    texts = []
    for name, stops in (("straight", [None]), ("parts", [5, None])):
        for stop_after in stops:
            model = tiny_model(dropout=0.2)
            make_trainer(
                settings_of_training(tokens=9 * 96), model, NumberedRows(52), directory=tmp_path / name / "checkpoints",
                callbacks=[PeriodicSamples(tmp_path / name / "samples", model, lambda model=model: write(model), every=2)],
                stop_after=stop_after,
            ).fit()  # fmt: skip
        texts.append({path.name: path.read_bytes() for path in sorted((tmp_path / name / "samples").iterdir())})
    assert texts[0] == texts[1]
    assert [*texts[0]] == [f"step-{step:08d}.txt" for step in (2, 4, 6, 8)]
