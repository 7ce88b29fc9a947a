"""Causal attention within records, in blocks of queries: for CPUs, where torch's fused kernel is the slowest part of a step.

Letters in names: B rows, T positions, H heads, G heads of keys and values, R = H/G, K width of a head, Q queries of a block,
S the keys that they may see.
"""

from __future__ import annotations

import math
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

NAME = "ttrain"  # among the attention implementations of transformers

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"  # kinds of layers, as configs name them

WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}

BLOCK = 128  # queries; 512 positions in 1, 2, 4 and 8 blocks: 46, 36, 32 and 34 ms, the fused kernel: 81 ms


def segment_mask(segments_BT: Tensor) -> Tensor:
    """[B, 1, T, T] bool: a position sees itself and the earlier positions of its own record."""
    T = segments_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=segments_BT.device).tril()
    return ((segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT)[:, None]


def with_attention_mask(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Convert the mask of `segment_mask` in a model's inputs to the form that its attention expects.

    Layers with a sliding window get a mask of their own: transformers adds no window to a mask that it is given.
    `eager` attention adds the mask to the scores, so that True and False would hide nothing (gemma2 and gpt_oss have no
    other).
    """
    mask_B1TS: Tensor = inputs["attention_mask"]
    windows = {kind: size for kind, size in _windows(model.config).items() if size < mask_B1TS.shape[-1]}
    additive = model.config._attn_implementation == "eager"
    if not windows:
        return {**inputs, "attention_mask": _scores(mask_B1TS)} if additive else inputs
    queries_BT = inputs["position_ids"]
    B, T = queries_BT.shape
    virtual_positions = torch.arange(mask_B1TS.shape[-1] - T, device=queries_BT.device).expand(B, -1)  # of virtual tokens
    q_B1T1, k_B11S = queries_BT[:, None, :, None], torch.cat([virtual_positions, queries_BT], 1)[:, None, None]
    masks = {}
    for kind in dict.fromkeys(getattr(model.config, "layer_types", None) or windows):
        size = windows.get(kind)
        near = mask_B1TS
        if size is not None:
            near = near & (q_B1T1 // size == k_B11S // size if kind == CHUNKED else q_B1T1 - k_B11S < size)
        masks[kind] = _scores(near) if additive else near
    uniform = getattr(model.config, "layer_types", None) is None
    return {**inputs, "attention_mask": masks[SLIDING] if uniform else masks}


def sees_windows(config: Any, length: int) -> bool:
    """Whether any layer's window is shorter than a row of this length."""
    return min(_windows(config).values(), default=length) < length


def _windows(config: Any) -> dict[str, int]:
    """Window size in positions of each kind of layer, the position itself included; kinds without a window are left out."""
    kinds = getattr(config, "layer_types", None) or [SLIDING]
    sizes = {kind: getattr(config, name, None) for kind, name in WINDOWS.items() if kind in kinds}
    return {kind: size for kind, size in sizes.items() if size is not None}


def _scores(mask: Tensor) -> Tensor:
    """The mask as a term added to the scores: 0 where it is True, else the smallest number."""
    zeros = torch.zeros(mask.shape, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(zeros.dtype).min)


def block_arguments(model: Any, segments_BT: Tensor) -> dict[str, Any]:
    """Extra arguments with which a transformers model computes its attention here; {} where it does not.

    Without them, as in `generate`, attention is what it was. The model's implementation must be torch's (`sdpa`), and the
    device a CPU without AMX, for which the fused kernel was written. A compiler would make a graph for every batch.
    """
    device = segments_BT.device
    if torch.compiler.is_compiling() or device.type != "cpu" or torch.cpu._is_amx_tile_supported():
        return {}
    if sees_windows(model.config, segments_BT.shape[1]):
        return {}
    if model.config._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, block_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    return {"first_keys": first_keys(segments_BT)} if model.config._attn_implementation == NAME else {}


def first_keys(segments_BT: Tensor) -> list[list[int]]:
    """For each row and block of queries, the first position of the earliest record in the block."""
    T = segments_BT.shape[1]
    same_BTT = segments_BT[:, :, None] == segments_BT[:, None, :]
    blocks = [same_BTT[:, start : start + BLOCK].any(1) for start in range(0, T, BLOCK)]
    first_positions: list[list[int]] = torch.stack([block.view(torch.uint8).argmax(-1) for block in blocks], 1).tolist()
    return first_positions


def block_attention(
    module: Any,
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    first_keys: list[list[int]] | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; returns [B, T, H, K]."""
    kind = query_BHTK.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query_BHTK.dtype
    if first_keys is None or attention_mask is None or dropout or dtype == torch.float16:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        states = (query_BHTK, key_BGTK, value_BGTK)
        output, _ = sdpa_attention_forward(module, *states, attention_mask, dropout=dropout, scaling=scaling, **others)
        return output, None
    scale = query_BHTK.shape[-1] ** -0.5 if scaling is None else scaling
    arguments = (query_BHTK, key_BGTK, value_BGTK, attention_mask[:, 0], first_keys, scale, dtype)
    output = BlockAttention.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    return output, None


class BlockAttention(torch.autograd.Function):
    """Softmax in fp32, products in `dtype`. Scores are computed again in the backward pass (arXiv:2205.14135)."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask_BTT: Tensor, first_keys: Any, scale: float, dtype: Any
    ) -> Tensor:
        B, H, T, K = query.shape
        G = key.shape[1]
        ctx.types, ctx.first_keys, ctx.scale = (query.dtype, key.dtype, value.dtype), first_keys, scale
        with torch.autocast(query.device.type, enabled=False):
            q_BGRTK = (query * scale).to(dtype).contiguous().view(B, G, H // G, T, K)
            k_BGTK, v_BGTK = key.to(dtype).contiguous(), value.to(dtype).contiguous()
            hidden_BTT = ~mask_BTT
            out_BTGRK = torch.empty(B, T, G, H // G, K, dtype=dtype, device=query.device)
            for b, rows, keys in _blocks(first_keys, T):
                p_GQS = _weights(q_BGRTK[b, :, :, rows], k_BGTK[b, :, keys], hidden_BTT[b, rows, keys]).to(dtype)
                o_GRQK = torch.bmm(p_GQS, v_BGTK[b, :, keys]).view(G, H // G, -1, K)
                out_BTGRK[b, rows] = o_GRQK.permute(2, 0, 1, 3)
        ctx.save_for_backward(q_BGRTK, k_BGTK, v_BGTK, hidden_BTT, out_BTGRK)
        return out_BTGRK.view(B, T, H, K)

    @staticmethod
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        q_BGRTK, k_BGTK, v_BGTK, hidden_BTT, out_BTGRK = ctx.saved_tensors
        B, G, R, T, K = q_BGRTK.shape
        dtype = q_BGRTK.dtype
        wide = torch.promote_types(dtype, torch.float32)
        do_BTGRK = grad_BTHK.reshape(B, T, G, R, K).to(dtype)
        delta_BGRT = (do_BTGRK * out_BTGRK).sum(-1, dtype=wide).permute(0, 2, 3, 1)
        do_BGRTK = do_BTGRK.permute(0, 2, 3, 1, 4).contiguous()
        dq = torch.empty(B, T, G, R, K, dtype=ctx.types[0], device=grad_BTHK.device)
        dk, dv = (torch.zeros(B, G, T, K, dtype=wide, device=grad_BTHK.device) for _ in range(2))
        for b, rows, keys in _blocks(ctx.first_keys, T):
            q_GRQK, k_GSK, v_GSK = q_BGRTK[b, :, :, rows], k_BGTK[b, :, keys], v_BGTK[b, :, keys]
            p_GQS = _weights(q_GRQK, k_GSK, hidden_BTT[b, rows, keys])
            do_GQK = do_BGRTK[b, :, :, rows].reshape(G, -1, K)
            dv[b, :, keys] += torch.bmm(p_GQS.to(dtype).transpose(1, 2), do_GQK)
            ds_GQS = torch.bmm(do_GQK, v_GSK.transpose(1, 2)).to(wide)
            ds_GQS = ds_GQS.sub_(delta_BGRT[b, :, :, rows].reshape(G, -1, 1)).mul_(p_GQS).to(dtype)
            dq[b, rows] = torch.bmm(ds_GQS, k_GSK).view(G, R, -1, K).permute(2, 0, 1, 3)
            dk[b, :, keys] += torch.bmm(ds_GQS.transpose(1, 2), q_GRQK.reshape(G, -1, K))
        dq.mul_(ctx.scale)
        types = ctx.types
        return dq.view(B, T, G * R, K).transpose(1, 2), dk.to(types[1]), dv.to(types[2]), None, None, None, None


def _blocks(first_keys: list[list[int]], T: int) -> Any:
    for b, firsts in enumerate(first_keys):
        for number, first in enumerate(firsts):
            end = min(T, (number + 1) * BLOCK)
            yield b, slice(number * BLOCK, end), slice(first, end)


def _weights(q_GRQK: Tensor, k_GSK: Tensor, hidden_QS: Tensor) -> Tensor:
    """Softmax of the scores, [G, R*Q, S], in fp32."""
    G, R, Q, K = q_GRQK.shape
    scores = torch.bmm(q_GRQK.reshape(G, R * Q, K), k_GSK.transpose(1, 2))
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    scores.view(G, R, Q, -1).masked_fill_(hidden_QS, -math.inf)
    return torch.softmax(scores, -1)


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
