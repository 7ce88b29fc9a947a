"""Next-token cross entropy: from logits, and from hidden states in chunks of tokens."""
# Letters in names: B rows, T positions, N positions of all rows, C of a chunk, D width of the
# hidden states, V entries of the vocabulary.

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ttrain.data.packing import IGNORE
from ttrain.train import native
from ttrain.train.precision import autocast_dtype

UNEVEN = "the number of live labels differs from batch to batch"  # why nothing is compiled
FEW_ROWS = 64

KEPT_ENTRIES = 1 << 24  # of the gradients of logits, until the backward pass: 64 MB of fp32

# Entries of softmax minus one-hot are at most 1, and 1/V underflows in fp16.
FP16_GRADIENT_SCALE = 4096.0


def default_chunk_tokens(device: torch.device) -> int:
    """Tokens whose logits are in memory at once."""
    # Large chunks accumulate the weight's gradient less often, small ones hold fewer logits.
    return 512 if device.type == "cpu" else 2048


def token_loss_sum(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Summed cross entropy in nats, in fp32, without labels of IGNORE; 0 if all are ignored."""
    return F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def token_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """The terms of `token_loss_sum`, [B, T]; 0 where the label is IGNORE."""
    losses_N = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses_N.view_as(labels_BT)


def labels_after_next(labels_BT: Tensor, segments_BT: Tensor) -> Tensor:
    """Targets of a head that predicts the token after the next one (arXiv:2404.19737)."""
    # Position t gets the label of position t+1 if that is in the same record, so a token that is
    # not a target of the first head is not one of the second. The last position of a row has none.
    found_BT = torch.full_like(labels_BT, IGNORE)
    found_BT[:, :-1] = torch.where(
        segments_BT[:, 1:] == segments_BT[:, :-1], labels_BT[:, 1:], IGNORE
    )
    return found_BT


class Lesson(NamedTuple):
    """A teacher's likeliest next tokens and their shares of the target, [N, K] (arXiv:1503.02531).

    The target gets shares from the label alone: what the teacher gives to other tokens stays
    there, so that its entries add up to 1. `total`: a counter of what it adds to the loss.
    """

    ids_NK: Tensor
    shares_NK: Tensor
    total: Tensor

    def of(self, rows: Tensor) -> Lesson:
        """Of these positions."""
        return Lesson(self.ids_NK[rows], self.shares_NK[rows], self.total)

    def loss(self, logits_NV: Tensor, labels_N: Tensor) -> Tensor:
        """What it adds to the summed cross entropy, in fp32; nothing where a label is IGNORE."""
        # -sum(q ln p) of the mixed target q, without the label's own term: the logarithm of the
        # normalizer cancels, so that the term is linear in the logits.
        of_labels_N1 = logits_NV.gather(1, labels_N.clamp(min=0)[:, None]).float()
        shares_NK = self._live(labels_N)
        return (shares_NK * (of_labels_N1 - logits_NV.gather(1, self.ids_NK).float())).sum()

    def add_slopes(self, slopes_NV: Tensor, labels_N: Tensor, scale: float) -> None:
        """Add to scaled gradients of logits those of `loss`."""
        shares_NK = self._live(labels_N) * scale
        of_labels_N1 = shares_NK.sum(1, keepdim=True).to(slopes_NV.dtype)
        slopes_NV.scatter_add_(1, labels_N.clamp(min=0)[:, None], of_labels_N1)
        slopes_NV.scatter_add_(1, self.ids_NK, -shares_NK.to(slopes_NV.dtype))

    def _live(self, labels_N: Tensor) -> Tensor:
        return self.shares_NK * (labels_N != IGNORE)[:, None]


@torch.compiler.disable(reason=UNEVEN)  # type: ignore[no-untyped-call,untyped-decorator]
def linear_token_loss_sum(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    chunk_tokens: int | None = None,
    *,
    compiled: bool = False,
    hits: Tensor | None = None,
    lesson: Lesson | None = None,
) -> Tensor:
    """`token_loss_sum(hidden @ weight.T, labels)`, with the logits of `chunk_tokens` at a time.

    `compiled`: use compiled softmax kernels on CUDA. `hits`: a counter of the labels with the
    largest logit. `lesson`: its term is added.
    """
    # The forward pass computes both gradients chunk by chunk, the backward pass only multiplies
    # them (fused linear cross entropy, arXiv:2410.10989, section 3.2); gradients that nobody needs
    # are skipped. Products are in the type of autocast; softmax, loss and the weight's gradient in
    # fp32. Not torch.nn.functional.linear_cross_entropy, which gives the sum itself in bf16, knows
    # no autocast, and is slower on a CPU than the plain way (247 ms against 205 ms).
    arguments = _arguments(hidden_BTD, weight_VD, labels_BT, chunk_tokens)
    return cast(Tensor, _LinearTokenLoss.apply(*arguments, compiled, hits, lesson))  # type: ignore[no-untyped-call]


def _arguments(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, chunk_tokens: int | None
) -> tuple[Any, ...]:
    gradients = torch.is_grad_enabled() and (hidden_BTD.requires_grad or weight_VD.requires_grad)
    chunk_tokens = chunk_tokens or default_chunk_tokens(hidden_BTD.device)
    return hidden_BTD.flatten(0, 1), weight_VD, labels_BT.flatten(), chunk_tokens, gradients


class _LinearTokenLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        chunk_tokens: int,
        gradients: bool,
        compiled: bool,
        hits: Tensor | None,
        lesson: Lesson | None,
    ) -> Tensor:
        kind = hidden_ND.device.type
        dtype = autocast_dtype(hidden_ND)
        wide = torch.promote_types(dtype, torch.float32)
        weight = weight_VD.to(dtype)
        # The loss scale is applied later.
        grad_dtype = wide if hidden_ND.dtype == torch.float16 else hidden_ND.dtype
        grad_hidden = (
            torch.zeros_like(hidden_ND, dtype=grad_dtype)
            if gradients and ctx.needs_input_grad[0]
            else None
        )
        grad_weight = (
            torch.zeros_like(weight_VD, dtype=wide)
            if gradients and ctx.needs_input_grad[1]
            else None
        )
        total = torch.zeros((), dtype=wide, device=hidden_ND.device)
        scale = FP16_GRADIENT_SCALE if dtype == torch.float16 else 1.0
        score = _compiled_score() if compiled and kind == "cuda" else _score
        with torch.autocast(kind, enabled=False):
            for rows in torch.split(live_rows(labels_N), chunk_tokens):
                hidden = hidden_ND.index_select(0, rows).to(dtype)
                labels = labels_N.index_select(0, rows)
                logits = hidden @ weight.T
                if hits is not None:
                    hits += count_hits(logits, labels)
                if lesson is None:
                    total += score(logits, labels, wide, scale if gradients else None).sum()
                else:
                    part = lesson.of(rows)
                    added = part.loss(logits, labels)
                    total += added + score(logits, labels, wide, scale if gradients else None).sum()
                    lesson.total.add_(added)
                    if gradients:
                        part.add_slopes(logits, labels, scale)
                if grad_hidden is not None:
                    grad_hidden.index_copy_(
                        0, rows, _product(logits, weight).div_(scale).to(grad_hidden.dtype)
                    )
                if grad_weight is not None:
                    grad_weight.add_(_product(logits.T, hidden), alpha=1 / scale)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.types = hidden_ND.dtype, weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (
            None if gradient is None else gradient.mul_(grad_total).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.types, strict=True)
        )
        return (*gradients, None, None, None, None, None, None)


@torch.compiler.disable(reason=UNEVEN)  # type: ignore[no-untyped-call,untyped-decorator]
def linear_token_losses(
    hidden_BTD: Tensor, weight_VD: Tensor, labels_BT: Tensor, chunk_tokens: int | None = None
) -> Tensor:
    """The terms of `linear_token_loss_sum`, [B, T], each with its own gradient; 0 at IGNORE.

    Up to `KEPT_ENTRIES` gradients of logits are kept, else recomputed in the backward pass.
    """
    hidden_ND, weight_VD, labels_N, chunk_tokens, gradients = _arguments(
        hidden_BTD, weight_VD, labels_BT, chunk_tokens
    )
    rows_N = live_rows(labels_N)
    keeps_slopes = len(rows_N) * len(weight_VD) <= KEPT_ENTRIES or not gradients
    dtype = torch.promote_types(autocast_dtype(hidden_ND), torch.float32)
    losses_N = torch.zeros(len(labels_N), dtype=dtype, device=labels_N.device)
    # One part also without a target: its gradient is 0, on some rank.
    for rows in torch.split(rows_N, chunk_tokens):
        arguments = (
            hidden_ND.index_select(0, rows),
            weight_VD,
            labels_N.index_select(0, rows),
            gradients,
        )
        if keeps_slopes:
            losses_C = _ChunkLosses.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            losses_C = checkpoint(
                _ChunkLosses.apply, *arguments, use_reentrant=False, preserve_rng_state=False
            )
        losses_N = losses_N.index_copy(0, rows, losses_C)
    return losses_N.view_as(labels_BT)


class _ChunkLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_CD: Tensor, weight_VD: Tensor, labels_C: Tensor, gradients: bool
    ) -> Tensor:
        dtype = autocast_dtype(hidden_CD)
        ctx.scale = FP16_GRADIENT_SCALE if dtype == torch.float16 else 1.0
        with torch.autocast(hidden_CD.device.type, enabled=False):
            logits_CV = hidden_CD.to(dtype) @ weight_VD.to(dtype).T
            wide = torch.promote_types(dtype, torch.float32)
            losses_C = _score(logits_CV, labels_C, wide, ctx.scale if gradients else None)
        ctx.save_for_backward(hidden_CD, weight_VD, logits_CV)
        return losses_C

    @staticmethod
    def backward(ctx: Any, grad_C: Tensor) -> tuple[Tensor | None, ...]:
        hidden_CD, weight_VD, slopes_CV = ctx.saved_tensors
        factors_C1 = grad_C[:, None] / ctx.scale
        grad_hidden = grad_weight = None
        with torch.autocast(hidden_CD.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_hidden = _product(slopes_CV, weight_VD.to(slopes_CV.dtype)) * factors_C1
                grad_hidden = grad_hidden.to(hidden_CD.dtype)
            if ctx.needs_input_grad[1]:
                scaled_CD = (hidden_CD.to(slopes_CV.dtype) * factors_C1).to(slopes_CV.dtype)
                grad_weight = _product(slopes_CV.T, scaled_CD).to(weight_VD.dtype)
        return grad_hidden, grad_weight, None, None


def _score(logits_CV: Tensor, labels_C: Tensor, wide: torch.dtype, scale: float | None) -> Tensor:
    """The losses of a chunk, [C]; with a scale, overwrites logits by scale times their gradient."""
    # The gradient is softmax minus one-hot, 0 without a target. The loss is max(logits) - logit of
    # the target - ln max(softmax): one pass of exponentials, none of which underflows.
    if wide == torch.float32 and native.takes(logits_CV, lanes=1):
        return native.score(logits_CV, labels_C, scale)
    dead_C1 = labels_C[:, None] == IGNORE
    targets_C1 = labels_C[:, None].masked_fill(dead_C1, 0)
    scores = logits_CV.to(wide)
    losses_C1 = scores.amax(1, keepdim=True) - scores.gather(1, targets_C1)
    slopes = torch.softmax(scores, 1)
    losses_C1 = losses_C1.sub_(slopes.amax(1, keepdim=True).log_()).masked_fill_(dead_C1, 0)
    if scale is not None:
        factors_C1 = torch.full_like(losses_C1, scale).masked_fill_(dead_C1, 0)
        slopes.scatter_add_(1, targets_C1, torch.full_like(losses_C1, -1)).mul_(factors_C1)
        logits_CV.copy_(slopes)
    return losses_C1[:, 0]


@functools.cache
def _compiled_score() -> Callable[..., Tensor]:
    return torch.compile(fused_score, dynamic=False)


def fused_score(
    logits_CV: Tensor, labels_C: Tensor, wide: torch.dtype, scale: float | None
) -> Tensor:
    """`_score` from operations that a compiler can fuse to two passes over the logits.

    5.3 ms for 65,536 tokens and 32,768 entries, on an H200.
    """
    dead_C1 = labels_C[:, None] == IGNORE
    targets_C1 = labels_C[:, None].masked_fill(dead_C1, 0)
    scores = logits_CV.to(wide)
    tops_C1 = scores.amax(1, keepdim=True)
    powers = torch.exp(scores - tops_C1)
    sums_C1 = powers.sum(1, keepdim=True)
    losses_C1 = (tops_C1 - scores.gather(1, targets_C1) + sums_C1.log()).masked_fill(dead_C1, 0)
    if scale is not None:
        hits = torch.arange(scores.shape[1], device=scores.device) == targets_C1
        logits_CV.copy_((powers / sums_C1 - hits.to(wide)) * torch.where(dead_C1, 0.0, scale))
    return losses_C1[:, 0]


def count_hits(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    """How many labels are the argmax of their logits; IGNORE never is."""
    # On a CPU argmax takes three times as long as head and loss together, the maximum a tenth of
    # that: so argmax decides only between equal logits, which occur in bf16.
    if logits_CV.device.type != "cpu":
        return (logits_CV.argmax(1) == labels_C).sum()
    of_labels_C1 = logits_CV.gather(1, labels_C.clamp(min=0)[:, None])
    is_largest_C = (of_labels_C1 == logits_CV.amax(1, keepdim=True))[:, 0] & (labels_C != IGNORE)
    rows = is_largest_C.nonzero()[:, 0]
    ties = (logits_CV.index_select(0, rows) == of_labels_C1.index_select(0, rows)).sum(1) > 1
    tied_rows = rows[ties]
    tied_hits = (
        logits_CV.index_select(0, tied_rows).argmax(1) == labels_C.index_select(0, tied_rows)
    ).sum()
    return len(rows) - len(tied_rows) + tied_hits


def live_rows(labels_N: Tensor) -> Tensor:
    """Positions to compute: on a CPU those with a target and up to `FEW_ROWS` others, or all."""
    # Counting would synchronise with other devices. oneDNN compiles a product for each number of
    # rows, hence multiples.
    if labels_N.device.type != "cpu":
        return torch.arange(len(labels_N), device=labels_N.device)
    order = (labels_N == IGNORE).to(torch.uint8).argsort(stable=True)
    live = int((labels_N != IGNORE).sum())
    return order[: -(-live // FEW_ROWS) * FEW_ROWS]


def _product(first: Tensor, second: Tensor) -> Tensor:
    if first.dtype != torch.float16:  # whose range a sum can exceed
        return first @ second
    if first.device.type == "cuda":
        return torch.mm(first, second, out_dtype=torch.float32)
    return first.float() @ second.float()
