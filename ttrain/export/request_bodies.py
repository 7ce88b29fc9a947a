"""What a request to the endpoint may say: bodies of OpenAI's interface, checked before a model sees them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, Json, ValidationError, field_validator
from pydantic_core import ErrorDetails

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
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    generation_config: Json[GenerationSettings] | None = None

    @field_validator("chat_template_kwargs")
    @classmethod
    def _only_variables_of_the_template(cls, variables: dict[str, Any] | None) -> dict[str, Any] | None:
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
    arguments: str | dict[str, Any]


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

    input: str | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Tokens = None


# What pydantic says in words of its own, or of Python.
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


def problem(error: ValidationError, body: Mapping[str, Any]) -> str:
    """What is wrong with a body, with its value and the rule, in a line: the first field, all of its rules where it may
    be of several kinds and is of none."""
    details = error.errors(include_url=False)
    first = next((detail for detail in details if _field(detail, body) and not detail["type"].endswith("_type")), details[0])
    if details[0]["loc"][:1] != first["loc"][:1]:  # of another field
        first = details[0]
    field = _field(first, body)
    if first["type"] == "missing":
        return f"{field} is missing"
    rules = dict.fromkeys(_rule(detail) for detail in details if _field(detail, body) == field)
    rule = " or ".join([next(iter(rules))] + [rule.removeprefix("must be ") for rule in list(rules)[1:]])
    value = json.dumps(first["input"], ensure_ascii=False, default=str)
    shown = value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."
    return f"{field} is {shown}: {rule if first['type'].endswith('_type') else _rule(first)}"


def _rule(detail: ErrorDetails) -> str:
    if detail["type"] in RULES:
        return RULES[detail["type"]].format(**detail.get("ctx", {}))
    return detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")


def _field(detail: ErrorDetails, body: Mapping[str, Any]) -> str:
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
