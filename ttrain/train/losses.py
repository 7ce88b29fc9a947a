"""Next-token cross entropy: from logits, and from hidden states in chunks, so that all logits are never in memory at once.

Letters in names: B rows, T positions, N positions of all rows, C of a chunk, D width of the hidden states, V entries of the
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ttrain.data.packing import IGNORE

# The weight's gradient is added up once a chunk, which larger ones do less often; smaller ones hold fewer logits.
CHUNK_TOKENS = {"cpu": 512}
CHUNK_TOKENS_ELSEWHERE = 2048
SLICE_ENTRIES = 1 << 18  # of softmax on a CPU: a megabyte of fp32, so that its passes stay in the cache of a core
FP16_GRADIENT_SCALE = 4096.0  # entries of softmax minus one-hot are at most 1, and 1/V underflows in fp16


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed cross entropy in nats, in fp32; labels of IGNORE do not count, and all of them ignored gives 0, not NaN."""
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE, reduction="sum")


def labels_after_next(labels_BT: Tensor, segments_BT: Tensor) -> Tensor:
    """Targets of a head that predicts the token after the next one (arXiv:2404.19737), from those of the next ones.

    Position t gets the label of position t+1, where that is in the same record; so a token that is no target of the first
    head is none of the second. The last position of a row has none: what comes after the row is not known.
    """
    found_BT = torch.full_like(labels_BT, IGNORE)
    same_BT = segments_BT[:, 1:] == segments_BT[:, :-1]
    found_BT[:, :-1] = torch.where(same_BT, labels_BT[:, 1:], IGNORE)
    return found_BT


@torch.compiler.disable(reason="the number of live labels differs from batch to batch")  # type: ignore[no-untyped-call,untyped-decorator]
def linear_token_loss_sum(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """`token_loss_sum(hidden @ weight.T, labels)` that holds the logits of `chunk_tokens` tokens at a time.

    The gradients of both inputs are computed chunk by chunk in the forward pass and only multiplied in the backward
    pass (fused linear cross entropy, arXiv:2410.10989, section 3.2), so no logits are kept or computed twice. The
    weight's gradient is summed in fp32; it is skipped where the weight is frozen, and both are where no gradient is
    recorded. Matrix products are in the type of autocast, softmax and loss in fp32. This is not
    torch.nn.functional.linear_cross_entropy, which gives the sum itself in bf16, knows no autocast, and is slower on a
    CPU than the plain way (247 ms against 205 ms).
    """
    chunk_tokens = chunk_tokens or CHUNK_TOKENS.get(hidden_BTD.device.type, CHUNK_TOKENS_ELSEWHERE)
    gradients = torch.is_grad_enabled() and (hidden_BTD.requires_grad or weight_VD.requires_grad)
    loss: Tensor = _LinearTokenLoss.apply(  # type: ignore[no-untyped-call]  # torch's
        hidden_BTD.flatten(0, 1), weight_VD, labels_BT.flatten(), chunk_tokens, gradients
    )
    return loss


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, chunk_tokens: int, gradients: bool
    ) -> Tensor:
        kind = hidden_ND.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_ND.dtype
        wide = torch.promote_types(dtype, torch.float32)
        weight = weight_VD.to(dtype)
        kept = wide if hidden_ND.dtype == torch.float16 else hidden_ND.dtype  # the loss scale is yet to come
        grad_hidden = torch.zeros_like(hidden_ND, dtype=kept) if gradients and ctx.needs_input_grad[0] else None
        grad_weight = torch.zeros_like(weight_VD, dtype=wide) if gradients and ctx.needs_input_grad[1] else None
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        rows_N, all_live = _rows(labels_N)
        scale = FP16_GRADIENT_SCALE if dtype == torch.float16 else 1.0
        with torch.autocast(kind, enabled=False):
            for rows in _parts(rows_N, chunk_tokens):
                hidden = hidden_ND.index_select(0, rows).to(dtype)
                labels = labels_N.index_select(0, rows)
                logits = hidden @ weight.T
                total += _score(logits, labels, wide, scale if gradients else None, all_live)
                if grad_hidden is not None:
                    grad_hidden.index_copy_(0, rows, _product(logits, weight).div_(scale).to(grad_hidden.dtype))
                if grad_weight is not None:
                    grad_weight.add_(_product(logits.T, hidden), alpha=1 / scale)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.types = hidden_ND.dtype, weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        found = zip(ctx.saved_tensors, ctx.types, strict=True)
        gradients = (None if gradient is None else gradient.mul_(grad_total).to(dtype) for gradient, dtype in found)
        return (*gradients, None, None, None)


def _score(logits_CV: Tensor, labels_C: Tensor, wide: torch.dtype, scale: float | None, all_live: bool) -> Tensor:
    """The loss of a chunk. With a scale, the logits become that times the slope of the loss in them.

    That is softmax minus one-hot, and 0 where there is no target.
    """
    total = torch.zeros((), dtype=wide, device=logits_CV.device)
    dead_C = labels_C == IGNORE
    targets_C1 = labels_C.masked_fill(dead_C, 0)[:, None]
    tokens = max(1, SLICE_ENTRIES // logits_CV.shape[1]) if logits_CV.device.type == "cpu" else len(logits_CV)
    for logits, dead, targets in zip(*(_parts(part, tokens) for part in (logits_CV, dead_C, targets_C1)), strict=True):
        scores = torch.log_softmax(logits, -1, dtype=wide)
        total -= scores.gather(1, targets)[:, 0].masked_fill_(dead, 0).sum()
        if scale is None:
            continue
        slopes = scores.exp_().scatter_add_(1, targets, -torch.ones_like(targets, dtype=wide))
        if not all_live:
            slopes.masked_fill_(dead[:, None], 0)
        logits.copy_(slopes if scale == 1 else slopes.mul_(scale))
    return total


def _rows(labels_N: Tensor) -> tuple[Tensor, bool]:
    """Positions to compute, and whether all have a target: elsewhere than on a CPU, to count them would be to wait."""
    if labels_N.device.type == "cpu":
        return (labels_N != IGNORE).nonzero()[:, 0], True
    return torch.arange(len(labels_N), device=labels_N.device), False


def _parts(tensor: Tensor, most: int) -> list[Tensor]:
    """Consecutive parts of at most `most`; none of an empty one."""
    return [tensor[start : start + most] for start in range(0, len(tensor), most)]


def _product(first: Tensor, second: Tensor) -> Tensor:
    """first @ second; of fp16, whose range a sum can leave, in fp32."""
    if first.dtype != torch.float16:
        return first @ second
    if first.device.type == "cuda":
        return torch.mm(first, second, out_dtype=torch.float32)
    return first.float() @ second.float()
