"""Layers with their own forward and backward passes: norms, gated layers, rotary attention."""
# Letters in names: B rows, T positions, H heads, K width of a head.

from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ttrain.train import native
from ttrain.train.attention import Records
from ttrain.train.precision import autocast_dtype

GATED_KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Ernie4_5_Moe", "Glm4Moe")

GATED = frozenset({f"{kind}MLP" for kind in GATED_KINDS})

# Mixtral has experts instead of an MLP.
NORMS = frozenset({f"{kind}RMSNorm" for kind in (*GATED_KINDS, "Mixtral")})

# Attention with rotary positions of the whole head, its halves in pairs, and perhaps norms of
# queries and keys.
ROTARY = frozenset(
    {f"{kind}Attention" for kind in ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe")}
)

SILUS = frozenset({"SiLU", "SiLUActivation"})  # torch's and transformers'


def fuse(model: nn.Module) -> None:
    """Replace the forward pass of these layers; results are the same up to rounding."""
    # Norms and gated layers stay unchanged without gradients, attention where native kernels do not
    # take it, and all under a compiler, which fuses by itself.
    for module in model.modules():
        name = type(module).__name__
        if name in NORMS:
            module.forward = MethodType(_norm, module)
        elif name in GATED and type(module.act_fn).__name__ in SILUS:
            module.forward = MethodType(_gated, module)
        elif name in ROTARY:
            module.forward = MethodType(_rotary_attention, module)


def _norm(self: Any, hidden: Tensor) -> Any:
    if (
        torch.compiler.is_compiling()
        or not torch.is_grad_enabled()
        or hidden.dtype != torch.float32
    ):
        return type(self).forward(self, hidden)
    arguments = (hidden, self.weight, self.variance_epsilon, autocast_dtype(hidden))
    return _RMSNorm.apply(*arguments)  # type: ignore[no-untyped-call]


def _gated(self: Any, hidden: Tensor) -> Any:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return type(self).forward(self, hidden)
    gate = self.gate_proj(hidden)
    up = self.up_proj(hidden)
    down = self.down_proj
    if type(down) is nn.Linear and getattr(down, "bias", None) is None:
        return _GatedProduct.apply(gate, up, down.weight)  # type: ignore[no-untyped-call]
    return down(_SwiGLU.apply(gate, up))  # type: ignore[no-untyped-call]  # an adapter's


class _RMSNorm(torch.autograd.Function):
    """y = weight x / rms(x) (arXiv:1910.07467), computed in fp32, returned in `dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
        if native.takes_norm(dtype, x, weight):
            output, scale = native.norm(x, weight, epsilon, dtype)
        else:
            squares: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
            scale = squares.div_(x.shape[-1]).add_(epsilon).rsqrt_()
            output = (x * scale).mul_(weight).to(dtype)
        ctx.save_for_backward(x, weight, scale)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        is_native = native.takes(grad) and native.takes_norm(grad.dtype, x, weight)
        return (
            *(native.norm_slopes if is_native else _rms_slopes)(grad, x, weight, scale),
            None,
            None,
        )


def _activated(gate: Tensor, up: Tensor) -> Tensor:
    return native.gated(gate, up) if native.takes(gate, up) else F.silu(gate).mul_(up)


def _activated_slopes(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Activation and the gradients of gate and up."""
    if native.takes(grad, gate, up):
        return native.gated_slopes(grad, gate, up)
    activated = F.silu(gate)
    return activated * up, torch.ops.aten.silu_backward(grad * up, gate), activated.mul_(grad)


class _GatedProduct(torch.autograd.Function):
    """y = (silu(gate) up) D (arXiv:2002.05202). The input of D is recomputed, not kept."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(_activated(gate, up), weight.to(gate.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        inner = grad.flatten(0, -2).mm(weight.to(gate.dtype)).view_as(gate)
        activated, of_gate, of_up = _activated_slopes(inner, gate, up)
        if not ctx.needs_input_grad[2]:
            return of_gate, of_up, None
        return of_gate, of_up, grad.flatten(0, -2).t().mm(activated.flatten(0, -2)).to(weight.dtype)


class _SwiGLU(torch.autograd.Function):
    """y = silu(gate) up (arXiv:2002.05202)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _activated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        _, of_gate, of_up = _activated_slopes(grad, *ctx.saved_tensors)
        return of_gate, of_up


def _rotary_attention(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Tensor | None = None,
    cache: Any = None,
    **others: Any,
) -> Any:
    def of_transformers() -> Any:
        return type(self).forward(
            self, hidden_states, position_embeddings, attention_mask, cache=cache, **others
        )

    records = cast(Records | None, others.get("records"))
    dtype = autocast_dtype(hidden_states)
    drops = self.training and self.attention_dropout
    if records is None or cache is not None or drops:
        return of_transformers()
    (B, T, _) = hidden_states.shape
    K = self.head_dim
    layers = [getattr(self, name, None) for name in ("q_norm", "k_norm")]
    norms = [
        (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon) for norm in layers
    ]
    angles = [angle.expand(B, T, -1).contiguous() for angle in position_embeddings]
    beside = [*angles, *(weight for weight, _ in norms if weight is not None)]
    if not (
        native.takes_heads(dtype, K, hidden_states)
        and native.takes(*beside, dtype=torch.float32)
        and all(tensor.shape[-1] == K for tensor in beside)
    ):
        return of_transformers()
    states = [
        layer(hidden_states).to(dtype).view(B, T, -1, K).contiguous()
        for layer in (self.q_proj, self.k_proj, self.v_proj)
    ]
    arguments = *norms[0], *norms[1], angles, records.places, self.scaling
    mixed_BTHK = native.Attention.apply(*states, *arguments)  # type: ignore[no-untyped-call]
    return self.o_proj(mixed_BTHK.view(B, T, -1)), None


def _rms_slopes(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and weight, where `scale` is the inverse RMS of x."""
    normed = x * scale
    product = grad * normed
    mean = (product @ weight).unsqueeze(-1).div_(x.shape[-1])
    grad_x = (grad * weight).sub_(normed.mul_(mean)).mul_(scale)
    return grad_x, product.flatten(0, -2).sum(0)
