"""Tokens of a prompt for the model that is served, counted in a thread, and not at all where its characters are too many.

transformers tokenizes in the middle of its handlers, in the event loop, where megabytes take seconds in which no other
request is answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import orjson
from tokenizers import Tokenizer, pre_tokenizers
from transformers import processing_utils, tokenization_utils_base
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from ttrain.core.files import JsonDict
from ttrain.data import jinja_templates

ENCODE = "_encode_plus"  # of transformers

CONTEXT_WITHOUT_LIMIT = 32_768  # tokens, for models that name no limit of their own

NFC_CONTRACTION = 4  # most characters that NFC makes one of; unicode.org/faq/normalization.html

CONTEXT: ContextVar[int] = ContextVar("context_tokens")  # of the model that the request is for

transformers_encode: Any = getattr(TokenizersBackend, ENCODE, None)

_characters: WeakKeyDictionary[Any, int | None] = WeakKeyDictionary()  # by tokenizer


class PromptTooLong(Exception):
    """A prompt of more characters than the model's context can hold; the message has both numbers."""


def tokenize_in_threads() -> None:
    """Have transformers tokenize in threads. Raises RuntimeError where it no longer tokenizes as it did."""
    if transformers_encode is None:
        raise RuntimeError(f"TokenizersBackend no longer has {ENCODE}, so long prompts would stop the server")
    TokenizersBackend._encode_plus = _encode


def context_of(model: Any) -> int:
    """Tokens that prompt and answer may have together."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or CONTEXT_WITHOUT_LIMIT


def characters_per_token(tokenizer: Any) -> int | None:
    """The most characters of a text that become one token; None where there is no certain bound."""
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


def _state(component: Any) -> JsonDict:
    """The JSON of a normalizer or a pre-tokenizer."""
    return {} if component is None else orjson.loads(component.__getstate__())


def _kinds(component: Any) -> set[str]:
    """The types of a component's steps."""
    state = _state(component)
    steps = state.get("normalizers") or state.get("pretokenizers") or ([state] if state else [])
    return {str(step["type"]) for step in steps}


def _encode(tokenizer: Any, text: Any, *arguments: Any, **settings: Any) -> Any:
    """The replacement of transformers' `_encode_plus`."""
    encode = partial(transformers_encode, tokenizer, text, *arguments, **settings)
    context = CONTEXT.get(None)
    if context is None:
        return encode()
    if isinstance(text, str) and (per_token := characters_per_token(tokenizer)) and len(text) > per_token * context:
        raise PromptTooLong(
            f"the prompt has {len(text):,} characters, and the model's context of {context} tokens holds at most "
            f"{per_token * context:,}; shorten it"
        )
    return in_thread(("tokens", repr((text, arguments, settings))), encode)


T = TypeVar("T")

RENDER, VARIABLES = "render_jinja_template", "_get_template_variables"  # of transformers

HANDLERS = ("transformers.cli.serving.chat_completion", "transformers.cli.serving.response")

Result = tuple[list[str], list[list[tuple[int, int]]]]  # texts, spans of `{% generation %}`

_results: ContextVar[dict[Hashable, Any]] = ContextVar("results_of_threads")  # by what was asked for


class TemplateRefused(Exception):
    """The model's template does not render these messages; the message says why."""


class _ResultMissing(Exception):
    """Interrupts a handler until the result that it needs is computed."""

    def __init__(self, request: Hashable, compute: Callable[[], Any]) -> None:
        self.request, self.compute = request, compute


def render_in_threads() -> None:
    """Have transformers render templates in threads. Raises RuntimeError where it no longer renders as it did."""
    for module, name in ((tokenization_utils_base, RENDER), (processing_utils, RENDER), (processing_utils, VARIABLES)):
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} no longer has {name}, so templates would stop the server")
    tokenization_utils_base.render_jinja_template = _rendered
    processing_utils.render_jinja_template = _rendered
    processing_utils._get_template_variables = lambda template: _EveryName()
    for handler in HANDLERS:
        logging.getLogger(handler).addFilter(_is_first_attempt)


async def with_templates(call: Callable[[], Awaitable[T]]) -> T:
    """The call's result. The call is made again after each result of `in_thread` that it needs. Raises TemplateRefused."""
    results: dict[Hashable, Any] = {}
    token = _results.set(results)
    try:
        while True:
            try:
                return await call()
            except _ResultMissing as missing:
                results[missing.request] = await asyncio.to_thread(missing.compute)
    finally:
        _results.reset(token)


def in_thread(request: Hashable, compute: Callable[[], T]) -> T:
    """The result of `compute`, which a thread calls once for a request while the handler of `with_templates` waits."""
    results = _results.get(None)
    if results is None:
        return compute()
    if request not in results:
        raise _ResultMissing(request, compute)
    result: T = results[request]
    return result


def _rendered(
    conversations: Sequence[jinja_templates.Turns],
    tools: Any = None,
    documents: Any = None,
    chat_template: str = "",
    return_assistant_tokens_mask: bool = False,
    continue_final_message: bool | str = False,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> Result:
    """The replacement of transformers' `render_jinja_template`."""
    arguments = {"tools": tools, "documents": documents, "continue_final_message": continue_final_message or None}
    variables |= {name: value for name, value in arguments.items() if value is not None}
    spans = return_assistant_tokens_mask
    request = orjson.dumps([chat_template, variables, conversations, add_generation_prompt, spans])
    return in_thread(request, partial(_render, request))


def _render(request: bytes) -> Result:
    template, variables, conversations, prompt, spans = orjson.loads(request)
    results = jinja_templates.render(template, variables, conversations, prompt=prompt, spans=spans)
    texts, all_spans = list[str](), list[list[tuple[int, int]]]()
    for result in results:
        if isinstance(result, str):
            raise TemplateRefused(f"the model's chat template does not render this: {result}")
        texts.append(result[0])
        all_spans.append(result[1])
    return texts, all_spans


class _EveryName(frozenset[str]):
    """The variables of a template: every name counts as one of them."""

    def __contains__(self, name: object) -> bool:
        return True


def _is_first_attempt(record: logging.LogRecord) -> bool:
    """Whether a handler's line is new: the second attempt says "[Request received]" again."""
    return not (_results.get({}) and record.getMessage().startswith("[Request received]"))
