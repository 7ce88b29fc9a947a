"""Language modelling: next tokens of packed rows, in pretraining, SFT and LoRA alike.

Letters in names: B rows, T positions.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from ttrain.config import Training
from ttrain.data.packing import Batch
from ttrain.train import attention, optim, schedules
from ttrain.train.attention import segment_mask
from ttrain.train.fused import fuse
from ttrain.train.losses import linear_token_loss_sum, token_loss_sum
from ttrain.train.task import LossSum, TrainingTask

# Whose logits are the hidden states times the weight of the output embedding and nothing more.
PLAIN_HEADS = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
log = logging.getLogger("ttrain")


@final
class LanguageModeling(TrainingTask):
    """Next-token prediction; pretraining, SFT and LoRA differ in their rows and in the model they are given.

    `chunk_tokens`: tokens whose logits are in memory at once; None: chosen, 0: those of the whole micro-batch.
    `gradient_checkpointing`: compute each layer again in the backward pass instead of keeping what is inside it
    (arXiv:1604.06174); the gradients are the same to the last bit.
    """

    def __init__(
        self,
        config: Training,
        model: nn.Module,
        *,
        chunk_tokens: int | None = None,
        gradient_checkpointing: bool = False,
    ) -> None:
        self.config = config
        self._model = NextTokenLoss(model, self.build_criterion(), chunk_tokens)
        if gradient_checkpointing:
            causal: Any = self._model.causal
            causal.activation_checkpointing_enable({"use_reentrant": False})

    def build_model(self) -> nn.Module:
        return self._model

    def build_optimizer(self, model: nn.Module) -> optim.Optimizers:
        return optim.build(model, self.config.optim)

    def build_scheduler(self, steps: int) -> Callable[[int], float]:
        return schedules.schedule(self.config.schedule, steps)

    def build_criterion(self) -> Callable[[Tensor, Tensor], Tensor]:
        return token_loss_sum

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        arrays = (batch.input_ids_BT, batch.positions_BT, batch.segments_BT, batch.labels_BT)
        total = model(*(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays))
        return LossSum(total, batch.live_tokens)

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        with torch.no_grad():
            return self.train_step(model, batch, device)


@final
class NextTokenLoss(nn.Module):
    """A causal language model of transformers or PEFT with its loss: one module, to be compiled, replicated or sharded."""

    def __init__(
        self, model: nn.Module, criterion: Callable[[Tensor, Tensor], Tensor], chunk_tokens: int | None = None
    ) -> None:
        super().__init__()
        self.model, self._criterion, self._chunk_tokens = model, criterion, chunk_tokens
        head = self.get_output_embeddings()
        plain = type(self.causal).__name__ in PLAIN_HEADS and type(head) is nn.Linear and head.bias is None
        self._chunked = plain and chunk_tokens != 0
        if plain:
            fuse(self.causal)
        else:
            name = type(self.causal).__name__
            log.warning("the output head of %s may do more than a product; all its logits are held in memory", name)

    @property
    def causal(self) -> nn.Module:
        """The model of transformers, within PEFT's where there is one."""
        inner = getattr(self.model, "get_base_model", None)
        found: nn.Module = self.model if inner is None else inner()
        return found

    def get_output_embeddings(self) -> nn.Module:
        """The output head, as transformers' models name it."""
        causal: Any = self.causal
        head: nn.Module = causal.get_output_embeddings()
        return head

    def forward(self, input_ids_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, labels_BT: Tensor) -> Tensor:
        """Loss in nats, summed over the positions with a label."""
        model: Any = self.causal
        inputs = {"input_ids": input_ids_BT, "position_ids": positions_BT, "attention_mask": segment_mask(segments_BT)}
        loss: Tensor
        if self._chunked:
            inputs |= attention.arguments(model, segments_BT)
            hidden_BTD = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
            weight_VD = model.get_output_embeddings().weight
            loss = linear_token_loss_sum(hidden_BTD, weight_VD, labels_BT, self._chunk_tokens)
        else:
            loss = self._criterion(model(**inputs, use_cache=False).logits, labels_BT)
        return loss
