"""An endpoint for clients of OpenAI's interface, and a page that compares two models."""

import asyncio
import functools
import itertools
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError, model_validator
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from ttrain.core.files import JsonDict, need_object, private_opener
from ttrain.core.text import first_line, invalid_values
from ttrain.data.chat import lead_text, prompt_ids
from ttrain.data.chat_shapes import messages_of
from ttrain.data.preferences import preference_of
from ttrain.errors import DataError, TTrainError, UsageError
from ttrain.inference.answer_queue import Answer, AnswerQueue, Order
from ttrain.inference.generate import TextStream
from ttrain.inference.loading import LoadedModel
from ttrain.inference.sampling import Sampling

PAGE = Path(__file__).with_name("page.html")
PAIRS = "preferences.jsonl"  # in the home
UNLIMITED = 32_768  # tokens of the context, where the model has no limit
TYPES = {429: "rate_limit_error", 500: "server_error"}


class RefusedError(HTTPException):
    """A refused request, with OpenAI's code for the reason."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(status, message, {"Retry-After": "1"} if status == 429 else None)
        self.code = code


class Body(Sampling):
    """The fields of a request; `top_k` and `repetition_penalty` are ours, not OpenAI's."""

    model_config = ConfigDict(strict=True)
    temperature: float = Field(1.0, ge=0, le=10)
    model: str = ""
    n: int = Field(1, ge=1, le=16)
    stream: bool = False
    stream_options: dict[str, bool] = Field(default_factory=dict)
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=16)
    frequency_penalty: float = Field(0.0, ge=0, le=0)
    presence_penalty: float = Field(0.0, ge=0, le=0)
    user: str = ""  # read by nobody

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, body: Any) -> Any:
        # Leave out null; a text may stand for a list of one.
        if not isinstance(body, dict):
            return body
        values = {name: value for name, value in body.items() if value is not None}
        if "max_completion_tokens" in values:
            values["max_tokens"] = values.pop("max_completion_tokens")
        texts = {
            name: [values[name]] for name in ("stop", "prompt") if isinstance(values.get(name), str)
        }
        return values | texts


class ChatBody(Body):
    messages: list[JsonDict] = Field(min_length=1)
    tools: list[JsonDict] = Field(default_factory=list)

    def prompts(self, model: LoadedModel) -> list[list[int]]:
        """Ids of the prompt. Raises UsageError for a model without a chat template."""
        if not model.can_chat:
            raise UsageError(
                f"the model '{model.name}' has no chat template; ask it at /v1/completions"
            )
        messages = tuple(messages_of({"messages": self.messages, "tools": self.tools}))
        return [prompt_ids(model.encoder, messages)]


class TextBody(Body):
    prompt: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1)
    max_tokens: int = Field(16, ge=1)

    def prompts(self, model: LoadedModel) -> list[list[int]]:
        """The ids of each prompt."""
        return model.text_ids(self.prompt)


@dataclass(frozen=True)
class Endpoint:
    """The routes over a queue. `names`: the offered models; `pairs`: the file of the verdicts."""

    queue: AnswerQueue
    names: Callable[[], list[str]]
    pairs: Path

    def application(self) -> Starlette:
        """The application, without a guard."""
        routes = [
            Route("/", self.page),
            Route("/v1/models", self.models),
            Route(
                "/v1/chat/completions", functools.partial(self.answer, ChatBody), methods=["POST"]
            ),
            Route("/v1/completions", functools.partial(self.answer, TextBody), methods=["POST"]),
            Route("/preferences", self.preferences, methods=["GET", "POST"]),
        ]
        handlers: Any = dict.fromkeys((HTTPException, ValueError, TTrainError), _error_response)
        return Starlette(routes=routes, exception_handlers=handlers)

    async def page(self, request: Request) -> Response:
        return FileResponse(PAGE, headers={"Cache-Control": "no-store"})

    async def models(self, request: Request) -> Response:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "ttrain"}
            for name in self.names()
        ]
        return JSONResponse({"object": "list", "data": models})

    async def preferences(self, request: Request) -> Response:
        """Return the file of the verdicts; append posted pairs as `data.dpo` reads them."""
        if request.method == "POST":
            rows = [need_object(line) for line in (await request.body()).splitlines()]
            for row in rows:
                preference_of(row)  # raises what is wrong with it
            with open(self.pairs, "a", encoding="utf-8", opener=private_opener) as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        return JSONResponse({"path": str(self.pairs)})

    def _need_room(self) -> None:
        if self.queue.requests >= self.queue.max_requests:
            raise RefusedError(
                429,
                "rate_limit_exceeded",
                f"{self.queue.max_requests} requests are answered or wait, "
                "as --max-requests allows; try again later",
            )

    async def answer(self, kind: type[ChatBody | TextBody], request: Request) -> Response:
        """Answer a request at once or as a stream."""
        body = kind.model_validate_json(await request.body())
        self._need_room()  # at once, since a model is loaded behind the answers that run
        try:
            model = await self.queue.model(body.model or self.names()[0])
        except UsageError as error:
            raise RefusedError(404, "model_not_found", str(error)) from None
        order = _order(model, body, await asyncio.to_thread(body.prompts, model))
        self._need_room()
        self.queue.submit(order)
        reply = _Reply(body, order)
        if body.stream:
            return StreamingResponse(reply.events(), media_type="text/event-stream")
        texts = [""] * len(order.answers)
        reasons = [""] * len(order.answers)
        async for index, text, reason in order.pieces():
            texts[index] += text
            reasons[index] = reason or ""
            if await request.is_disconnected():
                order.has_ended = True
                break
        choices = [
            reply.choice(index, texts[index], reason) for index, reason in enumerate(reasons)
        ]
        return JSONResponse(reply.fields | {"choices": choices, "usage": reply.usage()})


class _Reply:
    """The answers of a request in OpenAI's shape."""

    def __init__(self, body: Body, order: Order) -> None:
        self._body = body
        self._order = order
        self._is_chat = isinstance(body, ChatBody)
        kind = "chat.completion" if self._is_chat else "text_completion"
        self.fields: JsonDict = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if self._is_chat and body.stream else kind,
            "created": int(time.time()),
            "model": order.model.name,
        }

    def usage(self) -> JsonDict:
        answers = self._order.answers
        prompts = sum(len(answer.prompt) for answer in answers[:: self._body.n])
        tokens = sum(len(answer.stream.ids) for answer in answers)
        return {
            "prompt_tokens": prompts,
            "completion_tokens": tokens,
            "total_tokens": prompts + tokens,
        }

    def choice(self, index: int, text: str, reason: str | None) -> JsonDict:
        """An answer, or a piece of it."""
        choice = {"index": index, "finish_reason": reason, "logprobs": None}
        if not self._is_chat:
            return {**choice, "text": text}
        return {
            **choice,
            "delta" if self._body.stream else "message": {"role": "assistant", "content": text},
        }

    async def events(self) -> AsyncIterator[str]:
        """The events of a stream."""
        try:
            async for piece in self._order.pieces():
                yield _event(self.fields | {"choices": [self.choice(*piece)]})
            if self._body.stream_options.get("include_usage"):
                yield _event(self.fields | {"choices": [], "usage": self.usage()})
        except TTrainError as error:  # its status has been sent already
            yield _event(_error(500, str(error)))
        yield "data: [DONE]\n\n"


def _event(value: JsonDict) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _order(model: LoadedModel, body: Body, prompts: list[list[int]]) -> Order:
    # Raises RefusedError where the answers exceed the context.
    order = Order(model, body, body.stop)
    context = model.max_length or UNLIMITED
    lead = lead_text(model.encoder) if isinstance(body, ChatBody) else ""
    for prompt, number in itertools.product(prompts, range(body.n)):
        room = context - len(prompt)
        is_limited = "max_tokens" in body.model_fields_set or isinstance(body, TextBody)
        tokens = body.max_tokens if is_limited else max(room, 1)
        if tokens > room:
            raise RefusedError(
                400,
                "context_length_exceeded",
                f"the prompt has {len(prompt)} tokens and max_tokens is {tokens}, "
                f"but the model's context holds {context}; "
                f"set max_tokens to at most {max(room, 0)}, or shorten the prompt",
            )
        if "seed" not in body.model_fields_set:
            number = secrets.randbits(63)  # another answer each time
        order.answers.append(
            Answer(
                order, len(order.answers), prompt, tokens, number, TextStream(model.encoder, lead)
            )
        )
    return order


def _error(status: int, message: str, code: str | None = None) -> JsonDict:
    return {
        "error": {
            "message": message,
            "type": TYPES.get(status, "invalid_request_error"),
            "param": None,
            "code": code,
        }
    }


def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        content = _error(error.status_code, error.detail, getattr(error, "code", None))
        return JSONResponse(content, error.status_code, error.headers)
    status = 400 if isinstance(error, ValueError | UsageError | DataError) else 500
    message = (
        invalid_values(error.errors()[:1])
        if isinstance(error, ValidationError)
        else first_line(error)
    )
    return JSONResponse(_error(status, message), status)
