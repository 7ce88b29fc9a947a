"""The chat templates of ttrain as Jinja, which transformers renders, with their roles and special tokens."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from ttrain.core.files import JsonDict
from ttrain.core.sandbox import Sandbox, WorkFailed
from ttrain.data.tools import CALL_BEGIN, CALL_END, TOOLS_BEGIN, TOOLS_END, TOOLS_SENTENCE

ROLES = ("system", "user", "assistant", "tool")

PAD, UNK, BOS, EOS, END, IM_END = "<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>", "<|end|>", "<|im_end|>"

ROLE_TOKENS = tuple(f"<|{role}|>" for role in ROLES)

TINYSEEK_NAMES = {role: f"{role.capitalize()}：" for role in ROLES}


# Special tokens of a tokenizer that is trained, in the order of their ids, and the one that ends an answer.
SPECIAL_TOKENS = {"ttrain": (PAD, UNK, BOS, EOS, *ROLE_TOKENS, END), "tinyseek": (PAD, UNK, BOS, EOS, IM_END)}

END_TOKENS = {"ttrain": END, "tinyseek": IM_END}


# What transformers renders. `turn.text` is gathered as `ttrain.data.tools` does it: the functions on the first turn, the
# calls after the words of the assistant.
_JINJA = """\
$begin
{%- set functions = namespace(text='') -%}
{%- if tools -%}
{%- set functions.text = '$sentence\\n$tools_begin' -%}
{%- for tool in tools -%}{%- set functions.text = functions.text ~ '\\n' ~ (tool | tojson) -%}{%- endfor -%}
{%- set functions.text = functions.text ~ '\\n$tools_end' -%}
{%- if not messages or messages[0]['role'] != 'system' -%}
{%- set messages = [{'role': 'system', 'content': ''}] + messages -%}
{%- endif -%}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role not in $roles -%}{{- raise_exception('unknown role ' ~ role) -}}{%- endif -%}
{%- set turn = namespace(text=message['content'] or '') -%}
{%- if loop.first and functions.text -%}
{%- set turn.text = turn.text ~ ('\\n\\n' if turn.text else '') ~ functions.text -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{%- set arguments = function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -%}
{%- set written = '{"name": ' ~ (function['name'] | tojson) ~ ', "arguments": ' ~ arguments ~ '}' -%}
{%- set turn.text = turn.text ~ ('\\n' if turn.text else '') ~ '$call_begin\\n' ~ written ~ '\\n$call_end' -%}
{%- endfor -%}
{{- $header -}}
{%- if role == 'assistant' and turn.text | trim -%}
{%- generation -%}{{- turn.text ~ '$answer_end' -}}{%- endgeneration -%}
{%- else -%}
{{- turn.text ~ ($turn_end) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{%- set role = 'assistant' -%}{{- $header -}}{%- endif -%}
"""

_TOOLS = {
    "sentence": TOOLS_SENTENCE, "tools_begin": TOOLS_BEGIN, "tools_end": TOOLS_END, "call_begin": CALL_BEGIN,
    "call_end": CALL_END, "roles": str(list(ROLES)),
}  # fmt: skip

_PARTS = {
    "ttrain": {"begin": "{{- bos_token -}}", "header": "'<|' ~ role ~ '|>'", "answer_end": END, "turn_end": f"'{END}'"},
    "tinyseek": {
        "begin": "", "header": "role | capitalize ~ '：'", "answer_end": IM_END,
        "turn_end": f"'{IM_END}' if role == 'assistant' else '\\n'",
    },
}  # fmt: skip

JINJA = {name: string.Template(_JINJA).substitute(_TOOLS, **parts).lstrip() for name, parts in _PARTS.items()}


def name_of(jinja: str) -> str:
    """Name of the template whose Jinja text this is; "own" for any that is not one of ttrain's."""
    return next((name for name, text in JINJA.items() if text == jinja), "own")


Turns = Sequence[JsonDict]

Rendered = tuple[str, list[tuple[int, int]]]
# A conversation takes 0.1 ms; one of 1,000 turns in a template that is quadratic in them 50 ms.
SECONDS, SECONDS_PER_CONVERSATION, MEMORY_BYTES = 2.0, 0.05, 1 << 30
# What a template writes around the contents; the longest known one has 1 KB a turn.
WRITTEN_CHARACTERS, WRITTEN_CHARACTERS_PER_TURN = 1 << 20, 1 << 14

ERROR_CHARACTERS = 200


def render(
    template: str, variables: JsonDict, conversations: Sequence[Turns], *, prompt: bool, spans: bool
) -> list[Rendered | str]:
    """(text, spans of `{% generation %}` in it, where `spans`) of each conversation, or why it does not render.

    `variables`: special tokens by their names, and others that the template may read, such as `tools`.
    Raises BudgetExceeded if one of them needs more than its share of time or memory.
    """
    request = orjson.dumps(
        {"template": template, "variables": variables, "conversations": conversations, "prompt": prompt, "spans": spans}
    )
    try:
        renderings = [orjson.loads(result) for result in SANDBOX.stream(request)]
    except WorkFailed as error:
        return [str(error)[:ERROR_CHARACTERS]] * len(conversations)
    return [
        rendering if isinstance(rendering, str) else (rendering[0], [(start, end) for start, end in rendering[1]])
        for rendering in renderings
    ]


def answer(request: bytes) -> Iterator[bytes]:
    """In the child: [text, spans] of each conversation, or the reason why it does not render."""
    from transformers.utils import chat_template_utils

    parameters = orjson.loads(request)
    for turns in parameters["conversations"]:
        try:
            if parameters["spans"]:
                _track_spans_in_one_pass(chat_template_utils._compile_jinja_template(parameters["template"]))
            (text,), spans = chat_template_utils.render_jinja_template(
                [turns],
                chat_template=parameters["template"],
                add_generation_prompt=parameters["prompt"],
                return_assistant_tokens_mask=parameters["spans"],
                **parameters["variables"],
            )
            _check_length(text, turns, parameters["variables"])
            yield orjson.dumps([text, spans[0] if spans else []])
        except MemoryError:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            yield orjson.dumps(str(error)[:ERROR_CHARACTERS].encode("utf-8", "replace").decode("utf-8"))


def _track_spans_in_one_pass(template: Any) -> None:
    """Replace a method of the compiled template's tracker of `{% generation %}`: it joins all text so far at each answer.

    A chat of 32,000 turns took 3.5 s of CPU time, beyond the budget, and takes 0.15.
    """
    (tracker,) = (e for e in template.environment.extensions.values() if hasattr(e, "_generation_support"))
    tracked: list[str] = []  # of the conversation that is rendered
    blocks_read = length = 0

    def generation_support(caller: Callable[[], str]) -> str:
        nonlocal tracked, blocks_read, length
        text = caller()
        if tracker.is_active():
            if tracked is not tracker._rendered_blocks:
                tracked, blocks_read, length = tracker._rendered_blocks, 0, 0
            length += sum(map(len, tracked[blocks_read:]))
            blocks_read = len(tracked)
            tracker._generation_indices.append((length, length + len(text)))
        return text

    tracker._generation_support = generation_support


def _check_length(text: str, turns: Turns, variables: JsonDict) -> None:
    if len(text) <= WRITTEN_CHARACTERS:
        return
    read = len(orjson.dumps([turns, variables]))
    most = WRITTEN_CHARACTERS + WRITTEN_CHARACTERS_PER_TURN * len(turns) + 2 * read
    if len(text) > most:
        raise ValueError(f"it writes {len(text):,} characters, more than {most:,}")


SANDBOX = Sandbox(
    answer,
    seconds=SECONDS,
    seconds_per_result=SECONDS_PER_CONVERSATION,
    memory_bytes=MEMORY_BYTES,
    preloaded=("transformers.utils.chat_template_utils",),
)
