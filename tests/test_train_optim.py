"""What each optimizer is given, one update by hand, and state that comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from doubles import copies, same, tiny_model
from torch import nn

from ttrain.config import Optim
from ttrain.errors import ArtifactError
from ttrain.train import optim
from ttrain.train.optim import Optimizers

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Small(nn.Module):
    """One of each: an embedding, a matrix with a bias, a norm, a frozen matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)


def names_by_decay(model: nn.Module, optimizers: Optimizers) -> dict[tuple[str, float], set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[tuple[str, float], set[str]] = {}
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            found[type(optimizer).__name__, group["weight_decay"]] = {names[id(p)] for p in group["params"]}
    return found


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator)


def test_norms_biases_and_embeddings_do_not_decay() -> None:
    model = Small()
    assert names_by_decay(model, optim.build(model, Optim(weight_decay=0.3))) == {
        ("AdamW", 0.3): {"linear.weight"},
        ("AdamW", 0.0): {"embedding.weight", "linear.bias", "norm.weight", "norm.bias"},
    }


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_muon_gets_the_hidden_matrices_and_nothing_else(kind: str, tied: bool) -> None:
    model = tiny_model(kind=kind, tie_embeddings=tied)
    found = names_by_decay(model, optim.build(model, Optim(kind="muon")))
    names = {name for name, _ in model.named_parameters()}
    hidden = {name for name in names if name.split(".")[-2] in MATRICES}
    assert len(hidden) == 2 * len(MATRICES)
    assert found == {("Muon", 0.1): hidden, ("AdamW", 0.0): names - hidden}
    assert ("lm_head.weight" in names) is not tied


def test_every_trained_parameter_is_in_one_group_and_a_frozen_one_in_none() -> None:
    model = Small()
    for kind in ("adamw", "muon"):
        optimizers = optim.build(model, Optim(kind=kind))  # type: ignore[arg-type]
        ids = [id(p) for p in optimizers.parameters]
        assert sorted(ids) == sorted(id(p) for p in model.parameters() if p.requires_grad)
        assert sum(group["tensors"] for group in optimizers.groups()) == 5
        assert sum(group["parameters"] for group in optimizers.groups()) == 20 + 12 + 3 + 3 + 3


def test_three_steps_of_adamw_equal_the_ones_by_hand() -> None:
    model = Small()
    config = Optim(lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    optimizers = optim.build(model, config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    expected = {name: p.detach().double() for name, p in trained.items()}
    means = {name: torch.zeros_like(p) for name, p in expected.items()}
    squares = {name: torch.zeros_like(p) for name, p in expected.items()}
    for t, factor in enumerate((1.0, 0.5, 0.25), start=1):
        give_gradients(model, t)
        lr = 0.1 * factor
        for name, p in trained.items():
            assert p.grad is not None
            gradient = p.grad.double()
            means[name] = 0.8 * means[name] + 0.2 * gradient
            squares[name] = 0.9 * squares[name] + 0.1 * gradient**2
            decay = 0.5 if name == "linear.weight" else 0.0
            unbiased = (squares[name] / (1 - 0.9**t)).sqrt() + 1e-3
            expected[name] = expected[name] * (1 - lr * decay) - lr * (means[name] / (1 - 0.8**t)) / unbiased
        optimizers.set_factor(factor)
        optimizers.step()
        optimizers.zero_grad()
    for name, p in trained.items():
        torch.testing.assert_close(p.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_state_that_is_put_back_gives_the_same_steps(kind: Any) -> None:
    config = Optim(kind=kind, lr=0.1)
    first, second = Small(), Small()
    ours = optim.build(first, config)
    for seed in range(3):
        give_gradients(first, seed)
        ours.step()
    theirs = optim.build(second, config)
    second.load_state_dict(first.state_dict())
    theirs.load_state(copies(ours.state()))
    assert same(ours.state(), theirs.state())
    for seed in range(3, 6):
        for model, optimizers in ((first, ours), (second, theirs)):
            give_gradients(model, seed)
            optimizers.step()
    assert same(first.state_dict(), second.state_dict())
    assert same(ours.state(), theirs.state())


def test_the_state_names_the_parameters() -> None:
    model = Small()
    optimizers = optim.build(model, Optim(kind="muon"))
    give_gradients(model, 0)
    optimizers.step()
    others = ("embedding.weight", "linear.bias", "norm.weight", "norm.bias")
    assert {*optimizers.state()} == {
        "momentum_buffer|linear.weight", *(f"{key}|{name}" for name in others for key in ("step", "exp_avg", "exp_avg_sq"))
    }  # fmt: skip


def test_state_of_a_parameter_that_is_not_trained_is_refused_by_name() -> None:
    model = Small()
    optimizers = optim.build(model, Optim())
    for name in ("frozen.weight", "other.weight"):
        with pytest.raises(ArtifactError, match=f"state for {name}, which is not trained here"):
            optimizers.load_state({f"exp_avg|{name}": torch.zeros(3, 3)})
