"""Loss of each next token, only at the positions that count, without ever holding all logits.

Letters in names: B rows, T positions, N positions that count, C of a chunk, D width of the hidden states, V entries of the
vocabulary.
"""

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.data.packing import IGNORE
from ttrain.inference.loading import causal_of
from ttrain.train.losses import default_chunk_tokens

Parts = tuple[nn.Module, nn.Module]  # the decoder and the output head of a model
PROBED_TOKENS = 8
SLICE_ENTRIES = 1 << 18  # of softmax on a CPU: a megabyte of fp32, so that its passes stay in the cache of a core


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
        return self._score(input_ids_BT, labels_BT, inputs, greedy=False)[0]

    def with_greedy(self, input_ids_BT: Tensor, labels_BT: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """The nats of each label, and whether it is the most likely token, both of shape [N]."""
        return self._score(input_ids_BT, labels_BT, inputs, greedy=True)

    def parts(self, input_ids_BT: Tensor) -> Parts | None:
        """The decoder and the head, if the logits are just the head of the decoder's output."""
        if not self._probed:
            with torch.no_grad():
                self._parts = plain_parts(self._model, input_ids_BT[:1, :PROBED_TOKENS])
            self._probed = True
        return self._parts

    def _score(
        self, input_ids_BT: Tensor, labels_BT: Tensor, inputs: dict[str, Any], *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        live_N = (labels_BT.flatten() != IGNORE).nonzero()[:, 0]
        device = input_ids_BT.device
        labels_N = labels_BT.flatten()[live_N].to(device)
        inputs = {"use_cache": False, **inputs, "input_ids": input_ids_BT}
        parts = self.parts(input_ids_BT)
        with torch.no_grad():
            if parts is None:
                logits_BTV = self._model(**inputs).logits
                return _costs(logits_BTV.flatten(0, 1), live_N.to(device), labels_N, None, greedy=greedy)
            decoder, head = parts
            hidden_BTD = decoder(**inputs).last_hidden_state
            return _costs(hidden_BTD.flatten(0, 1), live_N.to(device), labels_N, head, greedy=greedy)


def plain_parts(model: Any, input_ids_BT: Tensor) -> Parts | None:
    """The parts of a model whose logits are just head(decoder(input_ids)); None for any other."""
    causal = causal_of(model)
    try:
        decoder, head = causal.get_decoder(), causal.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    if not isinstance(decoder, nn.Module) or not isinstance(head, nn.Module) or decoder is causal:
        return None
    hidden = getattr(decoder(input_ids=input_ids_BT, use_cache=False), "last_hidden_state", None)
    logits = model(input_ids=input_ids_BT, use_cache=False).logits
    return (decoder, head) if hidden is not None and torch.equal(head(hidden).float(), logits.float()) else None


def _costs(
    states: Tensor, live_N: Tensor, labels_N: Tensor, head: nn.Module | None, *, greedy: bool
) -> tuple[Tensor, Tensor]:
    """(nats of the labels, whether each is the most likely token; empty unless `greedy`).

    From hidden states and the head, or from logits; log-sum-exp in fp32 or the states' wider type.
    """
    on_cpu = states.device.type == "cpu"
    chunk = default_chunk_tokens(states.device)
    costs: list[Tensor] = []
    likeliest: list[Tensor] = []
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
        if greedy:
            likeliest.append(logits_CV.argmax(-1) == labels_C)
    nothing = torch.zeros(0, device=states.device)
    return torch.cat(costs) if costs else nothing, torch.cat(likeliest) if likeliest else nothing.bool()
