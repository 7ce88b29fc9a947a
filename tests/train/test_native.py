"""The native kernels: what torch's operations give, up to rounding, by any number of threads."""

import shutil
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from support.comparing import copies, distance, same, with_gradients
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor
from torch.nn import functional as F

from ttrain.data.packing import IGNORE
from ttrain.train import native, optim
from ttrain.train.attention import Records, segment_mask
from ttrain.train.language_modeling import NextTokenLoss

BF16, FP32 = torch.bfloat16, torch.float32
FLAGS = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []


def compiles() -> bool:
    """Whether there is a gcc that compiles them; clang calls itself gcc 4."""
    gcc = shutil.which("gcc")
    version = (
        subprocess.run([gcc, "-dumpversion"], capture_output=True, text=True, check=False).stdout
        if gcc
        else ""
    )
    return int(version.split(".")[0] or 0) >= 10


CAN_BE_THERE = bool(native.kernels()) or compiles()
needs_bf16 = pytest.mark.skipif(
    not (CAN_BE_THERE and "avx512_bf16" in FLAGS), reason="this CPU has no AVX512-BF16, or no gcc"
)


@pytest.fixture(params=["bf16", "fp32_avx512", "fp32_avx2"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    needed = {"bf16": "avx512_bf16", "fp32_avx512": "avx512dq", "fp32_avx2": "avx2"}[request.param]
    if needed not in FLAGS or not CAN_BE_THERE:
        pytest.skip(f"this CPU has no {needed}, or no gcc")
    monkeypatch.setattr(native, "KINDS", [one for one in native.KINDS if one[2] == request.param])
    found = native.kernels.__wrapped__()
    assert found, "install again: pip install -e ."
    monkeypatch.setattr(native, "kernels", lambda: found)
    return BF16 if request.param == "bf16" else FP32


def close(found: Tensor, expected: Tensor, kind: torch.dtype, atol: float = 1e-6) -> bool:
    return torch.allclose(
        found.double(), expected.double(), rtol=2**-8 if kind == BF16 else 1e-5, atol=atol
    )


def without(monkeypatch: pytest.MonkeyPatch, run: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(native, "kernels", dict)
        return run()


def random(*shape: int, seed: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(
    ("entries", "label"), [(3, torch.int64), (16, torch.int32), (2050, torch.int64)]
)
def test_losses_and_their_gradients_are_those_of_torch(
    entries: int, label: torch.dtype, kind: torch.dtype
) -> None:
    logits, labels = (
        3 * random(40, entries, seed=1, dtype=kind),
        (torch.arange(40) % entries).to(label),
    )
    labels[[0, 7]] = IGNORE
    logits[1] *= 100  # the others' probabilities vanish
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact, labels.long(), ignore_index=IGNORE, reduction="none")
    expected.sum().backward()  # type: ignore[no-untyped-call]
    untouched = logits.clone()
    assert torch.allclose(
        native.score(untouched, labels, None).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert torch.equal(untouched, logits)
    assert torch.allclose(
        native.score(logits, labels, 64.0).double(), expected, rtol=1e-5, atol=1e-5
    )
    assert exact.grad is not None
    assert close(logits, 64 * exact.grad, kind, atol=1e-5)


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_outside_the_vocabulary_is_an_error_and_changes_nothing(
    label: int, kind: torch.dtype
) -> None:
    logits = random(3, 50, seed=1, dtype=kind)
    before = logits.clone()
    with pytest.raises(
        IndexError, match=f"label {label} is out of bounds for a vocabulary of 50 entries"
    ):
        native.score(logits, torch.tensor([1, label, 2]), 1.0)
    assert torch.equal(logits, before)


def test_what_is_not_a_number_stays_so(kind: torch.dtype) -> None:
    """A step with it is then left out; see NonFinite. What has no weight at all, in a mask of -inf, is a number."""
    logits, x, weight = random(3, 64, seed=1, dtype=kind), torch.randn(2, 64), torch.ones(64)
    logits[0, 5] = x[0, 5] = torch.nan
    logits[2, 7:] = -torch.inf
    losses = native.score(logits, torch.tensor([1, 1, 1]), 1.0)
    assert losses.isnan().tolist() == [True, False, False]
    assert logits[0].isnan().all() and logits[2, 7:].eq(0).all()
    assert native.norm(x, weight, 1e-6, kind)[0].isnan().any(1).tolist() == [True, False]
    assert native.gated(logits, logits).isnan().any(1).tolist() == [True, False, False]


def test_gated_layers_are_those_of_torch(kind: torch.dtype) -> None:
    gate, up, grad = (random(7, 48, seed=seed, dtype=kind) for seed in (1, 2, 3))
    gate[0, :4] = torch.tensor([90.0, -90.0, 0.0, 2.0**25])
    exact = {"gate": gate.double().requires_grad_(), "up": up.double().requires_grad_()}
    expected = with_gradients(F.silu(exact["gate"]) * exact["up"], grad, exact)
    found = native.gated_slopes(grad, gate, up)
    assert torch.equal(found[0], native.gated(gate, up))
    assert all(close(one, right, kind) for one, right in zip(found, expected.values(), strict=True))


def test_norms_are_those_of_torch(kind: torch.dtype) -> None:
    x, weight, grad = (
        random(3, 50, 48, seed=1, dtype=FP32),
        torch.rand(48),
        random(3, 50, 48, seed=2, dtype=kind),
    )
    exact = {"x": x.double().requires_grad_(), "weight": weight.double().requires_grad_()}
    expected = with_gradients(F.rms_norm(exact["x"], (48,), exact["weight"], 1e-5), grad, exact)
    out, scale = native.norm(x, weight, 1e-5, kind)
    assert close(out, expected["out"], kind)
    of_x, of_weight = native.norm_slopes(grad, x, weight, scale)
    assert torch.allclose(of_x.double(), expected["x"], rtol=1e-4, atol=1e-5)
    assert torch.allclose(of_weight.double(), expected["weight"], rtol=1e-4, atol=1e-4)


SHAPES = {  # heads, of keys, their width, with norms, with rotation, rows of records by their lengths, or of their branches
    "records": (2, 2, 64, True, True, [[1, 2, 3, 150], [97, 59], [156]]),
    "groups of heads": (6, 2, 32, True, True, [[33, 31, 64], [128]]),
    "wide, one key head, no norm": (2, 1, 128, False, True, [[70, 65]]),
    "three halves of a block": (2, 2, 96, True, False, [[31, 32, 33]]),
    "neither norm nor rotation": (2, 2, 64, False, False, [[17], [17]]),
    "branches": (4, 2, 32, True, True, [[(40, 37, 60), 9], [(0, 1, 99), (5, 40), 1]]),
}


def attention(
    shape: str, kind: torch.dtype
) -> tuple[Callable[[], dict[str, Tensor]], dict[str, Tensor]]:
    H, G, K, has_norm, has_rotation, rows = SHAPES[shape]
    parts = [[one if isinstance(one, tuple) else (one,) for one in row] for row in rows]

    def numbers(of_record: Callable[[int, tuple[int, ...]], list[int]]) -> Tensor:
        return torch.tensor(
            [[*chain.from_iterable(map(of_record, range(len(row)), row))] for row in parts]
        )

    segments = numbers(lambda n, lengths: [n] * sum(lengths))
    branches = numbers(
        lambda n, lengths: [branch for branch, length in enumerate(lengths) for _ in range(length)]
    )
    places = numbers(lambda n, lengths: [*range(sum(lengths))])
    T = segments.shape[1]
    states = [
        random(len(rows), T, heads, K, seed=seed, dtype=kind).requires_grad_()
        for seed, heads in enumerate((H, G, G))
    ]
    weights = [(torch.rand(K) + 0.5).requires_grad_() if has_norm else None for _ in range(2)]
    angle = places[..., None] * 100.0 ** -(torch.arange(K) % (K // 2) / K)
    angles = (angle.cos(), angle.sin()) if has_rotation else None
    grad, scale = random(len(rows), T, H, K, seed=5, dtype=kind), K**-0.5
    leaves = {
        name: leaf
        for name, leaf in zip("qkvab", [*states, *weights], strict=True)
        if leaf is not None
    }

    def ours() -> dict[str, Tensor]:
        seen = Records(segments, branches if shape == "branches" else None).places
        arguments = (weights[0], 1e-6, weights[1], 1e-6, angles, seen, scale)
        out = native.Attention.apply(*states, *arguments)  # type: ignore[no-untyped-call]
        return with_gradients(out, grad, leaves)

    exact = {name: leaf.detach().double().requires_grad_() for name, leaf in leaves.items()}

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        x = x if weight is None else F.rms_norm(x, (K,), weight, 1e-6)
        if angles is None:
            return x
        cos, sin = (one[:, :, None].double() for one in angles)
        return x * cos + torch.cat([-x[..., K // 2 :], x[..., : K // 2]], -1) * sin

    query, key = turned(exact["q"], exact.get("a")), turned(exact["k"], exact.get("b"))
    flat = [tensor.transpose(1, 2) for tensor in (query, key, exact["v"])]
    mask = segment_mask(segments, branches)
    out = F.scaled_dot_product_attention(
        *flat, attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    return ours, with_gradients(out, grad, exact)


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients_are_those_of_torch(shape: str, kind: torch.dtype) -> None:
    ours, expected = attention(shape, kind)
    found = ours()
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < (
            0.008 if kind == BF16 else 1e-6
        ), name


def test_the_number_of_threads_changes_no_bit(kind: torch.dtype) -> None:
    ours, _ = attention("records", kind)
    x, weight, grad = (
        random(300, 64, seed=1, dtype=FP32),
        torch.rand(64),
        random(300, 64, seed=2, dtype=kind),
    )
    matrices, large = random(5, 32, 48, seed=3, dtype=FP32), random(2, 272, 144, seed=4, dtype=FP32)

    def results() -> dict[str, Tensor]:
        out, scale = native.norm(x, weight, 1e-6, kind)
        of_x, of_weight = native.norm_slopes(grad, x, weight, scale)
        losses = native.score(grad.clone(), torch.arange(300) % 64, 1.0)
        muon = {str(m.shape): optim.orthogonal(m, kind) for m in (matrices, large)}
        return {
            **copies(ours()),
            "norm": out,
            "of_x": of_x,
            "of_weight": of_weight,
            "losses": losses,
            **muon,
        }

    alone = results()
    torch.set_num_threads(3)
    assert same(alone, results())


@pytest.mark.parametrize("shape", [(3, 96, 16), (1, 48, 48), (3, 144, 336)], ids=str)
def test_matrices_become_as_orthogonal_as_by_torch(
    shape: tuple[int, ...], kind: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = random(*shape, seed=1, dtype=FP32)
    matrices[-1] *= 1e-3
    exact = without(monkeypatch, lambda: optim.orthogonal(matrices, torch.float64))
    rounded = without(monkeypatch, lambda: optim.orthogonal(matrices, kind))
    found = optim.orthogonal(matrices, kind)
    assert found.dtype == torch.float32
    assert distance({"": exact}, {"": found}) < 1.5 * distance({"": exact}, {"": rounded})
    assert torch.equal(
        optim.orthogonal(torch.zeros(1, *shape[1:]), kind), torch.zeros(1, *shape[1:])
    )


SEGMENTS = torch.tensor([[0] * 30 + [1] * 50, [0] * 79 + [1]])


@needs_bf16
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_has_the_loss_and_the_gradients_that_it_has_without_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    call = native._call
    monkeypatch.setattr(
        native,
        "_call",
        lambda dtype, name, *rest: (calls.append(name), call(dtype, name, *rest))[1],
    )

    def results(precision: torch.dtype) -> dict[str, Tensor]:
        model = tiny_model(kind=kind, hidden_size=64, kv_heads=1, layers=2).train()
        ids = torch.randint(9, VOCAB, SEGMENTS.shape, generator=torch.Generator().manual_seed(2))
        positions = torch.arange(SEGMENTS.shape[1]).expand_as(ids).contiguous()
        with torch.autocast("cpu", precision, enabled=precision != FP32):
            loss = NextTokenLoss(model)(ids, positions, SEGMENTS, ids)[0]
        return with_gradients(loss, torch.ones(()), dict(model.named_parameters()))

    exact, rounded = (
        without(monkeypatch, lambda dtype=dtype: results(dtype)) for dtype in (FP32, BF16)
    )
    assert not calls
    for precision in (FP32, BF16):
        calls.clear()
        found = results(precision)
        assert {*calls} == {*native.ARGUMENTS} - {"orthogonal"}, "each kernel is in use"
        for name in exact:
            limit = (
                1.3 * distance({name: exact[name]}, {name: rounded[name]}) + 1e-3
                if precision == BF16
                else 1e-5
            )
            assert distance({name: exact[name]}, {name: found[name]}) < limit, name


def test_where_they_are_missing_the_log_says_once_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "suits_machine", lambda: True)
    monkeypatch.setattr(native, "kernels", dict)
    native.warn_if_missing.cache_clear()
    for _ in range(2):
        native.warn_if_missing()
    assert caplog.text.count("gcc 10") == 1
    native.warn_if_missing.cache_clear()
