"""Attention within records: equal to that of torch, and only where it was asked for."""

from types import SimpleNamespace

import pytest
import torch
from support.comparing import distance, with_gradients
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ttrain.train import attention, native
from ttrain.train.attention import Records, segment_mask

T = 29
SEGMENTS = torch.tensor([[0] * T, [0] * 3 + [1] * 20 + [2] * 6, [4] * 9 + [-1] * 20, [*range(T)]])
# Of these records: a prompt with two answers, two prompts with several, one answer, none.
TWO_ANSWERS = [0] * 9 + [1] * 10 + [2] * 10
SEVERAL = [1] * 2 + [2] * 1 + [0] * 4 + [1] * 7 + [2] * 9 + [0] * 6
BRANCHES = torch.tensor([TWO_ANSWERS, SEVERAL, [0] * 8 + [1] + [0] * 20, [0] * T])
GROUPS = (2, torch.float64, None, 0.7, 1e-14)
BRANCHED = (4, torch.float32, BRANCHES, None, 1e-6)
ONE_KEY_HEAD = (1, torch.float32, BRANCHES, 0.7, 1e-6)


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "branches", "scale", "limit"), [GROUPS, BRANCHED, ONE_KEY_HEAD], ids=str
)
def test_record_attention_has_the_results_and_gradients_of_torch(
    kv_heads: int,
    dtype: torch.dtype,
    branches: Tensor | None,
    scale: float | None,
    limit: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the native kernels, which test_native tests."""
    monkeypatch.setattr(native, "kernels", dict)
    generator = torch.Generator().manual_seed(0)

    def random(heads: int) -> Tensor:
        return torch.randn(len(SEGMENTS), T, heads, 32, generator=generator, dtype=torch.float64)

    states = [random(heads).to(dtype).transpose(1, 2) for heads in (4, kv_heads, kv_heads)]
    leaves = {name: state.requires_grad_() for name, state in zip("qkv", states, strict=True)}
    layer = SimpleNamespace(num_key_value_groups=4 // kv_heads, is_causal=True)
    records, mask, upstream = (
        Records(SEGMENTS, branches),
        segment_mask(SEGMENTS, branches),
        random(4),
    )
    out, _ = attention.record_attention(layer, *states, None, scaling=scale, records=records)
    expected_out = scaled_dot_product_attention(
        *states, attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    results = with_gradients(out, upstream, leaves)
    for name, tensor in with_gradients(expected_out, upstream, leaves).items():
        assert distance({name: tensor}, {name: results[name]}) < limit, name


@pytest.mark.parametrize("branches_BT", [None, BRANCHES], ids=["records", "branches"])
def test_the_mask_is_that_of_a_naive_loop(branches_BT: Tensor | None) -> None:
    def sees(row: int, query: int, key: int) -> bool:
        segments = SEGMENTS[row]
        branches = torch.zeros(T) if branches_BT is None else branches_BT[row]
        near = bool(branches[key] == 0) or bool(branches[key] == branches[query])
        return key <= query and bool(segments[query] == segments[key]) and near

    rows = range(len(SEGMENTS))
    expected = [[[[sees(b, q, k) for k in range(T)] for q in range(T)]] for b in rows]
    assert segment_mask(SEGMENTS, branches_BT).tolist() == expected
