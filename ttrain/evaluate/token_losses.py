"""Loss of each next token, only at the positions that count, without ever holding all logits.

Letters in names: B rows, T positions, N positions that count, C of a chunk, D width of the hidden states, V entries of the
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.data.packing import IGNORE
from ttrain.train.losses import SLICE_ENTRIES, default_chunk_tokens

Parts = tuple[Callable[..., Any], nn.Module]  # the decoder and the output head of a model
PROBED_TOKENS = 8
MARK = 100.0  # so large that a cap, a scale or a shift between the head and the logits would change it


@final
class TokenLosses:
    """Computes negative log-likelihoods under one model, which is in eval mode.

    If the logits are just the output head applied to the decoder's output, the head is applied here, chunk by chunk and only
    to the positions that count. The first batch shows whether that is so; otherwise (a soft cap, a prefix before the row, a
    user's own model without `get_decoder`) the model computes all its logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._parts: Parts | None = None
        self._probed = False

    def __call__(self, input_ids_BT: Tensor, labels_BT: Tensor, **inputs: Any) -> Tensor:
        """Nats of each label that is not IGNORE, of shape [N] in fp32, in the order of `labels_BT[labels_BT != IGNORE]`.

        `labels_BT` lies on the CPU, so that nothing waits for a GPU to know where they are; `labels_BT[t]` follows
        `input_ids_BT[t]`. `inputs` go to the model unchanged. Uses no_grad, not inference_mode, which would make tables that
        the model caches unusable in training.
        """
        live_N = (labels_BT.flatten() != IGNORE).nonzero()[:, 0]
        device = input_ids_BT.device
        labels_N = labels_BT.flatten()[live_N].to(device)
        with torch.no_grad():
            if not self._probed:
                self._parts, self._probed = plain_parts(self._model, input_ids_BT[:1, :PROBED_TOKENS]), True
            if self._parts is None:
                logits_BTV = self._model(input_ids=input_ids_BT, use_cache=False, **inputs).logits
                return _costs(logits_BTV.flatten(0, 1), live_N.to(device), labels_N, None)
            decoder, head = self._parts
            hidden_BTD = decoder(input_ids=input_ids_BT, use_cache=False, **inputs).last_hidden_state
            return _costs(hidden_BTD.flatten(0, 1), live_N.to(device), labels_N, head)


def causal_of(model: Any) -> Any:
    """The model of transformers, inside PEFT's if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def plain_parts(model: Any, input_ids_BT: Tensor) -> Parts | None:
    """The parts of a model whose logits are just head(decoder(input_ids)); None for any other.

    The head's output is marked and must reach the logits unchanged; its input must be the decoder's output.
    """
    causal = causal_of(model)
    try:
        decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module) or decoder is causal:
        return None
    captured: list[tuple[Tensor, Tensor]] = []

    def mark(module: nn.Module, head_inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        marks_V = torch.linspace(-MARK, MARK, output.shape[-1], device=output.device, dtype=output.dtype)
        captured.append((head_inputs[0], output + marks_V))
        return captured[-1][1]

    watched = head.register_forward_hook(mark)
    try:
        logits = model(input_ids=input_ids_BT, use_cache=False).logits
    finally:
        watched.remove()
    hidden = getattr(decoder(input_ids=input_ids_BT, use_cache=False), "last_hidden_state", None)
    if len(captured) != 1 or hidden is None:
        return None
    head_input, marked = captured[0]
    return (decoder, head) if torch.equal(head_input, hidden) and torch.equal(marked.float(), logits.float()) else None


def _costs(states: Tensor, live_N: Tensor, labels_N: Tensor, head: nn.Module | None) -> Tensor:
    """Nats of the labels, from hidden states and the head, or from logits; log-sum-exp in fp32 or the states' wider type."""
    on_cpu = states.device.type == "cpu"
    chunk = default_chunk_tokens(states.device)
    costs: list[Tensor] = []
    for start in range(0, len(live_N), chunk):
        rows_C, labels_C = live_N[start : start + chunk], labels_N[start : start + chunk]
        chosen = states.index_select(0, rows_C)
        logits_CV = chosen if head is None else head(chosen)
        wide = torch.promote_types(logits_CV.dtype, torch.float32)
        slice_tokens = max(1, SLICE_ENTRIES // logits_CV.shape[-1]) if on_cpu else len(rows_C)
        costs += [
            F.cross_entropy(logits.to(wide), labels, reduction="none")
            for logits, labels in zip(torch.split(logits_CV, slice_tokens), torch.split(labels_C, slice_tokens), strict=True)
        ]
    return torch.cat(costs) if costs else torch.zeros(0, device=states.device)
