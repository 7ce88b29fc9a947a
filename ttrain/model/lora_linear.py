"""A linear layer with a low-rank adapter as one node of the autograd graph: PEFT's layer, names and files, fewer passes."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn


class FusedLinear(Linear):  # type: ignore[misc]  # PEFT has no types
    """y = x W' + s (x A') B' in three products; whatever is not that plain case is left to PEFT.

    PEFT casts the input twice (to the adapter's fp32 and back), autocast casts the frozen W in every pass, and the sum, its
    scale and their gradients are passes of their own over [tokens, out].
    """

    _narrow: tuple[Any, Tensor] | None = None

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else ""
        if arguments or options or not self._is_plain(name):
            return super().forward(x, *arguments, **options)  # type: ignore[no-any-return]
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self.base_layer.weight.dtype
        down, up = self.lora_A[name].weight, self.lora_B[name].weight
        bias = None if self.base_layer.bias is None else self.base_layer.bias.to(dtype)
        arguments = (x.to(dtype), self._weight(dtype), bias, down, up, self.scaling[name])
        found: Tensor = _LowRank.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
        return found

    def _is_plain(self, name: str) -> bool:
        return (
            name in self.lora_A
            and not torch.compiler.is_compiling()  # which fuses by itself, and cannot follow a kept copy
            and not self.disable_adapters
            and not self.merged
            and name not in self.lora_variant
            and (not self.training or isinstance(self.lora_dropout[name], nn.Identity))
            and self.lora_B[name].bias is None
            and not any(p.requires_grad for p in self.base_layer.parameters())
        )

    def _weight(self, dtype: torch.dtype) -> Tensor:
        """The frozen weight in `dtype`. A CPU keeps the copy; a GPU casts fast, and has less room for half as much again."""
        weight: Tensor = self.base_layer.weight.detach()
        if weight.dtype == dtype or weight.device.type != "cpu":
            return weight.to(dtype)
        key = (weight.data_ptr(), weight._version, dtype)
        if self._narrow is None or self._narrow[0] != key:
            self._narrow = (key, weight.to(dtype))
        return self._narrow[1]


class _LowRank(torch.autograd.Function):
    """LoRA, arXiv:2106.09685, equation 3. N tokens, D in, F out, r the rank."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight_FD: Tensor, bias_F: Tensor | None, down_rD: Tensor, up_Fr: Tensor, scale: float
    ) -> Tensor:
        dtype = weight_FD.dtype
        x_ND = x.flatten(0, -2)
        down, up = down_rD.to(dtype), (up_Fr * scale).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            h_Nr = x_ND @ down.T
            y = torch.nn.functional.linear(x, weight_FD, bias_F)  # no view, which some models could not write into
            y.view(-1, y.shape[-1]).addmm_(h_Nr, up.T)
        ctx.save_for_backward(x_ND, weight_FD, down, up, h_Nr)
        ctx.scale, ctx.type = scale, down_rD.dtype
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_ND, weight_FD, down, up, h_Nr = ctx.saved_tensors
        dy_NF = grad.flatten(0, -2)
        dh_Nr = dy_NF @ up
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (dy_NF @ weight_FD).addmm_(dh_Nr, down).view(*grad.shape[:-1], -1)
        grad_down = (dh_Nr.T @ x_ND).to(ctx.type)
        grad_up = (dy_NF.T @ h_Nr).to(ctx.type).mul_(ctx.scale)
        return grad_x, None, None, grad_down, grad_up, None
