"""A linear layer with a low-rank adapter as one autograd node, and prefixes."""

from typing import Any

import torch
from peft import PeftModelForCausalLM, PrefixTuningConfig, TaskType
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from transformers import PreTrainedModel

from ttrain.config import Lora
from ttrain.errors import UsageError


class FusedLinear(Linear):  # type: ignore[misc]  # PEFT has no types
    """y = x W' + s (x A') B' in three products; all other cases are left to PEFT."""

    # Without this class PEFT casts the input twice, autocast casts the frozen W in every pass, and
    # the sum, its scaling and their gradients are separate passes over [tokens, out].

    _narrow: tuple[Any, Tensor] | None = None

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        name = self.active_adapters[0] if len(self.active_adapters) == 1 else ""
        if arguments or options or not self.is_plain(name):
            return super().forward(x, *arguments, **options)  # type: ignore[no-any-return]
        kind = x.device.type
        dtype = (
            torch.get_autocast_dtype(kind)
            if torch.is_autocast_enabled(kind)
            else self.base_layer.weight.dtype
        )
        weights = (self.lora_A[name].weight, self.lora_B[name].weight)
        bias = None if self.base_layer.bias is None else self.base_layer.bias.to(dtype)
        arguments = (x.to(dtype), self._weight(dtype), bias, *weights, self.scaling[name])
        return LowRank.apply(*arguments)  # type: ignore[no-untyped-call, no-any-return]

    def is_plain(self, name: str) -> bool:
        """Whether this equals PEFT's result: one active adapter, no dropout, variant or bias."""
        return (
            name in self.lora_A
            # torch.compile fuses by itself, and cannot trace the cached weight.
            and not torch.compiler.is_compiling()
            and not self.disable_adapters
            and not self.merged
            and name not in self.lora_variant
            and (not self.training or isinstance(self.lora_dropout[name], nn.Identity))
            and self.lora_B[name].bias is None
            and not any(p.requires_grad for p in self.base_layer.parameters())
        )

    def _weight(self, dtype: torch.dtype) -> Tensor:
        # Cached on a CPU only: a GPU casts fast, and has less room for a copy.
        weight: Tensor = self.base_layer.weight.detach()
        if weight.dtype == dtype or weight.device.type != "cpu":
            return weight.to(dtype)
        key = (weight.data_ptr(), weight._version, dtype)
        if self._narrow is None or self._narrow[0] != key:
            self._narrow = (key, weight.to(dtype))
        return self._narrow[1]


class LowRank(torch.autograd.Function):
    """LoRA, arXiv:2106.09685, equation 3. N tokens, D in, F out, r the rank."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        down_rD: Tensor,
        up_Fr: Tensor,
        scale: float,
    ) -> Tensor:
        dtype = weight_FD.dtype
        x_ND = x.flatten(0, -2)
        down = down_rD.to(dtype)
        up = (up_Fr * scale).to(dtype)
        with torch.autocast(x.device.type, enabled=False):
            h_Nr = x_ND @ down.T
            # Not a view, since some models write into it.
            y = torch.nn.functional.linear(x, weight_FD, bias_F)
            y.view(-1, y.shape[-1]).addmm_(h_Nr, up.T)
        ctx.save_for_backward(x_ND, weight_FD, down, up, h_Nr)
        ctx.scale = scale
        ctx.type = down_rD.dtype
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


class PrefixModel(PeftModelForCausalLM):  # type: ignore[misc]  # PEFT has no types
    """PEFT's model, which can also be called token by token with its cache.

    Callers do not count virtual tokens: their mask and positions are those of the text.
    """

    def forward(self, *arguments: Any, cache: Any = None, **options: Any) -> Any:
        if cache is None or not cache.get_seq_length():
            return super().forward(*arguments, **options)
        return self.base_model(*arguments, cache=cache, **self._behind_prefix(options))

    def prepare_inputs_for_generation(self, *arguments: Any, **kwargs: Any) -> Any:
        # PEFT 0.21 looks for the cache as `past_key_values`, its name before transformers 5.24, and
        # would begin each token with an empty one. transformers looks for the name `kwargs`.
        inputs = self.base_model_prepare_inputs_for_generation(*arguments, **kwargs)
        cache = inputs.get("cache")
        if cache is None or not cache.get_seq_length():
            inputs["cache"] = self.get_prompt(batch_size=len(inputs["input_ids"]))
        return self._behind_prefix(inputs)

    def _behind_prefix(self, inputs: dict[str, Any]) -> dict[str, Any]:
        # The inputs of the text as the base model counts them: after the virtual tokens.
        virtual = self.active_peft_config.num_virtual_tokens
        inputs = dict(inputs)
        mask_BT = inputs.get("attention_mask")
        positions_BT = inputs.get("position_ids")
        if mask_BT is not None:
            inputs["attention_mask"] = torch.cat(
                [mask_BT.new_ones(len(mask_BT), virtual), mask_BT], 1
            )
        if positions_BT is not None:
            inputs["position_ids"] = positions_BT + virtual
        return inputs


def attach(model: PreTrainedModel, config: Lora) -> PrefixModel:
    """Add a prefix of random keys and values to a model and freeze the base.

    Raises UsageError if the base has too few positions, or does not cache keys and values of one
    shape in every layer.
    """
    _check_positions(model, config)
    was_training = model.training
    probe_11 = torch.ones((1, 1), dtype=torch.long, device=model.device)
    with torch.no_grad():
        cache = getattr(model.eval()(input_ids=probe_11, use_cache=True), "cache", None)
    layers = getattr(cache, "layers", ())
    states = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    shapes: set[Any] = {None if state is None else state.shape for state in states}
    if len(shapes) != 1 or None in shapes:
        raise UsageError(
            f"lora.kind is prefix, but a model of the kind {model.config.model_type} does not "
            "cache keys and values of one shape in every layer; set lora.kind=lora"
        )
    [(_, heads, _, width)] = shapes
    settings = PrefixTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        num_virtual_tokens=config.virtual_tokens,
        num_layers=len(layers),
        num_attention_heads=heads,
        token_dim=heads * width,
        num_transformer_submodules=1,
    )
    adapted = PrefixModel(model, settings)
    adapted.train(was_training)
    return adapted


def _check_positions(model: PreTrainedModel, config: Lora) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = config.row_length + config.virtual_tokens
    if limit is not None and needed > limit:
        length = limit - config.virtual_tokens
        fix = (
            f"set lora.row_length to at most {length}"
            if length > 0
            else "lower lora.virtual_tokens"
        )
        raise UsageError(
            f"lora.row_length is {config.row_length} and lora.virtual_tokens "
            f"{config.virtual_tokens}, together {needed} positions, but the base model has "
            f"{limit}; {fix}"
        )
