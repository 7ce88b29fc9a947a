"""The experts of a mixture, one product for each expert: the tokens are sorted by expert, and each takes its part.

transformers' own grouped products do not know autocast: in bf16 they compute in the fp32 of the weights. Here they are in
the type of autocast, and on a CPU the whole layer is one node of the autograd graph. Forward and backward of 4096 tokens,
width 512, 4 of 32 experts 352 wide, two EPYC cores, bf16: one expert after the other 2049 ms, transformers' groups 530 ms,
here 229 ms; in fp32 938, 511 and 436 ms.

Letters in names: N tokens, k experts for each, S = N*k choices sorted by expert, E experts, D width, F inner width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "ttrain"  # among the experts implementations of transformers
SILUS = frozenset({"SiLU", "SiLUActivation"})  # torch's and transformers'
AMPERE = (8, 0)  # from which on CUDA has grouped products


def group(model: nn.Module) -> None:
    """Let the experts of a model of transformers compute here; up to rounding they give what they gave."""
    named: Any = model
    found = [module for module in model.modules() if _is_plain(module)]
    if not found or named.config._experts_implementation == NAME:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    named.set_experts_implementation(NAME)


def _is_plain(module: Any) -> bool:
    """Whether these are SwiGLU experts (arXiv:2002.05202) in two tensors, [E, 2F, D] and [E, D, F], and nothing more."""
    others = ("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
    return (
        getattr(module, "has_gate", False)
        and getattr(module, "is_concatenated", False)
        and not any(getattr(module, name, True) for name in others)
        and type(getattr(module, "act_fn", None)).__name__ in SILUS
        and type(module)._apply_gate.__name__ == "_default_apply_gate"
    )


def _experts(self: Any, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """The weighted sum of what its experts make of each token, [N, D], as transformers calls it."""
    kind = hidden_ND.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
    found: Tensor
    if torch.compiler.is_compiling() or not _is_plain(self) or not _has_products(hidden_ND.device, dtype):
        from transformers.integrations.moe import grouped_mm_experts_forward

        found = grouped_mm_experts_forward(self, hidden_ND, experts_Nk, weights_Nk)
    elif kind == "cpu":
        arguments = (hidden_ND, self.gate_up_proj, self.down_proj, experts_Nk, weights_Nk, dtype)
        found = _Experts.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    else:
        found = _by_grouped_products(hidden_ND, self.gate_up_proj, self.down_proj, experts_Nk, weights_Nk, dtype)
    return found.to(hidden_ND.dtype)


def _has_products(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cuda":
        return dtype == torch.bfloat16 and torch.cuda.get_device_capability(device) >= AMPERE
    return device.type == "cpu" and dtype != torch.float16  # whose range a sum can leave


def _by_grouped_products(
    hidden_ND: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, experts_Nk: Tensor, weights_Nk: Tensor, dtype: torch.dtype
) -> Tensor:
    """With torch's grouped products, which ask the device for nothing: it does not wait."""
    N, k = experts_Nk.shape
    experts_S, order_S = experts_Nk.flatten().sort(stable=True)
    numbers_E = torch.arange(len(down_EDF), device=experts_S.device)
    ends_E = torch.searchsorted(experts_S, numbers_E, right=True).to(torch.int32)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        x_SD = hidden_ND.to(dtype)[order_S // k]
        gate_SF, up_SF = F.grouped_mm(x_SD, gate_up_E2FD.to(dtype).transpose(1, 2), offs=ends_E).chunk(2, -1)
        y_SD = F.grouped_mm(F.silu(gate_SF) * up_SF, down_EDF.to(dtype).transpose(1, 2), offs=ends_E)
        places_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(N * k, device=order_S.device))
        y_NkD = (y_SD * weights_Nk.flatten()[order_S, None])[places_S].view(N, k, -1)
    return y_NkD.sum(1)


class _Experts(torch.autograd.Function):
    """Keeps the tokens and what enters the activation; the rest is computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
        experts_Nk: Tensor,
        weights_Nk: Tensor,
        dtype: Any,
    ) -> Tensor:
        N, k = experts_Nk.shape
        experts_S, order_S = experts_Nk.flatten().sort(stable=True)
        counts = torch.bincount(experts_S, minlength=len(down_EDF))[: len(down_EDF)].tolist()
        with torch.autocast("cpu", enabled=False):
            hidden, gate_up, down = hidden_ND.to(dtype), gate_up_E2FD.to(dtype), down_EDF.to(dtype)
            weights_S1 = weights_Nk.flatten()[order_S, None].to(dtype)
            x_SD = hidden[order_S // k]
            inner_S2F = x_SD.new_zeros(len(order_S), gate_up.shape[1])
            for expert, rows in _parts(counts):
                torch.mm(x_SD[rows], gate_up[expert].T, out=inner_S2F[rows])
            gate_SF, up_SF = inner_S2F.chunk(2, -1)
            active_SF = F.silu(gate_SF).mul_(up_SF).mul_(weights_S1)
            y_SD = torch.zeros_like(x_SD)  # choices of no expert stand at the end, and add nothing
            for expert, rows in _parts(counts):
                torch.mm(active_SF[rows], down[expert].T, out=y_SD[rows])
        ctx.save_for_backward(hidden, inner_S2F, gate_up, down, order_S, weights_S1)
        ctx.counts, ctx.k, ctx.types = (
            counts,
            k,
            [tensor.dtype for tensor in (hidden_ND, gate_up_E2FD, down_EDF, weights_Nk)],
        )
        return torch.empty_like(y_SD).index_copy_(0, order_S, y_SD).view(N, k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        hidden, inner_S2F, gate_up, down, order_S, weights_S1 = ctx.saved_tensors
        tokens_S = order_S // ctx.k
        x_SD, grad_SD = hidden[tokens_S], grad_ND.to(hidden.dtype)[tokens_S]
        gate_SF, up_SF = inner_S2F.chunk(2, -1)
        silu_SF = F.silu(gate_SF)
        active_SF = silu_SF * up_SF
        grad_active_SF = torch.zeros_like(active_SF)
        for expert, rows in _parts(ctx.counts):
            torch.mm(grad_SD[rows], down[expert], out=grad_active_SF[rows])
        grad_weights_S = (grad_active_SF * active_SF).sum(-1, dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_active_SF.mul_(weights_S1)
        grad_gate_up = grad_down = None
        if ctx.needs_input_grad[2]:
            grad_down = _by_expert(grad_SD, active_SF.mul_(weights_S1), down, ctx.counts, ctx.types[2])
        grad_gate_SF = torch.ops.aten.silu_backward(grad_active_SF * up_SF, gate_SF)
        grad_inner_S2F = torch.cat((grad_gate_SF, grad_active_SF.mul_(silu_SF)), -1)
        if ctx.needs_input_grad[1]:
            grad_gate_up = _by_expert(grad_inner_S2F, x_SD, gate_up, ctx.counts, ctx.types[1])
        grad_x_SD = torch.zeros_like(x_SD)
        for expert, rows in _parts(ctx.counts):
            torch.mm(grad_inner_S2F[rows], gate_up[expert], out=grad_x_SD[rows])
        grad_hidden = torch.empty_like(grad_x_SD).index_copy_(0, order_S, grad_x_SD).view(len(hidden), ctx.k, -1).sum(1)
        grad_weights = torch.empty_like(grad_weights_S).index_copy_(0, order_S, grad_weights_S).view(-1, ctx.k)
        return grad_hidden.to(ctx.types[0]), grad_gate_up, grad_down, None, grad_weights.to(ctx.types[3]), None


def _parts(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, its choices), of those that have some."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _by_expert(left_SA: Tensor, right_SB: Tensor, like_EAB: Tensor, counts: list[int], dtype: torch.dtype) -> Tensor:
    """left.T @ right of each expert's choices, [E, A, B]; zeros for an expert without any."""
    found_EAB = torch.zeros(like_EAB.shape, dtype=dtype, device=like_EAB.device)
    for expert, rows in _parts(counts):
        found_EAB[expert] = left_SA[rows].T @ right_SB[rows]
    return found_EAB
