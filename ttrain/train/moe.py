"""Mixture-of-experts layers with one product per expert, over tokens sorted by expert.

transformers' own grouped products do not know autocast: in bf16 they compute in the fp32 of the weights. Here they are in
the type of autocast, and on a CPU the whole layer is one node of the autograd graph. Forward and backward of 4096 tokens,
width 512, 4 of 32 experts 352 wide, two EPYC cores, bf16: one expert after the other 2049 ms, transformers' groups 530 ms,
here 229 ms; in fp32 938, 511 and 436 ms.

Letters in names: N tokens, k experts for each, S = N*k choices sorted by expert, E experts, D width, F inner width.
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
from torch.nn import functional as F

from ttrain.config.model import Moe
from ttrain.errors import UsageError
from ttrain.train.distributed import shard_like
from ttrain.train.kernels import SILUS
from ttrain.train.precision import autocast_dtype, is_ampere

NAME = "ttrain"  # among the experts implementations of transformers


def group(model: nn.Module) -> None:
    """Let the experts of a transformers model compute here; results are the same up to rounding."""
    transformers_model: Any = model
    experts = [module for module in model.modules() if _is_plain(module)]
    if not experts or transformers_model.config._experts_implementation == NAME:
        return
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)
    transformers_model.set_experts_implementation(NAME)


def _is_plain(module: Any) -> bool:
    """Whether these are SwiGLU experts (arXiv:2002.05202) in two tensors, [E, 2F, D] and [E, D, F], and nothing more."""
    others = ("has_bias", "has_post_expert_norm", "is_transposed", "_is_expert_parallel")
    return (
        getattr(module, "has_gate", False)
        and getattr(module, "is_concatenated", False)
        and not any(getattr(module, name, True) for name in others)
        and type(getattr(module, "act_fn", None)).__name__ in SILUS
        and type(module)._apply_gate.__name__ == "_default_apply_gate"
    )


def _experts(self: Any, hidden_ND: Tensor, experts_Nk: Tensor, weights_Nk: Tensor) -> Tensor:
    """Weighted sum of the expert outputs of each token, [N, D]; the signature is transformers'."""
    dtype = autocast_dtype(hidden_ND.device, hidden_ND.dtype)
    output: Tensor
    if torch.compiler.is_compiling() or not _is_plain(self) or not _has_products(hidden_ND.device, dtype):
        from transformers.integrations.moe import grouped_mm_experts_forward

        output = grouped_mm_experts_forward(self, hidden_ND, experts_Nk, weights_Nk)
    elif hidden_ND.device.type == "cpu":
        arguments = (hidden_ND, self.gate_up_proj, self.down_proj, experts_Nk, weights_Nk, dtype)
        output = Experts.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    else:
        output = grouped_products(hidden_ND, self.gate_up_proj, self.down_proj, experts_Nk, weights_Nk, dtype)
    return output.to(hidden_ND.dtype)


def _has_products(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type == "cuda":
        return dtype == torch.bfloat16 and is_ampere(device)
    return device.type == "cpu" and dtype != torch.float16  # a sum can exceed the range of fp16


def grouped_products(
    hidden_ND: Tensor, gate_up_E2FD: Tensor, down_EDF: Tensor, experts_Nk: Tensor, weights_Nk: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute the experts with torch's grouped products, without synchronising with the device."""
    N, k = experts_Nk.shape
    experts_S, order_S = experts_Nk.flatten().sort(stable=True)
    numbers_E = torch.arange(len(down_EDF), device=experts_S.device)
    ends_E = torch.searchsorted(experts_S, numbers_E, right=True).to(torch.int32)
    with torch.autocast(hidden_ND.device.type, enabled=False):
        x_SD = hidden_ND.to(dtype)[order_S // k]
        gate_SF, up_SF = F.grouped_mm(x_SD, gate_up_E2FD.to(dtype).transpose(1, 2), offs=ends_E).chunk(2, -1)
        y_SD = F.grouped_mm(F.silu(gate_SF) * up_SF, down_EDF.to(dtype).transpose(1, 2), offs=ends_E)
        places_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(N * k, device=order_S.device))
        y_NkD = (y_SD * weights_Nk.flatten()[order_S, None])[places_S].view(N, k, -1)
    return y_NkD.sum(1)


class Experts(torch.autograd.Function):
    """Keeps the tokens and the inputs of the activation; recomputes the rest in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
        experts_Nk: Tensor,
        weights_Nk: Tensor,
        dtype: Any,
    ) -> Tensor:
        N, k = experts_Nk.shape
        experts_S, order_S = experts_Nk.flatten().sort(stable=True)
        counts = torch.bincount(experts_S, minlength=len(down_EDF))[: len(down_EDF)].tolist()
        with torch.autocast("cpu", enabled=False):
            hidden, gate_up, down = hidden_ND.to(dtype), gate_up_E2FD.to(dtype), down_EDF.to(dtype)
            weights_S1 = weights_Nk.flatten()[order_S, None].to(dtype)
            x_SD = hidden[order_S // k]
            inner_S2F = x_SD.new_zeros(len(order_S), gate_up.shape[1])
            for expert, rows in _parts(counts):
                torch.mm(x_SD[rows], gate_up[expert].T, out=inner_S2F[rows])
            gate_SF, up_SF = inner_S2F.chunk(2, -1)
            active_SF = F.silu(gate_SF).mul_(up_SF).mul_(weights_S1)
            y_SD = torch.zeros_like(x_SD)  # choices of no expert stand at the end, and add nothing
            for expert, rows in _parts(counts):
                torch.mm(active_SF[rows], down[expert].T, out=y_SD[rows])
        ctx.save_for_backward(hidden, inner_S2F, gate_up, down, order_S, weights_S1)
        ctx.counts, ctx.k, ctx.types = (
            counts,
            k,
            [tensor.dtype for tensor in (hidden_ND, gate_up_E2FD, down_EDF, weights_Nk)],
        )
        return torch.empty_like(y_SD).index_copy_(0, order_S, y_SD).view(N, k, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor | None, ...]:
        hidden, inner_S2F, gate_up, down, order_S, weights_S1 = ctx.saved_tensors
        tokens_S = order_S // ctx.k
        x_SD, grad_SD = hidden[tokens_S], grad_ND.to(hidden.dtype)[tokens_S]
        gate_SF, up_SF = inner_S2F.chunk(2, -1)
        silu_SF = F.silu(gate_SF)
        active_SF = silu_SF * up_SF
        grad_active_SF = torch.zeros_like(active_SF)
        for expert, rows in _parts(ctx.counts):
            torch.mm(grad_SD[rows], down[expert], out=grad_active_SF[rows])
        grad_weights_S = (grad_active_SF * active_SF).sum(-1, dtype=torch.promote_types(hidden.dtype, torch.float32))
        grad_active_SF.mul_(weights_S1)
        grad_gate_up = grad_down = None
        if ctx.needs_input_grad[2]:
            grad_down = _by_expert(grad_SD, active_SF.mul_(weights_S1), down, ctx.counts, ctx.types[2])
        grad_gate_SF = torch.ops.aten.silu_backward(grad_active_SF * up_SF, gate_SF)
        grad_inner_S2F = torch.cat((grad_gate_SF, grad_active_SF.mul_(silu_SF)), -1)
        if ctx.needs_input_grad[1]:
            grad_gate_up = _by_expert(grad_inner_S2F, x_SD, gate_up, ctx.counts, ctx.types[1])
        grad_x_SD = torch.zeros_like(x_SD)
        for expert, rows in _parts(ctx.counts):
            torch.mm(grad_inner_S2F[rows], gate_up[expert], out=grad_x_SD[rows])
        grad_hidden = torch.empty_like(grad_x_SD).index_copy_(0, order_S, grad_x_SD).view(len(hidden), ctx.k, -1).sum(1)
        grad_weights = torch.empty_like(grad_weights_S).index_copy_(0, order_S, grad_weights_S).view(-1, ctx.k)
        return grad_hidden.to(ctx.types[0]), grad_gate_up, grad_down, None, grad_weights.to(ctx.types[3]), None


def _parts(counts: list[int]) -> Iterator[tuple[int, slice]]:
    """(expert, slice of its choices) for every expert that was chosen."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _by_expert(left_SA: Tensor, right_SB: Tensor, like_EAB: Tensor, counts: list[int], dtype: torch.dtype) -> Tensor:
    """left.T @ right of each expert's choices, [E, A, B]; zeros for an expert without any."""
    found_EAB = torch.zeros(like_EAB.shape, dtype=dtype, device=like_EAB.device)
    for expert, rows in _parts(counts):
        found_EAB[expert] = left_SA[rows].T @ right_SB[rows]
    return found_EAB


SHOWN_LOADS = 256  # with more experts than this in all layers together, loads are summarised, not listed
# Routers that do not return logits, weights and experts: Llama 4's returns no experts, Dbrx's neither experts nor weights.
UNLIKE = frozenset({"Llama4Router", "DbrxRouter", "InklingTopkRouter"})

BIAS = "e_score_correction_bias"

LOAD, ENTROPY, DROPPED, TOKENS = "moe_load", "moe_entropy", "moe_dropped", "moe_tokens"  # names of sums


@dataclass
class RouterCall:
    """One call of a router; `dispatched`: the experts that were asked to compute it, if known."""

    router: int
    logits_NE: Tensor  # in fp32, or wider
    experts_Nk: Tensor
    dispatched_Nk: Tensor | None = None


class Routers:
    """The routers of a model, with their choices recorded. Their own products are computed in fp32, also under autocast.

    The router decides in logits which of a few experts it takes, and bf16 has three digits (arXiv:2101.03961, section 2.4).
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = [(name, module) for name, module in model.named_modules() if _is_watchable(type(module).__name__)]
        self._scored_independently = [_scores_apart(module) for _, module in self.modules]
        self._open: list[RouterCall] | None = None
        for number, (name, module) in enumerate(self.modules):
            module.forward = MethodType(_in_fp32, module)
            module.register_forward_hook(self._noting(number))
            experts = getattr(model.get_submodule(name.rpartition(".")[0]), "experts", None)
            if isinstance(experts, nn.Module):
                experts.register_forward_pre_hook(self._counting, with_kwargs=True)

    @property
    def trained(self) -> bool:
        """Whether the routers are trained; those of a frozen base are only observed."""
        return any(parameter.requires_grad for _, module in self.modules for parameter in module.parameters())

    @property
    def biases(self) -> list[Tensor | None]:
        """The balancing bias of each router, which no gradient trains."""
        tensors_by_name = ({**dict(module.named_buffers()), **dict(module.named_parameters())} for _, module in self.modules)
        return [next((t for name, t in some.items() if name.rpartition(".")[2] == BIAS), None) for some in tensors_by_name]

    @contextlib.contextmanager
    def watched(self) -> Iterator[list[RouterCall]]:
        """Record the router calls inside the context, without recomputation by gradient checkpointing, which comes later."""
        calls: list[RouterCall] = []
        self._open = calls
        try:
            yield calls
        finally:
            self._open = None

    def scores(self, choice: RouterCall) -> Tensor:
        """Normalised affinity of each token to each expert: shares [N, E] that sum to 1 (arXiv:2412.19437, eq. 19)."""
        logits_NE = choice.logits_NE
        if not self._scored_independently[choice.router]:
            return logits_NE.softmax(-1)
        scores_NE = logits_NE.sigmoid()
        return scores_NE / scores_NE.sum(-1, keepdim=True).clamp_min(torch.finfo(scores_NE.dtype).tiny)

    def _noting(self, number: int) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if self._open is not None:
                logits_NE, _, experts_Nk = output
                wide = torch.promote_types(logits_NE.dtype, torch.float32)
                self._open.append(RouterCall(number, logits_NE.to(wide), experts_Nk))

        return note

    def _counting(self, module: nn.Module, inputs: tuple[Any, ...], keyword_inputs: dict[str, Any]) -> None:
        if self._open:
            self._open[-1].dispatched_Nk = keyword_inputs.get("top_k_index", inputs[1] if len(inputs) > 1 else None)


def _is_watchable(name: str) -> bool:
    return name.endswith("Router") and name not in UNLIKE


def _scores_apart(router: nn.Module) -> bool:
    """Whether a router scores each expert by a sigmoid, as DeepSeek-V3's does, and not all together by softmax.

    Over twenty architectures of transformers do, with no setting or base class in common; hence the look at their code.
    """
    names = inspect.unwrap(type(router).forward).__code__.co_names
    return "sigmoid" in names and "softmax" not in names


def _in_fp32(self: Any, hidden: Tensor, *others: Any) -> Any:
    with torch.autocast(hidden.device.type, enabled=False):
        return type(self).forward(self, hidden.to(torch.promote_types(hidden.dtype, torch.float32)), *others)


@dataclass(frozen=True)
class Balancing:
    """Load-balancing settings of a model, from its own config."""

    balance: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, routers: Routers) -> Balancing:
        """The settings in the config; all zero if routers are frozen. Raises UsageError if that is impossible."""
        config: Any = getattr(model, "config", None)
        balancing = cls(**{setting: float(getattr(config, name, None) or 0.0) for name, setting in Moe.IN_CONFIG.items()})
        if not routers.modules:
            if balancing != cls() and "router_aux_loss_coef" in vars(config) and "router_z_loss_coef" in vars(config):
                raise UsageError(
                    f"model.moe asks for load balancing, but {type(model).__name__} has no router that can be observed; set "
                    f"model.moe.balance=0, model.moe.z_loss=0 and model.moe.bias_rate=0, or another model.kind"
                )
            return cls()
        if not routers.trained:
            return cls()
        if balancing.bias_rate and None in routers.biases:
            raise UsageError(
                f"model.moe.bias_rate is {balancing.bias_rate} but the routers of {type(model).__name__} have no bias; set "
                f"model.kind=llama or qwen3, or model.moe.bias_rate=0"
            )
        return balancing


def row_losses(
    routers: Routers, choices: Sequence[RouterCall], tokens_BT: Tensor, live_B: Tensor, *, z_loss: bool
) -> tuple[Tensor, Tensor]:
    """Balance loss and router z-loss, each summed over calls and rows, a row times its targets `live_B`.

    Of a row's T tokens: sum_e f_e P_e, with f_e the share of its choices that fell on expert e, times E, and P_e the mean of
    its scores (arXiv:2412.19437, eq. 17 to 20); 1 where all are even. P carries the gradient. The z-loss is the mean of
    logsumexp(logits)^2 (arXiv:2202.08906, eq. 5). `tokens_BT`: False at padding, which counts in neither.
    """
    with torch.autocast(tokens_BT.device.type, enabled=False):  # autocast would count in bf16
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
def sums(routers: Routers, choices: Sequence[RouterCall], tokens_BT: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens marked True: their number, each expert's load, the scores' entropy in nats, dropped choices.

    The load of each call has its number and its router's in the name. Loads and tokens are whole numbers, so that they are
    the same in whatever order they are summed. A choice is dropped if the experts were not asked to compute it.
    """
    inside_N = tokens_BT.flatten()
    loads: dict[str, Tensor] = {}
    entropies = []
    dropped = torch.zeros(1, dtype=torch.int64, device=inside_N.device)
    for number, choice in enumerate(choices):
        E = choice.logits_NE.shape[1]
        load_E = loads[f"{LOAD}/{number}/{choice.router}"] = _load(choice.experts_Nk, inside_N, E)
        entropies.append((torch.special.entr(routers.scores(choice)).sum(-1) * inside_N).sum())
        if choice.dispatched_Nk is not None:
            dropped += load_E.sum() - _load(choice.dispatched_Nk, inside_N, E).sum()
    return {**loads, ENTROPY: torch.stack(entropies), DROPPED: dropped, TOKENS: inside_N.sum()[None]}


def _load(experts_Nk: Tensor, inside_N: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen, [E]; numbers out of range mean no expert and do not count."""
    counted_Nk = inside_N[:, None] & (experts_Nk >= 0) & (experts_Nk < experts)
    load = torch.zeros(experts, dtype=torch.int64, device=experts_Nk.device)
    return load.scatter_add_(0, experts_Nk.clamp(0, experts - 1).flatten(), counted_Nk.flatten().long())


@torch.no_grad()
def move_biases(routers: Routers, step_sums: Mapping[str, Sequence[float]], rate: float) -> None:
    """Lower the biases of overloaded experts: b_e += rate * sign(mean load - load_e) (arXiv:2408.15664, algorithm 1).

    `step_sums`: the sums of a whole step, over its micro-batches and all ranks.
    """
    biases = routers.biases
    by_router: dict[int, Tensor] = {}
    for _, router, load in _loads(step_sums):
        counted = torch.tensor(load, dtype=torch.float64)
        by_router[router] = by_router.get(router, torch.zeros_like(counted)) + counted
    for router, counted in by_router.items():
        bias = biases[router]
        assert bias is not None, "Balancing.of has checked this"
        change = (rate * torch.sign(counted.mean() - counted)).to(bias.dtype).view(bias.shape)
        bias.add_(shard_like(change, bias))


def figures(window_sums: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Metrics for the log from the sums since the last line; {} if nothing was counted.

    moe_max_load                     the fullest expert of any layer, as a multiple of the mean
    moe_max_load/layer_l             the same of one layer
    moe_load/layer_l/expert_e        the expert's share of the layer's choices; left out where there are over 256 experts
    moe_router_entropy, .../layer_l  mean over the tokens, as a share of the maximum: 0 is certain, 1 is uniform
    moe_dropped                      choices that no expert computed, of real tokens
    """
    loads = _loads(window_sums)
    if not loads or not window_sums[TOKENS][0]:
        return {}
    shown = sum(len(load) for _, _, load in loads) <= SHOWN_LOADS
    fullest, entropy, shares = dict[str, float](), dict[str, float](), dict[str, float]()
    for layer, _, load in loads:
        total, experts = max(1.0, sum(load)), len(load)
        fullest[f"moe_max_load/layer_{layer}"] = max(load) * experts / total
        entropy[f"moe_router_entropy/layer_{layer}"] = (
            window_sums[ENTROPY][layer] / window_sums[TOKENS][0] / math.log(experts)
        )
        if shown:
            shares |= {f"moe_load/layer_{layer}/expert_{number}": count / total for number, count in enumerate(load)}
    return {
        "moe_max_load": max(fullest.values()),
        "moe_router_entropy": sum(entropy.values()) / len(entropy),
        "moe_dropped": window_sums[DROPPED][0],
        **fullest,
        **entropy,
        **shares,
    }


def _loads(named_sums: Mapping[str, Sequence[float]]) -> list[tuple[int, int, Sequence[float]]]:
    """(number of the call, its router, load of each expert), in the order of the calls."""
    loads = [(name.split("/"), load) for name, load in named_sums.items() if name.startswith(f"{LOAD}/")]
    return sorted((int(call), int(router), load) for (_, call, router), load in loads)
