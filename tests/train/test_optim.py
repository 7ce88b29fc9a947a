"""What each optimizer is given, one update by hand, and state that comes back."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.comparing import copies, distance, same
from support.tiny_trainers import ALONE, CPU, in_ranks, tiny_model
from torch import nn

from ttrain.config import Optim
from ttrain.errors import ArtifactError
from ttrain.train import optim
from ttrain.train.distributed import Ranks
from ttrain.train.optim import Optimizers

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)


def names_by_decay(model: nn.Module, optimizers: Optimizers) -> dict[tuple[str, float], set[str]]:
    names, by_decay = {id(p): name for name, p in model.named_parameters()}, {}
    for optimizer in optimizers.optimizers:
        for group in optimizer.param_groups:
            key = type(optimizer).__name__, group["weight_decay"]
            by_decay[key] = {names[id(p)] for p in group["params"]}
    return by_decay


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_muon_gets_the_hidden_matrices_and_nothing_else(kind: str, tied: bool) -> None:
    model = tiny_model(kind=kind, tie_embeddings=tied)
    by_decay = names_by_decay(model, optim.build(model, Optim(kind="muon")))
    names = {name for name, _ in model.named_parameters()}
    hidden = {name for name in names if name.split(".")[-2] in MATRICES}
    assert len(hidden) == 2 * len(MATRICES)
    assert by_decay == {("Muon", 0.1): hidden, ("AdamW", 0.0): names - hidden}
    assert ("lm_head.weight" in names) is not tied


def stacked() -> nn.Module:
    """A matrix, and two weights of three dimensions: experts, and one that is no stack of
    matrices."""
    model = nn.Linear(3, 2, bias=False)
    model.experts = nn.Parameter(torch.ones(2, 3, 4))
    model.convolution = nn.Conv1d(3, 2, 4, bias=False)
    return model


def test_stacked_matrices_decay_and_muon_takes_those_of_experts() -> None:
    model, experts, others = stacked(), {"weight", "experts"}, {"convolution.weight"}
    by_adamw = names_by_decay(model, optim.build(model, Optim()))
    assert by_adamw == {("AdamW", 0.1): experts | others}
    by_muon = names_by_decay(model, optim.build(model, Optim(kind="muon")))
    assert by_muon == {("Muon", 0.1): experts, ("AdamW", 0.1): others}


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_biases_of_stacked_experts_are_biases_although_they_have_two_dimensions(kind: Any) -> None:
    model = tiny_model(kind="tinyseek", moe={"experts": 4})
    by_decay = names_by_decay(model, optim.build(model, Optim(kind=kind)))
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    experts = "model.layers.{}.mlp.experts.{}_proj_bias"
    assert {experts.format(0, "up"), experts.format(1, "down")} < biases
    assert biases < by_decay.pop(("AdamW", 0.0))
    assert all(biases.isdisjoint(names) for names in by_decay.values())


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [("adamw", "AdamW", "AdamW"), ("adam", "Adam", "Adam"), ("muon", "Muon", "AdamW")],
)
def test_norms_biases_and_embeddings_do_not_decay(kind: Any, first: str, second: str) -> None:
    model = Small()
    others = {"embedding.weight", "linear.bias", "norm.weight", "norm.bias"}
    by_decay = names_by_decay(model, optim.build(model, Optim(kind=kind, weight_decay=0.3)))
    assert by_decay == {(first, 0.3): {"linear.weight"}, (second, 0.0): others}


def test_the_groups_describe_their_tensors() -> None:
    config = Optim(kind="muon", lr=0.1, muon_lr=0.2, weight_decay=0.3)
    muon, adamw = optim.build(Small(), config).groups()
    names = ["embedding.weight", "linear.bias", "norm.weight"]
    fields = ("optimizer", "lr", "weight_decay", "tensors", "parameters", "names")
    assert muon == dict(zip(fields, ("Muon", 0.2, 0.3, 1, 12, ["linear.weight"]), strict=True))
    assert adamw == dict(zip(fields, ("AdamW", 0.1, 0.0, 4, 29, names), strict=True))


def numbers(tensor: torch.Tensor) -> Any:
    return tensor.detach().double().numpy().copy()


@pytest.mark.parametrize("kind", ["adamw", "adam"])
def test_three_steps_of_adam_are_those_of_torch_with_decay_of_the_matrix_alone(kind: Any) -> None:
    model, reference, options = Small(), Small(), {"betas": (0.8, 0.9), "eps": 1e-3}
    optimizers = optim.build(model, Optim(kind=kind, lr=0.1, weight_decay=0.5, **options))
    others = [reference.embedding.weight, reference.linear.bias, *reference.norm.parameters()]
    decayed = {"params": [reference.linear.weight], "weight_decay": 0.5}
    groups = [decayed, {"params": others, "weight_decay": 0.0}]
    torchs = torch.optim.AdamW if kind == "adamw" else torch.optim.Adam
    theirs = torchs(groups, lr=0.1, foreach=False, **options)
    for seed, factor in enumerate((1.0, 0.5, 0.25)):
        for each in (model, reference):
            give_gradients(each, seed)
        for group in theirs.param_groups:
            group["lr"] = 0.1 * factor
        optimizers.set_factor(factor)
        optimizers.step()
        optimizers.zero_grad()
        theirs.step()
    assert distance(reference.state_dict(), model.state_dict()) < 1e-6
    assert not same(Small().state_dict(), model.state_dict())


def orthogonal(matrix: Any) -> Any:
    """Five Newton-Schulz steps of kellerjordan.github.io/posts/muon."""
    x = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if matrix.shape[0] <= matrix.shape[1] else x.T


def test_three_steps_of_muon_equal_the_formula() -> None:
    """In fp32; in bf16 they are those of torch's own: tests/model/test_moe_training."""
    scales = {"wide.weight": 1.0, "tall.weight": math.sqrt(2)}
    torch.manual_seed(0)
    wide, tall = nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False)
    model = nn.ModuleDict({"wide": wide, "tall": tall})
    optimizers = optim.build(model, Optim(kind="muon", muon_lr=0.1, weight_decay=0.5))
    optimizers.prepare(torch.float32, None)
    expected = {name: numbers(p) for name, p in model.named_parameters()}
    buffers = {name: np.zeros_like(value) for name, value in expected.items()}
    for t, factor in enumerate((1.0, 0.5, 0.25), start=1):
        give_gradients(model, t)
        lr = 0.1 * factor
        for name, p in model.named_parameters():
            assert p.grad is not None
            buffers[name] = 0.9 * buffers[name] + 0.1 * numbers(p.grad)
            update = orthogonal(0.1 * numbers(p.grad) + 0.9 * buffers[name])
            expected[name] = expected[name] * (1 - lr * 0.5) - lr * scales[name] * update
        optimizers.set_factor(factor)
        optimizers.step()
    for name, p in model.named_parameters():
        np.testing.assert_allclose(numbers(p), expected[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 208), (208, 96), (96, 96)], ids=str)
def test_steps_on_products_of_a_matrix_with_itself_equal_those_on_it(
    shape: tuple[int, int], kind: torch.dtype
) -> None:
    """Singular values from 1 to 1e-3, as means of gradients have: five steps without x err by
    4.6."""
    torch.manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(size, 96))[0] for size in shape)
    matrix = left * torch.logspace(0, -3, 96) @ right.T
    exact = torch.from_numpy(orthogonal(numbers(matrix.double())))
    difference = optim.orthogonal(matrix[None], kind)[0] - exact
    limit = {torch.float32: 1e-4, torch.bfloat16: 0.12}[kind]
    assert torch.linalg.norm(difference) / torch.linalg.norm(exact) < limit


def test_ranks_that_share_the_matrices_of_muon_take_the_step_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each shape a rank makes half orthogonal, and one more where their number is odd."""
    watched = Mock(side_effect=optim.orthogonal)
    monkeypatch.setattr(optim, "orthogonal", watched)

    def step(ranks: Ranks) -> tuple[dict[str, torch.Tensor], int]:
        parts = [tiny_model(kv_heads=1), stacked()]
        model = nn.ModuleList([*parts, *(nn.Linear(3, 2, bias=False) for _ in range(2))])
        optimizers = optim.build(model, Optim(kind="muon"))
        optimizers.prepare(torch.float32, ranks)
        give_gradients(model, 0)
        watched.reset_mock()
        optimizers.step()
        return copies(model.state_dict()), sum(len(call.args[0]) for call in watched.mock_calls)

    alone, every = step(ALONE)
    for weights, count in in_ranks(2, tmp_path, step):
        assert same(weights, alone), "the bits do not depend on who computes a matrix"
        assert count < 0.7 * every


@pytest.mark.parametrize(
    ("on_this_machine", "world", "shares"),
    [("2", 4, False), ("2", 2, True), (None, 2, False)],  # None: unknown
)
def test_ranks_of_several_machines_share_no_matrices(
    on_this_machine: str | None, world: int, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if on_this_machine:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", on_this_machine)
    optimizers = optim.build(Small(), Optim(kind="muon"))
    (muon,) = (each for each in optimizers.optimizers if isinstance(each, optim.Muon))
    muon.ranks = None if shares else Ranks(0, 2, CPU)  # as an earlier call left it
    optimizers.prepare(torch.float32, Ranks(0, world, CPU))
    assert (muon.ranks is not None) is shares


def test_the_state_names_the_parameters() -> None:
    model = Small()
    optimizers = optim.build(model, Optim(kind="muon"))
    give_gradients(model, 0)
    optimizers.step()
    others = ("embedding.weight", "linear.bias", "norm.weight", "norm.bias")
    assert {*optimizers.state()} == {
        "momentum_buffer|linear.weight",
        *(f"{key}|{name}" for name in others for key in ("step", "exp_avg", "exp_avg_sq")),
    }


def test_state_of_a_parameter_that_is_not_trained_is_refused_by_name() -> None:
    model = Small()
    optimizers = optim.build(model, Optim())
    for name in ("frozen.weight", "other.weight"):
        with pytest.raises(ArtifactError, match=f"state for {name}, "):
            optimizers.load_state({f"exp_avg|{name}": torch.zeros(3, 3)})
