"""Masks of records, models that no mask keeps apart, and attention of variable lengths with plain
kernels in the place of CUDA's."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.comparing import copies, distance, same, with_gradients
from support.tiny_data import NumberedRows
from support.tiny_trainers import ALONE, settings_of_training, tiny_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from ttrain.errors import UsageError
from ttrain.train import varlen
from ttrain.train.attention import segment_mask
from ttrain.train.language_modeling import LanguageModeling, NextTokenLoss
from ttrain.train.leakage_check import check
from ttrain.train.losses import token_loss_sum

T = 24
CPU, CUDA, BF16 = torch.device("cpu"), torch.device("cuda"), torch.bfloat16
SEGMENTS = torch.tensor([[0] * 3 + [1] * 15 + [2] * 6, [4] * 9 + [-1] * 15, [*range(T)]])
BRANCHES = torch.tensor([[0, 1, 2, *[0] * 5, *[1] * 7, *[2] * 9], [0] * 8 + [1] * 16, [0] * T])


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


def attend(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, scale: float) -> Tensor:
    """Of each record by itself, as the kernel of CUDA has it: [tokens, heads, width]."""
    pieces = []
    how: dict[str, Any] = {"is_causal": True, "scale": scale, "enable_gqa": True}
    for start, end in itertools.pairwise(spans.tolist()):
        states = [state[None, start:end].transpose(1, 2) for state in (q, k, v)]
        pieces.append(scaled_dot_product_attention(*states, **how)[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The spans of each backward pass; the kernels are plain ones in the place of CUDA's."""
    backward_spans: list[Tensor] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, spans: Tensor, longest: int, scale: float) -> Any:
        assert spans.dtype == torch.int32 and int(spans.diff().max()) == longest
        assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
        out = attend(q, k, v, spans, scale).contiguous()
        return out, q.new_zeros((q.shape[1], q.shape[0]), dtype=torch.float32)

    def backward(grad: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        *states, _, _, spans, _, scale = arguments
        backward_spans.append(spans)
        leaves = [state.detach().requires_grad_() for state in states]

        def gradients() -> tuple[Tensor, ...]:
            return torch.autograd.grad(attend(*leaves, spans, scale), leaves, grad)

        with ThreadPoolExecutor(1) as thread:  # within an operation torch records no gradients
            return tuple(gradient.contiguous() for gradient in thread.submit(gradients).result())

    monkeypatch.setattr(varlen, "forward_kernel", forward)
    monkeypatch.setattr(varlen, "backward_kernel", backward)
    monkeypatch.setattr(varlen, "is_usable", lambda device, dtype, width, dropout: not dropout)
    monkeypatch.setattr(varlen, "DEVICE", "cpu")
    return backward_spans


def test_spans_are_the_records_of_the_rows_and_empty_ones_up_to_a_power_of_two() -> None:
    """A record ends with its row, though the next row begins with the same number."""
    spans = varlen.record_spans(np.array([[0, 0, 1], [1, -1, -1], [5, 5, 5]]))
    assert spans.tolist() == [0, 2, 3, 4, 6, 9, 9, 9, 9]
    assert varlen.record_spans(np.zeros((1, 4))).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("options", "chunk_tokens"), [({}, 0), ({"kind": "qwen3", "kv_heads": 1}, None)], ids=str
)
def test_a_model_has_the_loss_and_the_gradients_that_it_has_with_a_mask(
    options: dict[str, Any], chunk_tokens: int | None, calls: list[Tensor]
) -> None:
    def gradients(kind: str) -> dict[str, Tensor]:
        config, model = settings_of_training(), tiny_model(**options)
        task = LanguageModeling(config, model, chunk_tokens=chunk_tokens, attention=kind)
        module = task.build_model().train()
        loss = task.train_step(module, NumberedRows(6, T).batch(range(6)), ALONE.device).total
        return with_gradients(loss, torch.ones(()), dict(module.named_parameters()))

    expected, results = gradients("masked"), gradients("records")
    assert len(calls) == 2, "each of the two layers took its attention from here"
    for name, tensor in expected.items():
        assert distance({name: tensor}, {name: results[name]}) < 1e-3, name


def test_dropout_and_windows_keep_the_mask(calls: list[Tensor]) -> None:
    def spans(window: int | None = None, **options: Any) -> varlen.Spans | None:
        model = tiny_model(kind="mistral", **options)
        model.config.sliding_window = window
        return NextTokenLoss(model).train().spans(NumberedRows(2, T).batch([0, 1]), ALONE.device)

    assert spans() is not None
    assert spans(window=8) is None and spans(dropout=0.5) is None


def test_the_kernel_is_for_cuda_half_precision_and_heads_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for major, arguments, is_usable in (
        (8, (CUDA, BF16, 256, 0.0), True),
        (7, (CUDA, BF16, 64, 0.0), False),
        (8, (CPU, BF16, 64, 0.0), False),
        (8, (CUDA, torch.float32, 64, 0.0), False),
        (8, (CUDA, BF16, 264, 0.0), False),
        (8, (CUDA, BF16, 36, 0.0), False),
        (8, (CUDA, BF16, 64, 0.1), False),
    ):
        capability = Mock(return_value=(major, 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        assert varlen.is_usable(*arguments) is is_usable


PACKED, UNPACKED = settings_of_training(), settings_of_training(packing="none")
SLIDING = {"kind": "gemma2", "fields": {"sliding_window": 5}}
EXPERTS = {"kind": "qwen3", "moe": {"experts": 8}}


def objective_of(**options: Any) -> NextTokenLoss:
    return NextTokenLoss(tiny_model(**{"hidden_size": 32, **options}))


@pytest.mark.parametrize("options", [{"dropout": 0.1}, SLIDING, EXPERTS], ids=str)
def test_a_model_that_keeps_records_apart_is_left_as_it_was(options: dict[str, Any]) -> None:
    objective = objective_of(**options).train()
    weights, random = copies(objective.state_dict()), torch.get_rng_state()
    check(objective, PACKED)
    assert objective.training
    assert same(weights, objective.state_dict())
    assert torch.equal(random, torch.get_rng_state())
    assert all(p.grad is None for p in objective.parameters())


@pytest.mark.parametrize("kind", ["rwkv", "minimax"])
def test_a_recurrent_model_needs_rows_of_one_record(kind: str) -> None:
    objective = objective_of(kind=kind)
    with pytest.raises(UsageError, match=r"training\.packing.*packing=none"):
        check(objective, PACKED)
    check(objective, UNPACKED)


class Seeing(nn.Module):
    """An objective whose loss of a position is that of the token two places on."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = self.model = tiny_model()

    def forward(self, ids: Tensor, places: Any, records: Any, labels: Tensor, **_: Any) -> Any:
        return (token_loss_sum(self.model(input_ids=ids.flip(1)).logits.flip(1), labels),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (partial(objective_of, kind="mamba"), r"MambaForCausalLM.*llama"),  # takes no mask
        (Seeing, "should predict"),
    ],
)
def test_what_no_mask_can_keep_apart_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(make(), UNPACKED)
