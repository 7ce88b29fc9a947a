"""Prefix tuning (arXiv:2101.00190) through PEFT: trained keys and values before every record, in every layer.

Letters in names: B rows, T positions, P virtual tokens, L layers, G heads of keys and values, K width of a head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModelForCausalLM
from torch import Tensor

from ttrain.config import Lora
from ttrain.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "default"
TOLERANCE = 0.2  # of what the tokens change: rounding is 1e-5 of it in fp32, and percents over 4-bit weights in bf16


class PrefixModel(PeftModelForCausalLM):  # type: ignore[misc]  # PEFT has no types
    """PEFT's model, which can also be called token by token with the cache that it returned: PEFT alone starts anew then.

    Its callers count no virtual tokens: a mask and positions that they pass are those of the text.
    """

    def forward(self, *arguments: Any, past_key_values: Any = None, **options: Any) -> Any:
        if past_key_values is None or not past_key_values.get_seq_length():
            return super().forward(*arguments, **options)
        virtual = self.active_peft_config.num_virtual_tokens
        mask_BT, positions_BT = options.get("attention_mask"), options.get("position_ids")
        if mask_BT is not None:
            options["attention_mask"] = torch.cat([mask_BT.new_ones(len(mask_BT), virtual), mask_BT], 1)
        if positions_BT is not None:
            options["position_ids"] = positions_BT + virtual
        return self.base_model(*arguments, past_key_values=past_key_values, **options)


def attach(model: PreTrainedModel, config: Lora) -> PrefixModel:
    """The model with a prefix of random keys and values, as PEFT draws them; the base is frozen.

    Raises UsageError where positions do not suffice, or where the architecture's attention takes no keys and values from
    elsewhere: that is tried, with those of some tokens, which must count as the tokens themselves do.
    """
    from peft import PrefixTuningConfig, TaskType

    _check_positions(model, config)
    training = model.training
    model.eval()
    ids_1P, probe_1T = _random_tokens(model, config.seed, config.virtual_tokens), _random_tokens(model, config.seed + 1, 4)
    keys_values_LPGK = _keys_and_values(model, ids_1P)
    layers, virtual, heads, width = keys_values_LPGK.shape
    settings = PrefixTuningConfig(
        task_type=TaskType.CAUSAL_LM,
        num_virtual_tokens=virtual,
        num_layers=layers // 2,
        num_attention_heads=heads,
        token_dim=heads * width,
        num_transformer_submodules=1,
    )
    with torch.no_grad():
        without_1TV = model(input_ids=probe_1T, use_cache=False).logits
        expected_1TV = model(input_ids=torch.cat([ids_1P, probe_1T], 1), use_cache=False).logits[:, virtual:]
        adapted = PrefixModel(model, settings)
        fresh = weight(adapted).clone()
        weight(adapted).copy_(keys_values_LPGK.transpose(0, 1).flatten(1))
        found_1TV = adapted(input_ids=probe_1T, use_cache=False).logits
        weight(adapted).copy_(fresh)
    if float((found_1TV - expected_1TV).norm()) > TOLERANCE * float((without_1TV - expected_1TV).norm()):
        raise _refusal(model, "does not look at keys and values that it is given")
    adapted.train(training)
    return adapted


def weight(model: PrefixModel, name: str = NAME) -> Tensor:
    """The prefix, [P, L*2*G*K], as PEFT's file holds it."""
    found: Tensor = model.prompt_encoder[name].embedding.weight
    return found


def _keys_and_values(model: PreTrainedModel, ids_1P: Tensor) -> Tensor:
    """[2L, P, G, K]: keys and values of each layer in turn, for these tokens."""
    with torch.no_grad():
        cache = getattr(model(input_ids=ids_1P, use_cache=True), "past_key_values", None)
    kept = [(getattr(layer, "keys", None), getattr(layer, "values", None)) for layer in getattr(cache, "layers", ())]
    parts = [part for pair in kept for part in pair if part is not None]
    if not parts or len(parts) < 2 * len(kept):
        raise _refusal(model, "keeps other things than keys and values of every layer")
    if len({part.shape for part in parts}) > 1:
        raise _refusal(model, "keeps keys and values of different shapes")
    return torch.cat(parts).transpose(1, 2).float()


def _refusal(model: PreTrainedModel, why: str) -> UsageError:
    kind = model.config.model_type
    return UsageError(f"lora.kind is prefix, but a model of the kind {kind} {why}; set lora.kind=lora")


def _check_positions(model: PreTrainedModel, config: Lora) -> None:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    needed = config.row_length + config.virtual_tokens
    if limit is not None and needed > limit:
        length = config.longest_row(limit - config.virtual_tokens)
        fix = f"set lora.row_length={length}" if length else "lower lora.virtual_tokens"
        raise UsageError(
            f"lora.row_length is {config.row_length} and lora.virtual_tokens {config.virtual_tokens}, together {needed} "
            f"positions, but the base model has {limit}; {fix}"
        )


def _random_tokens(model: PreTrainedModel, seed: int, count: int) -> Tensor:
    """[1, count] ids, without id 0, which some models take for padding."""
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(1, vocab_size, (1, count), generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)
