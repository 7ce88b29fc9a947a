"""Routers of a mixture of experts: what they chose, how evenly, and what keeps it even.

A router is a module whose class is named so and which returns (logits [N, E], weights [N, k], experts [N, k]), as those of
transformers do. Everything here is a sum over rows, so that neither micro-batches nor ranks change it.

Letters in names: L calls of routers in a forward pass, B rows, T positions, N = B*T, E experts, k chosen for each token.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ttrain.config.model import Moe
from ttrain.errors import UsageError
from ttrain.train.dtensor import placed

SHOWN_LOADS = 256  # more experts than these in all layers together are summed up, not listed
# Those that do not return logits, weights and experts: Llama 4's says not which experts it took, Dbrx's neither weights.
UNLIKE = frozenset({"Llama4Router", "DbrxRouter", "InklingTopkRouter"})
BIAS = "e_score_correction_bias"
LOAD, ENTROPY, DROPPED, TOKENS = "moe_load", "moe_entropy", "moe_dropped", "moe_tokens"  # names of sums


@dataclass
class Choice:
    """One call of a router; `given`: the experts that were asked to compute it, where that is known."""

    router: int
    logits_NE: Tensor  # in fp32, or wider
    experts_Nk: Tensor
    given_Nk: Tensor | None = None


class Routers:
    """The routers of a model, watched while it computes. Their own products are made in fp32, whatever autocast says.

    The router decides in logits which of a few experts it takes, and bf16 has three digits (arXiv:2101.03961, section 2.4).
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(name, module) for name, module in model.named_modules() if _is_watchable(type(module).__name__)]
        self._apart = [_scores_apart(module) for _, module in self.modules]
        self._open: list[Choice] | None = None
        for number, (name, module) in enumerate(self.modules):
            module.forward = MethodType(_in_fp32, module)
            module.register_forward_hook(self._noting(number))
            experts = getattr(model.get_submodule(name.rpartition(".")[0]), "experts", None)
            if isinstance(experts, nn.Module):
                experts.register_forward_pre_hook(self._counting, with_kwargs=True)

    @property
    def trained(self) -> bool:
        """Whether the routers learn; those of a frozen base are only watched."""
        return any(parameter.requires_grad for _, module in self.modules for parameter in module.parameters())

    @property
    def biases(self) -> list[Tensor | None]:
        """The balancing bias of each router, which no gradient trains."""
        held = ({**dict(module.named_buffers()), **dict(module.named_parameters())} for _, module in self.modules)
        return [next((t for name, t in some.items() if name.rpartition(".")[2] == BIAS), None) for some in held]

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[Choice]]:
        """The choices made meanwhile. What gradient checkpointing computes again comes later, and does not count."""
        found: list[Choice] = []
        self._open = found
        try:
            yield found
        finally:
            self._open = None

    def scores(self, choice: Choice) -> Tensor:
        """How much each expert of a call was wanted: shares [N, E] that sum to 1 (arXiv:2412.19437, eq. 19)."""
        logits_NE = choice.logits_NE
        if not self._apart[choice.router]:
            return logits_NE.softmax(-1)
        scores_NE = logits_NE.sigmoid()
        return scores_NE / scores_NE.sum(-1, keepdim=True).clamp_min(torch.finfo(scores_NE.dtype).tiny)

    def _noting(self, number: int) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._open is not None:
                logits_NE, _, experts_Nk = output
                wide = torch.promote_types(logits_NE.dtype, torch.float32)
                self._open.append(Choice(number, logits_NE.to(wide), experts_Nk))

        return note

    def _counting(self, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        if self._open:
            self._open[-1].given_Nk = named.get("top_k_index", inputs[1] if len(inputs) > 1 else None)


def _is_watchable(name: str) -> bool:
    return name.endswith("Router") and name not in UNLIKE


def _scores_apart(router: nn.Module) -> bool:
    """Whether it scores each expert for itself, as DeepSeek-V3's does, and not all together by softmax.

    Over twenty architectures of transformers do, with no setting or base class in common; the code of each calls it so.
    """
    names = inspect.unwrap(type(router).forward).__code__.co_names
    return "sigmoid" in names and "softmax" not in names


def _in_fp32(self: Any, hidden: Tensor, *others: Any) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return type(self).forward(self, hidden.to(torch.promote_types(hidden.dtype, torch.float32)), *others)


@dataclass(frozen=True)
class Balancing:
    """How the experts of a model are kept evenly loaded, as its own config says."""

    balance: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, routers: Routers) -> Balancing:
        """What the config asks for; nothing where the routers are frozen. Raises UsageError where it cannot be had."""
        config: Any = getattr(model, "config", None)
        asked = cls(**{setting: float(getattr(config, name, None) or 0.0) for name, setting in Moe.IN_CONFIG.items()})
        if not routers.modules:
            if asked != cls() and "router_aux_loss_coef" in vars(config) and "router_z_loss_coef" in vars(config):
                raise UsageError(
                    f"model.moe asks for a balance, but {type(model).__name__} has no router that could be watched; set "
                    f"model.moe.balance=0, model.moe.z_loss=0 and model.moe.bias_rate=0, or another model.kind"
                )
            return cls()
        if not routers.trained:
            return cls()
        if asked.bias_rate and None in routers.biases:
            raise UsageError(
                f"model.moe.bias_rate is {asked.bias_rate} but the routers of {type(model).__name__} have no bias; set "
                f"model.kind=llama or qwen3, or model.moe.bias_rate=0"
            )
        return asked


def row_losses(
    routers: Routers, choices: Sequence[Choice], tokens_BT: Tensor, live_B: Tensor, *, z_loss: bool
) -> tuple[Tensor, Tensor]:
    """Balance loss and router z-loss, each summed over calls and rows, a row times its targets `live_B`.

    Of a row's T tokens: sum_e f_e P_e, with f_e the share of its choices that fell on expert e, times E, and P_e the mean of
    its scores (arXiv:2412.19437, eq. 17 to 20); 1 where all are even. P carries the gradient. The z-loss is the mean of
    logsumexp(logits)^2 (arXiv:2202.08906, eq. 5). `tokens_BT`: False at padding, which counts in neither.
    """
    with torch.autocast(tokens_BT.device.type, enabled=False):  # which would count in bf16
        return _row_losses(routers, choices, tokens_BT, live_B, z_loss)


def _row_losses(
    routers: Routers, choices: Sequence[Choice], tokens_BT: Tensor, live_B: Tensor, z_loss: bool
) -> tuple[Tensor, Tensor]:
    B, T = tokens_BT.shape
    inside_BT = tokens_BT.to(choices[0].logits_NE.dtype)
    live_by_token_B = live_B / inside_BT.sum(1).clamp_min(1)
    balance = z = inside_BT.new_zeros(())
    for choice in choices:
        scores_NE = routers.scores(choice)
        E, k = scores_NE.shape[1], choice.experts_Nk.shape[1]
        with torch.no_grad():  # by the scores alone: eq. 18 leaves out the balancing bias
            wanted_Nk = scores_NE.topk(k, sorted=False).indices
            chosen_BTE = torch.zeros_like(scores_NE).scatter_(1, wanted_Nk, 1.0).view(B, T, E)
            counts_BE = torch.einsum("bte,bt->be", chosen_BTE, inside_BT)
            f_BE = counts_BE * (E / k) / inside_BT.sum(1, keepdim=True).clamp_min(1)
        sums_BE = torch.einsum("bte,bt->be", scores_NE.view(B, T, E), inside_BT)
        balance = balance + ((f_BE * sums_BE).sum(1) * live_by_token_B).sum()
        if z_loss:
            z_BT = choice.logits_NE.logsumexp(-1).square().view(B, T)
            z = z + ((z_BT * inside_BT).sum(1) * live_by_token_B).sum()
    return balance, z


@torch.no_grad()
def sums(routers: Routers, choices: Sequence[Choice], tokens_BT: Tensor) -> dict[str, Tensor]:
    """What is counted of the tokens marked True: themselves, each expert's load, the scores' entropy in nats, lost choices.

    The load of each call has its number and its router's in the name. Loads and tokens are whole numbers, so that they are
    the same in whatever order they are summed. A choice is lost where the experts were not asked to compute it.
    """
    inside_N = tokens_BT.flatten()
    found: dict[str, Tensor] = {}
    entropies = []
    dropped = torch.zeros(1, dtype=torch.int64, device=inside_N.device)
    for number, choice in enumerate(choices):
        E = choice.logits_NE.shape[1]
        load_E = found[f"{LOAD}/{number}/{choice.router}"] = _load(choice.experts_Nk, inside_N, E)
        entropies.append((torch.special.entr(routers.scores(choice)).sum(-1) * inside_N).sum())
        if choice.given_Nk is not None:
            dropped += load_E.sum() - _load(choice.given_Nk, inside_N, E).sum()
    return {**found, ENTROPY: torch.stack(entropies), DROPPED: dropped, TOKENS: inside_N.sum()[None]}


def _load(experts_Nk: Tensor, inside_N: Tensor, experts: int) -> Tensor:
    """How often each expert stands there, [E]; numbers beyond the experts, which mean none, do not count."""
    counted_Nk = inside_N[:, None] & (experts_Nk >= 0) & (experts_Nk < experts)
    load = torch.zeros(experts, dtype=torch.int64, device=experts_Nk.device)
    return load.scatter_add_(0, experts_Nk.clamp(0, experts - 1).flatten(), counted_Nk.flatten().long())


@torch.no_grad()
def move_biases(routers: Routers, found: Mapping[str, Sequence[float]], rate: float) -> None:
    """Make overloaded experts less wanted: b_e += rate * sign(mean load - load_e) (arXiv:2408.15664, algorithm 1).

    `found`: the sums of a whole step, over its micro-batches and all ranks.
    """
    biases = routers.biases
    by_router: dict[int, Tensor] = {}
    for _, router, load in _loads(found):
        counted = torch.tensor(load, dtype=torch.float64)
        by_router[router] = by_router.get(router, torch.zeros_like(counted)) + counted
    for router, counted in by_router.items():
        bias = biases[router]
        assert bias is not None, "Balancing.of has looked"
        change = (rate * torch.sign(counted.mean() - counted)).to(bias.dtype).view(bias.shape)
        bias.add_(placed(change, bias))


def figures(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """What is logged of the sums since the last line; {} where nothing was counted.

    moe_max_load                     the fullest expert of any layer, as a multiple of the mean
    moe_max_load/layer_l             the same of one layer
    moe_load/layer_l/expert_e        the expert's share of the layer's choices; left out where there are over 256 experts
    moe_router_entropy, .../layer_l  mean over the tokens, as a share of the largest there is: 0 is sure, 1 knows nothing
    moe_dropped                      choices that no expert computed, of real tokens
    """
    loads = _loads(found)
    if not loads or not found[TOKENS][0]:
        return {}
    shown = sum(len(load) for _, _, load in loads) <= SHOWN_LOADS
    fullest, entropy, shares = dict[str, float](), dict[str, float](), dict[str, float]()
    for layer, _, load in loads:
        total, experts = max(1.0, sum(load)), len(load)
        fullest[f"moe_max_load/layer_{layer}"] = max(load) * experts / total
        entropy[f"moe_router_entropy/layer_{layer}"] = found[ENTROPY][layer] / found[TOKENS][0] / math.log(experts)
        if shown:
            shares |= {f"moe_load/layer_{layer}/expert_{number}": count / total for number, count in enumerate(load)}
    return {
        "moe_max_load": max(fullest.values()),
        "moe_router_entropy": sum(entropy.values()) / len(entropy),
        "moe_dropped": found[DROPPED][0],
        **fullest,
        **entropy,
        **shares,
    }


def _loads(found: Mapping[str, Sequence[float]]) -> list[tuple[int, int, Sequence[float]]]:
    """(number of the call, its router, load of each expert), in the order of the calls."""
    named = [(name.split("/"), load) for name, load in found.items() if name.startswith(f"{LOAD}/")]
    return sorted((int(call), int(router), load) for (_, call, router), load in named)
