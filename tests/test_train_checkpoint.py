"""Checkpoints: whatever is torn, flipped or killed, the newest whole one is found, or the damage is named."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from doubles import NumberedRows, make_tokenizer, make_trainer, same, settings_of_training, tiny_model

from ttrain.digests import sha256_file
from ttrain.errors import ArtifactError
from ttrain.model import factory
from ttrain.stages.training import tokenizer_files
from ttrain.train import checkpoint
from ttrain.train.checkpoint import Checkpoints, Snapshot

FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "config.json")


def snapshot(step: int) -> Snapshot:
    """Tensors that hold the step's number."""
    return Snapshot(
        step, {"w": torch.full((3, 4), float(step))}, {"m|w": torch.full((3, 4), -float(step))}, {"last_loss": 0.5}
    )


def checkpoints(directory: Path, **options: Any) -> Checkpoints:
    return Checkpoints(directory, files=lambda: {"config.json": b'{"a": 1}'}, **options)


def write(directory: Path, *steps: int, **options: Any) -> None:
    ours = checkpoints(directory, **options)
    for step in steps:
        ours.save(snapshot(step))
    ours.close()


def is_snapshot(found: Snapshot | None, step: int) -> bool:
    assert found is not None
    wanted = snapshot(step)
    return found.step == step and same(found.weights, wanted.weights) and same(found.optimizer, wanted.optimizer)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def lose(path: Path) -> None:
    path.unlink()


def swap_a_digit(path: Path) -> None:
    """In JSON, a flip that still parses: the step, a counter, a digest."""
    data = bytearray(path.read_bytes())
    place = next((at for at, byte in enumerate(data) if chr(byte).isdigit()), 0)
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, empty, zero, lose, swap_a_digit])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: Callable[[Path], None]
) -> None:
    write(tmp_path, 4, 8)
    damage(tmp_path / "step-00000008" / name)
    with caplog.at_level(logging.WARNING, logger="ttrain"):
        found = checkpoints(tmp_path).newest()
    assert is_snapshot(found, 4)
    assert str(tmp_path / "step-00000008") in caplog.text
    damage(tmp_path / "step-00000004" / name)
    with pytest.raises(ArtifactError) as raised:
        checkpoints(tmp_path).newest()
    assert all(f"step-0000000{step}" in str(raised.value) for step in (4, 8))


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_of_a_checkpoint_is_seen(tmp_path: Path, name: str) -> None:
    write(tmp_path, 4)
    path = tmp_path / "step-00000004" / name
    data = path.read_bytes()
    for place in range(0, 8 * len(data), 13):  # 13 and 8 have no common factor, so every bit of a byte has its turn
        flipped = bytearray(data)
        flipped[place // 8] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(ArtifactError):
            checkpoint.read(path.parent)
    path.write_bytes(data)
    assert is_snapshot(checkpoint.read(path.parent), 4)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    write(tmp_path, 4)
    (tmp_path / "step-00000004").rename(tmp_path / "step-00000009")
    with pytest.raises(ArtifactError, match=r"step-00000009/state\.json is damaged"):
        checkpoint.read(tmp_path / "step-00000009")


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    config = settings_of_training(tokens=4 * 96)
    make_trainer(config, tiny_model(), NumberedRows(20), directory=tmp_path).fit()
    for path in tmp_path.glob("*/optimizer.safetensors"):
        truncate(path)
    start = Snapshot(2, {}, {}, {})
    with pytest.raises(ArtifactError, match=r"optimizer\.safetensors is damaged"):
        make_trainer(config, tiny_model(), NumberedRows(20), directory=tmp_path, start=start).fit()


def test_a_directory_without_checkpoints_is_a_start(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "none").newest() is None
    assert checkpoints(tmp_path).newest() is None


def test_the_last_ones_and_the_permanent_ones_are_kept(tmp_path: Path) -> None:
    write(tmp_path, *range(1, 8), keep=2, permanent=frozenset({3, 7}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000006", "step-00000007"]
    assert is_snapshot(checkpoint.read(tmp_path / "step-00000003"), 3)


def test_a_snapshot_is_out_of_the_way_of_training() -> None:
    weights = {"w": torch.zeros(4, 3).T}
    copy = checkpoint.copy_tensors(weights)
    weights["w"] += 1
    assert float(copy["w"].sum()) == 0
    assert copy["w"].is_contiguous()


def test_what_the_writer_raises_reaches_the_trainer(tmp_path: Path) -> None:
    def refuse() -> dict[str, bytes]:
        raise OSError(28, "No space left on device")

    trainer = make_trainer(settings_of_training(), tiny_model(), NumberedRows(52), directory=tmp_path)
    assert trainer.checkpoints is not None
    trainer.checkpoints._files = refuse
    with pytest.raises(OSError, match="No space left on device"):
        trainer.fit()


# --- no code in a checkpoint --------------------------------------------------------------------------------------------


class Malicious:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("how", ["pickle", "torch"])
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_pickle_in_the_place_of_tensors_is_refused_and_not_run(tmp_path: Path, name: str, how: str) -> None:
    """With digests that fit, as one who may write there would leave it."""
    write(tmp_path, 4)
    ran = tmp_path / "ran"
    path = tmp_path / "step-00000004"
    if how == "pickle":
        (path / name).write_bytes(pickle.dumps(Malicious(ran)))
    else:
        torch.save(Malicious(ran), path / name)
    state = json.loads((path / "state.json").read_bytes())
    del state["sha256"]
    state["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": sha256_file(path / name)}
    (path / "state.json").write_text(json.dumps({**state, "sha256": checkpoint._digest(state)}))
    with pytest.raises(ArtifactError, match=str(path)):
        checkpoints(tmp_path).newest()
    assert not ran.exists()
    pickle.loads(pickle.dumps(Malicious(ran)))
    assert ran.exists(), "the pickle does run where it is loaded"


# --- killed while writing -----------------------------------------------------------------------------------------------

KILLER = """
import os, shutil, signal, sys
from pathlib import Path
import test_train_checkpoint as tests

SYSCALLS = ("mkdir", "open", "fsync", "rename", "replace", "unlink", "rmdir")
scenario, root = sys.argv[1], Path(sys.argv[2])

def prepare(directory):
    tests.write(directory, 4, 8)
    if scenario == "again":  # the newest is damaged, so that the same step is written once more
        tests.truncate(directory / "step-00000008" / "model.safetensors")

def work(directory, kill_at):
    ours, calls = tests.checkpoints(directory), 0
    def counted(function):
        def call(*arguments, **named):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)
        return call
    for name in SYSCALLS:
        setattr(os, name, counted(getattr(os, name)))
    ours._write(tests.snapshot(8 if scenario == "again" else 12))

kill_at, killed = 0, True
prepare(root / "whole")
while killed:
    kill_at += 1
    directory = root / f"{kill_at:03d}"
    shutil.copytree(root / "whole", directory)
    child = os.fork()
    if not child:
        work(directory, kill_at)
        os._exit(0)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize("scenario", ["next", "again"])
def test_a_process_killed_anywhere_in_a_write_leaves_a_whole_newest(tmp_path: Path, scenario: str) -> None:
    here = Path(__file__).parent
    environment = {"PYTHONPATH": f"{here}:{here.parent}", "OMP_NUM_THREADS": "1", "PATH": ""}
    subprocess.run([sys.executable, "-c", KILLER, scenario, str(tmp_path)], check=True, env=environment, timeout=120)
    tried = sorted(path for path in tmp_path.iterdir() if path.name != "whole")
    assert len(tried) > 15, "every file, rename and removal is a point to die at"
    steps = []
    wanted = 8 if scenario == "again" else 12
    for directory in tried:
        found = checkpoints(directory).newest()
        assert found is not None
        assert is_snapshot(found, found.step)
        steps.append(found.step)
        write(directory, wanted)
        left = sorted(path.name for path in directory.iterdir())
        assert left == (["step-00000004", "step-00000008"] if scenario == "again" else ["step-00000008", "step-00000012"])
        assert is_snapshot(checkpoints(directory).newest(), wanted)
    before = 4 if scenario == "again" else 8
    assert {*steps} == {before, wanted}
    assert steps == sorted(steps), "once the new one is there, it stays"


# --- for others ---------------------------------------------------------------------------------------------------------

OPENS = """
import sys, torch
assert not any(name.startswith("ttrain") for name in sys.modules)
from transformers import AutoModelForCausalLM, AutoTokenizer
from safetensors.torch import save_file
for number, path in enumerate(sys.argv[2:]):
    model, report = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
    assert not any(report.values()), report
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    assert tokenizer.decode(ids[0], skip_special_tokens=True) == "def add(a, b):"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<|bos|><|user|>x<|end|>"
    with torch.no_grad():
        save_file({"ids": ids, "logits": model.eval()(ids).logits}, f"{sys.argv[1]}/{number}.safetensors")
    assert model.generate(ids, max_new_tokens=2, do_sample=False).shape[1] > ids.shape[1]
assert "ttrain" not in sys.modules
"""


@pytest.fixture
def three_models(tmp_path: Path) -> Iterator[list[tuple[Any, Path]]]:
    encoder = make_tokenizer(tmp_path / "tokenizer")
    found = []
    for number, options in enumerate(({}, {"kind": "qwen3", "kv_heads": 1}, {"tie_embeddings": False})):
        model = tiny_model(vocab=len(encoder), seed=number, **options)
        files = {**factory.files(model), **tokenizer_files(tmp_path / "tokenizer")}
        ours = Checkpoints(tmp_path / str(number), files=files.copy)
        ours.save(Snapshot(1, checkpoint.copy_tensors(factory.state(model)), {}, {}))
        ours.close()
        found.append((model, tmp_path / str(number) / "step-00000001"))
    yield found
    shutil.rmtree(tmp_path)


def test_a_checkpoint_opens_with_transformers_where_ttrain_is_not_imported(
    three_models: list[tuple[Any, Path]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    paths = [str(path) for _, path in three_models]
    environment = {"OMP_NUM_THREADS": "1", "PATH": "", "HF_HUB_OFFLINE": "1"}
    subprocess.run(
        [sys.executable, "-P", "-c", OPENS, str(tmp_path), *paths], check=True, env=environment, cwd=tmp_path, timeout=120
    )
    for number, (model, _) in enumerate(three_models):
        seen = load_file(tmp_path / f"{number}.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(seen["ids"]).logits, seen["logits"], rtol=1e-5, atol=1e-6)
