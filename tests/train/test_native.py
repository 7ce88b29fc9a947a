"""Native kernels and fused layers: what torch, transformers and PEFT give, up to rounding."""

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparing import copies, distance, same, with_gradients, worst
from support.tiny_adapters import disturb
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor
from torch.nn import functional as F

from ttrain.config import Lora
from ttrain.data.packing import IGNORE
from ttrain.model import adapters
from ttrain.model.adapter_layers import FusedLinear
from ttrain.train import native, optim
from ttrain.train.attention import Records, record_attention, segment_mask
from ttrain.train.kernels import GATED, NORMS, fuse
from ttrain.train.language_modeling import NextTokenLoss

BF16, FP32 = torch.bfloat16, torch.float32
FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
NEEDED = {"bf16": "avx512_bf16", "fp32_avx512": "avx512dq", "fp32_avx2": "avx2"}
Results = Mapping[str, Tensor]


def has_gcc() -> bool:
    """Whether there is a gcc that compiles them; clang calls itself gcc 4."""
    command = [shutil.which("gcc") or "false", "-dumpversion"]
    version = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return int(version.split(".")[0] or 0) >= 10


CAN_BE_THERE = bool(native.kernels()) or has_gcc()


@pytest.fixture(params=NEEDED)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    if NEEDED[request.param] not in FLAGS or not CAN_BE_THERE:
        pytest.skip(f"this CPU has no {NEEDED[request.param]}, or no gcc")
    monkeypatch.setattr(native, "KINDS", [row for row in native.KINDS if row[2] == request.param])
    kernels = native.kernels.__wrapped__()
    assert kernels, "install again: pip install -e ."
    monkeypatch.setattr(native, "kernels", lambda: kernels)
    return BF16 if request.param == "bf16" else FP32


def is_close(result: Tensor, expected: Tensor, kind: torch.dtype, atol: float = 1e-6) -> bool:
    rtol = 2**-8 if kind == BF16 else 1e-5
    return torch.allclose(result.double(), expected.double(), rtol=rtol, atol=atol)


def random(*shape: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("entries", "label"), [(3, torch.int64), (16, torch.int32), (2050, torch.int64)]
)
def test_losses_and_their_gradients_are_those_of_torch(
    entries: int, label: torch.dtype, kind: torch.dtype
) -> None:
    logits = 3 * random(40, entries, seed=1, dtype=kind)
    labels = (torch.arange(40) % entries).to(label)
    labels[[0, 7]] = IGNORE
    logits[1] *= 100  # the others' probabilities vanish
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels.long(), ignore_index=IGNORE, reduction="none")
    expected.sum().backward()  # type: ignore[no-untyped-call]
    before = logits.clone()
    assert is_close(native.score(logits, labels, None), expected, FP32, atol=1e-5)
    assert torch.equal(logits, before)
    assert is_close(native.score(logits, labels, 64.0), expected, FP32, atol=1e-5)
    assert exact.grad is not None
    assert is_close(logits, 64 * exact.grad, kind, atol=1e-5)
    for label in (entries, -1):
        with pytest.raises(IndexError, match=rf"label {label} "):
            native.score(logits, torch.full((40,), label), 1.0)


def test_nan_stays_nan(kind: torch.dtype) -> None:
    """The step is then skipped. What has no weight at all, in a mask of -inf, is a number."""
    logits, x, weight = random(3, 64, seed=1, dtype=kind), torch.randn(2, 64), torch.ones(64)
    logits[0, 5] = x[0, 5] = torch.nan
    logits[2, 7:] = -torch.inf
    losses = native.score(logits, torch.tensor([1, 1, 1]), 1.0)
    assert losses.isnan().tolist() == [True, False, False]
    assert logits[0].isnan().all() and logits[2, 7:].eq(0).all()
    assert native.norm(x, weight, 1e-6, kind)[0].isnan().any(1).tolist() == [True, False]
    assert native.gated(logits, logits).isnan().any(1).tolist() == [True, False, False]


T = 157  # longer than two blocks of queries, four of keys, and a part of each
SEGMENTS = torch.tensor(
    [[0] * T, [0] * 3 + [1] * 97 + [2] * 57, [4] * 9 + [-1] * 148, [*range(29)] + [29] * 128]
)
# Of these records: a prompt with two answers, one without a prompt, one answer, none.
TWO_ANSWERS = [0] * 40 + [1] * 37 + [2] * 80
SEVERAL = [1] * 2 + [2] * 1 + [0] * 34 + [1] * 2 + [2] * 61 + [0] * 57
BRANCHES = torch.tensor([TWO_ANSWERS, SEVERAL, [0] * 8 + [1] + [0] * 148, [0] * T])


def attention(
    kind: torch.dtype, heads: int, kv_heads: int, width: int, branches: Tensor | None
) -> tuple[Callable[[], Results], Results]:
    """The attention of records, to be called, and the results of torch's in fp64."""
    sizes = (heads, kv_heads, kv_heads)
    states = [random(4, n, T, width, seed=seed, dtype=kind) for seed, n in enumerate(sizes)]
    leaves = {name: state.requires_grad_() for name, state in zip("qkv", states, strict=True)}
    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}
    upstream = random(4, T, heads, width, seed=5, dtype=kind)
    layer = SimpleNamespace(num_key_value_groups=heads // kv_heads, is_causal=True)

    def ours() -> Results:
        records = Records(SEGMENTS, branches)
        out, _ = record_attention(
            layer, *leaves.values(), None, scaling=width**-0.5, records=records
        )
        return with_gradients(out, upstream, leaves)

    mask = segment_mask(SEGMENTS, branches)
    out = F.scaled_dot_product_attention(
        *exact.values(), attn_mask=mask, scale=width**-0.5, enable_gqa=True
    )
    return ours, with_gradients(out.transpose(1, 2), upstream, exact)


SHAPES = {
    "groups of heads": (6, 2, 32, None),
    "three halves of a block": (2, 2, 96, BRANCHES),
    "one key head": (4, 1, 128, BRANCHES),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients_are_those_of_torch(shape: str, kind: torch.dtype) -> None:
    ours, expected = attention(kind, *SHAPES[shape])
    results = ours()
    for name, tensor in expected.items():
        limit = 0.008 if kind == BF16 else 1e-6
        assert distance({name: tensor}, {name: results[name]}) < limit, name


def test_the_number_of_threads_changes_no_bit(kind: torch.dtype) -> None:
    attend, _ = attention(kind, 2, 2, 64, BRANCHES)
    x, weight, grad = random(300, 64, seed=1), torch.rand(64), random(300, 64, seed=2, dtype=kind)
    stacks = (random(5, 32, 48, seed=3), random(2, 272, 144, seed=4))

    def results() -> dict[str, Tensor]:
        out, scale = native.norm(x, weight, 1e-6, kind)
        losses = native.score(grad.clone(), torch.arange(300) % 64, 1.0)
        slopes = native.norm_slopes(grad, x, weight, scale)
        muon = [optim.orthogonal(matrices, kind) for matrices in stacks]
        others = {str(n): tensor for n, tensor in enumerate((out, losses, *slopes, *muon))}
        return {**copies(attend()), **others}

    alone = results()
    torch.set_num_threads(3)
    assert same(alone, results())


@pytest.mark.parametrize("model_kind", ["llama", "qwen3"])
def test_a_model_has_the_loss_and_the_gradients_that_it_has_without_kernels(
    model_kind: str, kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    segments, used = torch.tensor([[0] * 30 + [1] * 50, [0] * 79 + [1]]), set[str]()

    def noted(name: str, function: Any, *arguments: Any) -> Any:
        used.add(name)
        return function(*arguments)

    def results(precision: torch.dtype, kernels: Mapping[torch.dtype, Any]) -> Results:
        monkeypatch.setattr(native, "kernels", lambda: kernels)
        model = tiny_model(kind=model_kind, hidden_size=64, kv_heads=1, layers=2).train()
        ids = torch.randint(9, VOCAB, segments.shape, generator=torch.Generator().manual_seed(2))
        positions = torch.arange(segments.shape[1]).expand_as(ids).contiguous()
        with torch.autocast("cpu", precision, enabled=precision != FP32):
            loss = NextTokenLoss(model)(ids, positions, segments, ids)[0]
        return with_gradients(loss, torch.ones(()), dict(model.named_parameters()))

    functions = native.kernels()[kind]
    counted = {name: partial(noted, name, function) for name, function in functions.items()}
    exact, rounded = results(FP32, {}), results(BF16, {})
    ours = results(kind, {kind: counted})
    assert used == {*native.ARGUMENTS} - {"orthogonal"}, "each kernel is in use"
    for name, tensor in exact.items():
        error = distance({name: tensor}, {name: rounded[name]})
        limit = 1.3 * error + 1e-3 if kind == BF16 else 1e-5
        assert distance({name: tensor}, {name: ours[name]}) < limit, name


MOE = {"Qwen3Moe": "qwen3_moe", "Ernie4_5_Moe": "ernie4_5_moe", "Glm4Moe": "glm4_moe"}


def layer(name: str) -> Any:
    """A norm or a gated layer of transformers, width 16; its weights are neither zeros nor ones."""
    from transformers import AutoConfig

    torch.manual_seed(0)
    family = re.sub("RMSNorm|MLP", "", name)
    kind = MOE.get(family, family.lower())
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    if name in NORMS:
        norm = getattr(module, name)(16, eps=1e-5)
        torch.nn.init.uniform_(norm.weight, -1, 1)
        return norm
    sizes = {"hidden_size": 16, "intermediate_size": 40, "num_attention_heads": 2}
    return getattr(module, name)(AutoConfig.for_model(kind, **sizes))


def layer_results(module: Any, *, autocast: bool) -> Results:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 5, 16, generator=generator, requires_grad=True)
    with torch.autocast("cpu", BF16, enabled=autocast):
        out = module(3 * x)
    upstream = torch.randn(3, 5, 16, generator=generator)
    return with_gradients(out, upstream, {"x": x, **dict(module.named_parameters())})


@pytest.mark.parametrize("name", sorted(NORMS | GATED))
def test_a_fused_layer_gives_what_the_layer_of_transformers_gives(name: str) -> None:
    module = layer(name)
    exact, theirs = (layer_results(module, autocast=autocast) for autocast in (False, True))
    with torch.no_grad():
        without_gradients = module(torch.ones(2, 16))
    fuse(module)
    assert "forward" in vars(module), "this kind of layer is not fused"
    fused, ours = (layer_results(module, autocast=autocast) for autocast in (False, True))
    assert worst(exact, fused) < 1e-6
    assert {tensor.dtype for tensor in fused.values()} == {torch.float32}
    assert distance(exact, ours) < max(0.005, 1.2 * distance(exact, theirs))
    assert ours["out"].dtype == BF16
    with torch.no_grad():
        assert torch.equal(module(torch.ones(2, 16)), without_gradients)


def adapted() -> Any:
    base = tiny_model(kv_heads=1)
    up_proj = base.model.layers[1].mlp.up_proj
    up_proj.bias = torch.nn.Parameter(torch.linspace(-1, 1, up_proj.out_features))
    return disturb(adapters.attach(base, Lora(rank=3, alpha=12.0)).train(), by=0.05)


def lora_results(model: Any, *, autocast: bool) -> Results:
    ids = torch.randint(9, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.autocast("cpu", BF16, enabled=autocast):
        logits = model(input_ids=ids).logits.float()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return with_gradients(logits, 2 * logits.detach(), trained)


def test_a_low_rank_layer_gives_what_that_of_peft_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    fused, ours = (lora_results(model, autocast=autocast) for autocast in (False, True))
    monkeypatch.setattr(FusedLinear, "is_plain", lambda self, name: False)
    exact, theirs = (lora_results(model, autocast=autocast) for autocast in (False, True))
    assert len(exact) == 1 + 2 * 2 * 7 and worst(exact, fused) < 1e-6
    assert distance(exact, ours) < 1.2 * distance(exact, theirs)
    assert not same(fused, exact), "these were different computations"


def test_the_cached_bf16_copy_of_a_frozen_weight_follows_the_weight() -> None:
    used, fresh = adapted(), adapted()
    lora_results(used, autocast=True)
    with torch.no_grad():
        for model in (used, fresh):
            model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight.mul_(2)
    assert same(lora_results(used, autocast=True), lora_results(fresh, autocast=True))
