"""Attention of packed rows on CUDA: torch's flash attention of variable lengths."""
# A dense mask keeps flash attention out. Here the records of a batch stand one after the other, the
# kernel knows where each begins (arXiv:2205.14135, arXiv:2307.08691), and no score between records
# is computed. It is one operation for the compiler.
# Letters in names: B rows, T positions, M = B * T, H heads, G heads of keys and values, K width of
# a head, N records.

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttrain.train.distributed import on_device
from ttrain.train.precision import is_ampere

DEVICE = "cuda"
LONGEST_HEAD = 256  # maximum head width of the kernel
HALF_PRECISIONS = (torch.bfloat16, torch.float16)


class Spans(NamedTuple):
    """Bounds of the records among the B * T tokens, int32 [N + 1]; length of the longest one."""

    # `longest` is a tensor on the CPU: a number would be compiled in, with a graph for each value.

    bounds: Tensor
    longest: Tensor


def record_starts(segments_BT: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """First token of each record among the B * T. Padding of a row is a record."""
    begins_BT = np.ones(segments_BT.shape, bool)
    np.not_equal(segments_BT[:, 1:], segments_BT[:, :-1], out=begins_BT[:, 1:])
    return np.flatnonzero(begins_BT)


def record_spans(segments_BT: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    """Where each record begins among the B * T tokens, and their end, [N + 1]."""
    # Empty records make N a power of two, so that a compiled model meets few shapes.
    starts = record_starts(segments_BT)
    spans = np.full((1 << (len(starts) - 1).bit_length()) + 1, segments_BT.size, np.int32)
    spans[: len(starts)] = starts
    return spans


def spans_of(segments_BT: npt.NDArray[Any], device: torch.device) -> Spans:
    """The spans of the records of a batch."""
    spans = record_spans(segments_BT)
    [bounds] = on_device([spans], device)
    return Spans(bounds, torch.tensor(int(np.diff(spans).max())))


def is_usable(device: torch.device, dtype: torch.dtype, head_width: int, dropout: float) -> bool:
    """Whether the kernel runs on this device, in this format, for these heads and dropout."""
    return (
        is_ampere(device)
        and dtype in HALF_PRECISIONS
        and head_width <= LONGEST_HEAD
        and head_width % 8 == 0
        and not dropout
    )


def span_attention(
    query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, spans: Spans, scale: float
) -> Tensor:
    """Causal attention within the records of `spans`; returns [B, T, H, K]."""
    B, T, H, K = query_BTHK.shape
    states = (state.reshape(B * T, -1, K) for state in (query_BTHK, key_BTGK, value_BTGK))
    output: Tensor = _attention(*states, spans.bounds, spans.longest, scale)[0]
    return output.view(B, T, H, K)


@torch.library.custom_op("ttrain::span_attention", mutates_args=())
def _attention(
    q_MHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, spans: Tensor, longest: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return forward_kernel(q_MHK, k_MGK, v_MGK, spans, int(longest), scale)


@_attention.register_fake
def _(
    q_MHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, spans: Tensor, longest: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_MHK), q_MHK.new_empty(
        (q_MHK.shape[1], q_MHK.shape[0]), dtype=torch.float32
    )


@torch.library.custom_op("ttrain::span_attention_backward", mutates_args=())
def _attention_backward(
    grad_MHK: Tensor,
    q_MHK: Tensor,
    k_MGK: Tensor,
    v_MGK: Tensor,
    out_MHK: Tensor,
    sums_HM: Tensor,
    spans: Tensor,
    longest: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    with strictly_deterministic():
        return backward_kernel(
            grad_MHK.contiguous(), q_MHK, k_MGK, v_MGK, out_MHK, sums_HM, spans, int(longest), scale
        )


@_attention_backward.register_fake
def _(
    grad_MHK: Tensor,
    q_MHK: Tensor,
    k_MGK: Tensor,
    v_MGK: Tensor,
    out_MHK: Tensor,
    sums_HM: Tensor,
    spans: Tensor,
    longest: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q_MHK), torch.empty_like(k_MGK), torch.empty_like(v_MGK)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q_MHK, k_MGK, v_MGK, spans, longest, ctx.scale = inputs
    ctx.save_for_backward(q_MHK, k_MGK, v_MGK, *output, spans, longest)


def _differentiate(ctx: Any, grad_MHK: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad_MHK, *ctx.saved_tensors, ctx.scale), None, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


@contextlib.contextmanager
def strictly_deterministic() -> Iterator[None]:
    """In deterministic mode, let no kernel only warn: flash attention then has a fixed order."""
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not (torch.are_deterministic_algorithms_enabled() and warns_only):
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def forward_kernel(
    q_MHK: Tensor, k_MGK: Tensor, v_MGK: Tensor, spans: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The kernel behind `torch.nn.attention.varlen`, with what its backward pass needs."""
    output, sums_HM, *_ = torch.ops.aten._flash_attention_forward(
        q_MHK, k_MGK, v_MGK, spans, spans, longest, longest, 0.0, True, False, scale=scale
    )
    return output, sums_HM


def backward_kernel(
    grad_MHK: Tensor,
    q_MHK: Tensor,
    k_MGK: Tensor,
    v_MGK: Tensor,
    out_MHK: Tensor,
    sums_HM: Tensor,
    spans: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    # Of dropout, which there is none of.
    random_state = torch.zeros(2, dtype=torch.uint64, device=q_MHK.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_MHK,
        q_MHK,
        k_MGK,
        v_MGK,
        out_MHK,
        sums_HM,
        spans,
        spans,
        longest,
        longest,
        0.0,
        True,
        random_state,
        q_MHK.new_empty(0),
        scale=scale,
    )
    return gradients
