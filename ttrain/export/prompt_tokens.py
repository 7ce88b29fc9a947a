"""Tokens of a prompt for the model that is served, counted in a thread, and not at all where its characters are too many.

transformers tokenizes in the middle of its handlers, in the event loop, where megabytes take seconds in which no other
request is answered.
"""

from __future__ import annotations

from contextvars import ContextVar
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary

import orjson
from tokenizers import Tokenizer, pre_tokenizers
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from ttrain.export import chat_rendering

ENCODE: Final = "_encode_plus"  # of transformers
CONTEXT_WITHOUT_LIMIT: Final = 32_768  # tokens, for models that name no limit of their own
NFC_CONTRACTION: Final = 4  # most characters that NFC makes one of; unicode.org/faq/normalization.html
CONTEXT: ContextVar[int] = ContextVar("context_tokens")  # of the model that the request is for

_transformers_encode: Any = getattr(TokenizersBackend, ENCODE, None)
_characters: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()  # by tokenizer


class PromptTooLong(Exception):
    """A prompt of more characters than the model's context can hold; the message has both numbers."""


def install() -> None:
    """Have transformers tokenize in threads. Raises RuntimeError where it no longer tokenizes as it did."""
    if _transformers_encode is None:
        raise RuntimeError(f"TokenizersBackend no longer has {ENCODE}, so long prompts would stop the server")
    TokenizersBackend._encode_plus = _encode


def context_of(model: Any) -> int:
    """Tokens that prompt and answer may have together."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT_WITHOUT_LIMIT


def characters_per_token(tokenizer: Any) -> int | None:
    """The most characters of a text that become one token; None where there is no bound that is sure."""
    if tokenizer not in _characters:
        _characters[tokenizer] = _characters_per_token(tokenizer.backend_tokenizer)
    return _characters[tokenizer]


def _characters_per_token(tokenizer: Tokenizer) -> int | None:
    """A token of a byte-level vocabulary has a character for each byte of its text. Whatever drops or joins characters
    before (a normalizer, spaces around added tokens, bytes without a token) leaves no bound, except NFC."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    normalizer = _kinds(tokenizer.normalizer)
    drops = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    is_byte_level = "ByteLevel" in _kinds(tokenizer.pre_tokenizer) and vocabulary.keys() >= set(
        pre_tokenizers.ByteLevel.alphabet()
    )
    if drops or not is_byte_level or "Removed" in str(_state(tokenizer.pre_tokenizer)) or normalizer - {"NFC"}:
        return None
    return max(map(len, vocabulary)) * (NFC_CONTRACTION if normalizer else 1)


def _state(component: Any) -> dict[str, Any]:
    """The JSON of a normalizer or a pre-tokenizer."""
    return {} if component is None else orjson.loads(component.__getstate__())


def _kinds(component: Any) -> set[str]:
    """The types of the steps that it has."""
    state = _state(component)
    steps = state.get("normalizers") or state.get("pretokenizers") or ([state] if state else [])
    return {str(step["type"]) for step in steps}


def _encode(tokenizer: Any, text: Any, *arguments: Any, **settings: Any) -> Any:
    """In the place of transformers' `_encode_plus`."""
    encode = partial(_transformers_encode, tokenizer, text, *arguments, **settings)
    context = CONTEXT.get(None)
    if context is None:
        return encode()
    if isinstance(text, str) and (per_token := characters_per_token(tokenizer)) and len(text) > per_token * context:
        raise PromptTooLong(
            f"the prompt has {len(text):,} characters, and the model's context of {context} tokens holds at most "
            f"{per_token * context:,}; shorten it"
        )
    return chat_rendering.in_thread(("tokens", repr((text, arguments, settings))), encode)
