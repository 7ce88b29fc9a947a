"""8-bit optimizer state, where torchao is installed: its steps are compiled, which takes half a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.comparing import copies, same
from torch import nn

from ttrain.config import Optim
from ttrain.errors import ArtifactError
from ttrain.train import optim

pytest.importorskip("torchao")
pytestmark = pytest.mark.soak


def make(kind: Any, start: dict[str, torch.Tensor] | None = None) -> tuple[nn.Module, optim.Optimizers]:
    torch.manual_seed(0)
    model = nn.Linear(64, 128)
    if start:
        model.load_state_dict(start)
    return model, optim.build(model, Optim(kind=kind, lr=1e-2))


def step(model: nn.Module, optimizers: optim.Optimizers, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizers.set_factor(1 / (seed + 1))
    optimizers.step()


def test_8_bit_state_follows_32_bit_state_and_continues_bit_for_bit_from_a_file(tmp_path: Path) -> None:
    (whole, reference), (first, ours) = make("adamw"), make("adamw8bit")
    for seed in range(3):
        step(whole, reference, seed)
        step(first, ours, seed)
    moved = (whole.weight - make("adamw")[0].weight).abs().mean()
    assert 0 < (whole.weight - first.weight).abs().mean() < 0.05 * moved
    torch.testing.assert_close(first.bias, whole.bias)  # 128 numbers are too few for 8 bits
    assert ours.learning_rates() == {"adamw8bit": pytest.approx(1e-2 / 3)}
    assert [group["lr"] for group in ours.groups()] == [1e-2, 1e-2]

    state = copies(ours.state())
    assert state["exp_avg.codes|weight"].dtype == torch.uint8
    save_file(state, tmp_path / "optimizer.safetensors")
    second, theirs = make("adamw8bit", first.state_dict())
    theirs.load_state(load_file(tmp_path / "optimizer.safetensors"))
    assert same(ours.state(), theirs.state())
    for seed in range(3, 6):
        step(first, ours, seed)
        step(second, theirs, seed)
    assert same(first.state_dict(), second.state_dict())
    assert same(ours.state(), theirs.state())

    del state["exp_avg.scale|weight"]
    with pytest.raises(ArtifactError, match="lacks scale of exp_avg of weight"):
        theirs.load_state(state)
