"""Bodies of requests to the endpoint, as of OpenAI's interface, checked before a model sees them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, final

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, ValidationError, field_validator
from pydantic_core import ErrorDetails

from ttrain.core.files import JsonDict
from ttrain.core.text import rule_of, truncated

MAX_VALUE_CHARACTERS = 60  # of a wrong value, in a message

MAX_STOPS = 16

# `generation_config` and `chat_template_kwargs` reach calls of transformers whose other arguments cost memory without
# bound (num_beams, num_return_sequences), name files, or bring a template of the client's own, which may loop for hours.
TEMPLATE_ARGUMENTS = (
    "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "load_audio_from_video",
    "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens",
    "tokenize", "tokenizer_kwargs", "tools", "truncation",
)  # fmt: skip

# Numbers beyond these make logits infinite, of which nothing can be sampled; `strict`: true is not 1, nor is "1".
MAX_PENALTY = 10.0

MAX_BIAS = 100.0

MAX_TEMPERATURE, MIN_TEMPERATURE = 100.0, 0.01

MAX_COUNT = 2**31 - 1

Tokens = Annotated[int, Field(ge=1, strict=True)] | None

Count = Annotated[int, Field(ge=0, le=MAX_COUNT, strict=True)] | None

Share = Annotated[float, Field(gt=0, le=1, strict=True)] | None

Flag = Annotated[bool, Field(strict=True)] | None

Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, strict=True)]


def _not_almost_zero(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"must be 0, or at least {MIN_TEMPERATURE}")
    return temperature


Temperature = Annotated[float, Field(ge=0, le=MAX_TEMPERATURE, strict=True), AfterValidator(_not_almost_zero)] | None

Stop = Annotated[str, Field(min_length=1, max_length=256)]


class GenerationSettings(BaseModel):
    """What `generation_config` may hold, as JSON in a string."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    do_sample: Flag = None
    max_new_tokens: Tokens = None
    min_p: float | None = Field(None, ge=0, le=1, strict=True)
    no_repeat_ngram_size: Count = None
    repetition_penalty: float | None = Field(None, ge=1 / MAX_PENALTY, le=MAX_PENALTY, strict=True)
    temperature: Temperature = None
    top_k: Count = None
    top_p: Share = None
    typical_p: Share = None


class Body(BaseModel):
    """What all requests for an answer have in common. Other fields pass: the server refuses those that it does not know."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    limits: ClassVar[tuple[str, ...]] = (
        "max_tokens",
    )  # fields that say how long the answer may be; the first that is set counts

    model: str | None = None
    stream: Flag = None
    temperature: Temperature = None
    top_p: Share = None
    frequency_penalty: float | None = Field(None, ge=1 / MAX_PENALTY - 1, le=2, strict=True)  # becomes a factor of 1 more
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, strict=True)
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    logit_bias: dict[int, Bias] | None = None
    tools: list[JsonDict] | None = None
    chat_template_kwargs: JsonDict | None = None
    generation_config: Json[GenerationSettings] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _only_variables_of_the_template(cls, variables: JsonDict | None) -> JsonDict | None:
        refused = sorted(set(variables or ()).intersection(TEMPLATE_ARGUMENTS))
        if refused:
            raise ValueError(f"holds variables of the model's template only, not {', '.join(refused)}")
        return variables

    @property
    def max_tokens_requested(self) -> tuple[str, int] | None:
        """(the field that limits the answer, its tokens); None where the request does not say."""
        for name in self.limits:
            if (tokens := getattr(self, name)) is not None:
                return name, tokens
        if self.generation_config is None or self.generation_config.max_new_tokens is None:
            return None
        return "generation_config.max_new_tokens", self.generation_config.max_new_tokens


class Function(BaseModel):
    name: str
    arguments: str | JsonDict


class ToolCall(BaseModel):
    function: Function


class TextPart(BaseModel):
    type: Literal["text", "input_text", "output_text"]
    text: str


class ChatMessage(BaseModel):
    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None


class ChatBody(Body):
    """`/v1/chat/completions`."""

    limits: ClassVar[tuple[str, ...]] = ("max_completion_tokens", "max_tokens")

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: Tokens = None
    max_completion_tokens: Tokens = None


class CompletionBody(Body):
    """`/v1/completions`."""

    prompt: str = ""
    suffix: str | None = None
    max_tokens: Tokens = None


class ResponseBody(Body):
    """`/v1/responses`."""

    limits: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    input: str | Annotated[list[JsonDict], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens = None


# What a client reads, in the terms of JSON, beside the table of `rule_of`.
RULES = {
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "extra_forbidden": "cannot be set by a request; leave it out",
    "json_invalid": "must be JSON: {error}",
    "json_type": "must be JSON in a string",
}


def problem(error: ValidationError, body: JsonDict) -> str:
    """What is wrong with a body, with its value and the rule, in a line: the first field, all of its rules where it may
    be of several kinds and is of none."""
    details = error.errors(include_url=False)
    first = next((detail for detail in details if _field(detail, body) and not detail["type"].endswith("_type")), details[0])
    if details[0]["loc"][:1] != first["loc"][:1]:  # of another field
        first = details[0]
    field = _field(first, body)
    if first["type"] == "missing":
        return f"{field} is missing"
    rule, *others = dict.fromkeys(rule_of(detail, RULES) for detail in details if _field(detail, body) == field)
    rule = " or ".join([rule, *(other.removeprefix("must be ") for other in others)])
    value = json.dumps(first["input"], ensure_ascii=False, default=str)
    shown = truncated(value, MAX_VALUE_CHARACTERS)
    return f"{field} is {shown}: {rule if first['type'].endswith('_type') else rule_of(first, RULES)}"


def _field(detail: ErrorDetails, body: JsonDict) -> str:
    """Where the value is in the body; pydantic's place has names of Python's types in it, where there are several."""
    steps = []
    value: Any = body
    for number, step in enumerate(detail["loc"], 1):
        if isinstance(value, str):  # JSON in a string, as `generation_config`
            with contextlib.suppress(ValueError):
                value = orjson.loads(value)
        is_missing = detail["type"] == "missing" and number == len(detail["loc"])
        try:
            value = value[step]
        except (LookupError, TypeError):
            if not is_missing:
                continue
        steps.append(str(step))
    return ".".join(steps)


Scope = MutableMapping[str, Any]

Message = MutableMapping[str, Any]

Receive = Callable[[], Awaitable[Message]]

Send = Callable[[Message], Awaitable[None]]

MAX_BODY_BYTES = 4 * 2**20  # a context of 131,072 tokens at eight times the bytes that a token of English has

MAX_HELD_BYTES = 64 * 2**20  # of all bodies that are being read: a client may send the most of one, and then wait

BODY_SECONDS = 30.0  # for the most bytes at 1.1 Mbit/s

RETRY_SECONDS = "1"


@final
@dataclass(eq=False)
class ActiveRequest:
    """A request that is being answered: the length that it asks for, and whether its client still waits."""

    max_tokens: tuple[str, int] | None = None  # (field, tokens); None: as many as there is room for
    is_closed: bool = False  # whether no client waits for the answer any more; read by the thread that computes
    _callbacks: list[Callable[[], object]] = field(default_factory=list)

    def on_close(self, callback: Callable[[], object]) -> None:
        """Call this, in the event loop, once no client waits for the answer; at once where that is so already."""
        if self.is_closed:
            callback()
        else:
            self._callbacks.append(callback)

    def close(self) -> None:
        """Mark that no client waits for the answer any more: it is gone, or has the answer."""
        if not self.is_closed:
            self.is_closed = True
            for callback in self._callbacks:
                callback()


ACTIVE: ContextVar[ActiveRequest] = ContextVar("active_request")  # of the task that answers it


class _Refused(Exception):
    """A request that is not passed on: the status of the answer, its message and its headers."""

    def __init__(self, status: int, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers


@final
@dataclass(eq=False)
class LimitedRequests:
    """An ASGI application that answers at most `max_requests` POST requests at once, of at most `max_body_bytes`.

    One more is answered with 429, a larger one with 413. A request counts once its body is there, which may take
    `body_seconds`; then it is answered with 408. What is held of bodies until then is at most `max_held_bytes`. The
    application finds a request to `paths` in `ACTIVE`, which is closed as soon as the client is gone.
    """

    app: Any
    paths: Collection[str]
    max_requests: int
    max_body_bytes: int = MAX_BODY_BYTES
    max_held_bytes: int = MAX_HELD_BYTES
    body_seconds: float = BODY_SECONDS
    _active: int = 0
    _held_bytes: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        try:
            self._check_active()  # before any of the body is held
            body = await self._read(receive)
            self._check_active()
        except _Refused as refusal:
            await _refuse(send, refusal)
            return
        self._active += 1
        try:
            if scope["path"] not in self.paths:
                await self.app(scope, _replay(body, receive), send)
            else:
                await self._answer(scope, body, receive, send)
        finally:
            self._active -= 1

    def _check_active(self) -> None:
        if self._active >= self.max_requests:
            text = f"{self._active} requests are being answered, as many as --max-requests allows; try again later"
            raise _Refused(429, text, (b"retry-after", RETRY_SECONDS.encode()))

    async def _read(self, receive: Receive) -> bytes:
        """The body. What a client sent before it left is a body, too."""
        body = bytearray()
        has_more = True
        try:
            async with asyncio.timeout(self.body_seconds):
                while has_more:
                    message = await receive()
                    piece = message.get("body", b"")
                    body += piece
                    self._held_bytes += len(piece)
                    has_more = message.get("more_body", False)
                    self._check_size(len(body))
        except TimeoutError:
            text = f"the body of the request did not arrive within {self.body_seconds:g} s; send it whole"
            raise _Refused(408, text, (b"connection", b"close")) from None
        finally:
            self._held_bytes -= len(body)
        return bytes(body)

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self.max_body_bytes:
            text = f"the request has more than {self.max_body_bytes:,} bytes, the limit of this server; shorten it"
            raise _Refused(413, text)
        if self._held_bytes > self.max_held_bytes:
            text = f"requests of more than {self.max_held_bytes:,} bytes are arriving; try again later"
            raise _Refused(429, text, (b"retry-after", RETRY_SECONDS.encode()), (b"connection", b"close"))

    async def _answer(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> None:
        request, gone = ActiveRequest(), asyncio.Event()
        request.on_close(gone.set)
        token = ACTIVE.set(request)
        watch = asyncio.create_task(_close_with_client(request, receive))

        async def disconnected() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self.app(scope, _replay(body, disconnected), send)
        finally:
            request.close()
            watch.cancel()
            ACTIVE.reset(token)


def _replay(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body was read already."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed


async def _close_with_client(request: ActiveRequest, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    request.close()


def error_body(status: int, message: str) -> JsonDict:
    """The body of a refusal, in the form of OpenAI's interface."""
    kind = "rate_limit_error" if status == 429 else "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


async def _refuse(send: Send, refusal: _Refused) -> None:
    body = json.dumps(error_body(refusal.status, str(refusal))).encode()
    length = (b"content-length", str(len(body)).encode())
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": refusal.status, "headers": [kind, length, *refusal.headers]})
    await send({"type": "http.response.body", "body": body})
