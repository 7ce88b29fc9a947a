"""Attention of variable lengths: indices, positions and gradients, with the kernel of CUDA replaced by a plain one."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.comparing import distance, with_gradients
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, settings_of_training, tiny_model
from torch import Tensor
from torch.nn import functional as F

from ttrain.train import varlen
from ttrain.train.language_modeling import LanguageModeling, NextTokenLoss

T = 24
SEGMENTS = torch.tensor([[0] * T, [0] * 3 + [1] * 15 + [2] * 6])


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
    """Of each record by itself, as the kernel of CUDA has it: [tokens, heads, width]."""
    pieces = []
    for start, end in itertools.pairwise(spans.tolist()):
        states = [state[None, start:end].transpose(1, 2) for state in (q, k, v)]
        out = F.scaled_dot_product_attention(*states, is_causal=True, scale=scale, enable_gqa=True)
        pieces.append(out[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The spans of each backward pass, whose kernels are plain ones in the place of CUDA's."""
    found: list[Tensor] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, longest: int, scale: float) -> Any:
        assert spans.dtype == torch.int32 and int(spans.diff().max()) == longest
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        out = attend(q, k, v, spans, scale).contiguous()
        return out, q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)

    def backward(grad: Tensor, *given: Any) -> tuple[Tensor, ...]:
        *states, _, _, spans, _, scale = given
        found.append(spans)
        leaves = [state.detach().requires_grad_() for state in states]

        def gradients() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attend(*leaves, spans, scale), leaves, grad)

        with ThreadPoolExecutor(1) as thread:  # within an operation torch records no gradients
            return tuple(gradient.contiguous() for gradient in thread.submit(gradients).result())

    monkeypatch.setattr(varlen, "forward_kernel", forward)
    monkeypatch.setattr(varlen, "backward_kernel", backward)
    monkeypatch.setattr(varlen, "is_usable", lambda device, dtype, width, dropout: not dropout)
    monkeypatch.setattr(varlen, "DEVICE", "cpu")
    return found


def test_spans_are_the_records_of_the_rows_one_after_the_other_and_empty_ones_up_to_a_power_of_two() -> (
    None
):
    spans = varlen.record_spans(np.array([[0, 0, 1], [1, -1, -1], [5, 5, 5]]))
    assert spans.tolist() == [0, 2, 3, 4, 6, 9, 9, 9, 9], (
        "a record ends with its row, though the next has its number"
    )
    assert varlen.record_spans(np.zeros((1, 4))).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("options", "chunk_tokens"), [({}, 0), ({"kind": "qwen3", "kv_heads": 1}, None)], ids=str
)
def test_a_model_has_the_loss_and_the_gradients_that_it_has_with_a_mask(
    options: dict[str, Any], chunk_tokens: int | None, calls: list[Tensor]
) -> None:
    def gradients(kind: str) -> dict[str, Tensor]:
        task = LanguageModeling(
            settings_of_training(), tiny_model(**options), chunk_tokens=chunk_tokens, attention=kind
        )
        module = task.build_model().train()
        loss = task.train_step(module, NumberedRows(6, T).batch(range(6)), ALONE.device).total
        return with_gradients(loss, torch.ones(()), dict(module.named_parameters()))

    found = gradients("records")
    assert len(calls) == 2, "each of the two layers took its attention from here"
    expected = gradients("masked")
    assert len(calls) == 2
    for name in expected:
        assert distance({name: expected[name]}, {name: found[name]}) < 1e-3, name


def test_dropout_and_windows_keep_the_mask(calls: list[Tensor]) -> None:
    def spans(window: int | None = None, **options: Any) -> varlen.Spans | None:
        model = tiny_model(kind="mistral", **options)
        model.config.sliding_window = window
        return NextTokenLoss(model).train().spans(NumberedRows(2, T).batch([0, 1]), ALONE.device)

    assert spans() is not None
    assert spans(window=8) is None
    assert spans(dropout=0.5) is None


def test_it_is_one_operation_for_the_compiler_and_the_gradients_stay(calls: list[Tensor]) -> None:
    """Without inductor, which has nothing to say about it; graphs break at the loss alone."""
    q, k, v = (
        torch.randn(2, T, 4, 8, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        for seed in range(3)
    )
    spans = varlen.spans_of(SEGMENTS.numpy(), ALONE.device)

    def total(*states: Tensor) -> Tensor:
        return varlen.span_attention(*states, spans, 0.3).square().sum()

    expected = torch.autograd.grad(total(q, k, v), (q, k, v))
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    found = torch.autograd.grad(compiled(q, k, v), (q, k, v))
    assert all(torch.equal(left, right) for left, right in zip(expected, found, strict=True))


def test_the_kernel_runs_on_cuda_alone_in_half_precision_and_for_heads_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, half = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert varlen.is_usable(cuda, half, 64, 0.0)
    for others in (
        (torch.device("cpu"), half, 64, 0.0),
        (cuda, torch.float32, 64, 0.0),
        (cuda, half, 320, 0.0),
        (cuda, half, 36, 0.0),
        (cuda, half, 64, 0.1),
    ):
        assert not varlen.is_usable(*others), others
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not varlen.is_usable(cuda, half, 64, 0.0)


def test_torch_still_has_the_operations_with_the_arguments_that_are_passed() -> None:
    """Their signatures are not public; the arguments are as `forward_kernel` and `backward_kernel` pass them."""
    forward = [
        one.name for one in torch.ops.aten._flash_attention_forward.default._schema.arguments
    ]
    names = [
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
    ]
    assert forward[:11] == [*names, "return_debug_mask", "scale"]
    backward = [
        one.name for one in torch.ops.aten._flash_attention_backward.default._schema.arguments
    ]
    assert backward[:15] == [
        "grad_out",
        *names[:3],
        "out",
        "logsumexp",
        *names[3:],
        "rng_state",
        "unused",
        "scale",
    ]
