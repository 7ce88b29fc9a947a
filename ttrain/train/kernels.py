"""Layers with a forward and backward pass of their own: norms, gated feed-forward layers, and attention up to its scores.

Letters in names: B rows, T positions, H heads, K width of a head.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.train.attention import RecordGroups, autocast_dtype, record_attention

GATED_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Ernie4_5_Moe", "Glm4Moe")

GATED = frozenset({f"{kind}MLP" for kind in GATED_KINDS})

NORMS = frozenset({f"{kind}RMSNorm" for kind in (*GATED_KINDS, "Mixtral")})  # Mixtral has experts instead of an MLP

# Attention with rotary positions of the whole head, its halves in pairs, and perhaps norms of queries and keys.
ROTARY = frozenset({f"{kind}Attention" for kind in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")})

SILUS = frozenset({"SiLU", "SiLUActivation"})  # torch's and transformers'


def fuse(model: nn.Module) -> None:
    """Replace the forward pass of these layers; results are the same up to rounding.

    Norms and gated layers stay unchanged without gradients, where nothing is kept; attention where it is not computed
    record by record; and all under a compiler, which fuses by itself.
    """
    for module in model.modules():
        name = type(module).__name__
        if name in NORMS:
            module.forward = MethodType(_norm, module)
        elif name in GATED and type(module.act_fn).__name__ in SILUS:
            module.forward = MethodType(_gated, module)
        elif name in ROTARY:
            module.forward = MethodType(_rotary_attention, module)


def _norm(self: Any, hidden: Tensor) -> Tensor:
    output: Tensor
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or hidden.dtype != torch.float32:
        output = type(self).forward(self, hidden)
    else:
        dtype = autocast_dtype(hidden.device, hidden.dtype)
        output = _RMSNorm.apply(hidden, self.weight, self.variance_epsilon, dtype)  # type: ignore[no-untyped-call]  # torch's
    return output


def _gated(self: Any, hidden: Tensor) -> Tensor:
    output: Tensor
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        output = type(self).forward(self, hidden)
    else:
        projections = (self.gate_proj, self.up_proj, self.down_proj)
        if all(type(projection) is nn.Linear and projection.bias is None for projection in projections):
            dtype = autocast_dtype(hidden.device, hidden.dtype)
            output = _GatedLayer.apply(hidden.to(dtype), *(projection.weight for projection in projections))  # type: ignore[no-untyped-call]  # torch's
        else:  # some are an adapter's
            output = self.down_proj(_SwiGLU.apply(self.gate_proj(hidden), self.up_proj(hidden)))  # type: ignore[no-untyped-call]  # torch's
    return output


class _RMSNorm(torch.autograd.Function):
    """y = weight x / rms(x) (arXiv:1910.07467), computed in fp32, returned in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        scale = _inverse_rms(x, epsilon)
        ctx.save_for_backward(x, weight, scale)
        output: Tensor = (x * scale).mul_(weight).to(dtype)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *_rms_slopes(grad, *ctx.saved_tensors), None, None


class _GatedLayer(torch.autograd.Function):
    """y = (silu(x G) (x U)) D (arXiv:2002.05202), in the type of x.

    What D multiplies is computed again for its gradient, from silu(x G), which is needed there anyway, and weights are cast
    again: of 811 MB that a step keeps at a width of 512 with 8 layers and 4,096 tokens, 687 are left.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
        gate, up = F.linear(x, gate_weight.to(x.dtype)), F.linear(x, up_weight.to(x.dtype))
        ctx.save_for_backward(x, gate, up, gate_weight, up_weight, down_weight)
        return F.linear(F.silu(gate).mul_(up), down_weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, *weights = ctx.saved_tensors
        gate_weight, up_weight, down_weight = weights
        activated = F.silu(gate)
        inner = grad.flatten(0, -2).mm(down_weight.to(x.dtype)).view_as(gate)
        of_weights = [_weight_slopes(grad, activated * up, down_weight) if ctx.needs_input_grad[3] else None]
        of_up = activated.mul_(inner)
        of_gate = torch.ops.aten.silu_backward(inner.mul_(up), gate)
        for number, slopes in ((2, of_up), (1, of_gate)):
            of_weights.insert(0, _weight_slopes(slopes, x, weights[number - 1]) if ctx.needs_input_grad[number] else None)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = of_up.flatten(0, -2).mm(up_weight.to(x.dtype))
            of_x = of_x.add_(of_gate.flatten(0, -2).mm(gate_weight.to(x.dtype))).view_as(x)
        return of_x, *of_weights


def _weight_slopes(grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the weight of a product with x."""
    return grad.flatten(0, -2).t().mm(x.flatten(0, -2)).to(weight.dtype)


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


def _rotary_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    past_key_values: Any = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    if "groups" not in others or past_key_values is not None:
        output: tuple[Tensor, Tensor | None] = type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values=past_key_values, **others
        )
        return output
    B, T, _ = hidden_states.shape
    projections = (self.q_proj, self.k_proj, self.v_proj)
    query, key, value = (projection(hidden_states).view(B, T, -1, self.head_dim) for projection in projections)
    query = _rotated(query, getattr(self, "q_norm", None), position_embeddings, others["groups"])
    key = _rotated(key, getattr(self, "k_norm", None), position_embeddings, others["groups"])
    dropout = self.attention_dropout if self.training else 0.0
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mixed, _ = record_attention(
        self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, groups=others["groups"]
    )
    return self.o_proj(mixed.reshape(B, T, -1)), None


def _rotated(states_BTHK: Tensor, norm: Any, angles: tuple[Tensor, Tensor], groups: RecordGroups) -> Tensor:
    """Queries or keys after their norm, if there is one, and the rotation of their positions."""
    heads = states_BTHK.shape[2]
    if heads not in groups.angles:  # the same in all layers
        cos_BTHK, sin_BTHK = (angle[:, :, None].expand(-1, -1, heads, -1).contiguous() for angle in angles)
        sin_BTHK[..., : sin_BTHK.shape[-1] // 2].neg_()
        groups.angles[heads] = cos_BTHK, sin_BTHK
    weight, epsilon = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
    rotated: Tensor = _Rotation.apply(states_BTHK, weight, epsilon, *groups.angles[heads])  # type: ignore[no-untyped-call]  # torch's
    return rotated


class _Rotation(torch.autograd.Function):
    """y = R(positions) weight x / rms(x), without a weight R x (arXiv:2104.09864, arXiv:2302.05442), computed in fp32.

    The pairs are half a head apart: y = x cos + roll(x) sin, where `sin` is negative in the first half.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, epsilon: float, cos: Tensor, sin: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = None
        if weight is not None:
            scale = _inverse_rms(wide, epsilon)
            wide = (wide * scale).mul_(weight)
        ctx.save_for_backward(x, weight, scale, cos, sin)
        return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale, cos, sin = ctx.saved_tensors
        grad = grad.to(torch.promote_types(x.dtype, torch.float32))
        grad_x, grad_weight = (grad * cos).add_((grad * sin).roll(x.shape[-1] // 2, -1)), None
        if weight is not None:
            grad_x, grad_weight = _rms_slopes(grad_x, x, weight, scale)
        return grad_x.to(x.dtype), grad_weight, None, None, None


def _inverse_rms(x: Tensor, epsilon: float) -> Tensor:
    """1 / rms(x) over the last dimension, which is kept."""
    squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    return squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()


def _rms_slopes(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight of weight x scale, where scale is the inverse RMS of x."""
    normed = x * scale
    product = grad * normed
    mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
    grad_x = (grad * weight).sub_(normed.mul_(mean)).mul_(scale)
    return grad_x, product.flatten(0, -2).sum(0)
