"""Optimizers with their groups, and state that saves without pickle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config import Optim
from ttrain.errors import ArtifactError


class Optimizers:
    """One or two torch optimizers that step together; each group keeps its own peak learning rate."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], names: dict[Tensor, str]) -> None:
        self.optimizers = optimizers
        self._names = names
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]

    @property
    def parameters(self) -> list[Tensor]:
        """All parameters that are trained."""
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    def set_factor(self, factor: float) -> None:
        """Learning rate of each group: its peak times the factor."""
        for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def learning_rates(self) -> dict[str, float]:
        """Present rate by optimizer: {"muon": 0.02, "adamw": 0.004}."""
        return {type(o).__name__.lower(): float(o.param_groups[0]["lr"]) for o in self.optimizers}

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def groups(self) -> list[dict[str, Any]]:
        """What is in each group, for the log: optimizer, peak rate, weight decay, tensors, parameters."""
        return [
            {
                "optimizer": type(optimizer).__name__,
                "lr": peak,
                "weight_decay": group["weight_decay"],
                "tensors": len(group["params"]),
                "parameters": sum(p.numel() for p in group["params"]),
            }
            for optimizer, peaks in zip(self.optimizers, self._peaks, strict=True)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True)
        ]

    def state(self) -> dict[str, Tensor]:
        """All state as named tensors: {"exp_avg|model.norm.weight": ...}."""
        return {f"{key}|{self._names[p]}": value for p, key, value in self._entries()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `state()` gave. Raises ArtifactError where a name is unknown."""
        parameters = {name: p for p, name in self._names.items()}
        owner = {id(p): o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        for name, tensor in tensors.items():
            key, _, parameter_name = name.partition("|")
            parameter = parameters.get(parameter_name)
            if parameter is None or id(parameter) not in owner:
                raise ArtifactError(f"the checkpoint has optimizer state for {parameter_name}, which is not trained here")
            optimizer = owner[id(parameter)]
            stays = key == "step" and not optimizer.defaults.get("fused")  # only a fused optimizer counts on the device
            optimizer.state[parameter][key] = tensor if stays else tensor.to(parameter.device)

    def _entries(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        for optimizer in self.optimizers:
            for parameter, entries in optimizer.state.items():
                for key, value in entries.items():
                    if value is not None:
                        yield parameter, key, value if isinstance(value, Tensor) else torch.tensor(value)


def build(model: nn.Module, config: Optim) -> Optimizers:
    """Muon (Jordan 2024, kellerjordan.github.io/posts/muon) for hidden matrices where asked for; else AdamW.

    AdamW: arXiv:1711.05101. Weight decay falls on matrices only: never on norms, biases and embeddings.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None:
        embeddings.add(id(head.weight))
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices = [p for _, p in trained if p.ndim == 2 and id(p) not in embeddings]
    chosen = {id(p) for p in matrices}
    others = [p for _, p in trained if id(p) not in chosen]
    groups = [{"params": others, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if config.kind == "muon" and matrices:
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.muon_lr, momentum=config.muon_momentum, weight_decay=config.weight_decay)
        )
    else:
        groups.insert(0, {"params": matrices, "weight_decay": config.weight_decay})
    groups = [group for group in groups if group["params"]]
    if groups:
        fused = all(p.device.type in ("cpu", "cuda") for _, p in trained)
        optimizers.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
    return Optimizers(optimizers, {p: name for name, p in trained})
