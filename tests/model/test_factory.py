"""Models: strict when loaded, and no code or pickle of theirs is run."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.comparing import copies, same
from support.tiny_adapters import save_base
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model

from ttrain.errors import ArtifactError
from ttrain.model import factory

LORA = '{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}'
CODE = "from transformers import LlamaConfig as Theirs, LlamaForCausalLM as Model\n"
AUTO_MAP = {"AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.Model"}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return save_base(tiny_model(), tmp_path / "model")


def test_no_pickle_next_to_a_model_is_loaded_and_a_torn_file_is_refused(directory: Path) -> None:
    (directory / "adapter_config.json").write_text(LORA)
    (directory / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ArtifactError, match="adapter_config"):
        factory.load(directory)
    (directory / "adapter_config.json").unlink()
    weights = directory / "model.safetensors"
    shutil.copyfile(weights, directory / "pytorch_model.bin")
    for damage in (lambda: os.truncate(weights, 99), weights.unlink):
        damage()
        with pytest.raises(ArtifactError, match="cannot load"):
            factory.load(directory)


def test_every_weight_that_does_not_fit_is_named_and_nothing_is_loaded(directory: Path) -> None:
    model, path = tiny_model(), directory / "model.safetensors"
    weights, embeddings = load_file(path), torch.zeros(VOCAB + 1, 16)
    del weights["model.norm.weight"]
    weights |= {"model.router.weight": torch.zeros(2), "model.embed_tokens.weight": embeddings}
    save_file(weights, path, metadata={"format": "pt"})
    before = copies(factory.state(model))
    for load in (
        lambda: factory.load(directory),
        lambda: factory.overwrite(factory.state(model), weights),
    ):
        with pytest.raises(ArtifactError) as refused:
            load()
        assert str(refused.value).split("\n  ")[1:] == [
            "missing: model.norm.weight [16]",
            "unexpected: model.router.weight",
            f"mis-shaped: model.embed_tokens.weight is [{VOCAB + 1}, 16] but must be [{VOCAB}, 16]",
        ]
    assert same(before, factory.state(model))


def test_a_weight_that_is_not_finite_is_named() -> None:
    integers = torch.ones(2, dtype=torch.int64)
    weights = {"empty": torch.zeros(0), "integers": integers, "good": torch.ones(2, 2)}
    factory.need_finite(weights, "here")
    for number in (float("nan"), -float("inf")):
        weights["half"] = torch.tensor([0, number], dtype=torch.bfloat16)
        with pytest.raises(ArtifactError, match=r"1 .*here.*\(half\)"):
            factory.need_finite(weights, "here")


def test_code_next_to_weights_is_never_run_whatever_the_next_line_of_input_is(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, ran = json.loads((directory / "config.json").read_bytes()), tmp_path / "ran"
    config |= {"model_type": "theirs", "auto_map": AUTO_MAP}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "code.py").write_text(f"open({str(ran)!r}, 'w').close()\n{CODE}")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    with pytest.raises(ArtifactError, match="never runs"):
        factory.load(directory)
    assert not ran.exists()
