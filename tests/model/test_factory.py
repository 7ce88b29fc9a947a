"""Models and adapters: strict when loaded. What a position sees: tests/doctor."""

import io
import json
import os
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


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_embedding_is_saved_once(tmp_path: Path, tied: bool) -> None:
    directory = save_base(tiny_model(tie_embeddings=tied), tmp_path / "model")
    names = {*load_file(directory / "model.safetensors")}
    assert "model.embed_tokens.weight" in names and ("lm_head.weight" in names) is not tied
    loaded = factory.load(directory)
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied


def test_no_pickle_beside_a_model_is_loaded(tmp_path: Path) -> None:
    directory = save_base(tiny_model(), tmp_path / "model")
    (directory / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "base_model_name_or_path": "elsewhere"}'
    )
    (directory / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(ArtifactError, match="adapter_config"):
        factory.load(directory)
    (directory / "adapter_config.json").unlink()
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(ArtifactError, match="cannot load"):
        factory.load(directory)


def test_every_weight_that_does_not_fit_is_named_and_nothing_is_loaded(tmp_path: Path) -> None:
    model = tiny_model()
    directory = save_base(model, tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    del weights["model.norm.weight"]
    weights |= {
        "model.router.weight": torch.zeros(2),
        "model.embed_tokens.weight": torch.zeros(VOCAB + 1, 16),
    }
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    before = copies(factory.state(model))
    for load in (
        lambda: factory.load(directory),
        lambda: factory.overwrite(factory.state(model), weights),
    ):
        with pytest.raises(ArtifactError) as refused:
            load()
        for said in (
            "missing: model.norm.weight [16]",
            "unexpected: model.router.weight",
            f"mis-shaped: model.embed_tokens.weight is [{VOCAB + 1}, 16] but must be [{VOCAB}, 16]",
        ):
            assert said in str(refused.value)
    assert same(before, factory.state(model))


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(number: float) -> None:
    weights = {
        "empty": torch.zeros(0),
        "whole": torch.ones(2, dtype=torch.int64),
        "good": torch.ones(2, 2),
    }
    factory.need_finite(weights, "here")
    weights |= {"half": torch.tensor([[0, number]], dtype=torch.bfloat16, requires_grad=True)}
    with pytest.raises(ArtifactError, match=r"1 of the 4 weights in here .*\(half\)"):
        factory.need_finite(weights, "here")


def test_a_model_with_a_torn_file_or_without_one_is_refused(tmp_path: Path) -> None:
    directory = save_base(tiny_model(), tmp_path / "model")
    weights = directory / "model.safetensors"
    for damage in (lambda: os.truncate(weights, 99), weights.unlink):
        damage()
        with pytest.raises(ArtifactError, match="cannot load"):
            factory.load(directory)


def test_code_beside_weights_is_never_run_whatever_the_next_line_of_input_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_base(tiny_model(), tmp_path / "model")
    described = json.loads((directory / "config.json").read_bytes())
    described |= {
        "model_type": "theirs",
        "auto_map": {"AutoConfig": "code.Theirs", "AutoModelForCausalLM": "code.Model"},
    }
    (directory / "config.json").write_text(json.dumps(described))
    ran = tmp_path / "ran"
    (directory / "code.py").write_text(
        f"open({str(ran)!r}, 'w').close()\nfrom transformers import LlamaConfig as Theirs, LlamaForCausalLM as Model\n"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO("y\ny\n"))
    with pytest.raises(ArtifactError, match="never runs"):
        factory.load(directory)
    assert not ran.exists()
