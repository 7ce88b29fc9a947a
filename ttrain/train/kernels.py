"""Layers whose forward and backward pass is fused while gradients are recorded: norms and gated feed-forward layers."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

GATED_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Ernie4_5_Moe", "Glm4Moe")

GATED = frozenset({f"{kind}MLP" for kind in GATED_KINDS})

NORMS = frozenset({f"{kind}RMSNorm" for kind in (*GATED_KINDS, "Mixtral")})  # Mixtral has experts instead of an MLP

SILUS = frozenset({"SiLU", "SiLUActivation"})  # torch's and transformers'


def fuse(model: nn.Module) -> None:
    """Replace the forward pass of these layers while gradients are recorded; results are the same up to rounding.

    They stay unchanged under a compiler, which fuses by itself, and without gradients, where nothing is kept.
    """
    for module in model.modules():
        name = type(module).__name__
        if name in NORMS:
            module.forward = MethodType(_norm, module)
        elif name in GATED and type(module.act_fn).__name__ in SILUS:
            module.forward = MethodType(_gated, module)


def _norm(self: Any, hidden: Tensor) -> Tensor:
    output: Tensor
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or hidden.dtype != torch.float32:
        output = type(self).forward(self, hidden)
    else:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        output = _RMSNorm.apply(hidden, self.weight, self.variance_epsilon, dtype)  # type: ignore[no-untyped-call]  # torch's
    return output


def _gated(self: Any, hidden: Tensor) -> Tensor:
    output: Tensor
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        output = type(self).forward(self, hidden)
    else:
        gate, up = self.gate_proj(hidden), self.up_proj(hidden)
        output = self.down_proj(_SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]  # torch's
    return output


class _RMSNorm(torch.autograd.Function):
    """y = weight x / rms(x) (arXiv:1910.07467), computed in fp32, returned in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        output: Tensor = (x * scale).mul_(weight).to(dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        product = grad * normed
        grad_weight = product.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
        grad_x = (grad * weight).sub_(normed.mul_(mean)).mul_(scale)
        return grad_x, grad_weight, None, None


class _SwiGLU(torch.autograd.Function):
    """y = silu(gate) up (arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        activated: Tensor = F.silu(gate).mul_(up)
        return activated

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate: Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, F.silu(gate).mul_(grad)
