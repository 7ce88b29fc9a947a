"""The files of adapters: what they hold, who opens them, and how adapters are shown and merged."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.tiny_adapters import (
    CASE_IDS,
    CASES,
    KINDS,
    SHAPES,
    disturb,
    logits,
    save_adapter,
    save_base,
    settings,
)
from support.tiny_trainers import tiny_model
from transformers import AutoModelForCausalLM

from ttrain.errors import ArtifactError
from ttrain.model import adapters, factory
from ttrain.store.model_files import ADAPTER, BASE, weights_digest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root, found = tmp_path_factory.mktemp("saved"), {}
    for (shape, kind), name in zip(CASES, CASE_IDS, strict=True):
        place = root / name.replace(" ", "-")
        base = save_base(tiny_model(**SHAPES[shape]), place / "base")
        before = logits(factory.load(base))
        model = disturb(
            adapters.attach(factory.load(base), settings(kind=kind, targets=("all-linear",)))
        )
        adapter = save_adapter(model, place / "adapter", base)
        found[name] = {"base": base, "adapter": adapter, "logits": logits(model), "before": before}
    return found


@pytest.mark.parametrize("name", CASE_IDS)
def test_an_adapter_gives_the_same_logits_loaded_here_by_plain_peft_and_merged(
    saved: Any, name: str
) -> None:
    """Up to rounding: products of experts differ in the last bit with where their rows lie in memory."""
    case = saved[name]
    plain = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(case["base"]), case["adapter"]
    )
    assert not any(type(module).__module__.startswith("ttrain") for module in plain.modules())
    assert not torch.allclose(case["logits"], case["before"], atol=1e-3), "it moves nothing"
    torch.testing.assert_close(logits(plain), case["logits"], rtol=1e-5, atol=1e-6)
    model = adapters.load(factory.load(case["base"]), case["adapter"], weights_digest(case["base"]))
    torch.testing.assert_close(logits(model), case["logits"], rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in model.parameters())
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), case["before"], rtol=0, atol=1e-6)
    if "prefix" in name:
        return
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        torch.testing.assert_close(logits(model), case["logits"], rtol=1e-5, atol=1e-5)
    merged = adapters.merge(model)
    torch.testing.assert_close(logits(merged), case["logits"], rtol=1e-5, atol=1e-5)
    assert {*factory.state(merged)} == {*factory.state(factory.load(case["base"]))}, "a plain model"


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_file_holds_the_adapter_only_and_what_a_reader_must_know(
    tmp_path: Path, kind: str
) -> None:
    base = tiny_model(hidden_size=128, vocab=2000)
    config = settings(kind=kind, rank=1)
    directory = save_base(base, tmp_path / "base")
    adapter = save_adapter(adapters.attach(base, config), tmp_path / "adapter", directory)
    weights = load_file(adapter / "adapter_model.safetensors")
    parts = {
        "lora": ("lora_A", "lora_B"),
        "dora": ("lora_A", "lora_B", "lora_magnitude"),
        "prefix": ("prompt_embeddings",),
    }
    assert all(any(part in name for part in parts[kind]) for name in weights)
    size = (adapter / ADAPTER).stat().st_size
    assert (
        size
        < (0.01 if kind == "prefix" else 0.05) * (directory / "model.safetensors").stat().st_size
    )
    told = json.loads((adapter / "adapter_config.json").read_text())
    if kind == "prefix":
        assert (told["num_virtual_tokens"], told["peft_type"]) == (4, "PREFIX_TUNING")
        assert weights["prompt_embeddings"].shape == (4, 2 * 2 * 128), (
            "keys and values of two layers"
        )
    else:
        assert (told["r"], told["lora_alpha"], told["use_dora"], len(told["target_modules"])) == (
            1,
            8.0,
            kind == "dora",
            7,
        )
    assert json.loads((adapter / "base.json").read_text()) == {
        "base_weights_sha256": weights_digest(directory)
    }


def test_a_base_in_shards_has_a_digest_too_and_a_changed_shard_is_refused(tmp_path: Path) -> None:
    whole = save_base(tiny_model(), tmp_path / "whole")
    base = tmp_path / "sharded"
    factory.load(whole).save_pretrained(base, max_shard_size="4KB")
    assert (
        len([*base.glob("model-*.safetensors")]) > 2 and not (base / "model.safetensors").exists()
    )
    model = disturb(adapters.attach(factory.load(base), settings()))
    adapter = save_adapter(model, tmp_path / "adapter", base)
    assert torch.equal(
        logits(adapters.load(factory.load(base), adapter, weights_digest(base))), logits(model)
    )
    shard = sorted(base.glob("model-*.safetensors"))[0]
    save_file(
        {name: tensor + 1 for name, tensor in load_file(shard).items()},
        shard,
        metadata={"format": "pt"},
    )
    with pytest.raises(ArtifactError, match="trained on"):
        adapters.load(factory.load(base), adapter, weights_digest(base))


def test_an_adapter_that_does_not_fit_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    case = saved["lora on llama"]
    spoilt = shutil.copytree(case["adapter"], tmp_path / "spoilt")
    weights = load_file(spoilt / ADAPTER)
    gone, cut, *_ = sorted(weights)
    del weights[gone]
    weights |= {"odd": torch.zeros(1), cut: weights[cut][:1].clone()}
    save_file(weights, spoilt / ADAPTER)
    with pytest.raises(ArtifactError) as refused:
        adapters.load(factory.load(case["base"]), spoilt, weights_digest(case["base"]))
    for said in (f"missing: {gone} [", "unexpected: odd", f"mis-shaped: {cut} "):
        assert said in str(refused.value)
    for name, message in (
        ("adapter_config.json", r"cannot read .*adapter_config"),
        (BASE, r"base\.json.* is damaged"),
    ):
        (spoilt / name).write_text("{")
        with pytest.raises(ArtifactError, match=message):
            adapters.load(factory.load(case["base"]), spoilt, weights_digest(case["base"]))
