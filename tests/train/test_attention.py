"""Attention within records: equal to that of torch, and only where it was asked for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.comparing import distance, with_gradients
from support.tiny_data import VOCAB
from support.tiny_trainers import tiny_model
from torch import Tensor
from torch.nn import functional as F

from ttrain.model import factory
from ttrain.train import attention, native
from ttrain.train.attention import Records, segment_mask
from ttrain.train.language_modeling import NextTokenLoss

T = 29
SEGMENTS = torch.tensor(
    [
        [0] * T,
        [0] * 3 + [1] * 20 + [2] * 6,
        [4] * 9 + [-1] * 20,
        [*range(T)],
    ]
)

BRANCHES = torch.tensor(  # of the records above: a prompt with two answers, and one, and neither
    [
        [0] * 9 + [1] * 10 + [2] * 10,
        [1] * 2 + [2] * 1 + [0] * 4 + [1] * 7 + [2] * 9 + [0] * 6,
        [0] * 8 + [1] + [0] * 20,
        [0] * T,
    ]
)


def heads(kv: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries of four heads, keys and values of `kv`, as a model lays them out."""
    generator, B = torch.Generator().manual_seed(0), len(SEGMENTS)
    shapes = [(B, T, 4, 32), (B, T, kv, 32), (B, T, kv, 32)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64)
        .to(dtype)
        .transpose(1, 2)
        .requires_grad_()
        for shape in shapes
    ]


def results(out: Tensor, leaves: list[Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    upstream = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return with_gradients(out, upstream, dict(zip("qkv", leaves, strict=True)))


def by_records(leaves: list[Tensor], branches: Tensor | None = None, **options: Any) -> Tensor:
    layer = SimpleNamespace(
        num_key_value_groups=leaves[0].shape[1] // leaves[1].shape[1], is_causal=True
    )
    return attention.record_attention(
        layer, *leaves, None, records=Records(SEGMENTS, branches), **options
    )[0]


def of_torch(leaves: list[Tensor], branches: Tensor | None = None, **options: Any) -> Tensor:
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=segment_mask(SEGMENTS, branches), enable_gqa=True, **options
    )
    return out.transpose(1, 2)


@pytest.mark.parametrize(
    ("kv", "dtype", "branches"),
    [(2, torch.float64, None), (4, torch.float32, BRANCHES), (1, torch.float32, BRANCHES)],
    ids=["groups of heads in fp64", "branches", "one key head and branches"],
)
def test_attention_within_records_equals_that_of_torch_with_its_gradients(
    kv: int, dtype: torch.dtype, branches: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the native kernels, whose own test is test_native's."""
    monkeypatch.setattr(native, "kernels", dict)
    leaves = heads(kv, dtype)
    for usual, ours in (({}, {}), ({"scale": 0.7}, {"scaling": 0.7})):
        expected = results(of_torch(leaves, branches, **usual), leaves)
        found = results(by_records(leaves, branches, **ours), leaves)
        for name in expected:
            assert distance({name: expected[name]}, {name: found[name]}) < (
                1e-6 if dtype == torch.float32 else 1e-14
            ), name


@pytest.mark.parametrize("branches_BT", [None, BRANCHES], ids=["records", "branches"])
def test_the_mask_is_that_of_a_naive_loop(branches_BT: Tensor | None) -> None:
    def sees(row: int, query: int, key: int) -> bool:
        segments, branches = (
            SEGMENTS[row],
            torch.zeros(T) if branches_BT is None else branches_BT[row],
        )
        near = bool(branches[key] == 0) or bool(branches[key] == branches[query])
        return key <= query and bool(segments[query] == segments[key]) and near

    expected = [
        [[[sees(row, query, key) for key in range(T)] for query in range(T)]]
        for row in range(len(SEGMENTS))
    ]
    assert segment_mask(SEGMENTS, branches_BT).tolist() == expected


def test_generation_and_saving_do_not_notice() -> None:
    """A batch padded on the left, which its mask must keep out, as with a model that was never trained."""
    trained, untouched = tiny_model(), tiny_model()
    ids = torch.randint(9, VOCAB, SEGMENTS.shape, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(T).expand_as(ids).contiguous()
    NextTokenLoss(trained)(ids, positions, SEGMENTS, ids)
    assert trained.config._attn_implementation == attention.NAME
    assert factory.files(trained) == factory.files(untouched)
    ids = torch.randint(9, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    ids[0, :4] = 0
    padding = torch.ones_like(ids)
    padding[0, :4] = 0
    texts = [
        model.eval().generate(ids, attention_mask=padding, max_new_tokens=5, do_sample=False)
        for model in (trained, untouched)
    ]
    assert torch.equal(*texts)
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, untouched(ids).logits)
