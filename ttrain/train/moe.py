"""Mixture-of-experts layers with torch's grouped products, over tokens sorted by expert."""
# In the type of autocast, which transformers' grouped products do not know. Forward and backward of
# 2048 tokens, width 512, 4 of 32 experts 352 wide, one EPYC core: 260 ms in bf16, 400 in fp32.
# Letters in names: N tokens, k experts for each, S = N*k choices sorted by expert, E experts, D
# width, F inner width.

import contextlib
import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.config.model import Moe
from ttrain.errors import UsageError
from ttrain.train.distributed import Tensors, shard_like
from ttrain.train.kernels import SILUS
from ttrain.train.precision import autocast_dtype, is_ampere
from ttrain.train.task import Metrics, Sums

NAME = "ttrain"  # among the experts implementations of transformers
# What widths are a multiple of: the rows of grouped products take 16 bytes, also in bf16.
ALIGNED = 8


# With more experts than this in all layers together, loads are summarised, not listed.
SHOWN_LOADS = 256
# Routers that do not return logits, weights and experts: Llama 4's returns no experts, Dbrx's
# neither experts nor weights.
UNLIKE = frozenset({"Llama4Router", "DbrxRouter", "InklingTopkRouter"})
BIAS = "e_score_correction_bias"
LOAD = "moe_load"
ENTROPY = "moe_entropy"
TOKENS = "moe_tokens"  # names of sums


def group(model: Any) -> None:
    """Compute the experts of a transformers model here; results are the same up to rounding."""
    experts: list[Any] = [module for module in model.modules() if _is_plain(module)]
    if not experts or model.config._experts_implementation == NAME:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    is_aligned = all(
        size % ALIGNED == 0 for module in experts for size in module.down_proj.shape[1:]
    )
    model.set_experts_implementation(NAME if is_aligned else "eager")


def _is_plain(module: Any) -> bool:
    # SwiGLU experts (arXiv:2002.05202) in two tensors, [E, 2F, D] and [E, D, F], and nothing more.
    others = ("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
    return (
        getattr(module, "has_gate", False)
        and getattr(module, "is_concatenated", False)
        and not any(getattr(module, name, True) for name in others)
        and type(getattr(module, "act_fn", None)).__name__ in SILUS
        and type(module)._apply_gate.__name__ == "_default_apply_gate"
    )


def _experts(self: Any, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Any:
    dtype = autocast_dtype(hidden_ND)
    if (
        torch.compiler.is_compiling()
        or not _is_plain(self)
        or not _has_products(hidden_ND.device, dtype)
    ):
        from transformers.integrations.moe import grouped_mm_experts_forward

        output = grouped_mm_experts_forward(self, hidden_ND, experts_Nk, weights_Nk)
    else:
        output = grouped_products(
            hidden_ND, self.gate_up_proj, self.down_proj, experts_Nk, weights_Nk, dtype
        )
    return output.to(hidden_ND.dtype)


def _has_products(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cuda":
        return dtype == torch.bfloat16 and is_ampere(device)
    return device.type == "cpu" and dtype != torch.float16  # a sum can exceed the range of fp16


def grouped_products(
    hidden_ND: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    experts_Nk: Tensor,
    weights_Nk: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the experts with torch's grouped products, without synchronising."""
    N, k = experts_Nk.shape
    experts_S, order_S = experts_Nk.flatten().sort(stable=True)
    numbers_E = torch.arange(len(down_EDF), device=experts_S.device)
    ends_E = torch.searchsorted(experts_S, numbers_E, right=True).to(torch.int32)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        x_SD = hidden_ND.to(dtype)[order_S // k]
        gate_SF, up_SF = F.grouped_mm(
            x_SD, gate_up_E2FD.to(dtype).transpose(1, 2), offs=ends_E
        ).chunk(2, -1)
        y_SD = F.grouped_mm(
            F.silu(gate_SF) * up_SF, down_EDF.to(dtype).transpose(1, 2), offs=ends_E
        )
        places_S = torch.empty_like(order_S).scatter_(
            0, order_S, torch.arange(N * k, device=order_S.device)
        )
        y_NkD = (y_SD * weights_Nk.flatten()[order_S, None])[places_S].view(N, k, -1)
    return y_NkD.sum(1)


class RouterCall(NamedTuple):
    """One call of a router."""

    router: int
    logits_NE: Tensor  # in fp32, or wider
    experts_Nk: Tensor


class Routers:
    """The routers of a model, with their choices recorded, and computed in fp32 under autocast."""

    # A router decides by its logits between few experts, and bf16 has three digits
    # (arXiv:2101.03961, section 2.4).

    def __init__(self, model: nn.Module) -> None:
        names = {module: type(module).__name__ for module in model.modules()}
        self.modules = [
            module
            for module, name in names.items()
            if name.endswith("Router") and name not in UNLIKE
        ]
        # Over twenty architectures of transformers score each expert by a sigmoid, as DeepSeek-V3
        # does, with no setting or base class in common; hence the look at their code.
        called = [inspect.unwrap(type(module).forward).__code__.co_names for module in self.modules]
        self._scored_independently = [
            "sigmoid" in functions and "softmax" not in functions for functions in called
        ]
        self._open: list[RouterCall] | None = None
        for number, module in enumerate(self.modules):
            module.forward = MethodType(_in_fp32, module)
            module.register_forward_hook(partial(self._note, number))

    @property
    def trained(self) -> bool:
        """Whether the routers are trained; those of a frozen base are only observed."""
        return any(
            parameter.requires_grad for module in self.modules for parameter in module.parameters()
        )

    @property
    def biases(self) -> list[Tensor | None]:
        """The balancing bias of each router, which no gradient trains."""
        biases: list[Tensor | None] = []
        for module in self.modules:
            named = (*module.named_buffers(), *module.named_parameters())
            biases.append(next((tensor for name, tensor in named if name.endswith(BIAS)), None))
        return biases

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[RouterCall]]:
        """Record the router calls inside the context, without recomputation in backward passes."""
        self._open = calls = list[RouterCall]()
        try:
            yield calls
        finally:
            self._open = None

    def scores(self, choice: RouterCall) -> Tensor:
        """Affinity of each token to each expert, [N, E], normalised (arXiv:2412.19437, eq. 19)."""
        logits_NE = choice.logits_NE
        if not self._scored_independently[choice.router]:
            return logits_NE.softmax(-1)
        scores_NE = logits_NE.sigmoid()
        return scores_NE / scores_NE.sum(-1, keepdim=True).clamp_min(
            torch.finfo(scores_NE.dtype).tiny
        )

    def _note(self, number: int, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._open is not None:
            logits_NE, _, experts_Nk = output
            wide = torch.promote_types(logits_NE.dtype, torch.float32)
            self._open.append(RouterCall(number, logits_NE.to(wide), experts_Nk))


def _in_fp32(self: Any, hidden: Tensor, *others: Any) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return type(self).forward(
            self, hidden.to(torch.promote_types(hidden.dtype, torch.float32)), *others
        )


@dataclass(frozen=True)
class Balancing:
    """Load-balancing settings of a model, from its own config."""

    balance: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, routers: Routers) -> Self:
        """The settings in a model's config; zero for frozen routers. Raises UsageError."""
        config: Any = getattr(model, "config", None)
        balancing = cls(
            **{
                setting: float(getattr(config, name, None) or 0.0)
                for name, setting in Moe.IN_CONFIG.items()
            }
        )
        if (
            not routers.modules
            and balancing != cls()
            and "router_aux_loss_coef" in vars(config)
            and "router_z_loss_coef" in vars(config)
        ):
            raise UsageError(
                f"model.moe asks for load balancing, but {type(model).__name__} has no router "
                "that can be observed; set model.moe.balance=0, model.moe.z_loss=0 and "
                "model.moe.bias_rate=0, or another model.kind"
            )
        if not routers.trained:
            return cls()
        if balancing.bias_rate and None in routers.biases:
            raise UsageError(
                f"model.moe.bias_rate is {balancing.bias_rate} but the routers of "
                f"{type(model).__name__} have no bias; set model.kind=llama or qwen3, or "
                "model.moe.bias_rate=0"
            )
        return balancing


def row_losses(
    routers: Routers,
    choices: Sequence[RouterCall],
    tokens_BT: Tensor,
    live_B: Tensor,
    *,
    z_loss: bool,
) -> tuple[Tensor, Tensor]:
    """Balance loss and router z-loss, summed over calls and rows, a row times its targets `live_B`.

    `tokens_BT`: False at padding, which counts in neither.
    """
    # The balance of a row of T tokens is sum_e f_e P_e (arXiv:2412.19437, eq. 17 to 20): f_e is E
    # times the share of choices that fell on expert e, P_e, which carries the gradient, its mean
    # score; even loads give 1. The z-loss is the mean of logsumexp(logits)^2 (arXiv:2202.08906, eq.
    # 5).
    with torch.autocast(tokens_BT.device.type, enabled=False):  # autocast would count in bf16
        B, T = tokens_BT.shape
        inside_BT = tokens_BT.to(choices[0].logits_NE.dtype)
        live_by_token_B = live_B / inside_BT.sum(1).clamp_min(1)
        balance = z = inside_BT.new_zeros(())
        for choice in choices:
            scores_NE = routers.scores(choice)
            E = scores_NE.shape[1]
            k = choice.experts_Nk.shape[1]
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
def sums(routers: Routers, choices: Sequence[RouterCall], tokens_BT: Tensor) -> Tensors:
    """Sums over the tokens marked True: their number, each expert's load, entropies in nats."""
    # Names of loads hold the number of the call and of its router. Loads and tokens are whole
    # numbers, the same in any order of summation.
    inside_N = tokens_BT.flatten()
    loads = dict[str, Tensor]()
    entropies = []
    for number, choice in enumerate(choices):
        counts_NE = torch.zeros_like(choice.logits_NE, dtype=torch.int64).scatter_(
            1, choice.experts_Nk, 1
        )
        loads[f"{LOAD}/{number}/{choice.router}"] = (counts_NE * inside_N[:, None]).sum(0)
        entropies.append((torch.special.entr(routers.scores(choice)).sum(-1) * inside_N).sum())
    return {**loads, ENTROPY: torch.stack(entropies), TOKENS: inside_N.sum()[None]}


@torch.no_grad()
def move_biases(routers: Routers, step_sums: Sums, rate: float) -> None:
    """Move biases against the load: b_e += rate * sign(mean load - load_e).

    arXiv:2408.15664, algorithm 1. `step_sums`: the sums of a whole step, over micro-batches and
    ranks.
    """
    biases = routers.biases
    by_router: dict[int, Tensor] = {}
    for _, router, load in _loads(step_sums):
        counted = torch.tensor(load, dtype=torch.float64)
        by_router[router] = by_router.get(router, 0) + counted
    for router, counted in by_router.items():
        bias = biases[router]
        assert bias is not None, "Balancing.of has checked this"
        change = (rate * torch.sign(counted.mean() - counted)).to(bias.dtype).view(bias.shape)
        bias.add_(shard_like(change, bias))


def figures(window_sums: Sums) -> Metrics:
    """Metrics for the log from the sums since the last line; {} if nothing was counted."""
    # moe_max_load: the fullest expert of any layer, as a multiple of the mean; /layer_l: of one
    # layer. moe_load/layer_l/expert_e: share of the layer's choices; left out for over 256 experts.
    # moe_router_entropy, /layer_l: mean over tokens, of the maximum: 0 is certain, 1 is uniform.
    loads = _loads(window_sums)
    if not loads or not window_sums[TOKENS][0]:
        return {}
    fullest = dict[str, float]()
    entropy = dict[str, float]()
    shares = dict[str, float]()
    for layer, _, load in loads:
        total = max(1.0, sum(load))
        experts = len(load)
        fullest[f"moe_max_load/layer_{layer}"] = max(load) * experts / total
        entropy[f"moe_router_entropy/layer_{layer}"] = window_sums[ENTROPY][layer] / (
            window_sums[TOKENS][0] * math.log(experts)
        )
        if sum(len(load) for _, _, load in loads) <= SHOWN_LOADS:
            shares |= {
                f"moe_load/layer_{layer}/expert_{number}": count / total
                for number, count in enumerate(load)
            }
    return {
        "moe_max_load": max(fullest.values()),
        "moe_router_entropy": sum(entropy.values()) / len(entropy),
        **fullest,
        **entropy,
        **shares,
    }


def _loads(named_sums: Sums) -> list[tuple[int, int, Sequence[float]]]:
    """(number of the call, its router, load of each expert), in the order of the calls."""
    loads = [
        (name.split("/"), load) for name, load in named_sums.items() if name.startswith(f"{LOAD}/")
    ]
    return sorted((int(call), int(router), load) for (_, call, router), load in loads)
