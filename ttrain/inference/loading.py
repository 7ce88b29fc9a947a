"""From a reference to a model that can be talked to: weights, adapter, tokenizer, and the second head where there is one."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ttrain.data import existing_tokenizer
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.errors import ArtifactError, UsageError
from ttrain.model import adapters, factory, multi_token
from ttrain.store.model_reference import Reference
from ttrain.train import precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, eq=False)
class Speaker:
    """A model and what is needed to talk to it.

    name         what the user called it
    model        of transformers or PEFT, on its device, not training; its generation settings hold nothing but ids
    begin_ids    tokens before a text that is to be continued
    stop_ids     tokens that end an answer
    max_length   positions the model accepts; None where it has no limit
    second_head  predicts the token after the next from the same hidden state; None where there is none
    can_chat     whether its tokenizer brings a chat template, whose tokens the model knows
    """

    name: str
    model: PreTrainedModel
    encoder: Encoder
    begin_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_length: int | None
    second_head: nn.Linear | None
    can_chat: bool

    @property
    def device(self) -> torch.device:
        place: torch.device = next(self.model.parameters()).device
        return place

    @property
    def causal(self) -> PreTrainedModel:
        """The model of transformers, within PEFT's where there is one."""
        inner = getattr(self.model, "get_base_model", None)
        return self.model if inner is None else inner()

    @property
    def uses_cache(self) -> bool:
        """Whether the model keeps keys and values in a cache that can be handed to it."""
        wanted = self.model.generation_config.use_cache
        return bool(wanted) and "past_key_values" in inspect.signature(self.causal.forward).parameters

    def describe(self) -> str:
        """A line about it."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        limit = f", {self.max_length} tokens of context" if self.max_length else ""
        kind = str(self.model.dtype).removeprefix("torch.")
        return f"{self.name}: {self.causal.config.model_type}, {size:,} parameters in {kind} on {self.device}{limit}"


def load(reference: Reference, *, device: str = "auto", dtype: str = "fp32") -> Speaker:
    """The model of the reference on the device, its weights as `dtype`.

    Raises ArtifactError for what is damaged or does not belong together.
    """
    place = precision.resolve_device(device)
    reference.verify()
    model: Any = factory.load(reference.model)
    head = _second_head(model, reference.model)
    if reference.adapter is not None:
        model = adapters.load(model, reference.adapter, reference.base_digest)
        if not model.active_peft_config.is_prompt_learning:
            model = adapters.merge(model)  # as fast as the base
    head = head.to(place, DTYPES[dtype]).eval() if head is not None else None
    return speaker_of(reference.text, _placed(model, place, DTYPES[dtype]), reference.tokenizer, second_head=head)


def load_adapters(references: Sequence[Reference], *, device: str = "auto", dtype: str = "fp32") -> list[Speaker]:
    """The models of several adapters on one base, which is in memory once; the last of them counts. None is merged.

    Raises UsageError where one is no adapter or of another kind, ArtifactError where one was trained on another base.
    """
    first, *more = references
    if plain := next((reference.text for reference in references if reference.adapter is None), None):
        raise UsageError(f"'{plain}' is a full model, no adapter; --adapter switches between adapters of one base")
    if len({reference.text for reference in references}) < len(references):
        raise UsageError(f"an adapter is named twice: {', '.join(reference.text for reference in references)}")
    for reference in references:
        reference.verify()
    place, digest = precision.resolve_device(device), first.base_digest
    model: Any = factory.load(first.model)
    head = _second_head(model, first.model)
    model = adapters.load(model, first.directory, digest, adapter_name(0))
    for number, reference in enumerate(more, start=1):
        adapters.add(model, reference.directory, digest, adapter_name(number))
    model = _placed(model, place, DTYPES[dtype])
    head = head.to(place, DTYPES[dtype]).eval() if head is not None else None
    speakers = []
    for number, reference in enumerate(references):
        adapters.switch(model, adapter_name(number))  # how many positions are left is the adapter's own
        speakers.append(speaker_of(reference.text, model, reference.tokenizer, second_head=head))
    return speakers


def adapter_name(number: int) -> str:
    """What PEFT calls one of several adapters: a name of its own takes no dots, which paths have."""
    return f"adapter{number}"


def _placed(model: Any, place: torch.device, dtype: torch.dtype) -> Any:
    """The model on the device, its weights as `dtype`; but tables that it computes, such as the frequencies of rotary
    positions, as they are: in bf16 these would be off by a radian some hundred positions on."""
    tables = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name in module._non_persistent_buffers_set
    ]
    model = model.to(place, dtype)
    for module, name, buffer in tables:
        setattr(module, name, buffer.to(place))
    return model


def speaker_of(name: str, model: Any, tokenizer: Path, *, second_head: nn.Linear | None = None) -> Speaker:
    """A model that is loaded, with the tokenizer of that directory; from now on it is not training."""
    encoder, begins, can_chat = _encoder(tokenizer)
    return speaking(name, model, encoder, begins, can_chat=can_chat, second_head=second_head)


def speaking(
    name: str, model: Any, encoder: Encoder, begins: tuple[int, ...], *, can_chat: bool, second_head: nn.Linear | None = None
) -> Speaker:
    """The same with a tokenizer that is open. The model gets generation settings of its own, and is in eval mode."""
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    config, own = causal.config.get_text_config(), causal.generation_config.eos_token_id
    stops = {encoder.eos_id, encoder.end_id, *(own if isinstance(own, list) else [own] if own is not None else [])}
    speaker = Speaker(
        name=name,
        model=model.eval(),
        encoder=encoder,
        begin_ids=begins,
        stop_ids=tuple(sorted(stops)),
        max_length=_max_length(model, config),
        second_head=second_head,
        can_chat=can_chat,
    )
    for part in {id(part): part for part in (model, causal)}.values():
        part.generation_config = _plain(config, encoder, speaker.stop_ids)
    return speaker


def _max_length(model: Any, config: Any) -> int | None:
    """Positions that are left for tokens: a prefix takes some."""
    length: int | None = getattr(config, "max_position_embeddings", None)
    prefix = getattr(model, "active_peft_config", None)
    if length is not None and prefix is not None and prefix.is_prompt_learning:
        length -= prefix.num_virtual_tokens
    return length


def _plain(config: Any, encoder: Encoder, stops: tuple[int, ...]) -> Any:
    """Generation settings that do nothing: `generate` fills what it is not told from the model's own, such as a
    temperature or a penalty that a model of the Hub brings."""
    from transformers import GenerationConfig

    pad = encoder.pad_id if encoder.pad_id < config.vocab_size else 0  # is masked, but has to be in the embedding
    uses_cache = getattr(config, "use_cache", True) is not False
    return GenerationConfig(do_sample=False, eos_token_id=list(stops), pad_token_id=pad, use_cache=uses_cache)


def _encoder(directory: Path) -> tuple[Encoder, tuple[int, ...], bool]:
    """(the tokenizer of the directory, what begins a text with it, whether one can chat with it).

    One that is not of ttrain is completed in a temporary directory: nothing that the user has is written to.
    """
    if not (directory / existing_tokenizer.JSON).is_file():
        raise ArtifactError(f"{directory} holds no {existing_tokenizer.JSON}, so that no text can be given to its model")
    if (directory / "chat_template.jinja").is_file():
        try:
            encoder = Encoder(directory)
            return encoder, (encoder.bos_id,), True
        except ArtifactError:
            pass  # without some of the names that ttrain needs
    can_chat = existing_tokenizer.brings_template(directory)
    begins = open_tokenizer(directory / existing_tokenizer.JSON).encode("", add_special_tokens=True).ids
    with tempfile.TemporaryDirectory(prefix="ttrain-") as temporary:
        files = [directory / name for name in existing_tokenizer.FILES if (directory / name).is_file()]
        existing_tokenizer.take(files, Path(temporary), "own" if can_chat else "ttrain")
        return Encoder(Path(temporary)), tuple(begins), can_chat


def _second_head(model: PreTrainedModel, directory: Path) -> nn.Linear | None:
    """The head beside the weights in the directory, apart from the model: what is saved or counted of that has none."""
    if not multi_token.attach_from(model, directory):
        return None
    head: nn.Linear = getattr(model, multi_token.NAME)
    delattr(model, multi_token.NAME)
    return head


def need_second_head(speaker: Speaker) -> nn.Linear:
    """The second head. Raises UsageError where the model has none."""
    if speaker.second_head is None:
        raise UsageError(
            f"--speculative needs a second head, but there is none beside the model of '{speaker.name}'; train one with "
            "model.multi_token.keep_head=true, or leave --speculative out"
        )
    return speaker.second_head
