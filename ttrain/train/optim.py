"""Optimizers with their parameter groups, and state that is saved without pickle."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ttrain.config import Optim
from ttrain.errors import ArtifactError
from ttrain.train import native
from ttrain.train.distributed import Ranks, Tensors, full_tensor, local_part, shard_like

FUSED_DEVICES = frozenset({"cpu", "cuda"})  # where torch's fused kernels were run and are faster

MOMENTUM = 0.9  # of Muon; at 0.95 the quickstart ends 0.025 bits per byte higher, at 0.85 the same
SHOWN_NAMES = 3


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7  # those of torch.optim.Muon


class Optimizers:
    """One or two torch optimizers that step together; each group has its own peak rate."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], names: dict[Tensor, str]) -> None:
        self.optimizers = optimizers
        self.names = names
        for _, group in self._groups():
            group["initial_lr"] = group["lr"]  # as torch's own schedulers name the peak

    @property
    def parameters(self) -> list[Tensor]:
        """All trained parameters."""
        return [parameter for _, group in self._groups() for parameter in group["params"]]

    def set_factor(self, factor: float) -> None:
        """Learning rate of each group: its peak times the factor."""
        for _, group in self._groups():
            group["lr"] = group["initial_lr"] * factor

    def learning_rates(self) -> dict[str, float]:
        """Current rate by optimizer, {"muon": 0.02, "adamw": 0.004}, that of `optim.lr` last."""
        return {
            type(each).__name__.lower(): float(each.param_groups[0]["lr"])
            for each in self.optimizers
        }

    @property
    def can_be_prevented(self) -> bool:
        """Whether `step_unless` is possible."""
        return all(
            isinstance(optimizer, Muon) or optimizer.defaults.get("fused")
            for optimizer in self.optimizers
        )

    def prepare(self, dtype: torch.dtype, ranks: Ranks | None) -> None:
        """Set the number format of Muon's products, which ranks that step together divide."""
        # Ranks on several machines divide nothing: through a network results take longer than
        # computing them on a GPU.
        for optimizer in self.optimizers:
            if isinstance(optimizer, Muon):
                optimizer.dtype = dtype
                optimizer.ranks = ranks if ranks is not None and ranks.on_one_machine else None

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def step_unless(self, prevented: Tensor) -> None:
        """Update, except where `prevented` (on the device) is 1.0."""
        for optimizer in self.optimizers:
            optimizer.found_inf = prevented  # type: ignore[attr-defined]
        self.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def groups(self) -> list[dict[str, Any]]:
        """Description of each parameter group for the log."""
        groups = []
        for optimizer, group in self._groups():
            parameters = group["params"]
            groups.append(
                {
                    "optimizer": type(optimizer).__name__,
                    "lr": group["initial_lr"],
                    "weight_decay": group["weight_decay"],
                    "tensors": len(parameters),
                    "parameters": sum(p.numel() for p in parameters),
                    "names": [self.names[p] for p in parameters[:SHOWN_NAMES]],
                }
            )
        return groups

    def state(self) -> Tensors:
        """All state as named plain tensors: {"exp_avg|model.norm.weight": ...}."""
        tensors = {}
        for optimizer in self.optimizers:
            for parameter, entries in optimizer.state.items():
                for key, value in entries.items():
                    if value is not None:
                        plain = value if isinstance(value, Tensor) else torch.tensor(value)
                        tensors[f"{key}|{self.names[parameter]}"] = plain
        return tensors

    def load_state(self, tensors: Tensors) -> None:
        """Restore what `state()` returned. Raises ArtifactError for an unknown name."""
        owners = {
            self.names[p]: (p, optimizer)
            for optimizer, group in self._groups()
            for p in group["params"]
        }
        for name, tensor in tensors.items():
            key, _, parameter_name = name.partition("|")
            if parameter_name not in owners:
                raise ArtifactError(
                    f"the checkpoint has optimizer state for {parameter_name}, which is not "
                    "trained here"
                )
            parameter, optimizer = owners[parameter_name]
            # Only a fused optimizer counts on the device.
            stays = key == "step" and not optimizer.defaults.get("fused")
            optimizer.state[parameter][key] = tensor if stays else shard_like(tensor, parameter)

    def _groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                yield optimizer, group


def build(model: nn.Module, config: Optim) -> Optimizers:
    """Build the optimizers of a model's trainable parameters."""
    # `adamw` decouples weight decay from the gradient (arXiv:1711.05101), `adam` (arXiv:1412.6980)
    # adds it there, as L2. `muon` (Jordan 2024, kellerjordan.github.io/posts/muon) takes the hidden
    # matrices and leaves the rest to AdamW. Stacked experts are matrices too: 8 of them, 2 a token,
    # on 0.6 M bytes of text in 300 steps, end at 1.18 nats a byte held out, with AdamW at 1.30.
    # Embedding and output head may have rates of their own; a tied weight takes the head's. Weight
    # decay falls on matrices only: never on norms, biases (also those of stacked experts, which
    # have two dimensions) and embeddings.
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    getters = ("get_output_embeddings", "get_second_head")
    output_heads = (getattr(model, name, lambda: None)() for name in getters)
    heads = {id(head.weight) for head in output_heads if head is not None}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    muon: list[Tensor] = []
    groups: dict[tuple[float, float], list[Tensor]] = {}  # by rate and decay
    for name, p in trained:
        lr = config.lr
        decay = 0.0
        if id(p) in heads:
            lr = config.head_lr or lr
        elif id(p) in embeddings:
            lr = config.embedding_lr or lr
        elif p.ndim >= 2 and not name.endswith("bias"):
            if config.kind == "muon" and (
                p.ndim == 2 or (p.ndim == 3 and "experts" in name.split("."))
            ):
                muon.append(p)
                continue
            decay = config.weight_decay
        groups.setdefault((lr, decay), []).append(p)
    first = sorted(groups, key=lambda group: (group[0] != config.lr, -group[1]))
    optimizers: list[torch.optim.Optimizer] = []
    if muon:
        optimizers.append(Muon(muon, lr=config.muon_lr, weight_decay=config.weight_decay))
    if groups:
        described = [
            {"params": groups[lr, decay], "lr": lr, "weight_decay": decay} for lr, decay in first
        ]
        kind = torch.optim.Adam if config.kind == "adam" else torch.optim.AdamW
        fused = all(p.device.type in FUSED_DEVICES for _, p in trained)
        optimizers.append(
            kind(described, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)
        )
    return Optimizers(optimizers, {p: name for name, p in trained})


@final
class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made orthogonal (Jordan 2024).

    kellerjordan.github.io/posts/muon, for matrices [A, B] and stacks of experts [E, A, B]. A
    sharded matrix is gathered; with `ranks` each makes its share orthogonal. `dtype`: of the
    products.
    """

    # All matrices of one shape are one batch of products: 12 ms a step of the quickstart, where
    # torch.optim.Muon takes 22. On a CPU that emulates bf16 a step takes 514 ms of CPU in fp32,
    # 1,372 in bf16. An expert that no token visited is updated by its momentum only.

    def __init__(self, params: Iterable[Tensor], *, lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        # As in torch's fused optimizers: where it is 1.0, nothing is updated.
        self.found_inf: Tensor | None = None
        self.ranks: Ranks | None = None
        self.dtype = torch.float32

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[bool, torch.Size], list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    key = (
                        parameter.ndim == 3 and hasattr(parameter, "to_local"),
                        parameter.shape[-2:],
                    )
                    alike.setdefault(key, []).append(parameter)
            made = [
                self._own_share(parameters, shared=not local)
                for (local, _), parameters in alike.items()
            ]
            parts = [number for number, (local, _) in enumerate(alike) if not local]
            for number, whole in zip(
                parts, self._exchanged([made[number] for number in parts]), strict=True
            ):
                made[number] = whole
            for parameters, directions_EAB in zip(alike.values(), made, strict=True):
                self._update(parameters, directions_EAB, group["lr"], group["weight_decay"])

    def _own_share(self, parameters: list[Tensor], *, shared: bool) -> Tensor:
        matrices = [
            matrix
            for direction in self._momenta(parameters)
            for matrix in direction.view(-1, *direction.shape[-2:])
        ]
        if not shared or self.ranks is None or self.ranks.world == 1:
            return orthogonal(torch.stack(matrices), self.dtype)
        count = -(-len(matrices) // self.ranks.world)
        mine = matrices[self.ranks.rank * count : (self.ranks.rank + 1) * count]
        absent = [torch.zeros_like(matrices[0])] * (count - len(mine))
        return orthogonal(torch.stack([*mine, *absent]), self.dtype)

    def _exchanged(self, shares: list[Tensor]) -> list[Tensor]:
        if self.ranks is None or self.ranks.world == 1 or not shares:
            return shares
        gathered = self.ranks.gather(torch.cat([share.flatten() for share in shares]))
        parts = torch.split(gathered, [share.numel() for share in shares], 1)
        return [
            part.reshape(-1, *share.shape[1:]) for part, share in zip(parts, shares, strict=True)
        ]

    def _update(
        self, parameters: list[Tensor], directions_EAB: Tensor, lr: float, weight_decay: float
    ) -> None:
        A, B = parameters[0].shape[-2:]
        rate = lr * math.sqrt(max(1, A / B))
        kept = cast(Any, 1 - lr * weight_decay)
        if self.found_inf is not None:
            applied = 1 - self.found_inf
            directions_EAB = directions_EAB.to(parameters[0].dtype) * (applied * rate)
            rate = 1.0
            kept = 1 - applied * (lr * weight_decay)
        weights = [local_part(parameter) for parameter in parameters]
        counts = [1 if part.ndim == 2 else len(part) for part in weights]
        directions = [
            local_part(shard_like(direction[0], parameter)) if parameter.ndim == 2 else direction
            for parameter, direction in zip(
                parameters, torch.split(directions_EAB[: sum(counts)], counts), strict=True
            )
        ]
        torch._foreach_mul_(weights, kept)
        torch._foreach_add_(weights, directions, alpha=-rate)

    def _momenta(self, parameters: list[Tensor]) -> list[Tensor]:
        """The gradients with Nesterov momentum; of sharded experts those of this rank."""
        for parameter in parameters:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        of_rank: Callable[[Any], Tensor] = (
            local_part if parameters[0].ndim == 3 else lambda tensor: tensor
        )
        means = [of_rank(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        gradients = [of_rank(parameter.grad) for parameter in parameters]
        shares: Any = 1 - MOMENTUM
        if self.found_inf is not None:
            gradients = [torch.where(self.found_inf > 0, 0.0, gradient) for gradient in gradients]
            shares = [shares * (1 - self.found_inf)] * len(means)
        torch._foreach_lerp_(means, gradients, shares)
        return [
            full_tensor(direction) for direction in torch._foreach_lerp(gradients, means, MOMENTUM)
        ]


def orthogonal(matrices_EAB: Tensor, dtype: torch.dtype) -> Tensor:
    """Each matrix with singular values near 1, by five Newton-Schulz steps in this format."""
    # A step is x <- p(G) x with G = x x^T and p(G) = a + b G + c G G. Where G is much smaller than
    # x, three and then two steps use G alone, G <- p(G) G p(G), before the product of their p(G)
    # multiplies x: 0.65 of the work for [512, 1376]. All five so would make errors of bf16 several
    # times x.
    if native.takes_matrices(matrices_EAB, dtype):
        return native.orthogonal(matrices_EAB, COEFFICIENTS, STEPS, EPS, dtype)
    a, b, c = COEFFICIENTS
    tall = matrices_EAB.shape[1] > matrices_EAB.shape[2]
    x = (matrices_EAB.transpose(1, 2) if tall else matrices_EAB).to(dtype)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=EPS)
    for count in (3, 2) if 2 * x.shape[2] >= 3 * x.shape[1] else (1,) * STEPS:
        gram = torch.bmm(x, x.transpose(1, 2))
        single = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # p(G) - a
        combined = single
        factor = a  # the product of all p(G) so far, without `factor` times 1
        for _ in range(1, count):
            mixed = torch.baddbmm(gram, single, gram, beta=a)
            gram = torch.baddbmm(mixed, single, mixed, beta=a)
            single = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            combined = torch.baddbmm(single, combined, single, beta=factor).add_(combined, alpha=a)
            factor *= a
        x = torch.baddbmm(x, combined, x, beta=factor)
    return x.transpose(1, 2) if tall else x
