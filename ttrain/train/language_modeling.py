"""Language modelling: next tokens of packed rows, in pretraining, SFT and LoRA alike.

Letters in names: B rows, T positions.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from ttrain.config import Training
from ttrain.data.packing import IGNORE, Batch
from ttrain.train import attention, moe, moe_balance, optim, schedules, virtual_tokens
from ttrain.train.attention import segment_mask
from ttrain.train.fused_layers import fuse
from ttrain.train.losses import labels_after_next, linear_token_loss_sum, token_loss_sum
from ttrain.train.moe_balance import Balancing, Routers
from ttrain.train.task import LossSum, TrainingTask

# Whose logits are the hidden states times the weight of the output embedding and nothing more.
PLAIN_HEADS = frozenset({
    "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "MixtralForCausalLM", "Qwen3MoeForCausalLM", "Ernie4_5_MoeForCausalLM", "Glm4MoeForCausalLM",
})  # fmt: skip
Measured = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]  # total, its parts, other sums
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
            virtual_tokens.check_checkpointing(model)
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
        total, parts, sums = model(*_arrays(batch, device))
        return LossSum(total, batch.live_tokens, parts, sums)

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        """The cross entropy of the next tokens alone, which is what perplexity and the best checkpoint are about."""
        with torch.no_grad():
            total, _, _ = model(*_arrays(batch, device), next_only=True)
        return LossSum(total, batch.live_tokens)

    def after_step(self, sums: Mapping[str, Sequence[float]]) -> None:
        self._model.move_biases(sums)

    def figures(self, sums: Mapping[str, Sequence[float]]) -> Mapping[str, float]:
        return moe_balance.figures(sums)

    def derived(self, losses: Mapping[str, float]) -> Mapping[str, float]:
        """The cross entropy of the next tokens, and what is added to it; together they are the loss."""
        if "loss" not in losses:
            return {}
        entropy = losses.get("loss_ce1", losses["loss"])
        return {"logits_loss": entropy, "aux_loss": losses["loss"] - entropy}


@functools.cache
def _tell_of_logits(architecture: str) -> None:
    """Once in a process: the doctor alone makes 15 such models."""
    log.warning("the output head of %s may do more than a product; all its logits are held in memory", architecture)


def _arrays(batch: Batch, device: torch.device) -> list[Tensor]:
    arrays = (batch.input_ids_BT, batch.positions_BT, batch.segments_BT, batch.labels_BT)
    return [torch.from_numpy(array).to(device, non_blocking=True) for array in arrays]


@final
class NextTokenLoss(nn.Module):
    """A causal language model of transformers or PEFT with its loss: one module, to be compiled, replicated or sharded.

    The loss is ce1, and with a second head (`multi_token` of the model) and with trained routers
    ce1 + loss_weight * ce2 + balance * L_balance + z_loss * L_z, where all are divided by the targets of the first head.
    """

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
            _tell_of_logits(type(self.causal).__name__)
        moe.group(self.causal)
        self._routers = Routers(self.causal)
        self._balancing = Balancing.of(self.causal, self._routers)

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

    def get_second_head(self) -> nn.Module | None:
        """The head that predicts the token after the next one; an adapter's base keeps it as it is."""
        return None if self.causal is not self.model else getattr(self.causal, "multi_token", None)

    def forward(
        self, input_ids_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, labels_BT: Tensor, next_only: bool = False
    ) -> Measured:
        """Loss in nats, summed over the positions with a label; its parts where it has several, and what routers chose.

        `next_only`: the cross entropy of the first head and nothing else.
        """
        if next_only:
            return self._first_head(input_ids_BT, positions_BT, segments_BT, labels_BT)[1], {}, {}
        with self._routers.watched() as choices:
            hidden_BTD, loss = self._first_head(input_ids_BT, positions_BT, segments_BT, labels_BT)
        parts = {"ce1": loss}
        sums: dict[str, Tensor] = {}
        second: Any = self.get_second_head()
        if second is not None:
            parts["ce2"] = self._second_head(second, hidden_BTD, labels_after_next(labels_BT, segments_BT))
            loss = loss + second.loss_weight * parts["ce2"]
        if choices:
            live_B = (labels_BT != IGNORE).sum(1)
            inside_BT = segments_BT >= 0
            sums = moe_balance.sums(self._routers, choices, inside_BT & (live_B > 0)[:, None])
            if self._routers.trained:
                loss = loss + self._balance(choices, inside_BT, live_B, parts)
        return loss, parts if len(parts) > 1 else {}, sums

    def move_biases(self, sums: Mapping[str, Sequence[float]]) -> None:
        """After a step, where the experts are balanced without a loss."""
        if self._balancing.bias_rate:
            moe_balance.move_biases(self._routers, sums, self._balancing.bias_rate)

    def _first_head(
        self, input_ids_BT: Tensor, positions_BT: Tensor, segments_BT: Tensor, labels_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What the decoder gives, [B, T, D], and the loss of the next tokens."""
        model: Any = self.causal
        inputs = {"input_ids": input_ids_BT, "position_ids": positions_BT, "attention_mask": segment_mask(segments_BT)}
        inputs = attention.suited(model, virtual_tokens.prepend(self.model, inputs))
        if self._chunked:
            if not virtual_tokens.count(self.model):  # whose keys stand before the row, where those blocks do not look
                inputs |= attention.arguments(model, segments_BT)
            hidden_BTD = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
            weight_VD = model.get_output_embeddings().weight
            return hidden_BTD, linear_token_loss_sum(hidden_BTD, weight_VD, labels_BT, self._chunk_tokens)
        found: list[Tensor] = []
        seen = model.get_output_embeddings().register_forward_pre_hook(lambda head, given: found.append(given[0]))
        try:
            loss = self._criterion(model(**inputs, use_cache=False).logits, labels_BT)
        finally:
            seen.remove()
        return found[0], loss

    def _second_head(self, head: Any, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
        loss: Tensor
        if self._chunk_tokens == 0 or head.bias is not None:
            loss = self._criterion(head(hidden_BTD), labels_BT)
        else:
            loss = linear_token_loss_sum(hidden_BTD, head.weight, labels_BT, self._chunk_tokens)
        return loss

    def _balance(
        self, choices: list[moe_balance.Choice], inside_BT: Tensor, live_B: Tensor, parts: dict[str, Tensor]
    ) -> Tensor:
        """What routers add to the loss; its parts are put with the others, each without its weight."""
        asked = self._balancing
        with torch.set_grad_enabled(torch.is_grad_enabled() and max(asked.balance, asked.z_loss) > 0):
            even, z = moe_balance.row_losses(self._routers, choices, inside_BT, live_B, z_loss=asked.z_loss > 0)
        parts["balance"] = even
        if asked.z_loss:
            parts["z"] = z
        return asked.balance * even + asked.z_loss * z
