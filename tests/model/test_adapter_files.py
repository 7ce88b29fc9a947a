"""The files of adapters: what they hold, who opens them, and how adapters are merged."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support import tiny_adapters
from support.tiny_adapters import CASE_IDS, CASES, SHAPES, disturb, logits, save_adapter
from support.tiny_trainers import tiny_model
from transformers import AutoModelForCausalLM

from ttrain.errors import ArtifactError
from ttrain.model import adapters, factory
from ttrain.store.model_files import ADAPTER, BASE, weights_digest


def load(base: Path, adapter: Path) -> Any:
    return adapters.load(factory.load(base), adapter, weights_digest(base))


def saved(shape: str, kind: str, directory: Path) -> tuple[Path, Path, torch.Tensor]:
    """A base, an adapter of it that moves it, and the logits of both together."""
    base = tiny_adapters.save_base(tiny_model(**SHAPES[shape]), directory / "base")
    config = tiny_adapters.settings(kind=kind, targets=("all-linear",))
    model = disturb(adapters.attach(factory.load(base), config))
    return base, save_adapter(model, directory / "adapter", base), logits(model)


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=CASE_IDS)
def test_an_adapter_gives_the_same_logits_everywhere(tmp_path: Path, shape: str, kind: str) -> None:
    """Up to rounding: products of experts differ in the last bit with where their rows lie."""
    base, adapter, expected = saved(shape, kind, tmp_path)
    of_base = logits(factory.load(base))
    assert not torch.allclose(expected, of_base, atol=1e-3), "it moves nothing"
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    assert not any(type(module).__module__.startswith("ttrain") for module in plain.modules())
    torch.testing.assert_close(logits(plain), expected, rtol=1e-5, atol=1e-6)
    model = load(base, adapter)
    torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in model.parameters())
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), of_base, rtol=0, atol=1e-6)
    if kind == "prefix":
        return
    for change in (model.merge_adapter, model.unmerge_adapter):
        change()
        torch.testing.assert_close(logits(model), expected, rtol=1e-5, atol=1e-5)
    merged = adapters.merge(model)
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
    assert {*factory.state(merged)} == {*factory.state(factory.load(base))}, "a plain model"


def test_a_base_in_shards_has_a_digest_too_and_a_changed_shard_is_refused(tmp_path: Path) -> None:
    whole = tiny_adapters.save_base(tiny_model(), tmp_path / "whole")
    base = tmp_path / "sharded"
    factory.load(whole).save_pretrained(base, max_shard_size="4KB")
    shards = sorted(base.glob("model-*.safetensors"))
    assert len(shards) > 2 and not (base / "model.safetensors").exists()
    model = disturb(adapters.attach(factory.load(base), tiny_adapters.settings()))
    adapter = save_adapter(model, tmp_path / "adapter", base)
    assert torch.equal(logits(load(base, adapter)), logits(model))
    changed = {name: tensor + 1 for name, tensor in load_file(shards[0]).items()}
    save_file(changed, shards[0], metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="trained on"):
        load(base, adapter)


def test_an_adapter_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    base, adapter, _ = saved("llama", "lora", tmp_path)
    spoilt = shutil.copytree(adapter, tmp_path / "spoilt")
    weights = load_file(spoilt / ADAPTER)
    missing, cut, *_ = sorted(weights)
    del weights[missing]
    weights |= {"odd": torch.zeros(1), cut: weights[cut][:1].clone()}
    save_file(weights, spoilt / ADAPTER)
    with pytest.raises(ArtifactError) as refused:
        load(base, spoilt)
    for part in (f"missing: {missing} [", "unexpected: odd", f"mis-shaped: {cut} "):
        assert part in str(refused.value)
    for name in ("adapter_config.json", BASE):
        (spoilt / name).write_text("{")
        with pytest.raises(ArtifactError, match=name):
            load(base, spoilt)
