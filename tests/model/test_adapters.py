"""Adapters of every kind on every shape: what they touch, what they leave alone, and how they
train."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.comparing import copies, distance, same
from support.tiny_adapters import (
    CASE_IDS,
    CASES,
    CPU,
    KINDS,
    SHAPES,
    disturb,
    logits,
    save_adapter,
    save_base,
    settings,
)
from support.tiny_data import NumberedRows
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import Held, PlainSgd, in_ranks, make_trainer, tiny_model
from torch import Tensor

from ttrain.data.encoder import Encoder
from ttrain.errors import UsageError
from ttrain.model import adapters, factory
from ttrain.store.model_files import ADAPTER, weights_digest
from ttrain.tasks import lora
from ttrain.tasks.new_model import TOKENIZER_FILES
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.training_options import Speed

ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


class HeldAdapter(Held):
    def state(self) -> dict[str, Tensor]:
        return adapters.state(self.model)  # type: ignore[arg-type]

    def load(self, weights: dict[str, Tensor]) -> None:
        factory.overwrite(adapters.state(self.model), weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error::FutureWarning")
def test_nothing_that_a_library_will_drop_is_used(kind: str, tmp_path: Path) -> None:
    base = save_base(tiny_model(), tmp_path / "base")
    model = adapters.attach(tiny_model(), settings(kind=kind))
    adapter = save_adapter(model, tmp_path / "adapter", base)
    loaded = adapters.load(factory.load(base), adapter, weights_digest(base))
    assert same(adapters.state(model), adapters.state(loaded))


def without_layer(names: Any) -> set[str]:
    """model.layers.0.mlp.up_proj and transformer.h.0.mlp.c_fc to mlp.up_proj and mlp.c_fc."""
    return {name.split(".", 3)[-1] for name in names}


STACKS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
DENSE = {f"{name}.weight" for name in MLP}
SHARED_EXPERTS = {name.replace("mlp.", "mlp.shared_experts.") for name in DENSE}
GPT2_ATTENTION = {"attn.c_attn", "attn.c_proj"}


@pytest.mark.parametrize(
    ("shape", "preset", "layers", "parameters"),
    [
        ("llama", "attention", ATTENTION, set()),
        ("llama", "all-linear", ATTENTION | MLP, set()),
        ("gpt2", "attention", GPT2_ATTENTION, set()),
        ("gpt2", "all-linear", GPT2_ATTENTION | {"mlp.c_fc", "mlp.c_proj"}, set()),
        ("experts", "attention", ATTENTION, set()),
        ("experts", "all-linear", ATTENTION, STACKS),
        ("shared experts", "all-linear", ATTENTION, STACKS | DENSE | SHARED_EXPERTS),
    ],
)
def test_a_preset_takes_these_layers_and_never_the_output_head(
    shape: str, preset: str, layers: set[str], parameters: set[str]
) -> None:
    model = tiny_model(**SHAPES[shape], tie_embeddings=False)
    targets, named = adapters.find_targets(model, [preset]), dict(model.named_parameters())
    names = {*(f"{name}.weight" for name in targets.layers), *targets.parameters}
    sizes = [named[name].shape for name in names]
    assert without_layer(targets.layers) == layers
    assert without_layer(targets.parameters) == parameters
    adapted = adapters.attach(model, settings(targets=(preset,)))
    trained = {name: p for name, p in adapted.named_parameters() if p.requires_grad}
    touched = {
        name.removeprefix("base_model.model.").partition(".lora_")[0].replace(".base_layer", "")
        for name in trained
    }
    assert touched == targets.layers | {name.rpartition(".")[0] for name in targets.parameters}
    assert len(touched) % 2 == 0 or shape == "shared experts", "both layers, unless they differ"
    # Rank times (in + out), of each expert.
    expected = sum(2 * size[:-2].numel() * sum(size[-2:]) for size in sizes)
    assert sum(p.numel() for p in trained.values()) == expected


def test_a_target_may_be_the_last_parts_of_a_name() -> None:
    targets = adapters.find_targets(tiny_model(kind="gpt2"), ["mlp.c_proj", "0.attn.c_attn"])
    names = {"0.mlp.c_proj", "1.mlp.c_proj", "0.attn.c_attn"}
    assert targets.layers == {f"transformer.h.{name}" for name in names}
    assert targets.layer_suffixes == ("0.attn.c_attn", "mlp.c_proj") and targets.transposed


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ("llama", ("q_proj", "qkv"), r"lora\.targets names qkv, .* are down_proj, .*all-linear"),
        ("experts", ("up_proj",), r"names up_proj, .* are down_proj, gate_up_proj, k_proj"),
        ("llama", ("embed_tokens",), "names embed_tokens"),
    ],
)
def test_an_unknown_target_is_refused(shape: str, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        adapters.attach(tiny_model(**SHAPES[shape]), settings(targets=names))


def test_the_output_head_is_adapted_unless_it_is_the_embedding() -> None:
    adapted = adapters.attach(tiny_model(tie_embeddings=False), settings(targets=("lm_head",)))
    assert all(".lm_head.lora_" in name for name in adapters.state(adapted))
    with pytest.raises(UsageError, match=r"model\.tie_embeddings"):
        adapters.attach(tiny_model(tie_embeddings=True), settings(targets=("q_proj", "lm_head")))


@pytest.mark.parametrize(("name", "value", "cure"), [("kind", "dora", "lora"), ("dropout", 0.1, 0)])
def test_what_peft_cannot_do_to_experts_is_refused(name: str, value: Any, cure: Any) -> None:
    message = rf"experts .*set lora\.{name}={cure}.* or lora\.targets=attention"
    with pytest.raises(UsageError, match=message):
        adapters.attach(tiny_model(**SHAPES["experts"]), settings(**{name: value}))


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=CASE_IDS)
def test_training_moves_all_of_the_adapter_and_nothing_of_the_base(shape: str, kind: str) -> None:
    base = tiny_model(**SHAPES[shape])
    frozen = copies(base.state_dict())
    config = settings(kind=kind, targets=("all-linear",))
    logits_before = logits(base)
    model = adapters.attach(base, config)
    # A fresh adapter of low rank changes no bit.
    assert torch.equal(logits(model), logits_before) is (kind != "prefix")
    before = copies(adapters.state(model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = NumberedRows(6)
    trainer = make_trainer(config, model, rows, rows_per_device=6, weights=HeldAdapter(model))
    batches = [rows.batch(range(6))]
    loss_before = trainer.model.measure(batches)[0]
    trainer.fit()
    loss_after = trainer.model.measure(batches)[0]
    after = adapters.state(model)
    assert {*after} == {*before} and trained == sum(tensor.numel() for tensor in after.values())
    assert [name for name in after if torch.equal(before[name], after[name])] == []
    assert loss_after < loss_before - 0.005
    prefix = "base_model." if kind == "prefix" else "base_model.model."
    tensors = model.state_dict().items()
    kept = {name.removeprefix(prefix).replace(".base_layer", ""): p for name, p in tensors}
    assert same(frozen, {name: kept[name] for name in frozen})


def test_two_sharded_ranks_train_the_same_adapter_as_one(tmp_path: Path) -> None:
    """Whole ones, of every kind of adapter: tests/doctor."""
    config = settings(tokens=3 * 96)

    def fit(ranks: Ranks) -> dict[str, Tensor]:
        model, rows = adapters.attach(tiny_model(), config), NumberedRows(12)
        how = Speed(parallel="fsdp")
        trainer = make_trainer(config, model, rows, ranks=ranks, rows_per_device=3, how=how)
        trainer.fit()
        return copies(trainer.parallel.whole(adapters.state(model)))

    alone = fit(Ranks(0, 1, CPU))
    first, _ = in_ranks(2, tmp_path / "ranks", fit)  # which gathers them
    assert distance(alone, first) < 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
def test_a_compiled_adapter_is_trained_to_the_same_weights(kind: str) -> None:
    """By SGD: AdamW divides by gradients near 0, which magnifies the rounding."""
    config, weights = settings(kind=kind), []
    for how in (Speed(), Speed(compile=True)):
        model = adapters.attach(tiny_model(), config)
        before = copies(adapters.state(model))
        options: dict[str, Any] = {"task": PlainSgd(config, model), "weights": HeldAdapter(model)}
        trainer = make_trainer(config, model, NumberedRows(24), how=how, **options)
        trainer.fit()
        assert trainer.model.compiled is how.compile
        weights.append(copies(adapters.state(model)))
    assert distance(*weights) < 1e-4 * distance(before, weights[0])


def test_the_stage_continues_to_the_same_bytes(stage_home: Home, tmp_path: Path) -> None:
    tokenizer = stage_home.tokenizer.path
    base = save_base(tiny_model(vocab=len(Encoder(tokenizer))), tmp_path / "base" / "model")
    for name in TOKENIZER_FILES:
        shutil.copyfile(tokenizer / name, base / name)
    digest, settings = weights_digest(base), stage_settings()
    whole, again = tmp_path / "1", tmp_path / "2"
    changes = {"kind": "prefix", "start_from": "pretrain", "virtual_tokens": 4}
    config = settings.replaced({"lora": {**changes, "epochs": None, "tokens": 6 * 256}})
    inputs = {"base": base.parent, "shards": stage_home.chats.path}
    result = run_here(lora, config, whole, inputs, settings.runtime)
    first = sorted((whole / "checkpoints").glob("step-*"))[0]
    shutil.copytree(first, again / "checkpoints" / first.name)
    continued = run_here(lora, config, again, inputs, settings.runtime)
    assert 0 < continued["resumed_from_step"] < continued["steps"] == result["steps"]
    adapter = whole / "adapter"
    assert (adapter / ADAPTER).read_bytes() == (again / "adapter" / ADAPTER).read_bytes()
    recorded = json.loads((adapter / "base.json").read_text())["base_weights_sha256"]
    assert weights_digest(base) == digest == recorded
    weights = load_file(adapter / ADAPTER)
    assert result["trainable_parameters"] == sum(tensor.numel() for tensor in weights.values())
    peft = json.loads((adapter / "adapter_config.json").read_text())
    assert peft["base_model_name_or_path"] == "ttrain-pretrain"
    model = adapters.load(factory.load(base), adapter, digest)
    assert not torch.allclose(logits(model), logits(factory.load(base)), atol=1e-4)


def test_int8_and_dora_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"lora\.quantize=nf4"):
        settings(kind="dora", quantize="int8")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is there")
def test_without_bitsandbytes_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lora\.quantize.*nf4.*bitsandbytes"):
        adapters.load_quantized(save_base(tiny_model(), tmp_path), settings(quantize="nf4"))


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_quantized_base_gets_the_gradient_of_it(tmp_path: Path, kind: str) -> None:
    """Also after a validation, in which bitsandbytes may pack the weights of a CPU for
    inference."""
    import bitsandbytes

    config = settings(kind=kind, quantize="nf4")
    path = save_base(tiny_model(hidden_size=64), tmp_path / "base")
    held, plain = adapters.load_quantized(path, config), factory.load(path)
    with torch.no_grad():
        for name, module in held.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                weight, dequantize = module.weight, bitsandbytes.functional.dequantize_4bit
                whole = dequantize(weight.data, weight.quant_state)
                plain.get_submodule(name).weight.copy_(whole)
    assert any("Linear4bit" in type(module).__name__ for module in held.modules())
    gradients = []
    for base in (held, plain):
        model = adapters.attach(base, config)
        disturb(model)
        task, batch = LanguageModeling(config, model), NumberedRows(4).batch([0, 1, 2, 3])
        module = task.build_model()
        task.validation_step(module.eval(), batch, CPU)
        task.train_step(module.train(), batch, CPU).total.backward()
        gradients.append({name: p.grad for name, p in module.named_parameters() if p.requires_grad})
    assert distance(gradients[1], gradients[0]) < 1e-3
