"""An earlier model as the teacher: its likeliest tokens beside the rows, and the loss with them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from support.comparing import curve
from support.kill_points import killed_at
from support.tiny_data import make_shards
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import in_ranks

from ttrain.config import Settings
from ttrain.core.files import write_json
from ttrain.core.hashing import sha256_file
from ttrain.data import tokenizer
from ttrain.data.encoder import Encoder
from ttrain.data.packing import IGNORE
from ttrain.errors import UsageError
from ttrain.tasks import TEACHER, new_model, teacher
from ttrain.tasks.common.rows import open_rows, with_replay
from ttrain.train import losses
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.losses import Lesson
from ttrain.train.teacher import IDS, TOP, TaughtRows

SETTINGS = stage_settings(0, {"tokens": None, "epochs": 3, "teacher": "previous"})


def teach(inputs: dict[str, Path], output: Path, settings: Settings = SETTINGS) -> Any:
    output.mkdir(exist_ok=True)
    part = Settings.rebuilt(TEACHER.part_of(settings))
    return run_here(teacher, part, output, inputs, settings.runtime)


@pytest.fixture(scope="module")
def inputs(stage_home: Home, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    models = {f"by-{seed}": tmp_path_factory.mktemp("teacher") for seed in range(2)}
    for seed, model in enumerate(models.values()):
        settings = SETTINGS.replaced({"pretrain": {"seed": seed}})
        run_here(new_model, settings, model, stage_home.paths, SETTINGS.runtime)
    return {**stage_home.paths, **models}


@pytest.fixture(scope="module")
def taught(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("taught")
    teach(inputs, output)
    return output


def test_rows_bring_the_mean_shares_of_the_teachers(inputs: dict[str, Path], taught: Path) -> None:
    encoder = Encoder(inputs["tokenizer"])
    rows = open_rows(inputs["shards"] / "train", encoder, SETTINGS.pretrain)
    numbers = [len(rows) - 1, 0]
    batch = TaughtRows(rows, taught, 0.25).batch(numbers)
    models = [new_model.load(inputs[f"by-{number}"] / "model").eval() for number in range(2)]
    plain = rows.batch(numbers)
    assert (batch.input_ids_BT == plain.input_ids_BT).all()
    shares_BTK = torch.from_numpy(batch.taught[1])
    for line, row in enumerate(plain.input_ids_BT):
        first, end = next(iter(plain.spans(line)))
        ids = torch.from_numpy(row[None, first:end])
        parts = [model(input_ids=ids).logits.softmax(-1) for model in models]
        top = torch.stack(parts).mean(0).topk(TOP)
        assert torch.allclose(shares_BTK[line, first:end], 0.25 * top.values[0], rtol=1e-2)


def test_a_killed_pass_and_two_ranks_leave_the_same_files(
    inputs: dict[str, Path], taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher, "BLOCK_ROWS", 8)
    teach(inputs, tmp_path / "whole")
    assert killed_at(4, ("replace",), lambda: teach(inputs, tmp_path / "killed"))
    left = list((tmp_path / "killed").glob("*.safetensors"))
    teach(inputs, tmp_path / "killed")

    def work(ranks: Ranks) -> Any:
        monkeypatch.setattr(teacher, "start", lambda runtime: ranks)  # in a fork of this process
        return teach(inputs, tmp_path / "ranks")

    first, second = in_ranks(2, tmp_path / "store", work)
    assert first == second
    names = ("whole", "killed", "ranks")
    files, *others = [sorted((tmp_path / name).glob("*.safetensors")) for name in names]
    assert 0 < len(left) < len(files)
    for other in others:
        assert [sha256_file(path) for path in other] == [sha256_file(path) for path in files]
    blocks = [load_file(path)[IDS] for path in files]
    assert (np.concatenate(blocks) == load_file(taught / "000000.safetensors")[IDS]).all()


def test_another_tokenizer_is_refused(inputs: dict[str, Path], tmp_path: Path) -> None:
    tokenizer.save(tokenizer.train(["another text"] * 9, 290), tmp_path / "other")
    foreign = {"tokenizer": tmp_path / "other"}
    run_here(new_model, SETTINGS, tmp_path, foreign, SETTINGS.runtime)
    with pytest.raises(UsageError, match="of another tokenizer"):
        teach({**inputs, "by-0": tmp_path}, tmp_path / "foreign")


def test_a_night_is_taught_what_it_replays_alone(inputs: dict[str, Path], tmp_path: Path) -> None:
    encoder = Encoder(inputs["tokenizer"])
    make_shards(tmp_path / "replay", encoder, "documents", 20)
    index = tmp_path / "replay" / "train" / "index.json"
    write_json(index, {**json.loads(index.read_text()), "share": 0.5})
    read = {**inputs, "replay": tmp_path / "replay"}
    figures = teach(read, tmp_path / "night", stage_settings(1, {"teacher": "champion"}))
    new = open_rows(inputs["shards"] / "train", encoder, SETTINGS.pretrain)
    rows = with_replay(new, tmp_path / "replay" / "train", encoder, SETTINGS.pretrain)
    assert figures["taught_rows"] == len(rows) - len(new) > 0
    batch = TaughtRows(rows, tmp_path / "night", 0.5).batch([0, len(new)])
    assert batch.taught[1][0].max() == 0 < batch.taught[1][1].max()


@pytest.mark.parametrize("chunk_tokens", [16, 0])
def test_the_loss_is_the_cross_entropy_of_the_mixed_target(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    hidden_BTD = torch.randn(4, 16, 32, requires_grad=True)
    weight_VD = torch.randn(64, 32, requires_grad=True)
    labels_BT = torch.randint(0, 64, (4, 16))
    labels_BT[0, :5] = IGNORE
    top = torch.randn(64, 64).softmax(-1).topk(8)
    lesson = Lesson(top.indices, 0.7 * top.values, torch.zeros(()))
    logits_NV = (hidden_BTD @ weight_VD.T).flatten(0, 1)
    labels_N = labels_BT.flatten()
    if chunk_tokens:
        found = losses.linear_token_loss_sum(
            hidden_BTD, weight_VD, labels_BT, chunk_tokens, lesson=lesson
        )
    else:
        plain = losses.token_loss_sum(logits_NV[None], labels_N[None])
        found = plain + lesson.loss(logits_NV, labels_N)
    found_gradients = torch.autograd.grad(found, (hidden_BTD, weight_VD), retain_graph=True)
    target_NV = torch.zeros(64, 64).scatter_(1, top.indices, 0.7 * top.values)
    rest_N1 = 1 - target_NV.sum(1, keepdim=True)
    target_NV.scatter_add_(1, labels_N.clamp(min=0)[:, None], rest_N1)
    terms_N = -(target_NV * logits_NV.log_softmax(-1)).sum(1)
    expected = terms_N[labels_N != IGNORE].sum()
    torch.testing.assert_close(found, expected)
    for gradient, other in zip(
        found_gradients, torch.autograd.grad(expected, (hidden_BTD, weight_VD)), strict=True
    ):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-5)


def test_a_student_comes_closer_to_its_teacher(
    stage_home: Home, inputs: dict[str, Path], taught: Path, tmp_path: Path
) -> None:
    """A teacher that knows nothing: the student learns less from the labels, more from it."""
    encoder = Encoder(inputs["tokenizer"])
    rows = open_rows(inputs["shards"] / "train", encoder, SETTINGS.pretrain)
    batch = TaughtRows(rows, taught, 1.0).batch(range(8))
    settings = stage_settings(24, {"teacher_weight": 1.0})
    totals, entropies = [], []
    for name, more in (("plain", {}), ("taught", {"teacher": taught})):
        stage_home.pretrain(settings, tmp_path / name, more)
        task = LanguageModeling(settings.pretrain, new_model.load(tmp_path / name / "model"))
        with torch.no_grad():
            loss = task.train_step(task.build_model(), batch, torch.device("cpu"))
        totals.append(float(loss.total))
        entropies.append(float(loss.parts["ce1"]))
    assert totals[1] < totals[0] and entropies[1] > entropies[0]
    last = curve(tmp_path / "taught" / "run" / "metrics.jsonl")[-2]["metrics"]
    assert last["loss"] == pytest.approx(last["loss_ce1"] + last["loss_teacher"], abs=1e-5)
