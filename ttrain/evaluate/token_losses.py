"""Loss of each next token, only at the positions that count, without ever holding all logits."""

# Letters in names: B rows, T positions, N positions that count, C of a chunk, D width of the hidden
# states, V entries of the vocabulary.

from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttrain.core.files import JsonDict
from ttrain.data.packing import IGNORE
from ttrain.inference.loading import causal_of
from ttrain.train.losses import default_chunk_tokens

Parts = tuple[nn.Module, nn.Module]  # the decoder and the output head of a model
PROBED_TOKENS = 8
SLICE_ENTRIES = (
    1 << 18
)  # of softmax on a CPU: a megabyte of fp32, so that its passes stay in the cache of a core


@final
class TokenLosses:
    """Computes negative log-likelihoods under one model, which is in eval mode.

    parts  decoder and head, where the logits are just the head of the decoder's output
    """

    # Then the head is applied here, in chunks and only to the positions that count; a pass over a
    # few tokens shows whether that is right. Otherwise (a soft cap, a prefix, no `get_decoder`) the
    # model computes all its logits.

    # Not inference_mode, which would make tables that the model caches unusable in training.
    @torch.no_grad()
    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        probe_1T = torch.arange(PROBED_TOKENS, device=next(model.parameters()).device)[None]
        self.parts = plain_parts(model, probe_1T)

    @torch.no_grad()
    def __call__(self, input_ids_BT: Tensor, labels_BT: Tensor, **inputs: Any) -> Tensor:
        """Nats of each label that is not IGNORE, [N] in fp32, in the order of the labels.

        `labels_BT[t]` follows `input_ids_BT[t]` and lies on the CPU.
        """
        # On the CPU, so that nothing waits for a GPU.
        return torch.cat([_nats(*chunk) for chunk in self._logits(input_ids_BT, labels_BT, inputs)])

    @torch.no_grad()
    def with_greedy(
        self, input_ids_BT: Tensor, labels_BT: Tensor, **inputs: Any
    ) -> tuple[Tensor, Tensor]:
        """The nats of each label, and whether it is the likeliest token, both of shape [N]."""
        nats: list[Tensor] = []
        are_likeliest: list[Tensor] = []
        for logits_CV, labels_C in self._logits(input_ids_BT, labels_BT, inputs):
            nats.append(_nats(logits_CV, labels_C))
            are_likeliest.append(logits_CV.argmax(-1) == labels_C)
        return torch.cat(nats), torch.cat(are_likeliest)

    def _logits(
        self, input_ids_BT: Tensor, labels_BT: Tensor, inputs: JsonDict
    ) -> Iterator[tuple[Tensor, Tensor]]:
        # Yield the logits of the positions that count and their labels, in chunks; one chunk of
        # none if none counts.
        inputs = {"use_cache": False, **inputs, "input_ids": input_ids_BT}
        head: nn.Module = nn.Identity()
        if self.parts is None:
            states = self._model(**inputs).logits.flatten(0, 1)
        else:
            decoder, head = self.parts
            states = decoder(**inputs).last_hidden_state.flatten(0, 1)
        live_N = (labels_BT.flatten() != IGNORE).nonzero()[:, 0]
        chunk = default_chunk_tokens(states.device)
        chunks = (
            torch.split(tensor_N.to(states.device), chunk)
            for tensor_N in (live_N, labels_BT.flatten()[live_N])
        )
        for rows_C, labels_C in zip(*chunks, strict=True):
            yield head(states.index_select(0, rows_C)), labels_C


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
    is_plain = hidden is not None and torch.equal(head(hidden).float(), logits.float())
    return (decoder, head) if is_plain else None


def _nats(logits_CV: Tensor, labels_C: Tensor) -> Tensor:
    # Log-sum-exp in fp32 or the logits' wider type.
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    is_cpu = logits_CV.device.type == "cpu"
    rows = max(1, SLICE_ENTRIES // logits_CV.shape[-1] if is_cpu else len(labels_C))
    slices = zip(torch.split(logits_CV, rows), torch.split(labels_C, rows), strict=True)
    return torch.cat(
        [F.cross_entropy(logits.to(wide), labels, reduction="none") for logits, labels in slices]
    )
