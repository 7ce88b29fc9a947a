"""Causal attention within the records of packed rows: masks for torch's attention, and the attention of CPUs.

`varlen` has the attention of CUDA.

On a CPU where native kernels do not take them, records of about the same length are stacked and computed by batched
products: no score between two records is computed, and no mask is read.

A record may branch: a prefix, and branches that see it and themselves alone, such as two answers to one prompt.

Letters in names: B rows, T positions, H heads, G heads of keys and values, R = H/G, K width of a head, N records of a group,
L positions of its longest record, Q queries of a block, S the keys that they may see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ttrain.train import native
from ttrain.train.precision import autocast_dtype
from ttrain.train.varlen import Spans, span_attention

NAME = "ttrain"  # among the attention implementations of transformers

SLIDING, CHUNKED = "sliding_attention", "chunked_attention"  # kinds of layers, as configs name them
WINDOWS = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}
BLOCK = 128  # queries; rows of 256 in blocks of 128: 7.1 ms, of 192: 7.7, of 256: 7.9
LENGTH_STEP = 16  # lengths of groups are multiples of it, of which there are few
GROUP_COST = 16_384  # a group costs as much as so many more scores of one head: 0.1 ms

Group = tuple[Tensor, Tensor, Tensor]  # queries [N*G, R, L, K], keys and values [N*G, L, K]


def segment_mask(segments_BT: Tensor, branches_BT: Tensor | None = None) -> Tensor:
    """[B, 1, T, T] bool: a position sees itself and the earlier positions of its own record.

    Where records branch, of those the ones in the prefix, which is branch 0, and in its own branch.
    """
    T = segments_BT.shape[1]
    causal_TT = torch.ones(T, T, dtype=torch.bool, device=segments_BT.device).tril()
    seen_BTT = (segments_BT[:, :, None] == segments_BT[:, None, :]) & causal_TT
    if branches_BT is not None:
        seen_BTT &= (branches_BT[:, None, :] == 0) | (branches_BT[:, :, None] == branches_BT[:, None, :])
    return seen_BTT[:, None]


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


@final
class Records:
    """The records of a batch: as the native kernels take them, in groups, or as a mask; each made when it is asked for."""

    def __init__(self, segments_BT: Tensor, branches_BT: Tensor | None = None) -> None:
        self._segments, self.branches = segments_BT, branches_BT

    @cached_property
    def groups(self) -> RecordGroups:
        return RecordGroups(self._segments)

    @cached_property
    def mask(self) -> Tensor:
        return segment_mask(self._segments, self.branches)

    @cached_property
    def places(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The number of each record's first token among the B * T, and how many it has, longest first; all tokens'
        branches."""
        starts, lengths = _runs(self._segments)
        order = np.argsort(-lengths, kind="stable")
        branches = None if self.branches is None else self.branches.to(torch.int32).contiguous()
        return torch.from_numpy(starts[order]), torch.from_numpy(lengths[order]), branches


@final
class RecordGroups:
    """The records of a batch in groups of about the same length.

    `places` has for each group the places [N, L] of its records' tokens among the B * T of the batch; beyond the end of a
    record stands its last token, and further records of place 0 make N one of few numbers. `padding` has the numbers of
    the places of both in the N * L. Padding of a row is a record.
    """

    def __init__(self, segments_BT: Tensor) -> None:
        starts, lengths = _runs(segments_BT)
        T = segments_BT.shape[1]
        step = max(LENGTH_STEP, T // 32)
        few = np.array([few_counts(count) for count in range(-(-T // step) + 1)])
        rounded = few[-(-lengths // step)] * step
        self.places: list[Tensor] = []
        self.padding: list[Tensor] = []
        numbers_by_place = np.empty(segments_BT.numel(), np.int64)
        shortest = first = 0
        for longest in group_lengths(*(tuple(counts.tolist()) for counts in np.unique(rounded, return_counts=True))):
            mine = np.flatnonzero((rounded > shortest) & (rounded <= longest))
            N, offsets = few_counts(len(mine)), np.arange(min(longest, T))
            places, inside = (np.zeros((N, len(offsets)), kind) for kind in (np.int64, bool))
            places[: len(mine)] = starts[mine, None] + np.minimum(offsets, lengths[mine, None] - 1)
            inside[: len(mine)] = offsets < lengths[mine, None]
            numbers_by_place[places[inside]] = first + np.flatnonzero(inside)
            self.places.append(torch.from_numpy(places))
            self.padding.append(torch.from_numpy(np.flatnonzero(~inside)))
            shortest, first = longest, first + places.size
        self._where = torch.from_numpy(numbers_by_place)
        self._indices: dict[int, tuple[list[Tensor], list[Tensor], Tensor]] = {}

    def indices(self, heads: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """For states of shape [B*T*heads, K]: the indices that make the groups, each [N*heads*L]; those of padding in
        them; and the index into all groups, one after the other, that makes [B*T*heads, K] of them again.
        """
        if heads not in self._indices:
            head_H = torch.arange(heads)
            takes, padding, backs, first = [], [], [], 0
            for places_NL, padding_P in zip(self.places, self.padding, strict=True):
                N, L = places_NL.shape
                takes.append((places_NL[:, None] * heads + head_H[:, None]).flatten())
                padding.append(((padding_P // L * heads + head_H[:, None]) * L + padding_P % L).flatten())
                numbers_NLH = torch.arange(N * heads * L).view(N, heads, L).transpose(1, 2)
                backs.append(numbers_NLH.reshape(N * L, heads) + first)
                first += N * heads * L
            self._indices[heads] = takes, padding, torch.cat(backs).index_select(0, self._where).flatten()
        return self._indices[heads]


def _runs(segments_BT: Tensor) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The number of each record's first token among the B * T, and how many it has."""
    segments = segments_BT.numpy()
    begins = np.ones(segments.shape, bool)
    np.not_equal(segments[:, 1:], segments[:, :-1], out=begins[:, 1:])
    starts = np.flatnonzero(begins)
    return starts, np.diff(starts, append=begins.size)


def few_counts(count: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on.

    oneDNN compiles the products of a shape when it meets the first one, about 0.3 ms each, and keeps 1,024 of them, 0.5 MB
    each: with all counts and lengths of groups a step of the quickstart took 130 ms instead of 100. With few counts, but
    all lengths, 21 steps of 16 rows of 256 took 1,093 MB instead of 952.
    """
    unit = 1 << max(0, count.bit_length() - 2)
    return -(-count // unit) * unit


@lru_cache(maxsize=4096)
def group_lengths(lengths: tuple[int, ...], counts: tuple[int, ...]) -> list[int]:
    """The longest lengths of the groups, ascending, that make the fewest scores; each group costs `GROUP_COST` besides.

    `lengths` ascend, and `counts` has the records of each.
    """
    best: list[tuple[int, list[int]]] = [(0, [])]
    for last, longest in enumerate(lengths):
        scores = longest * (longest + min(longest, BLOCK)) // 2
        best.append(
            min(
                (
                    best[first][0] + GROUP_COST + few_counts(sum(counts[first : last + 1])) * scores,
                    [*best[first][1], longest],
                )
                for first in range(last + 1)
            )
        )
    return best[-1][1]


def record_arguments(model: Any, segments_BT: Tensor, branches_BT: Tensor | None = None) -> dict[str, Any]:
    """Extra arguments with which a transformers model computes its attention here; {} where it does not.

    Without them, as in `generate`, attention is what it was. The model's implementation must be torch's (`sdpa`), and the
    device a CPU. A compiler would make a graph for every batch.
    """
    if segments_BT.device.type != "cpu" or is_compiled(model):
        return {}
    return {"records": Records(segments_BT, branches_BT)} if takes_records(model, segments_BT.shape[1]) else {}


def is_compiled(model: Any) -> bool:
    """Whether a compiler reads this call, or calls of the model's layers."""
    return torch.compiler.is_compiling() or any(module._compiled_call_impl is not None for module in model.modules())


def takes_records(model: Any, length: int) -> bool:
    """Whether a model computes rows of this length record by record where it is given them; prepares it for that."""
    if sees_windows(model.config, length):
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
    dtype = autocast_dtype(query_BHTK.device, query_BHTK.dtype)
    scale = query_BHTK.shape[-1] ** -0.5 if scaling is None else scaling
    query, key, value = (state.transpose(1, 2) for state in (query_BHTK, key_BGTK, value_BGTK))
    if spans is not None:
        return span_attention(query.to(dtype), key.to(dtype), value.to(dtype), spans, scale), None
    if records is not None and not dropout and dtype != torch.float16:
        states = [state.to(dtype).contiguous() for state in (query, key, value)]
        if len({state.shape[-1] for state in states}) == 1 and native.takes(*states, lanes=2 * native.LANES):
            return native.Attention.apply(*states, None, 0.0, None, 0.0, None, records.places, scale), None  # type: ignore[no-untyped-call]  # torch's
        if records.branches is None:
            return RecordAttention.apply(query, key, value, records.groups, scale, dtype), None  # type: ignore[no-untyped-call]  # torch's
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    arguments = query_BHTK, key_BGTK, value_BGTK, attention_mask if records is None else records.mask
    output, _ = sdpa_attention_forward(module, *arguments, dropout=dropout, scaling=scaling, **others)
    return output, None


class RecordAttention(torch.autograd.Function):
    """Products and weights in `dtype`. The weights are computed again for the gradients (arXiv:2205.14135)."""

    @staticmethod
    def forward(
        ctx: Any, query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, groups: RecordGroups, scale: float, dtype: Any
    ) -> Tensor:
        query, key, value = (tensor.to(dtype) for tensor in (query_BTHK, key_BTGK, value_BTGK))
        ctx.types, ctx.groups, ctx.scale = (query_BTHK.dtype, key_BTGK.dtype, value_BTGK.dtype), groups, scale
        out = mixed(query, key, value, groups, scale)
        ctx.save_for_backward(out, query, key, value)
        return out

    @staticmethod
    def backward(ctx: Any, grad_BTHK: Tensor) -> tuple[Tensor | None, ...]:
        out, *states = ctx.saved_tensors
        slopes = mixed_slopes(grad_BTHK, out, states, ctx.groups, ctx.scale)
        return *(slope.to(dtype) for slope, dtype in zip(slopes, ctx.types, strict=True)), None, None, None


def mixed(query_BTHK: Tensor, key_BTGK: Tensor, value_BTGK: Tensor, groups: RecordGroups, scale: float) -> Tensor:
    """Values [B, T, H, K], mixed by the attention within records."""
    outs = []
    H, K = query_BTHK.shape[2:]
    with torch.autocast(query_BTHK.device.type, enabled=False):
        for q_XRLK, k_XLK, v_XLK in grouped((query_BTHK, key_BTGK, value_BTGK), groups):
            X, R, L, K = q_XRLK.shape
            parts = []
            for rows, end in _blocks(L):
                weights = _weights(q_XRLK[:, :, rows], k_XLK[:, :end], scale)
                parts.append(torch.bmm(weights, v_XLK[:, :end]).view(X, R, -1, K))
            outs.append(_joined(parts).view(-1, K))
    return torch.cat(outs).index_select(0, groups.indices(H)[2]).view(query_BTHK.shape)


def mixed_slopes(
    grad_BTHK: Tensor, out_BTHK: Tensor, states: Sequence[Tensor], groups: RecordGroups, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, in their type, from that of what `mixed` made of them."""
    B, T, H, K = out_BTHK.shape
    G, dtype = states[1].shape[2], out_BTHK.dtype
    wide = torch.promote_types(dtype, torch.float32)
    queries, padding, query_back = groups.indices(H)
    grad = grad_BTHK.to(dtype).reshape(-1, K)
    grads_of_groups: tuple[list[Tensor], ...] = ([], [], [])
    delta_M = (grad * out_BTHK.view(-1, K)).sum(-1)
    for number, (q_XRLK, k_XLK, v_XLK) in enumerate(grouped(states, groups)):
        X, R, L, _ = q_XRLK.shape
        do_XRLK = grad.index_select(0, queries[number]).index_fill_(0, padding[number], 0).view(X, R, L, K)
        delta_XRL1 = delta_M.index_select(0, queries[number]).index_fill_(0, padding[number], 0).view(X, R, L, 1)
        dq_parts: list[Tensor] = []
        dk_XLK = dv_XLK = torch.empty(0)
        for rows, end in reversed(_blocks(L)):  # the last block sees all keys
            q_XSK, do_XSK = (tensor[:, :, rows].reshape(X, -1, K) for tensor in (q_XRLK, do_XRLK))
            k_XSK, v_XSK = k_XLK[:, :end], v_XLK[:, :end]
            weights = _weights(q_XRLK[:, :, rows], k_XSK, scale)
            delta_XS1 = delta_XRL1[:, :, rows].reshape(X, -1, 1).expand(-1, -1, end)
            slopes = torch.baddbmm(delta_XS1, do_XSK, v_XSK.transpose(1, 2), beta=-1).mul_(weights)
            dq_parts.append(torch.bmm(slopes, k_XSK).view(X, R, -1, K))
            dk, dv = torch.bmm(slopes.transpose(1, 2), q_XSK), torch.bmm(weights.transpose(1, 2), do_XSK)
            if end == L:
                dk_XLK, dv_XLK = (dk, dv) if end <= BLOCK else (dk.to(wide), dv.to(wide))
            else:
                dk_XLK[:, :end] += dk
                dv_XLK[:, :end] += dv
        for grads, grad_of_group in zip(grads_of_groups, (_joined(dq_parts[::-1]), dk_XLK, dv_XLK), strict=True):
            grads.append(grad_of_group.view(-1, K).to(dtype))
    dq = torch.cat(grads_of_groups[0]).index_select(0, query_back)
    dk, dv = (torch.cat(parts).index_select(0, groups.indices(G)[2]) for parts in grads_of_groups[1:])
    return dq.mul_(scale).view(B, T, H, K), dk.mul_(scale).view(B, T, G, K), dv.view(B, T, G, K)


def grouped(states: Sequence[Tensor], groups: RecordGroups) -> Iterator[Group]:
    """Copies of queries, keys and values by group."""
    (H, K), G = states[0].shape[2:], states[1].shape[2]
    q, k, v = (tensor.reshape(-1, K) for tensor in states)
    for places_NL, of_queries, of_keys in zip(groups.places, groups.indices(H)[0], groups.indices(G)[0], strict=True):
        X, L = places_NL.shape[0] * G, places_NL.shape[1]
        keys, values = (tensor.index_select(0, of_keys).view(X, L, K) for tensor in (k, v))
        yield q.index_select(0, of_queries).view(X, H // G, L, K), keys, values


def _blocks(L: int) -> list[tuple[slice, int]]:
    """(queries, the number of keys that they may see) of each block."""
    return [(slice(start, min(L, start + BLOCK)), min(L, start + BLOCK)) for start in range(0, L, BLOCK)]


def _joined(parts_XRQK: list[Tensor]) -> Tensor:
    return parts_XRQK[0] if len(parts_XRQK) == 1 else torch.cat(parts_XRQK, 2)


def _weights(q_XRQK: Tensor, k_XSK: Tensor, scale: float) -> Tensor:
    """Softmax of the scores, [X, R*Q, S]; the queries are the last Q of the S positions."""
    X, R, Q, K = q_XRQK.shape
    S = k_XSK.shape[1]
    scores = torch.baddbmm(_future(R, Q, S, k_XSK.dtype), q_XRQK.reshape(X, R * Q, K), k_XSK.transpose(1, 2), alpha=scale)
    return torch.softmax(scores, -1)


@lru_cache(maxsize=64)
def _future(R: int, Q: int, S: int, dtype: torch.dtype) -> Tensor:
    """[R*Q, S]: 0 for the keys that a query sees, and a number of which the softmax is 0 for the keys after it."""
    hidden_QS = torch.ones(Q, S, dtype=torch.bool).triu(S - Q + 1)
    return torch.zeros(Q, S, dtype=dtype).masked_fill_(hidden_QS, torch.finfo(dtype).min / 2).repeat(R, 1)
