"""Muon for matrices that are stacked in one tensor, as the experts of a layer are: each is orthogonalised by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, final

import torch
from torch import Tensor

COEFFICIENTS, STEPS, EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7  # those of torch.optim.Muon


@final
class StackedMuon(torch.optim.Optimizer):
    """torch.optim.Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for tensors [E, A, B] of E matrices.

    The steps of all E are one batch of products. An expert that no token visited gets no update but that of its momentum.
    """

    def __init__(
        self, params: Iterable[Tensor], *, lr: float, momentum: float, weight_decay: float, adjust_lr_fn: str
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # there is no closure
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        weights_EAB, grad_EAB, mean_EAB = map(_held, (parameter, parameter.grad, state["momentum_buffer"]))
        mean_EAB.lerp_(grad_EAB, 1 - momentum)
        direction_EAB = orthogonal(grad_EAB.lerp(mean_EAB, momentum))
        A, B = parameter.shape[1:]
        matched = group["adjust_lr_fn"] == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(A, B)) if matched else math.sqrt(max(1, A / B))
        weights_EAB.mul_(1 - group["lr"] * group["weight_decay"])
        weights_EAB.add_(direction_EAB, alpha=-group["lr"] * scale)


def _held(tensor: Any) -> Tensor:
    """The experts that this rank holds: a sharded tensor is cut between them, so that each is whole somewhere."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def orthogonal(matrices_EAB: Tensor) -> Tensor:
    """Each matrix with singular values near 1, by five Newton-Schulz steps in bf16."""
    a, b, c = COEFFICIENTS
    tall = matrices_EAB.shape[1] > matrices_EAB.shape[2]
    x = (matrices_EAB.transpose(1, 2) if tall else matrices_EAB).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = torch.bmm(x, x.transpose(1, 2))
        gram = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, gram, x, beta=a)
    return x.transpose(1, 2) if tall else x
