"""Language modelling: next tokens of packed rows, in pretraining, SFT and LoRA alike."""
# Letters in names: B rows, T positions.

from __future__ import annotations

import functools
import logging
from typing import Any, NamedTuple, Self, cast, final

import torch
from torch import Tensor, nn

from ttrain.config import Runtime, Training
from ttrain.data.packing import IGNORE, Batch
from ttrain.errors import UsageError
from ttrain.train import attention, moe, varlen
from ttrain.train.attention import Inputs, segment_mask
from ttrain.train.distributed import Tensors, on_device
from ttrain.train.kernels import fuse
from ttrain.train.losses import (
    Lesson,
    count_hits,
    labels_after_next,
    linear_token_loss_sum,
    linear_token_losses,
    token_loss_sum,
    token_losses,
)
from ttrain.train.moe import Balancing, Routers
from ttrain.train.precision import autocast_dtype
from ttrain.train.task import LossSum, Metrics, Sums, TrainingTask
from ttrain.train.teacher import TaughtBatch
from ttrain.train.varlen import Spans

# Architectures whose logits are just the hidden states times the weight of the output embedding.
PLAIN_HEADS = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "MixtralForCausalLM",
        "Qwen3MoeForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Glm4MoeForCausalLM",
    }
)

LossTerms = tuple[Tensor, Tensors, Tensors]  # total, its parts, other sums


HITS = "hits"  # among the sums of a validation: the labels with the largest logit, and all labels


class PackedTensors(NamedTuple):
    """Packed rows on the device, with the spans and branches of their records."""

    input_ids_BT: Tensor
    positions_BT: Tensor
    segments_BT: Tensor
    labels_BT: Tensor
    spans: Spans | None
    branches_BT: Tensor | None
    lesson: Lesson | None = None


log = logging.getLogger("ttrain")


class CausalTask(TrainingTask):
    """A task on the next-token losses of a causal language model.

    `chunk_tokens` and `attention`: as in `NextTokenLoss`. `gradient_checkpointing`: recompute each
    layer in the backward pass (arXiv:1604.06174); the gradients are the same bits.
    """

    def __init__(
        self,
        config: Training,
        model: nn.Module,
        *,
        chunk_tokens: int | None = None,
        attention: str = "auto",
        gradient_checkpointing: bool = False,
    ) -> None:
        self.config = config
        self._model = NextTokenLoss(model, chunk_tokens, attention)
        if gradient_checkpointing:
            if count(model):
                raise UsageError(
                    "runtime.gradient_checkpointing is true but lora.kind is prefix, whose keys "
                    "and values a recomputed layer does not see; set "
                    "runtime.gradient_checkpointing=false, or lora.kind=lora"
                )
            self._model.causal.activation_checkpointing_enable({"use_reentrant": False})

    @classmethod
    def of(cls, config: Any, model: nn.Module, runtime: Runtime) -> Self:
        """The task of a stage; settings of `runtime` change only the order of summation."""
        return cls(
            config,
            model,
            chunk_tokens=runtime.loss_chunk_tokens,
            attention=runtime.attention,
            gradient_checkpointing=runtime.gradient_checkpointing,
        )

    def build_model(self) -> NextTokenLoss:
        return self._model

    def after_step(self, sums: Sums) -> None:
        self._model.move_biases(sums)

    def figures(self, sums: Sums) -> Metrics:
        return moe.figures(sums)


@final
class LanguageModeling(CausalTask):
    """Next-token prediction; pretraining, SFT and LoRA differ only in rows and model."""

    def train_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        total, parts, sums = model(
            *_arrays(batch, device),
            spans=self._model.spans(batch, device),
            taught=_taught(batch, device),
        )
        return LossSum(total, batch.live_tokens, parts, sums)

    def validation_step(self, model: nn.Module, batch: Batch, device: torch.device) -> LossSum:
        """Cross entropy of the next tokens alone, and how often the likeliest token is right."""
        with torch.no_grad():
            total, _, sums = model(
                *_arrays(batch, device), next_only=True, spans=self._model.spans(batch, device)
            )
        return LossSum(total, batch.live_tokens, sums=sums)

    def figures(self, sums: Sums) -> Metrics:
        hits, targets = sums.get(HITS, (0.0, 0.0))
        return {**super().figures(sums), **({"accuracy": hits / targets} if targets else {})}

    def derived(self, losses: Metrics) -> Metrics:
        """Cross entropy of the next tokens, and everything added to it."""
        if "loss" not in losses:
            return {}
        entropy = losses.get("loss_ce1", losses["loss"])
        return {"logits_loss": entropy, "aux_loss": losses["loss"] - entropy}


@functools.cache
def warn_unchunked_logits(architecture: str) -> None:
    """Warn once per process that all logits are held in memory."""
    log.warning(
        "the output head of %s may do more than a product; all its logits are held in memory",
        architecture,
    )


def _arrays(batch: Batch, device: torch.device) -> list[Tensor]:
    return on_device(
        (batch.input_ids_BT, batch.positions_BT, batch.segments_BT, batch.labels_BT), device
    )


def _taught(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not isinstance(batch, TaughtBatch):
        return None
    ids_BTK, shares_BTK = on_device(batch.taught, device)
    return ids_BTK.flatten(0, 1), shares_BTK.flatten(0, 1)


@final
class NextTokenLoss(nn.Module):
    """A causal model of transformers or PEFT with its loss, compiled or sharded as one."""

    # The loss is ce1 + loss_weight * ce2 + balance * L_balance + z_loss * L_z, all divided by the
    # targets of the first head; ce2 is that of a second head (`multi_token` of the model), the last
    # two those of trained routers.

    def __init__(
        self, model: nn.Module, chunk_tokens: int | None = None, attention: str = "auto"
    ) -> None:
        """Options change results only in the order of summation.

        `chunk_tokens`: tokens whose logits are in memory at once; None: by device, 0: all of a
        micro-batch. `attention`: as `runtime.attention`.
        """
        super().__init__()
        self.model = model
        causal = self.causal
        head = self.get_output_embeddings()
        self._plain = (
            type(causal).__name__ in PLAIN_HEADS and type(head) is nn.Linear and head.bias is None
        )
        self._chunk_tokens = chunk_tokens
        self._by_records = attention != "masked"
        self._chunked = self._plain and chunk_tokens != 0
        if self._plain:
            fuse(causal)
        else:
            warn_unchunked_logits(type(causal).__name__)
        moe.group(causal)
        self._routers = Routers(causal)
        self._balancing = Balancing.of(causal, self._routers)

    def spans(self, batch: Batch, device: torch.device) -> Spans | None:
        """Where the records of a batch begin, if attention on this device uses that, else None."""
        config = self.causal.config
        if (
            not (self._plain and self._by_records)
            or count(self.model)
            or device.type != varlen.DEVICE
        ):
            return None
        width = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        dropout = (getattr(config, "attention_dropout", 0.0) or 0.0) if self.training else 0.0
        is_usable = varlen.is_usable(
            device, autocast_dtype(next(self.parameters())), width, dropout
        ) and attention.takes_records(self.causal, batch.segments_BT.shape[1])
        return varlen.spans_of(batch.segments_BT, device) if is_usable else None

    @property
    def causal(self) -> Any:
        """The model of transformers, without PEFT's wrapper."""
        return getattr(self.model, "get_base_model", lambda: self.model)()

    def get_output_embeddings(self) -> nn.Module:
        """The output head, as transformers' models name it."""
        return cast(nn.Module, self.causal.get_output_embeddings())

    def get_second_head(self) -> nn.Module | None:
        """The head for the token after the next one; None if an adapter is trained."""
        return None if self.causal is not self.model else getattr(self.causal, "multi_token", None)

    def forward(
        self,
        input_ids_BT: Tensor,
        positions_BT: Tensor,
        segments_BT: Tensor,
        labels_BT: Tensor,
        next_only: bool = False,
        spans: Spans | None = None,
        branches_BT: Tensor | None = None,
        weights_B: Tensor | None = None,
        taught: tuple[Tensor, Tensor] | None = None,
    ) -> LossTerms:
        """Loss in nats, summed over the labels; its parts, if several; sums over routers' choices.

        `next_only`: only the cross entropy of the first head, and as a sum its hits and targets.
        `spans`: of `self.spans`. With `branches_BT` the loss is its terms, [B, T], and the parts
        are the balance terms, unweighted (see `balance_of`), where each row counts `weights_B`
        times. `taught`: ids and shares of a `Lesson`, whose term is a part.
        """
        lesson = (
            None if taught is None else Lesson(*taught, torch.zeros((), device=labels_BT.device))
        )
        rows = PackedTensors(
            input_ids_BT, positions_BT, segments_BT, labels_BT, spans, branches_BT, lesson
        )
        if next_only and branches_BT is not None:
            return self._first_head(rows)[1], {}, {}
        if next_only:
            hits = torch.zeros((), dtype=torch.int64, device=labels_BT.device)
            loss = self._first_head(rows, hits)[1]
            return loss, {}, {HITS: torch.stack([hits, (labels_BT != IGNORE).sum()])}
        with self._routers.watched() as choices:
            hidden_BTD, loss = self._first_head(rows)
        parts: dict[str, Tensor] = {} if branches_BT is not None else {"ce1": loss}
        if lesson is not None:
            parts = {"ce1": loss.detach() - lesson.total, "teacher": lesson.total}
        sums: Tensors = {}
        second: Any = self.get_second_head() if branches_BT is None else None
        if second is not None:
            parts["ce2"] = self._second_head(
                second, hidden_BTD, labels_after_next(labels_BT, segments_BT)
            )
            loss = loss + second.loss_weight * parts["ce2"]
        if choices:
            live_B = (labels_BT != IGNORE).sum(1) if weights_B is None else weights_B
            inside_BT = segments_BT >= 0
            sums = moe.sums(self._routers, choices, inside_BT & (live_B > 0)[:, None])
            if self._routers.trained:
                parts |= self._balance(choices, inside_BT, live_B)
                loss = loss if branches_BT is not None else loss + self.balance_of(parts)
        return loss, {} if [*parts] == ["ce1"] else parts, sums

    def logits(self, batch: Batch, device: torch.device) -> Tensor:
        """Logits of the next tokens, [B, T, V]."""
        input_ids_BT, positions_BT, segments_BT, labels_BT = _arrays(batch, device)
        spans = self.spans(batch, device)
        rows = PackedTensors(input_ids_BT, positions_BT, segments_BT, labels_BT, spans, None)
        return cast(Tensor, self.causal(**self._inputs(rows), use_cache=False).logits)

    def balance_of(self, parts: Tensors) -> Tensor:
        """What the balance terms among the parts add to the loss."""
        balancing = self._balancing
        return balancing.balance * parts["balance"] + balancing.z_loss * parts.get("z", 0.0)

    def move_biases(self, sums: Sums) -> None:
        """Update the routers' biases after a step, if experts are balanced without a loss."""
        if self._balancing.bias_rate:
            moe.move_biases(self._routers, sums, self._balancing.bias_rate)

    def _first_head(self, rows: PackedTensors, hits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Hidden states, [B, T, D], and the next-token loss, its terms with branches."""
        model = self.causal
        inputs = self._inputs(rows)
        if not self._chunked:
            return self._head_as_it_is(inputs, rows, hits)
        hidden_BTD = model.get_decoder()(**inputs, use_cache=False).last_hidden_state
        weight_VD = model.get_output_embeddings().weight
        if rows.branches_BT is not None:
            return hidden_BTD, linear_token_losses(
                hidden_BTD, weight_VD, rows.labels_BT, self._chunk_tokens
            )
        return hidden_BTD, self._loss_in_chunks(
            hidden_BTD, weight_VD, rows.labels_BT, hits, rows.lesson
        )

    def _inputs(self, rows: PackedTensors) -> Inputs:
        model = self.causal
        inputs: Inputs = {"input_ids": rows.input_ids_BT, "position_ids": rows.positions_BT}
        arguments: Inputs = {} if rows.spans is None else {"spans": rows.spans}
        # Which cover no prefix.
        if self._chunked and rows.spans is None and self._by_records and not count(self.model):
            arguments = attention.record_arguments(model, rows.segments_BT, rows.branches_BT)
        if arguments:
            # transformers takes a mask of four dimensions as it is, and else would make one.
            return inputs | {
                "attention_mask": rows.segments_BT.new_ones((1, 1, 1, 1), dtype=torch.bool),
                **arguments,
            }
        inputs = prepend(
            self.model,
            {**inputs, "attention_mask": segment_mask(rows.segments_BT, rows.branches_BT)},
        )
        return attention.with_attention_mask(model, inputs)

    def _head_as_it_is(
        self, inputs: Inputs, rows: PackedTensors, hits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        model = self.causal
        hidden_states: list[Tensor] = []
        hook = model.get_output_embeddings().register_forward_pre_hook(
            lambda head, head_inputs: hidden_states.append(head_inputs[0])
        )
        try:
            logits_BTV = model(**inputs, use_cache=False).logits
            loss = (token_loss_sum if rows.branches_BT is None else token_losses)(
                logits_BTV, rows.labels_BT
            )
            flat = logits_BTV.flatten(0, 1), rows.labels_BT.flatten()
            if hits is not None:
                hits += count_hits(*flat)
            if rows.lesson is not None:
                added = rows.lesson.loss(*flat)
                rows.lesson.total.add_(added.detach())
                loss = loss + added
        finally:
            hook.remove()
        return hidden_states[0], loss

    def _loss_in_chunks(
        self,
        hidden_BTD: Tensor,
        weight_VD: Tensor,
        labels_BT: Tensor,
        hits: Tensor | None = None,
        lesson: Lesson | None = None,
    ) -> Tensor:
        return cast(
            Tensor,
            linear_token_loss_sum(
                hidden_BTD,
                weight_VD,
                labels_BT,
                self._chunk_tokens,
                compiled=attention.is_compiled(self.causal),
                hits=hits,
                lesson=lesson,
            ),
        )

    def _second_head(self, head: Any, hidden_BTD: Tensor, labels_BT: Tensor) -> Tensor:
        if self._chunk_tokens == 0 or head.bias is not None:
            return token_loss_sum(head(hidden_BTD), labels_BT)
        return self._loss_in_chunks(hidden_BTD, head.weight, labels_BT)

    def _balance(self, choices: list[moe.RouterCall], inside_BT: Tensor, live_B: Tensor) -> Tensors:
        balancing = self._balancing
        with torch.set_grad_enabled(
            torch.is_grad_enabled() and max(balancing.balance, balancing.z_loss) > 0
        ):
            even, z = moe.row_losses(
                self._routers, choices, inside_BT, live_B, z_loss=balancing.z_loss > 0
            )
        return {"balance": even, "z": z} if balancing.z_loss else {"balance": even}


def count(model: nn.Module) -> int:
    """Number of virtual tokens that a PEFT model puts before a text; 0 for other models."""
    settings = getattr(model, "active_peft_config", None)
    return (
        int(settings.num_virtual_tokens)
        if settings is not None and settings.is_prompt_learning
        else 0
    )


def prepend(model: Any, inputs: Inputs) -> Inputs:
    """Add the prefix of a PEFT model, if any, to inputs, as if each record stood alone."""
    # The keys and values of P virtual tokens stand once before the row; the mask is widened from
    # [B, 1, T, T] to [B, 1, T, P + T], and every record begins at position P.
    virtual = count(model)
    if not virtual:
        return dict(inputs)
    mask: Tensor = inputs["attention_mask"]
    B, _, T, _ = mask.shape
    return {
        **inputs,
        "cache": model.get_prompt(B, max_cache_len=virtual + T),
        "position_ids": inputs["position_ids"] + virtual,
        "attention_mask": torch.cat([mask.new_ones(B, 1, T, virtual), mask], -1),
    }
