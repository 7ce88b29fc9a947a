"""Adapters of every kind on every shape: what they touch, what they leave alone, how they are kept, switched and merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from support.comparing import copies, distance, same
from support.tiny_adapters import CPU, SHAPES, disturb, logits, save_adapter, save_base, settings
from support.tiny_data import NumberedRows
from support.tiny_stages import Home, run_here, stage_settings
from support.tiny_trainers import Held, PlainSgd, in_ranks, make_trainer, tiny_model  # fmt: skip
from torch import Tensor
from transformers import AutoModelForCausalLM

from ttrain.cli.main import main
from ttrain.config import Lora, LoraConfig
from ttrain.data.encoder import Encoder
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import adapters, factory
from ttrain.stages import lora
from ttrain.stages.new_model import TOKENIZER_FILES
from ttrain.store.model_files import weights_digest
from ttrain.train.distributed import Ranks
from ttrain.train.language_modeling import LanguageModeling
from ttrain.train.trainer import TrainerOptions

KINDS = ("lora", "dora", "prefix")


def preset_for(shape: str, kind: str) -> str:
    """PEFT does not offer DoRA for experts."""
    return "attention" if kind == "dora" and "experts" in shape else "all-linear"


CASES = [(shape, kind) for shape in SHAPES for kind in KINDS]
CASE_IDS = [f"{kind} on {shape}" for shape, kind in CASES]
LIKE_QKV = {"attention": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}}
MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}


class HeldAdapter(Held):
    """The adapter's weights of a model."""

    def state(self) -> dict[str, Tensor]:
        return adapters.state(self.model)  # type: ignore[arg-type]

    def load(self, weights: dict[str, Tensor]) -> None:
        adapters.load_state(self.model, weights)  # type: ignore[arg-type]


def train(model: Any, config: Lora, **options: Any) -> tuple[float, float]:
    """Loss on what is learnt, before and after."""
    rows = NumberedRows(6)
    trainer = make_trainer(config, model, rows, validation=[rows.batch(range(6))], **options)
    trainer.weights = HeldAdapter(model)
    before = trainer.validate(trainer.validation)
    trainer.fit()
    return before, trainer.validate(trainer.validation)


# --- targets ------------------------------------------------------------------------------------------------------------


def without_layer(names: Any) -> set[str]:
    """model.layers.0.mlp.up_proj and transformer.h.0.mlp.c_fc to mlp.up_proj and mlp.c_fc."""
    return {name.split(".", 3)[-1] for name in names}


@pytest.mark.parametrize(
    ("shape", "preset", "layers", "parameters"),
    [
        ("llama", "attention", LIKE_QKV["attention"], set()),
        ("llama", "all-linear", LIKE_QKV["attention"] | MLP, set()),
        ("gpt2", "attention", {"attn.c_attn", "attn.c_proj"}, set()),
        ("gpt2", "all-linear", {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}, set()),
        ("experts", "attention", LIKE_QKV["attention"], set()),
        ("experts", "all-linear", LIKE_QKV["attention"], {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}),
        ("shared experts", "all-linear", LIKE_QKV["attention"], {
            "mlp.experts.gate_up_proj", "mlp.experts.down_proj", *(f"{name}.weight" for name in MLP),
            *(f"{name}.weight".replace("mlp.", "mlp.shared_experts.") for name in MLP),
        }),
    ],
)  # fmt: skip
def test_a_preset_takes_these_layers_and_never_the_output_head(
    shape: str, preset: str, layers: set[str], parameters: set[str]
) -> None:
    model = tiny_model(**SHAPES[shape], tie_embeddings=False)
    found = adapters.find_targets(model, [preset])
    assert (without_layer(found.layers), without_layer(found.parameters)) == (layers, parameters)
    adapted = adapters.attach(model, settings(targets=(preset,)))
    touched = {
        name.removeprefix("base_model.model.").partition(".lora_")[0].replace(".base_layer", "")
        for name, p in adapted.named_parameters() if p.requires_grad
    }  # fmt: skip
    assert touched == found.layers | {name.rpartition(".")[0] for name in found.parameters}
    assert len(touched) % 2 == 0 or shape == "shared experts", "both layers, unless they differ"


def test_a_target_may_be_the_last_parts_of_a_name() -> None:
    found = adapters.find_targets(tiny_model(kind="gpt2"), ["mlp.c_proj", "0.attn.c_attn"])
    assert found.layers == {"transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj", "transformer.h.0.attn.c_attn"}
    assert (found.layer_suffixes, found.transposed) == (("0.attn.c_attn", "mlp.c_proj"), True)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ("llama", ("q_proj", "qkv"), r"lora\.targets names qkv, .* are down_proj, gate_proj, .* or write all-linear"),
        ("llama", ("q_proj", "proj"), r"names proj, but"),
        ("experts", ("up_proj",), r"names up_proj, .* are down_proj, gate_up_proj, k_proj"),
        ("llama", ("embed_tokens",), "names embed_tokens"),
    ],
)
def test_an_unknown_target_is_refused_with_the_list(shape: str, names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        adapters.attach(tiny_model(**SHAPES[shape]), settings(targets=names))


def test_the_output_head_is_adapted_where_it_is_named_and_refused_where_it_is_the_embedding() -> None:
    adapted = adapters.attach(tiny_model(tie_embeddings=False), settings(targets=("lm_head",)))
    assert all(".lm_head.lora_" in name for name in adapters.state(adapted))
    with pytest.raises(UsageError, match=r"model\.tie_embeddings makes it the embedding too"):
        adapters.attach(tiny_model(tie_embeddings=True), settings(targets=("q_proj", "lm_head")))


@pytest.mark.parametrize(
    ("change", "cure"), [({"kind": "dora"}, "set lora.kind=lora"), ({"dropout": 0.1}, "set lora.dropout=0")]
)
def test_what_peft_cannot_do_to_stacked_experts_is_refused_with_the_cure(change: dict[str, Any], cure: str) -> None:
    with pytest.raises(UsageError, match=f"experts .*{cure}.* or lora.targets=attention"):
        adapters.attach(tiny_model(**SHAPES["experts"]), settings(**change))


# --- training -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "kind"), CASES, ids=CASE_IDS)
def test_training_moves_every_tensor_of_the_adapter_and_none_of_the_base(shape: str, kind: str) -> None:
    base = tiny_model(**SHAPES[shape])
    frozen = copies(base.state_dict())
    config = settings(kind=kind, targets=(preset_for(shape, kind),))
    model = adapters.attach(base, config)
    before = copies(adapters.state(model))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    loss_before, loss_after = train(model, config)
    after = adapters.state(model)
    assert {*after} == {*before} and trained == sum(tensor.numel() for tensor in after.values())
    assert [name for name in after if torch.equal(before[name], after[name])] == []
    assert loss_after < loss_before - 0.005
    prefix = "base_model." if kind == "prefix" else "base_model.model."
    kept = {name.removeprefix(prefix).replace(".base_layer", ""): tensor for name, tensor in model.state_dict().items()}
    assert same(frozen, {name: kept[name] for name in frozen})


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_fresh_low_rank_adapter_changes_no_bit_of_the_logits(shape: str, kind: str) -> None:
    base = tiny_model(**SHAPES[shape])
    before = logits(base)
    config = settings(kind=kind, targets=(preset_for(shape, kind),))
    assert torch.equal(logits(adapters.attach(base, config)), before)


def test_the_trained_parameters_of_experts_are_rank_times_in_plus_out_of_each_expert() -> None:
    base = tiny_model(**SHAPES["experts"])
    stacks = [dict(base.named_parameters())[name] for name in adapters.expert_stacks(base)]
    names = ("gate_up_proj", "down_proj")
    model = adapters.attach(base, settings(targets=names))
    expected = sum(2 * stack.shape[0] * (stack.shape[1] + stack.shape[2]) for stack in stacks)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == expected


def test_two_sharded_ranks_train_the_same_adapter_as_one(tmp_path: Path) -> None:
    """Whole ones, of every kind of adapter: tests/doctor."""
    config = settings()

    def fit(ranks: Ranks) -> dict[str, Tensor]:
        model = adapters.attach(tiny_model(), config)
        how = TrainerOptions(parallel="fsdp")
        trainer = make_trainer(config, model, NumberedRows(12), ranks=ranks, rows_per_device=3, how=how)
        trainer.weights = HeldAdapter(model)
        trainer.fit()
        return copies(trainer.parallel.whole(adapters.state(model)))

    alone = fit(Ranks(0, 1, CPU))
    first, _ = in_ranks(2, tmp_path / "ranks", fit)  # which gathers them
    assert distance(alone, first) < 1e-4


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
def test_a_compiled_adapter_is_trained_to_the_same_weights(kind: str) -> None:
    """Up to rounding: a millionth of the way. By SGD, since AdamW divides by gradients near 0, which magnifies it."""
    config, found = settings(kind=kind), []
    for how in (TrainerOptions(), TrainerOptions(compile=True)):
        model = adapters.attach(tiny_model(), config)
        before = copies(adapters.state(model))
        trainer = make_trainer(config, model, NumberedRows(24), how=how, task=PlainSgd(config, model))
        trainer.weights = HeldAdapter(model)
        trainer.fit()
        assert trainer.compiled is how.compile
        found.append(copies(adapters.state(model)))
    assert distance(*found) < 1e-4 * distance(before, found[0])


# --- the stage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_the_stage_leaves_an_adapter_and_continues_to_the_same_bytes(stage_home: Home, tmp_path: Path, kind: str) -> None:
    words = stage_home.tokenizer.path
    base = save_base(tiny_model(vocab=len(Encoder(words))), tmp_path / "base" / "model")
    for name in TOKENIZER_FILES:
        shutil.copyfile(words / name, base / name)
    before = weights_digest(base)
    changed = stage_settings(steps=4)
    config = LoraConfig(lora=changed.lora.model_copy(update={"kind": kind, "start_from": "pretrain", "virtual_tokens": 4}))
    inputs = {"base": base.parent, "shards": stage_home.chats.path}
    found = run_here(lora, config, tmp_path / "whole", inputs, changed.runtime)
    first = sorted((tmp_path / "whole" / "checkpoints").glob("step-*"))[0]
    shutil.copytree(first, tmp_path / "again" / "checkpoints" / first.name)
    again = run_here(lora, config, tmp_path / "again", inputs, changed.runtime)
    assert 0 < again["resumed_from_step"] < again["steps"] == found["steps"]
    adapter = tmp_path / "whole" / "adapter"
    assert (adapter / adapters.WEIGHTS).read_bytes() == (tmp_path / "again" / "adapter" / adapters.WEIGHTS).read_bytes()
    assert weights_digest(base) == before == json.loads((adapter / "base.json").read_text())["base_weights_sha256"]
    assert found["trainable_parameters"] == sum(tensor.numel() for tensor in load_file(adapter / adapters.WEIGHTS).values())
    assert json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"] == "ttrain-pretrain"
    model = adapters.load(factory.load(base), adapter, before)
    assert not torch.allclose(logits(model), logits(factory.load(base)), atol=1e-4)


# --- files --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """A base and an adapter that moves it, on disk, by the id of the case; with the logits that they give."""
    torch.set_num_threads(1)
    root, found = tmp_path_factory.mktemp("saved"), {}
    for (shape, kind), name in zip(CASES, CASE_IDS, strict=True):
        place = root / name.replace(" ", "-")
        base = save_base(tiny_model(**SHAPES[shape]), place / "base")
        config = settings(kind=kind, targets=(preset_for(shape, kind),))
        before = logits(factory.load(base))
        model = disturb(adapters.attach(factory.load(base), config))
        adapter = save_adapter(model, place / "adapter", base)
        found[name] = {"base": base, "adapter": adapter, "logits": logits(model), "before": before}
    yield found


@pytest.mark.parametrize("name", CASE_IDS)
def test_an_adapter_gives_the_same_logits_loaded_here_and_by_plain_peft_and_trains_nothing(saved: Any, name: str) -> None:
    """Up to rounding: products of experts differ in the last bit with where their rows lie in memory."""
    case = saved[name]
    plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(case["base"]), case["adapter"])
    assert not any(type(module).__module__.startswith("ttrain") for module in plain.modules())
    assert not torch.allclose(case["logits"], case["before"], atol=1e-3), "it moves nothing"
    torch.testing.assert_close(logits(plain), case["logits"], rtol=1e-5, atol=1e-6)
    model = adapters.load(factory.load(case["base"]), case["adapter"], weights_digest(case["base"]))
    torch.testing.assert_close(logits(model), case["logits"], rtol=0, atol=1e-6)
    assert not any(p.requires_grad for p in model.parameters())
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), case["before"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_file_holds_the_adapter_only_and_what_a_reader_must_know(tmp_path: Path, kind: str) -> None:
    base = tiny_model(hidden_size=128, vocab=2000)
    config = settings(kind=kind, rank=1)
    directory = save_base(base, tmp_path / "base")
    adapter = save_adapter(adapters.attach(base, config), tmp_path / "adapter", directory)
    weights = load_file(adapter / "adapter_model.safetensors")
    parts = {"lora": ("lora_A", "lora_B"), "dora": ("lora_A", "lora_B", "lora_magnitude"), "prefix": ("prompt_embeddings",)}
    assert all(any(part in name for part in parts[kind]) for name in weights)
    size = (adapter / adapters.WEIGHTS).stat().st_size
    assert size < (0.01 if kind == "prefix" else 0.05) * (directory / "model.safetensors").stat().st_size
    told = json.loads((adapter / "adapter_config.json").read_text())
    if kind == "prefix":
        assert (told["num_virtual_tokens"], told["peft_type"]) == (4, "PREFIX_TUNING")
        assert weights["prompt_embeddings"].shape == (4, 2 * 2 * 128), "keys and values of two layers"
    else:
        assert (told["r"], told["lora_alpha"], told["use_dora"], len(told["target_modules"])) == (1, 8.0, kind == "dora", 7)
    assert json.loads((adapter / "base.json").read_text()) == {"base_weights_sha256": weights_digest(directory)}


def test_a_base_in_shards_has_a_digest_too_and_a_changed_shard_is_refused(tmp_path: Path) -> None:
    whole = save_base(tiny_model(), tmp_path / "whole")
    base = tmp_path / "sharded"
    factory.load(whole).save_pretrained(base, max_shard_size="4KB")
    assert len([*base.glob("model-*.safetensors")]) > 2 and not (base / "model.safetensors").exists()
    model = disturb(adapters.attach(factory.load(base), settings()))
    adapter = save_adapter(model, tmp_path / "adapter", base)
    assert torch.equal(logits(adapters.load(factory.load(base), adapter, weights_digest(base))), logits(model))
    shard = sorted(base.glob("model-*.safetensors"))[0]
    save_file({name: tensor + 1 for name, tensor in load_file(shard).items()}, shard, metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="was trained on the base"):
        adapters.load(factory.load(base), adapter, weights_digest(base))


def test_an_adapter_that_does_not_fit_is_refused_by_name(saved: Any, tmp_path: Path) -> None:
    case = saved["lora on llama"]
    spoilt = shutil.copytree(case["adapter"], tmp_path / "spoilt")
    weights = load_file(spoilt / adapters.WEIGHTS)
    gone, cut, *_ = sorted(weights)
    save_file({**{n: w for n, w in weights.items() if n != gone}, "odd": torch.zeros(1)}, spoilt / adapters.WEIGHTS)
    with pytest.raises(ArtifactError, match=rf"missing: {gone.replace('.', '[.]')} \[.*\]\n.*unexpected: odd"):
        adapters.load(factory.load(case["base"]), spoilt, weights_digest(case["base"]))
    save_file({**weights, cut: weights[cut][:1].clone()}, spoilt / adapters.WEIGHTS)
    with pytest.raises(ArtifactError, match=rf"mis-shaped: {cut.replace('.', '[.]')} "):
        adapters.load(factory.load(case["base"]), spoilt, weights_digest(case["base"]))
    (spoilt / "adapter_config.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"cannot read .*adapter_config"):
        adapters.load(factory.load(case["base"]), spoilt, weights_digest(case["base"]))


def command(*words: str) -> int:
    """The status with which `ttrain` ends."""
    with pytest.raises(SystemExit) as end:
        main([*words])
    return int(end.value.code or 0)


@pytest.mark.parametrize("name", ["lora on shared experts", "dora on gpt2", "prefix on llama"])
def test_show_tells_what_an_adapter_is(saved: Any, capsys: pytest.CaptureFixture[str], name: str) -> None:
    case = saved[name]
    show = ("adapter", "show", str(case["adapter"]), "--base")
    assert command(*show, str(case["base"]), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    numbers = sum(tensor.numel() for tensor in load_file(case["adapter"] / adapters.WEIGHTS).values())
    of_base = sum(tensor.numel() for tensor in load_file(case["base"] / "model.safetensors").values())
    assert (told["parameters"], told["share_of_base"]) == (numbers, numbers / of_base)
    assert told["base_fits"] is True and told["base_weights_sha256"] == weights_digest(case["base"])
    expected: dict[str, Any] = {
        "lora on shared experts": {"kind": "lora", "rank": 2, "alpha": 8.0, "dropout": 0.0},
        "dora on gpt2": {"kind": "dora", "rank": 2, "targets": ["c_attn", "c_fc", "c_proj"]},
        "prefix on llama": {"kind": "prefix", "virtual_tokens": 4, "layers": 2},
    }[name]
    assert {key: told[key] for key in expected} == expected
    assert command(*show, str(saved["lora on experts"]["base"])) == 0
    assert "NO: it was trained on other weights" in capsys.readouterr().out
    assert command("adapter", "show", str(case["base"])) != 0
    assert "is a full model, not an adapter" in capsys.readouterr().err


def test_show_says_what_a_damaged_config_lacks(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = saved["lora on llama"]
    shutil.copytree(case["adapter"], tmp_path / "adapter")
    (tmp_path / "adapter" / adapters.CONFIG).write_text('{"peft_type": "LORA"}')
    assert command("adapter", "show", str(tmp_path / "adapter"), "--base", str(case["base"])) != 0
    assert "adapter_config.json does not say 'r'" in capsys.readouterr().err


# --- several of them, and none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lora on experts", "dora on gpt2", "prefix on llama"])
def test_switching_restores_the_logits_of_each_adapter_and_of_the_base(saved: Any, tmp_path: Path, name: str) -> None:
    case = saved[name]
    digest = weights_digest(case["base"])
    model = adapters.load(factory.load(case["base"]), case["adapter"], digest, "first")
    other = disturb(adapters.load(factory.load(case["base"]), case["adapter"], digest), seed=2)
    adapters.add(model, save_adapter(other, tmp_path / "other", case["base"]), digest, "second")
    for wanted, expected in (("second", logits(other)), ("first", case["logits"]), ("second", logits(other))):
        adapters.switch(model, wanted)
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)
        assert not any(p.requires_grad for p in model.parameters())
        with model.disable_adapter():
            torch.testing.assert_close(logits(model), case["before"], rtol=0, atol=1e-6)
    with pytest.raises(UsageError, match="no adapter 'third'; there are first, second"):
        adapters.switch(model, "third")


def test_another_kind_of_adapter_cannot_stand_beside(saved: Any) -> None:
    case = saved["lora on llama"]
    digest = weights_digest(case["base"])
    model = adapters.load(factory.load(case["base"]), case["adapter"], digest)
    with pytest.raises(UsageError, match="cannot be loaded together with default"):
        adapters.add(model, saved["prefix on llama"]["adapter"], digest, "second")
    with pytest.raises(UsageError, match="an adapter 'default' already"):
        adapters.add(model, case["adapter"], digest, "default")


@pytest.mark.parametrize("name", [name for name in CASE_IDS if "prefix" not in name])
def test_a_merged_model_is_the_unmerged_one_and_a_plain_one(saved: Any, name: str) -> None:
    case = saved[name]
    base = factory.load(case["base"])
    names = {*factory.state(base)}
    model = adapters.load(base, case["adapter"], weights_digest(case["base"]))
    model.merge_adapter()
    torch.testing.assert_close(logits(model), case["logits"], rtol=1e-5, atol=1e-5)
    model.unmerge_adapter()
    torch.testing.assert_close(logits(model), case["logits"], rtol=1e-5, atol=1e-5)
    merged = adapters.merge(model)
    torch.testing.assert_close(logits(merged), case["logits"], rtol=1e-5, atol=1e-5)
    assert {*factory.state(merged)} == names


def test_a_merge_that_gives_no_number_is_refused(saved: Any) -> None:
    case = saved["lora on llama"]
    model = adapters.load(factory.load(case["base"]), case["adapter"], weights_digest(case["base"]))
    with torch.no_grad():
        next(iter(adapters.state(model).values())).fill_(float("inf"))
    with pytest.raises(ArtifactError, match="cannot be merged"):
        adapters.merge(model)


# --- a base in few bits -------------------------------------------------------------------------------------------------


def test_int8_and_dora_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"lora\.quantize=nf4"):
        settings(kind="dora", quantize="int8")


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is there")
def test_without_bitsandbytes_the_command_that_installs_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"lora\.quantize is nf4, .* pip install bitsandbytes"):
        adapters.load_quantized(save_base(tiny_model(), tmp_path / "base"), settings(quantize="nf4"))


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_on_a_quantized_base_gets_the_gradient_of_what_that_base_stands_for(tmp_path: Path, kind: str) -> None:
    """Also after a validation, in which bitsandbytes packs the weights of a CPU for inference, unless it is told not to."""
    import bitsandbytes

    config = settings(kind=kind, quantize="nf4")
    path = save_base(tiny_model(hidden_size=64), tmp_path / "base")
    held, plain = adapters.load_quantized(path, config), factory.load(path)
    with torch.no_grad():
        for name, module in held.named_modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                whole = bitsandbytes.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
                plain.get_submodule(name).weight.copy_(whole)
    assert any("Linear4bit" in type(module).__name__ for module in held.modules())
    gradients = []
    for base in (held, plain):
        model = adapters.attach(base, config)
        weights = {"prompt_embeddings": torch.randn(4, 256, generator=torch.Generator().manual_seed(1))}
        adapters.load_state(model, weights) if kind == "prefix" else disturb(model)
        task, batch = LanguageModeling(config, model), NumberedRows(4).batch([0, 1, 2, 3])
        module = task.build_model()
        task.validation_step(module.eval(), batch, CPU)
        task.train_step(module.train(), batch, CPU).total.backward()
        gradients.append({name: p.grad for name, p in module.named_parameters() if p.requires_grad})
    assert distance(gradients[1], gradients[0]) < 1e-3
