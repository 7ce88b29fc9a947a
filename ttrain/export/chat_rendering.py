"""Chat templates of the model that is served, rendered in the child of `data.rendering` instead of in the server.

transformers renders in the middle of its handlers, in the event loop. Its function is replaced by one that interrupts the
handler; the template is rendered in a thread while other requests go on, and the handler begins again with the text.
`prompt_tokens` does the same with what tokenizes the text.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import orjson
from transformers import processing_utils, tokenization_utils_base

from ttrain.core.sandbox import BudgetExceeded
from ttrain.data import template_rendering

T = TypeVar("T")
RENDER, VARIABLES = "render_jinja_template", "_get_template_variables"  # of transformers
CHILDREN = 2  # that are there from the start; further ones begin where more requests are rendered at once
HANDLERS = ("transformers.cli.serving.chat_completion", "transformers.cli.serving.response")
Result = tuple[list[str], list[list[tuple[int, int]]]]  # texts, spans of `{% generation %}`
_results: ContextVar[dict[Hashable, Any]] = ContextVar("results_of_threads")  # by what was asked for


class TemplateRefused(Exception):
    """The model's template does not render these messages, or not within its budget; the message says why."""


class _ResultMissing(Exception):
    """Interrupts a handler: this is to be computed first."""

    def __init__(self, request: Hashable, compute: Callable[[], Any]) -> None:
        super().__init__()
        self.request, self.compute = request, compute


def install() -> None:
    """Have transformers render no template in this process. Raises RuntimeError where it no longer renders as it did."""
    for module, name in ((tokenization_utils_base, RENDER), (processing_utils, RENDER), (processing_utils, VARIABLES)):
        if not hasattr(module, name):
            raise RuntimeError(f"{module.__name__} no longer has {name}, so chat templates would have no limits")
    tokenization_utils_base.render_jinja_template = _rendered
    processing_utils.render_jinja_template = _rendered
    processing_utils._get_template_variables = lambda template: _EveryName()
    for handler in HANDLERS:
        logging.getLogger(handler).addFilter(_is_first_attempt)


def warm_up() -> list[threading.Thread]:
    """Start children in threads, so that no request waits for their imports, also while one template uses its time up."""
    work = partial(template_rendering.render, "", {}, [[]], prompt=False, spans=False)
    threads = [threading.Thread(target=work, name="templates", daemon=True) for _ in range(CHILDREN)]
    for thread in threads:
        thread.start()
    return threads


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
    conversations: Sequence[template_rendering.Turns],
    tools: Any = None,
    documents: Any = None,
    chat_template: str = "",
    return_assistant_tokens_mask: bool = False,
    continue_final_message: bool | str = False,
    add_generation_prompt: bool = False,
    **variables: Any,
) -> Result:
    """In the place of transformers' `render_jinja_template`."""
    arguments = {"tools": tools, "documents": documents, "continue_final_message": continue_final_message or None}
    variables |= {name: value for name, value in arguments.items() if value is not None}
    spans = return_assistant_tokens_mask
    request = orjson.dumps([chat_template, variables, conversations, add_generation_prompt, spans])
    return in_thread(request, partial(_render, request))


def _render(request: bytes) -> Result:
    template, variables, conversations, prompt, spans = orjson.loads(request)
    try:
        results = template_rendering.render(template, variables, conversations, prompt=prompt, spans=spans)
    except BudgetExceeded as error:
        raise TemplateRefused(f"the model's chat template asks for too much: {error}") from None
    for result in results:
        if isinstance(result, str):
            raise TemplateRefused(f"the model's chat template does not render this: {result}")
    texts = [result for result in results if not isinstance(result, str)]
    return [text for text, _ in texts], [places for _, places in texts]


class _EveryName(frozenset[str]):
    """The variables of a template that nobody has compiled: what a request names is one of them."""

    def __contains__(self, name: object) -> bool:
        return True


def _is_first_attempt(record: logging.LogRecord) -> bool:
    """Whether a handler's line is new: the second attempt says "[Request received]" again."""
    return not (_results.get({}) and record.getMessage().startswith("[Request received]"))
