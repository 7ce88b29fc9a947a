"""transformers' own server with limits: what a request may ask for, how many at once, and no work for clients that are gone.

`transformers serve` builds its parts inside one constructor. So two names are replaced before it runs: what keeps the
managers of generation, and what builds the application. `chat_rendering` replaces what renders the model's template.
`serve` asks the server whether the guard is in front.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fastapi import HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from pydantic import ValidationError
from transformers import GenerationConfig, StoppingCriteria
from transformers.cli.serving import server, utils
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, CBWorkerDeadError, GenerationState

from ttrain.core.files import JsonDict
from ttrain.core.signals import PARENT, end_with_parent
from ttrain.core.text import first_line
from ttrain.export import prompt_tokens
from ttrain.export.requests import (
    ACTIVE,
    ActiveRequest,
    Body,
    ChatBody,
    CompletionBody,
    LimitedRequests,
    ResponseBody,
    error_body,
    problem,
)

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
PATHS = frozenset({*GENERATING, "/v1/models", "/health"})  # of transformers' own routes; others load any model
CLIENT_GONE = 499  # nginx' code; nobody reads it
MAX_ERROR_CHARACTERS = 300
logger = logging.getLogger(__name__)
transformers_build = server.build_server


class RefusedError(Exception):
    """A request that cannot be answered as it is; the client gets the message with 400."""


def serve(arguments: Sequence[str], *, max_requests: int, guard: Callable[[Any], Any]) -> None:
    """Run `transformers` with the arguments, with our limits and behind the guard, until the parent ends.

    Does not ask the network for a newer version, as transformers' own command does.
    """
    end_with_parent(int(os.environ[PARENT]))

    def build(*parts: Any, **options: Any) -> Any:
        return guard(application(*parts, max_requests=max_requests, **options))

    utils.GenerationState = LimitedGeneration
    server.build_server = build
    from transformers.cli.transformers import app

    app(list(arguments))


def application(
    model_manager: Any,
    chat_handler: Any,
    completion_handler: Any,
    response_handler: Any,
    *unused: Any,
    max_requests: int,
    generation_state: GenerationState,
    **others: Any,
) -> LimitedRequests:
    """The application of transformers' `build_server`, with checked requests and without routes that load other models."""
    if not isinstance(generation_state, LimitedGeneration):
        raise RuntimeError(
            "transformers serve no longer takes the generation state of ttrain, so its requests would have no limits"
        )
    # By its kind a model gets the answer template of the vendor's chats, which ours are not: prompts came back as answers.
    utils.get_response_template = lambda processor, model: None
    prompt_tokens.render_in_threads()
    prompt_tokens.tokenize_in_threads()
    app = transformers_build(
        model_manager,
        CheckedHandler(chat_handler, ChatBody),
        CheckedHandler(completion_handler, CompletionBody),
        CheckedHandler(response_handler, ResponseBody),
        *unused,
        generation_state=generation_state,
        **others,
    )
    app.router.routes = [route for route in app.router.routes if getattr(route, "path", None) in PATHS]
    app.add_exception_handler(RequestValidationError, _refuse_unread)
    return LimitedRequests(app, GENERATING, max_requests=max_requests)


@dataclass(frozen=True)
class CheckedHandler:
    """A handler of transformers whose requests are checked first; what is wrong with one is answered with 400."""

    handler: Any
    kind: type[Body]

    async def handle_request(self, body: JsonDict, request_id: str) -> Any:
        """The handler's answer. The id of the request is ours: two clients with one id would get each other's answers."""
        request = ACTIVE.get()
        try:
            checked = self.kind.model_validate(body)
            request.max_tokens = checked.max_tokens_requested
            if checked.logit_bias is not None:  # transformers wants decimals, OpenAI's page shows -100
                body["logit_bias"] = checked.logit_bias
            _, model, _ = self.handler._resolve_model(body)
            prompt_tokens.CONTEXT.set(prompt_tokens.context_of(model))  # of this request's task
            name = uuid.uuid4().hex
            return await prompt_tokens.with_templates(lambda: self.handler.handle_request(body, name))
        except ValidationError as error:
            return _refusal(400, problem(error, body))
        except HTTPException as error:
            return _refusal(error.status_code, str(error.detail))
        except (RefusedError, prompt_tokens.TemplateRefused, prompt_tokens.PromptTooLong) as error:
            return _refusal(400, str(error))
        except (ValueError, TypeError, KeyError, TemplateError) as error:
            logger.warning("a request cannot be answered: %s", _line(error))
            return _refusal(400, f"the model cannot be asked this: {type(error).__name__}: {error}")
        except CBWorkerDeadError:
            raise  # transformers answers it with 503, as it does at /health
        except Exception as error:
            logger.error("an answer could not be computed: %s", _line(error))
            return _refusal(500, f"the answer could not be computed: {_line(error)}")
        except asyncio.CancelledError:
            if not request.is_closed:
                raise
            return _refusal(CLIENT_GONE, "the client is gone")


def _line(error: Exception) -> str:
    """An error in a line: kind and the beginning of its message."""
    return f"{type(error).__name__}: {first_line(error)[:MAX_ERROR_CHARACTERS]}"


async def _refuse_unread(request: Request, error: RequestValidationError) -> JSONResponse:
    """Refuse a body that is not a JSON object, as OpenAI's interface does."""
    detail = error.errors()[0]
    reason = f": {detail.get('ctx', {}).get('error')}" if detail["type"] == "json_invalid" else ""
    return _refusal(400, f"the body of the request must be a JSON object{reason}")


def _refusal(status: int, message: str) -> JSONResponse:
    return JSONResponse(error_body(status, message), status_code=status)


class LimitedGeneration(GenerationState):  # type: ignore[misc]
    """The managers of generation, each with our limits around it."""

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        return LimitedManager(super().get_manager(model_id, use_cb=use_cb))


class LimitedManager(BaseGenerateManager):  # type: ignore[misc]
    """Generates as the manager that it wraps does, within the model's context and for as long as the client waits."""

    def __init__(self, manager: BaseGenerateManager) -> None:
        self._manager = manager

    def init_cb(self, model: Any, gen_config: GenerationConfig) -> None:
        self._manager.init_cb(model, gen_config)

    def generate_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str, **options: Any
    ) -> tuple[asyncio.Queue[Any], Any]:
        request = ACTIVE.get()
        _fit_to_context(request, model, inputs, gen_config)
        queue, streamer = self._manager.generate_streaming(model, processor, inputs, gen_config, request_id, **options)
        request.on_close(streamer.cancel)
        return queue, streamer

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: GenerationConfig, request_id: str
    ) -> Any:
        request = ACTIVE.get()
        _fit_to_context(request, model, inputs, gen_config)
        if isinstance(self._manager, CBGenerateManager):
            batching = self._manager._cb
            answer = asyncio.ensure_future(
                self._manager.generate_non_streaming(model, processor, inputs, gen_config, request_id)
            )
            request.on_close(lambda: batching.cancel_request(request_id))
            request.on_close(answer.cancel)  # a request that is cancelled gets no result
            return await answer
        stopping = {**inputs, "stopping_criteria": [ClientGone(request)]}
        return await self._manager.generate_non_streaming(model, processor, stopping, gen_config, request_id)

    def stop(self) -> None:
        self._manager.stop()


class ClientGone(StoppingCriteria):  # type: ignore[misc]
    """Ends the generation of an answer whose client is gone."""

    def __init__(self, request: ActiveRequest) -> None:
        self._request = request

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **unused: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self._request.is_closed, device=input_ids.device, dtype=torch.bool)


def _fit_to_context(request: ActiveRequest, model: Any, inputs: Any, config: GenerationConfig) -> None:
    """Raise RefusedError where prompt and answer are longer than the context; it bounds an answer of any length, too."""
    ids = inputs["input_ids"]
    prompt = len(ids) if isinstance(ids, list) else ids.shape[-1]
    context = prompt_tokens.context_of(model)
    available_tokens = context - prompt
    if prompt == 0:
        raise RefusedError("the prompt has 0 tokens, but needs at least 1")
    if available_tokens < 1:
        raise RefusedError(
            f"the prompt has {prompt} tokens, and the model's context of {context} leaves no room for an answer; shorten it"
        )
    if request.max_tokens is None:
        config.max_new_tokens = min(config.max_new_tokens or available_tokens, available_tokens)
        return
    field, tokens = request.max_tokens
    if tokens > available_tokens:
        raise RefusedError(
            f"the prompt has {prompt} tokens and {field} is {tokens}, together {prompt + tokens}, but the model's context "
            f"holds {context}; set {field} to at most {available_tokens}, or shorten the prompt"
        )
