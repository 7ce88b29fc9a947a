"""Causal attention within the records of packed rows: masks, and native kernels on CPUs.

A record may branch: a prefix, and branches that see it and themselves alone, such as two answers to
one prompt.
"""
# Letters in names: B rows, T and S positions, H heads, G heads of keys and values, K width of a
# head.

from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ttrain.train import native
from ttrain.train.precision import autocast_dtype
from ttrain.train.varlen import Spans, record_starts, span_attention

Inputs = dict[str, Any]  # of a model of transformers

NAME = "ttrain"  # among the attention implementations of transformers

SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"  # kinds of layers, as configs name them
WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}


def segment_mask(segments_BT: Tensor, branches_BT: Tensor | None = None) -> Tensor:
    """[B, 1, T, T] bool: a position sees itself and the earlier positions of its own record.

    Where records branch, it sees only their prefix, which is branch 0, and its own branch.
    """
    T = segments_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=segments_BT.device).tril()
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT
    if branches_BT is not None:
        seen_BTT &= (branches_BT[:, None, :] == 0) | (
            branches_BT[:, :, None] == branches_BT[:, None, :]
        )
    return seen_BTT[:, None]


def with_attention_mask(model: Any, inputs: Inputs) -> Inputs:
    """Convert the mask of `segment_mask` in a model's inputs to the form of its attention."""
    # Layers with a sliding window get a mask of their own: transformers adds no window to a given
    # mask. `eager` attention adds the mask to the scores, so True and False would hide nothing
    # (gemma2 and gpt_oss have no other).
    mask_B1TS: Tensor = inputs["attention_mask"]
    windows = {
        kind: size for kind, size in _windows(model.config).items() if size < mask_B1TS.shape[-1]
    }
    additive = model.config._attn_implementation == "eager"
    if not windows:
        return {**inputs, "attention_mask": _scores(mask_B1TS)} if additive else inputs
    queries_BT = inputs["position_ids"]
    B, T = queries_BT.shape
    # Of virtual tokens.
    virtual_positions = torch.arange(mask_B1TS.shape[-1] - T, device=queries_BT.device).expand(
        B, -1
    )
    q_B1T1 = queries_BT[:, None, :, None]
    k_B11S = torch.cat([virtual_positions, queries_BT], 1)[:, None, None]
    masks = {}
    for kind in dict.fromkeys(getattr(model.config, "layer_types", None) or windows):
        size = windows.get(kind)
        near = mask_B1TS
        if size is not None:
            near = near & (
                q_B1T1 // size == k_B11S // size if kind == CHUNKED else q_B1T1 - k_B11S < size
            )
        masks[kind] = _scores(near) if additive else near
    has_types = getattr(model.config, "layer_types", None) is not None
    return {**inputs, "attention_mask": masks if has_types else masks[SLIDING]}


def _windows(config: Any) -> dict[str, int]:
    kinds = getattr(config, "layer_types", None) or [SLIDING]
    sizes = {kind: getattr(config, name, None) for kind, name in WINDOWS.items() if kind in kinds}
    return {kind: size for kind, size in sizes.items() if size is not None}


def _scores(mask: Tensor) -> Tensor:
    zeros = torch.zeros(mask.shape, device=mask.device)
    return zeros.masked_fill_(~mask, torch.finfo(zeros.dtype).min)


@final
class Records:
    """The records of a batch, as the native kernels take them or as a mask; each made on demand."""

    def __init__(self, segments_BT: Tensor, branches_BT: Tensor | None = None) -> None:
        self._segments = segments_BT
        self._branches = branches_BT

    @cached_property
    def mask(self) -> Tensor:
        return segment_mask(self._segments, self._branches)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Start (of B * T) and length of each record, longest first; branches of all tokens."""
        starts = record_starts(self._segments.numpy())
        lengths = np.diff(starts, append=self._segments.numel())
        order = np.argsort(-lengths, kind="stable")
        branches = None if self._branches is None else self._branches.to(torch.int32).contiguous()
        return torch.from_numpy(starts[order]), torch.from_numpy(lengths[order]), branches


def record_arguments(model: Any, segments_BT: Tensor, branches_BT: Tensor | None = None) -> Inputs:
    """Extra arguments that make a transformers model compute attention here; {} where it cannot."""
    # Only on a CPU and for `sdpa`. A compiler would make a graph for every batch.
    if segments_BT.device.type != "cpu" or is_compiled(model):
        return {}
    native.warn_if_missing()
    return (
        {"records": Records(segments_BT, branches_BT)}
        if takes_records(model, segments_BT.shape[1])
        else {}
    )


def is_compiled(model: Any) -> bool:
    """Whether a compiler traces this call, or calls of the model's layers."""
    return torch.compiler.is_compiling() or any(
        module._compiled_call_impl is not None for module in model.modules()
    )


def takes_records(model: Any, length: int) -> bool:
    """Whether a model can compute rows of this length record by record; prepares it for that."""
    if min(_windows(model.config).values(), default=length) < length:
        return False
    if model.config._attn_implementation == "sdpa":
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(NAME, record_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def record_attention(
    module: Any,
    query_BHTK: Tensor,
    key_BGTK: Tensor,
    value_BGTK: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    records: Records | None = None,
    spans: Spans | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it; returns [B, T, H, K]. `spans`: on CUDA."""
    dtype = autocast_dtype(query_BHTK)
    scale = query_BHTK.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (state.transpose(1, 2) for state in (query_BHTK, key_BGTK, value_BGTK))
    if spans is not None:
        return span_attention(query.to(dtype), key.to(dtype), value.to(dtype), spans, scale), None
    if records is not None and not dropout and dtype != torch.float16:
        states = [state.to(dtype).contiguous() for state in (query, key, value)]
        if len({state.shape[-1] for state in states}) == 1 and native.takes(
            *states, lanes=2 * native.LANES
        ):
            return native.Attention.apply(
                *states, None, 0.0, None, 0.0, None, records.places, scale
            ), None  # type: ignore[no-untyped-call]  # torch's
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    arguments = (
        query_BHTK,
        key_BGTK,
        value_BGTK,
        attention_mask if records is None else records.mask,
    )
    output, _ = sdpa_attention_forward(
        module, *arguments, dropout=dropout, scaling=scaling, **others
    )
    return output, None
