"""Attention of variable lengths: indices, positions and gradients, with the kernel of CUDA replaced by a plain one."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import distance
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, settings_of_training, tiny_model
from torch import Tensor
from torch.nn import functional as F

from ttrain.train import attention, varlen
from ttrain.train.language_modeling import LanguageModeling, NextTokenLoss
from ttrain.train.losses import token_loss_sum

T = 24
SEGMENTS = torch.tensor([[0] * T, [0] * 3 + [1] * 15 + [2] * 6, [4] * 9 + [-1] * 15, [*range(T)], [0, 1, 2] + [3] * 21])


def records(spans: Tensor, *states: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
    """Each record that is not empty: its tokens, and its states [H, L, K], where heads of keys are repeated."""
    H = max(state.shape[1] for state in states)
    for start, end in itertools.pairwise(spans.tolist()):
        if start < end:
            tokens = slice(start, end)
            yield tokens, [state[tokens].repeat_interleave(H // state.shape[1], 1).transpose(0, 1) for state in states]


def weights_of(query: Tensor, key: Tensor, scale: float) -> Tensor:
    scores = query @ key.transpose(1, 2) * scale
    return scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def plain_forward(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, longest: int, scale: float) -> tuple[Tensor, Tensor]:
    assert spans.dtype == torch.int32 and int(spans.diff().max()) == longest, "as the kernel of CUDA asks"
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    out = torch.empty_like(q)
    for tokens, (query, key, value) in records(spans, q, k, v):
        out[tokens] = (weights_of(query, key, scale) @ value).transpose(0, 1)
    return out, q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)


def plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, spans: Tensor, longest: int, scale: float
) -> tuple[Tensor, ...]:
    gradients = [torch.empty_like(state) for state in (q, k, v)]
    for tokens, (query, key, value, slope) in records(spans, q, k, v, grad):
        weights = weights_of(query, key, scale)
        of_weights = slope @ value.transpose(1, 2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
        found = of_scores @ key, of_scores.transpose(1, 2) @ query, weights.transpose(1, 2) @ slope
        for gradient, each in zip(gradients, found, strict=True):
            gradient[tokens] = each.transpose(0, 1).unflatten(1, (gradient.shape[1], -1)).sum(2)
    return tuple(gradients)


@pytest.fixture
def plain_kernel(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The kernels of CUDA replaced by plain ones; whether each call was without a warning instead of determinism."""
    strict: list[bool] = []

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        strict.append(not torch.is_deterministic_algorithms_warn_only_enabled())
        return plain_backward(*arguments)

    monkeypatch.setattr(varlen, "forward_kernel", plain_forward)
    monkeypatch.setattr(varlen, "backward_kernel", backward)
    return strict


def test_spans_are_the_records_of_the_rows_one_after_the_other_and_empty_ones_up_to_a_power_of_two() -> None:
    spans = varlen.record_spans(np.array([[0, 0, 1], [1, -1, -1], [5, 5, 5]]))
    assert spans.tolist() == [0, 2, 3, 4, 6, 9, 9, 9, 9], "a record ends with its row, though the next has its number"
    assert spans.dtype == np.int32
    assert varlen.record_spans(np.zeros((1, 4))).tolist() == [0, 4]
    assert varlen.record_spans(np.arange(4)[None]).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kv", [4, 2, 1])
def test_attention_within_spans_equals_torch_with_a_mask_and_its_gradients(kv: int, plain_kernel: list[bool]) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 4, T, 8), (5, kv, T, 8), (5, kv, T, 8)]
    leaves = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    upstream = torch.randn(5, T, 4, 8, generator=generator)
    masked = F.scaled_dot_product_attention(*leaves, attn_mask=attention.segment_mask(SEGMENTS), enable_gqa=True)
    expected = torch.autograd.grad(masked.transpose(1, 2), leaves, upstream)
    spans = varlen.spans_of(SEGMENTS.numpy(), ALONE.device)
    by_spans, _ = attention.record_attention(None, *leaves, None, spans=spans)
    found = torch.autograd.grad(by_spans, leaves, upstream)
    for left, right in zip((masked.transpose(1, 2), *expected), (by_spans, *found), strict=True):
        assert (left - right).abs().max() < 1e-5


@pytest.fixture
def as_on_cuda(plain_kernel: list[bool], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    monkeypatch.setattr(varlen, "is_usable", lambda device, dtype, width, dropout: not dropout)
    monkeypatch.setattr(varlen, "DEVICE", "cpu")
    yield plain_kernel


@pytest.mark.parametrize(
    ("options", "chunk_tokens"), [({}, 0), ({"kv_heads": 1}, None), ({"kind": "qwen3", "kv_heads": 1}, None)], ids=str
)
def test_a_model_has_the_loss_and_the_gradients_that_it_has_with_a_mask(
    options: dict[str, Any], chunk_tokens: int | None, as_on_cuda: list[bool]
) -> None:
    def gradients(kind: str) -> dict[str, Tensor]:
        task = LanguageModeling(settings_of_training(), tiny_model(**options), chunk_tokens=chunk_tokens, attention=kind)
        module = task.build_model().train()
        loss = task.train_step(module, NumberedRows(6, T).batch(range(6)), ALONE.device).total
        loss.backward()  # type: ignore[no-untyped-call]
        return {"loss": loss.detach(), **{name: p.grad for name, p in module.named_parameters() if p.grad is not None}}

    found = gradients("records")
    assert len(as_on_cuda) == 2, "each of the two layers took its attention from here"
    expected = gradients("masked")
    assert len(as_on_cuda) == 2
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < 1e-3, name


def test_dropout_and_windows_keep_the_mask(as_on_cuda: list[bool]) -> None:
    def spans(window: int | None = None, **options: Any) -> varlen.Spans | None:
        model = tiny_model(kind="mistral", **options)
        model.config.sliding_window = window
        return NextTokenLoss(model, token_loss_sum).train().spans(NumberedRows(2, T).batch([0, 1]), ALONE.device)

    assert spans() is not None
    assert spans(window=8) is None
    assert spans(dropout=0.5) is None


def test_it_is_one_operation_for_the_compiler_and_the_gradients_stay(as_on_cuda: list[bool]) -> None:
    """Without inductor, which has nothing to say about it; graphs break at the loss alone."""
    q, k, v = (torch.randn(2, T, 4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3))
    spans = varlen.spans_of(SEGMENTS[:2].numpy(), ALONE.device)

    def total(*states: Tensor) -> Tensor:
        return varlen.span_attention(*states, spans, 0.3).square().sum()

    expected = torch.autograd.grad(total(q, k, v), (q, k, v))
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))


def test_the_kernel_runs_on_cuda_alone_in_half_precision_and_for_heads_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert varlen.is_usable(cuda, half, 64, 0.0)
    for others in (
        (torch.device("cpu"), half, 64, 0.0), (cuda, torch.float32, 64, 0.0), (cuda, half, 320, 0.0), (cuda, half, 36, 0.0),
        (cuda, half, 64, 0.1),
    ):  # fmt: skip
        assert not varlen.is_usable(*others), others
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not varlen.is_usable(cuda, half, 64, 0.0)


def test_torch_still_has_the_operations_with_the_arguments_that_are_passed() -> None:
    """Their signatures are not public; the arguments are as `forward_kernel` and `backward_kernel` pass them."""
    forward = [one.name for one in torch.ops.aten._flash_attention_forward.default._schema.arguments]
    names = ["query", "key", "value", "cum_seq_q", "cum_seq_k", "max_q", "max_k", "dropout_p", "is_causal"]
    assert forward[:11] == [*names, "return_debug_mask", "scale"]
    backward = [one.name for one in torch.ops.aten._flash_attention_backward.default._schema.arguments]
    assert backward[:15] == ["grad_out", *names[:3], "out", "logsumexp", *names[3:], "rng_state", "unused", "scale"]
