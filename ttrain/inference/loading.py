"""Loads a chat model from a reference: weights, adapter, tokenizer."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import GenerationConfig, PreTrainedModel

from ttrain.core.files import temporary_directory
from ttrain.data import existing
from ttrain.data.encoder import Encoder, open_tokenizer
from ttrain.data.jinja_templates import BOS
from ttrain.errors import ArtifactError, UsageError
from ttrain.inference.generate import Completion, generate
from ttrain.inference.sampling import Sampling
from ttrain.model import adapters, factory
from ttrain.store.model_files import Reference
from ttrain.train import precision
from ttrain.train.distributed import Ranks


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model loaded for text generation, with its tokenizer.

    name          the reference that the user gave
    begin_ids     tokens before a text that is to be continued
    max_length    positions that the model accepts; None: no limit
    can_chat      whether the tokenizer has a chat template whose tokens the model knows
    has_prefix    whether an adapter puts virtual tokens before every text
    batch_tokens  padded tokens of a batch of an evaluation
    ranks         that score together; None: this process alone
    """

    name: str
    model: PreTrainedModel
    encoder: Encoder
    begin_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    max_length: int | None
    can_chat: bool
    has_prefix: bool = False
    batch_tokens: int = 4096
    ranks: Ranks | None = None

    @property
    def device(self) -> torch.device:
        return cast(torch.device, next(self.model.parameters()).device)

    @property
    def causal(self) -> PreTrainedModel:
        """The transformers model, inside PEFT's if there is one."""
        return cast(PreTrainedModel, causal_of(self.model))

    def room(self, new_tokens: int) -> tuple[int, int | None]:
        """(tokens of an answer, at most half of `max_length`; most tokens of a prompt)."""
        # Both are the same for all prompts, so that no answer depends on its batch.
        if self.max_length is None:
            return new_tokens, None
        tokens = min(new_tokens, self.max_length // 2)
        return tokens, self.max_length - tokens

    def beginning(self) -> tuple[int, ...]:
        """Ids before a text, so that its first token is scored too. Raises UsageError."""
        # The ids that the tokenizer adds, else its bos, as in lm-evaluation-harness, else its eos.
        # A bos that ttrain added is skipped: the model was not trained on it.
        rows = self.model.get_input_embeddings().weight.shape[0]
        bos_ids = () if self.encoder.tokens["bos_token"] == BOS else (self.encoder.bos_id,)
        for ids in (self.begin_ids, bos_ids, (self.encoder.eos_id,)):
            if ids and max(ids) < rows:
                return ids
        raise UsageError(
            f"the model {self.name} knows no token that begins or ends a text, "
            "so the first token of a text cannot be "
            "scored; give its tokenizer a bos_token or an eos_token"
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        stop: re.Pattern[str] | None = None,
        progress: Callable[[int, int], object] = lambda done, total: None,
    ) -> list[Completion]:
        """Greedy answers to the prompts, in batches of like length.

        An answer in which `stop` is found ends, but is not cut there.
        """

        def stopped(answers: dict[int, list[int]]) -> list[int]:
            return [
                row
                for row, ids in answers.items()
                if stop and stop.search(self.encoder.decode(ids))
            ]

        order = sorted(
            range(len(prompts)), key=lambda number: -len(prompts[number])
        )  # so that there is little padding
        completions: dict[int, Completion] = {}
        while order:
            rows = max(1, self.batch_tokens // (len(prompts[order[0]]) + new_tokens))
            batch = order[:rows]
            order = order[rows:]
            answers = generate(
                self,
                [prompts[number] for number in batch],
                Sampling(max_tokens=new_tokens),
                on_tokens=stopped if stop else None,
            )
            completions |= zip(batch, answers, strict=True)
            progress(len(completions), len(prompts))
        return [completions[number] for number in range(len(prompts))]

    def text_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of texts that are to be continued."""
        return [[*self.begin_ids, *ids] for ids in self.encoder.encode(texts)]

    def describe(self) -> str:
        """Summarise name, kind, parameters, dtype, device and context in a line."""
        size = sum(parameter.numel() for parameter in self.model.parameters())
        limit = f", {self.max_length} tokens of context" if self.max_length else ""
        numbers = f"{size:,} parameters in {str(self.model.dtype).removeprefix('torch.')}"
        return f"{self.name}: {self.causal.config.model_type}, {numbers} on {self.device}{limit}"


def most_batch_tokens(device: torch.device) -> int:
    """Padded tokens of a forward pass, by default."""
    return 4096 if device.type == "cpu" else 32_768


def causal_of(model: Any) -> Any:
    """The model of transformers, inside PEFT's if there is one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load(reference: Reference, *, device: str = "auto", dtype: str = "fp32") -> LoadedModel:
    """Load the model of a reference onto the device, its weights as `dtype`.

    Raises ArtifactError if files are damaged or do not belong together.
    """
    target_device = precision.resolve_device(device, name="--device")
    reference.verify()
    model: Any = factory.load(reference.model)
    if reference.adapter is not None:
        model = adapters.load(model, reference.adapter, reference.base_digest)
        if not model.active_peft_config.is_prompt_learning:
            model = adapters.merge(model)  # as fast as the base
    # Only the weights: the frequencies of rotary positions in bf16 would be off by a radian after
    # some hundred positions
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.DTYPES[dtype])
    return with_tokenizer(reference.text, model.to(target_device), reference.tokenizer)


def with_tokenizer(name: str, model: Any, tokenizer: Path) -> LoadedModel:
    """Combine a loaded model with the tokenizer of a directory; sets eval mode."""
    encoder, begins, can_chat = _encoder(tokenizer)
    return with_encoder(name, model, encoder, begins, can_chat=can_chat)


def with_encoder(
    name: str, model: Any, encoder: Encoder, begins: tuple[int, ...], *, can_chat: bool
) -> LoadedModel:
    """Combine a loaded model with a tokenizer; replaces its generation settings, sets eval mode."""
    causal = causal_of(model)
    config = causal.config.get_text_config()
    model_eos = causal.generation_config.eos_token_id
    stops = {encoder.eos_id, encoder.end_id}
    if model_eos is not None:
        stops.update(model_eos if isinstance(model_eos, list) else [model_eos])
    adapter = getattr(model, "active_peft_config", None)
    virtual_tokens = (
        adapter.num_virtual_tokens if adapter is not None and adapter.is_prompt_learning else 0
    )
    max_length = getattr(config, "max_position_embeddings", None)
    loaded = LoadedModel(
        name=name,
        model=model.eval(),
        encoder=encoder,
        begin_ids=begins,
        stop_ids=tuple(sorted(stops)),
        max_length=max_length and max_length - virtual_tokens,
        can_chat=can_chat,
        has_prefix=virtual_tokens > 0,
        batch_tokens=most_batch_tokens(next(model.parameters()).device),
    )
    # Neutral settings: `generate` would use a temperature or a penalty that a model from the Hub
    # brings
    pad = (
        encoder.pad_id if encoder.pad_id < config.vocab_size else 0
    )  # masked, but it must exist in the embedding
    settings = {"do_sample": False, "eos_token_id": list(loaded.stop_ids), "pad_token_id": pad}
    causal.generation_config = GenerationConfig(
        **settings, use_cache=getattr(config, "use_cache", True) is not False
    )
    model.generation_config = causal.generation_config
    return loaded


def _encoder(directory: Path) -> tuple[Encoder, tuple[int, ...], bool]:
    # (tokenizer, ids that begin a text, whether it has a chat template). A foreign tokenizer is
    # completed in a temporary directory: the user's files are not changed.
    if not (directory / existing.JSON).is_file():
        raise ArtifactError(
            f"{directory} holds no {existing.JSON}, so its model cannot be given text"
        )
    if (directory / "chat_template.jinja").is_file():
        # One that lacks some of the tokens that ttrain needs is refused.
        with contextlib.suppress(ArtifactError):
            encoder = Encoder(directory)
            return encoder, (encoder.bos_id,), True
    can_chat = existing.brings_template(directory)
    begins = open_tokenizer(directory / existing.JSON).encode("", add_special_tokens=True).ids
    with temporary_directory("tokenizer") as temporary:
        existing.install(existing.files_in(directory), temporary, "own" if can_chat else "ttrain")
        return Encoder(temporary), tuple(begins), can_chat
